//! Collects the commands and options of the programs, and the names that the reference pages list.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result, bail};

use super::{definitions, sources};
use crate::command::output;

/// The name of knictl as a plugin of kubectl.
const PLUGIN: &str = "kubectl kni";

/// A command with its options.
#[derive(Debug, Default)]
pub(super) struct Command {
    /// Its name; that of a program may have two words.
    pub(super) name: String,
    /// The name with the commands before it.
    pub(super) full: String,
    /// Its options, without dashes.
    pub(super) options: Vec<String>,
    /// Its sub-commands.
    pub(super) commands: Vec<Self>,
    /// Whether it takes words that are not sub-commands.
    pub(super) takes_words: bool,
    /// Whether it passes all following arguments on to another program.
    pub(super) passes_on: bool,
}

/// All facts that pages are compared with.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// The programs of this project.
    pub(super) programs: Vec<Command>,
    /// Verdicts by name, with their codes.
    pub(super) verdicts: BTreeMap<String, u16>,
    /// The families of metrics.
    pub(super) metrics: BTreeSet<String>,
    /// Annotations and labels of this project in the sources.
    pub(super) keys: BTreeSet<String>,
    /// Fields of each kind.
    pub(super) fields: BTreeMap<String, BTreeSet<String>>,
    /// All sources and manifests in one text, to search for other names.
    pub(super) sources: String,
}

impl Facts {
    /// Reads the sources below `root` and the help texts of the built `programs`.
    pub(super) fn gather(root: &Path, programs: &[(&str, PathBuf)]) -> Result<Self> {
        let sources = sources::product(root)?;
        let read = |file: &str| fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"));
        let mut facts = Self {
            programs: defined(),
            verdicts: sources::verdicts(&read("kni-common/src/verdict.rs")?),
            metrics: sources::metrics(&root.join("kni-agent/metrics/src"))?,
            keys: sources::keys(&sources),
            fields: sources::fields(&root.join("deploy/crds"))?,
            sources,
        };
        for (name, path) in programs {
            if *name == "knictl" {
                // The same program under the name by which kubectl starts it; it also takes the commands of knictl.
                let mut plugin = ask(PLUGIN, path, &[])?;
                let others = ask(name, path, &[])?.commands;
                let is_new = |command: &Command| plugin.commands.iter().all(|own| own.name != command.name);
                let others: Vec<_> = others.into_iter().filter(is_new).collect();
                for other in others.iter().filter(|other| other.name != "help") {
                    if ask(PLUGIN, path, std::slice::from_ref(&other.name))?.options.is_empty() {
                        bail!("`{PLUGIN} {} --help` prints no help", other.name);
                    }
                }
                plugin.commands.extend(others);
                facts.programs.push(plugin);
            }
            facts.programs.push(ask(name, path, &[])?);
        }
        Ok(facts)
    }

    /// The expected entries of each reference page.
    pub(super) fn lists(&self) -> Vec<(&'static str, Vec<String>)> {
        let fields = self
            .fields
            .iter()
            .flat_map(|(kind, fields)| fields.iter().map(move |field| format!("{kind} {field}")));
        let verdicts = self.verdicts.iter().map(|(name, code)| format!("{name} {code}"));
        vec![
            ("drop-reasons", verdicts.collect()),
            ("metrics", self.metrics.iter().cloned().collect()),
            ("annotations", self.keys.iter().cloned().collect()),
            ("objects", fields.collect()),
            ("cli", self.programs.iter().flat_map(Command::lines).collect()),
        ]
    }
}

impl Command {
    /// One line per option, including the sub-commands.
    fn lines(&self) -> Vec<String> {
        let own = self.options.iter().map(|option| format!("{} --{option}", self.full));
        own.chain(self.commands.iter().flat_map(Self::lines)).collect()
    }
}

/// The commands of `cargo xtask`, and of the programs that are not built.
fn defined() -> Vec<Command> {
    fn convert(command: &clap::Command, before: &str) -> Command {
        let full = format!("{before} {}", command.get_name()).trim().to_owned();
        Command {
            name: command.get_name().to_owned(),
            options: command
                .get_arguments()
                .filter_map(|arg| arg.get_long().map(str::to_owned))
                .chain(["help".into()])
                .collect(),
            commands: command
                .get_subcommands()
                .map(|command| convert(command, &full))
                .collect(),
            takes_words: command.get_positionals().count() > 0,
            passes_on: command.get_positionals().any(clap::Arg::is_trailing_var_arg_set),
            full,
        }
    }
    definitions::all().iter().map(|command| convert(command, "")).collect()
}

