//! Owns the table of the page of kernels: what each kernel's verifier counted, and by how much it may grow.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context, Result, bail};

use super::kernel::{LINES, Line};
use crate::workspace::root;

/// The page with the committed table.
const PAGE: &str = "docs/reference/kernels.md";
const HEAD: [&str; 2] = [
    "| kernel | release | hooks | program | instructions | stack | result |",
    "|---|---|---|---|---|---|---|",
];
/// What a number may become, in percent of the committed one.
const ALLOWED: u64 = 110;

/// What a verifier counted for one program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Row {
    release: String,
    /// Hooks at which the checks passed.
    hooks: String,
    /// Instructions that the verifier processed.
    instructions: u64,
    /// Bytes of stack of the program and of the function that needs the most, as `200+96`,
    /// and on newer kernels of the deepest chain of calls, as `200+96 (256)`.
    stack: String,
}

/// The rows by line of kernels and program, in the order of [`LINES`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Results(BTreeMap<(usize, String), Row>);

impl Results {
    /// Reads the console of a machine whose checks passed.
    pub(super) fn read(line: &str, release: &str, console: &str) -> Self {
        let after = |start: &str| {
            let lines = console.lines().map(str::trim);
            let found = lines.filter_map(|line| line.strip_prefix(start).map(str::to_owned));
            found.collect::<Vec<String>>()
        };
        let hooks = after("passed at hook ").join(", ");
        let rows = after("verified ").into_iter().filter_map(|text| {
            // from_pod: 1234 instructions, stack 200+16+96+0
            let (program, numbers) = text.split_once(": ")?;
            let (instructions, stack) = numbers.split_once(" instructions, stack ")?;
            let row = Row {
                release: release.to_owned(),
                hooks: hooks.clone(),
                instructions: instructions.parse().ok()?,
                stack: largest(stack)?,
            };
            Some(((position(line)?, program.to_owned()), row))
        });
        Self(rows.collect())
    }

    /// Adds the rows of another machine.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Fails if the console of one of these kernels had no numbers.
    pub(super) fn is_whole(&self, lines: &[Line]) -> Result<()> {
        for line in lines {
            let here = position(line.name);
            if !self.0.keys().any(|(line, _)| Some(*line) == here) {
                bail!("the machine with kernel {} reported no verified program", line.name);
            }
        }
        Ok(())
    }

    /// The lines of the table.
    pub(super) fn table(&self) -> Vec<String> {
        let rows = self.0.iter().map(|((line, program), row)| {
            format!(
                "| {} | {} | {} | {} | {} | {} | loaded, passed |",
                name_of(*line),
                row.release,
                row.hooks,
                program_in_page(program),
                row.instructions,
                row.stack
            )
        });
        HEAD.map(str::to_owned).into_iter().chain(rows).collect()
    }

    /// Writes these rows into the page; those of other lines stay.
    pub(super) fn accept(self) -> Result<()> {
        let text = page()?;
        let mut all = Self::parse(&text);
        let lines: Vec<usize> = self.0.keys().map(|(line, _)| *line).collect();
        all.0.retain(|(line, _), _| !lines.contains(line));
        all.extend(self);
        let path = path();
        fs::write(&path, all.within(&text)?).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Fails if a number is more than a tenth above the committed one, or if a program of `lines` is in only one of
    /// both.
    pub(super) fn compare(&self, lines: &[Line]) -> Result<()> {
        let mut committed = Self::parse(&page()?);
        let wanted: Vec<usize> = lines.iter().filter_map(|line| position(line.name)).collect();
        committed.0.retain(|(line, _), _| wanted.contains(line));
        let problems = self.problems(&committed);
        if problems.is_empty() {
            return Ok(());
        }
        bail!(
            "{}\nwhere this is intended, `cargo xtask vmtest --accept` writes {PAGE}",
            problems.join("\n")
        )
    }

    fn problems(&self, committed: &Self) -> Vec<String> {
        let mut problems = Vec::new();
        for (key, known) in &committed.0 {
            let name = format!("{} on {}", key.1, name_of(key.0));
            let Some(row) = self.0.get(key) else {
                problems.push(format!("{name} is in {PAGE}, but was not verified"));
                continue;
            };
            for (what, now, then) in [
                ("instructions", row.instructions, known.instructions),
                ("bytes of stack", bytes(&row.stack), bytes(&known.stack)),
            ] {
                if now * 100 > then * ALLOWED {
                    problems.push(format!("{name}: {now} {what}, more than a tenth above {then}"));
                }
            }
            for hook in known.hooks.split(", ").filter(|hook| !row.hooks.contains(hook)) {
                problems.push(format!("{name}: not at hook {hook}"));
            }
        }
        let added = self.0.keys().filter(|key| !committed.0.contains_key(key));
        problems.extend(added.map(|(line, program)| format!("{program} on {} is not in {PAGE}", name_of(*line))));
        problems
    }

    fn parse(page: &str) -> Self {
        let rows = page.lines().filter_map(|line| {
            let cells: Vec<&str> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
            let [line, release, hooks, program, instructions, stack, _result] = cells[..] else {
                return None;
            };
            let row = Row {
                release: release.to_owned(),
                hooks: hooks.to_owned(),
                instructions: instructions.parse().ok()?,
                stack: stack.to_owned(),
            };
            Some(((position(line)?, program.replace('`', "")), row))
        });
        Self(rows.collect())
    }

    /// The page with this table in place of its own.
    fn within(&self, page: &str) -> Result<String> {
        let mut lines = page.lines();
        let before: Vec<&str> = lines.by_ref().take_while(|line| *line != HEAD[0]).collect();
        if before.len() == page.lines().count() {
            bail!("{PAGE} has no line `{}`", HEAD[0]);
        }
        let after = lines.skip_while(|line| line.starts_with('|')).map(str::to_owned);
        let all = before.into_iter().map(str::to_owned).chain(self.table()).chain(after);
        Ok(all.map(|line| line + "\n").collect())
    }
}

/// `from_pod (dry run)` as the page writes it.
fn program_in_page(program: &str) -> String {
    match program.split_once(' ') {
        Some((name, rest)) => format!("`{name}` {rest}"),
        None => format!("`{program}`"),
    }
}

fn name_of(line: usize) -> &'static str {
    LINES.get(line).map_or("", |line| line.name)
}

