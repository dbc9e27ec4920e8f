//! Checks that the command lines and options in the pages exist.

use super::{
    facts::{Command, Facts},
    page::Page,
};

/// Options of other programs that pages mention without the program.
const FOREIGN: &[&str] = &["set"];

/// The command lines of `page` that do not exist.
pub(super) fn check(page: &Page, facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in shell_lines(page) {
        found.extend(refuse_line(&line, facts).map(|why| page.at(number, &why)));
    }
    for (number, code) in page.inline_code() {
        let why = if is_option(code) {
            refuse_option(code, facts)
        } else {
            refuse_line(code, facts)
        };
        found.extend(why.map(|why| page.at(number, &why)));
    }
    found
}

/// The command lines of the code blocks; a line with a backslash at its end is joined with the next one.
fn shell_lines(page: &Page) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for line in &page.lines {
        let Some(language) = &line.block else {
            is_open = false;
            continue;
        };
        let text = line.text.trim();
        let prompted = text.strip_prefix("$ ").or_else(|| text.strip_prefix("# "));
        let is_shell = matches!(language.as_str(), "sh" | "bash" | "shell" | "console");
        let command = match prompted {
            Some(command) => command,
            None if is_open || is_shell => text,
            None => continue,
        };
        let (command, continues) = match command.strip_suffix('\\') {
            Some(command) => (command, true),
            None => (command, false),
        };
        match found.last_mut() {
            Some((_, last)) if is_open => {
                last.push(' ');
                last.push_str(command);
            }
            _ => found.push((line.number, command.to_owned())),
        }
        is_open = continues;
    }
    found
}

/// Whether inline code is an option by itself.
fn is_option(code: &str) -> bool {
    code.strip_prefix("--")
        .is_some_and(|name| name.starts_with(|char: char| char.is_ascii_lowercase()))
}

fn refuse_option(code: &str, facts: &Facts) -> Option<String> {
    let name = option_name(code.split(' ').next()?)?;
    let is_known = facts.programs.iter().any(|program| program.has_anywhere(name)) || FOREIGN.contains(&name);
    (!is_known).then(|| format!("no program has the option `--{name}`"))
}

/// The reason why a shell line is invalid: a command or option that a program of this project does not have.
fn refuse_line(line: &str, facts: &Facts) -> Option<String> {
    let line = line.split(" # ").next().unwrap_or_default();
    line.split(['|', ';'])
        .flat_map(|part| part.split("&&"))
        .find_map(|part| refuse_words(&part.split_whitespace().collect::<Vec<_>>(), facts))
}

fn refuse_words(words: &[&str], facts: &Facts) -> Option<String> {
    let is_before =
        |word: &str| word == "sudo" || word == "env" || word == "exec" || word == "time" || word.contains('=');
    let start = words.iter().position(|word| !is_before(word))?;
    let words = words.get(start..)?;
    let program = facts.programs.iter().find(|program| program.starts(words))?;
    let mut path = vec![program];
    let mut may_be_command = true;
    for word in words.iter().skip(program.words()) {
        let word = word.trim_matches(['"', '\'', '(', ')', '[', ']', ',']);
        let last = path.last()?;
        if word == "--" || last.passes_on {
            break;
        }
        if let Some(name) = option_name(word) {
            if !last.options.iter().any(|option| option == name) {
                return Some(format!("`{}` has no option `--{name}`", last.full));
            }
            may_be_command = false;
        } else if let Some(command) = last.commands.iter().find(|command| command.name == word) {
            path.push(command);
            may_be_command = true;
        } else {
            let is_word = !word.is_empty() && word.chars().all(|char| char.is_ascii_lowercase() || char == '-');
            if may_be_command && is_word && !last.commands.is_empty() && !last.takes_words {
                return Some(format!("`{}` has no command `{word}`", last.full));
            }
            may_be_command = false;
        }
    }
    None
}

/// The option name: `manifests` for `--manifests` and `--manifests=a`.
fn option_name(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--")?;
    let end = name
        .find(|char: char| !char.is_ascii_alphanumeric() && char != '-')
        .unwrap_or(name.len());
    name.get(..end).filter(|name| !name.is_empty())
}

impl Command {
    /// Whether the words of a shell line run this program.
    fn starts(&self, words: &[&str]) -> bool {
        let own: Vec<&str> = self.name.split(' ').collect();
        let Some((first, rest)) = words.split_first() else {
            return false;
        };
        let program = first.rsplit('/').next().unwrap_or(first);
        own.first() == Some(&program) && own.iter().skip(1).zip(rest).filter(|(a, b)| a == b).count() + 1 == own.len()
    }

    /// The number of words in its name.
    fn words(&self) -> usize {
        self.name.split(' ').count()
    }

    /// Whether it or one of its sub-commands has the option.
    fn has_anywhere(&self, option: &str) -> bool {
        self.options.iter().any(|own| own == option) || self.commands.iter().any(|command| command.has_anywhere(option))
    }
}