/// The options that `program` and its commands print with `--help`.
fn ask(name: &str, program: &Path, before: &[String]) -> Result<Command> {
    let mut command = process::Command::new(program);
    command.args(before).arg("--help").env("COLUMNS", "200");
    if name == PLUGIN {
        command.arg0(PLUGIN.replace(' ', "-"));
    }
    // A program without options answers with an error, or waits for its input.
    let help = output(&mut command).unwrap_or_default();
    in_lines(name, &help)?;
    let mut found = Command::parse(name, &help);
    found.full = [&[name.to_owned()], before].concat().join(" ");
    if let Some(last) = before.last() {
        found.name.clone_from(last);
    }
    let names = std::mem::take(&mut found.commands);
    for sub in names.iter().filter(|sub| sub.name != "help") {
        let path = [before, std::slice::from_ref(&sub.name)].concat();
        found.commands.push(ask(name, program, &path)?);
    }
    Ok(found)
}

/// Fails if the help text of `name` has the two characters of an escaped end of a line.
pub(super) fn in_lines(name: &str, help: &str) -> Result<()> {
    match help.lines().find(|line| line.contains("\\n")) {
        Some(line) => bail!("the help of {name} prints a backslash and an n for the end of a line: {line}"),
        None => Ok(()),
    }
}

impl Command {
    /// Parses the help text of clap.
    fn parse(name: &str, help: &str) -> Self {
        let mut found = Self {
            name: name.to_owned(),
            ..Self::default()
        };
        let mut is_commands = false;
        for line in help.lines() {
            if !line.starts_with(' ') {
                is_commands = line == "Commands:";
                found.takes_words |= line == "Arguments:";
                continue;
            }
            let text = line.trim_start();
            let indent = line.len() - text.len();
            let word = text.split([' ', ',']).next().unwrap_or_default();
            if is_commands && indent == 2 {
                found.commands.push(Self {
                    name: word.to_owned(),
                    ..Self::default()
                });
            }
            let long = match text.strip_prefix("--") {
                Some(long) if indent <= 6 => Some(long),
                _ if indent == 2 && text.starts_with('-') => text.split_once(", --").map(|(_, long)| long),
                _ => None,
            };
            let is_name = |char: char| char.is_ascii_alphanumeric() || char == '-';
            found
                .options
                .extend(long.map(|long| long.chars().take_while(|char| is_name(*char)).collect::<String>()));
        }
        found
    }

    #[cfg(test)]
    fn example(name: &str, full: &str, options: &[&str], commands: Vec<Self>) -> Self {
        Self {
            name: name.into(),
            full: full.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            commands,
            ..Self::default()
        }
    }
}

#[cfg(test)]
impl Facts {
    /// A small example of each kind of fact.
    pub(super) fn example() -> Self {
        let stop = Command::example("stop", "kni-agent stop", &["force"], Vec::new());
        let mut agent = Command::example("kni-agent", "kni-agent", &["manifests"], vec![stop]);
        agent.takes_words = false;
        Self {
            programs: vec![agent],
            verdicts: BTreeMap::from([("no_route".into(), 25)]),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_of_a_program_is_read() {
        let help = "Does it\n\nUsage: x [OPTIONS] [COMMAND]\n\nCommands:\n  stop        End it\n  help        Print this\n\n\
                    Options:\n      --manifests <DIR>  Where --other is not\n  -o, --output <KIND>\n          Long text\n\
                    \u{20}         --not-this in a text\n  -h, --help  Print help\n";
        let command = Command::parse("x", help);
        assert_eq!(command.options, ["manifests", "output", "help"]);
        let names: Vec<_> = command.commands.iter().map(|command| command.name.as_str()).collect();
        assert_eq!(names, ["stop", "help"]);
    }

    #[test]
    fn an_escaped_end_of_a_line_in_a_help_text_is_found() {
        in_lines("x", "Usage: x\n\nOptions:\n").unwrap();
        in_lines("x", "Usage: x\\n\\nOptions:\n").unwrap_err();
    }

    #[test]
    fn our_own_commands_are_known() {
        let own = defined().remove(0);
        let test = own.commands.iter().find(|command| command.name == "test").unwrap();
        assert_eq!(test.full, "cargo xtask test");
        assert!(test.options.iter().any(|option| option == "tier"));
        let bench = own.commands.iter().find(|command| command.name == "bench").unwrap();
        assert!(bench.passes_on && !test.passes_on);
    }
}