fn position(name: &str) -> Option<usize> {
    LINES.iter().position(|line| line.name == name)
}

/// The first part, which is the program's own, and the largest of the others; what is in parentheses stays.
fn largest(stack: &str) -> Option<String> {
    let (parts, deepest) = stack
        .split_once(' ')
        .map_or((stack, None), |(parts, rest)| (parts, Some(rest)));
    let parts: Option<Vec<u64>> = parts.split('+').map(|part| part.parse().ok()).collect();
    let parts = parts?;
    let (own, functions) = parts.split_first()?;
    let largest = functions.iter().max().map(|largest| format!("+{largest}"));
    let deepest = deepest.map(|deepest| format!(" {deepest}"));
    Some(format!(
        "{own}{}{}",
        largest.unwrap_or_default(),
        deepest.unwrap_or_default()
    ))
}

/// The stack of the deepest chain of calls where the kernel reports it, otherwise the sum of the parts.
fn bytes(stack: &str) -> u64 {
    let (parts, deepest) = stack.split_once(" (").unwrap_or((stack, ""));
    let sum = || parts.split('+').filter_map(|part| part.parse::<u64>().ok()).sum();
    deepest.trim_end_matches(')').parse().unwrap_or_else(|_| sum())
}

fn path() -> PathBuf {
    root().join(PAGE)
}

fn page() -> Result<String> {
    let path = path();
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONSOLE: &str = "kernel 6.1.0\r\nverified from_pod: 1000 instructions, stack 400+8+16+0\r\n\
                           verified to_pod (dry run): 500 instructions, stack 96\r\n\
                           passed at hook clsact\r\npassed at hook tcx\r\n";

    fn found() -> Results {
        Results::read("6.12", "6.12.1-cloud", CONSOLE)
    }

    #[test]
    fn a_console_becomes_a_table_that_reads_back() {
        let table = found().table();
        assert_eq!(
            table[2..],
            [
                "| 6.12 | 6.12.1-cloud | clsact, tcx | `from_pod` | 1000 | 400+16 | loaded, passed |",
                "| 6.12 | 6.12.1-cloud | clsact, tcx | `to_pod` (dry run) | 500 | 96 | loaded, passed |",
            ]
        );
        assert_eq!(Results::parse(&table.join("\n")), found());
        let page = format!("# Page\n\n{}\nold\n\nafter\n", HEAD.join("\n"));
        let page = page.replace("old\n", "| 6.1 | x | clsact | `a` | 1 | 1 | loaded, passed |\n");
        let within = found().within(&page).unwrap();
        assert_eq!(within, format!("# Page\n\n{}\n\nafter\n", table.join("\n")));
        assert!(found().within("# Page\n").is_err());
    }

    #[test]
    fn a_tenth_more_is_allowed() {
        let grown = |from: &str, to: &str| Results::read("6.12", "6.12.2", &CONSOLE.replace(from, to));
        assert_eq!(grown("1000", "1100").problems(&found()), Vec::<String>::new());
        assert_eq!(grown("1000", "900").problems(&found()), Vec::<String>::new());
        assert_eq!(grown("1000", "1101").problems(&found()).len(), 1);
        assert_eq!(grown("400+8+16", "400+8+64").problems(&found()).len(), 1);
        let deepest = |depth: &str| grown("400+8+16+0", &format!("400+8+16+0 ({depth})"));
        assert_eq!(deepest("440").problems(&deepest("400")), Vec::<String>::new());
        assert_eq!(deepest("441").problems(&deepest("400")).len(), 1);
    }

    #[test]
    fn what_is_missing_or_new_is_a_problem() {
        let without = Results::read("6.12", "6.12.2", &CONSOLE.replace("verified to_pod", "refused to_pod"));
        assert_eq!(without.problems(&found()).len(), 1);
        assert_eq!(found().problems(&without).len(), 1);
        let one_hook = Results::read("6.12", "6.12.2", &CONSOLE.replace("hook tcx", "nothing"));
        assert_eq!(one_hook.problems(&found()).len(), 2);
    }
}
