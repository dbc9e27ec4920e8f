//! Compares the lists of docs/reference with the existing names, in both directions.

use std::collections::BTreeSet;

use super::{
    facts::{Command, Facts},
    page::{Page, Row},
};

/// The folder of the pages.
const FOLDER: &str = "docs/reference";
/// Suffixes of a metric after the name of its family.
const SUFFIXES: [&str; 5] = ["", "_total", "_seconds", "_seconds_total", "_info"];
/// Types that several kinds share: their fields are listed in a separate section.
const SHARED: [(&str, &str); 3] = [
    ("Selector.", "LabelSelector"),
    (".selector.", "LabelSelector"),
    ("conditions[].", "Condition"),
];

/// Compares one page with the facts.
type Check = fn(&Page, &Facts) -> Vec<String>;

/// Missing and superfluous entries of the lists.
pub(super) fn check(pages: &[Page], facts: &Facts) -> Vec<String> {
    let checks: [(&str, Check); 5] = [
        ("drop-reasons.md", verdicts),
        ("metrics.md", metrics),
        ("annotations.md", keys),
        ("objects.md", objects),
        ("cli.md", options),
    ];
    let mut found = Vec::new();
    for (name, check) in checks {
        let path = format!("{FOLDER}/{name}");
        match pages.iter().find(|page| page.path.to_str() == Some(&path)) {
            Some(page) => found.extend(check(page, facts)),
            None => found.push(format!("{path}: has no page")),
        }
    }
    found
}

/// Compares the rows of `page` with the existing names; `shown` formats a name.
fn compare(page: &Page, rows: &[(usize, String)], names: &BTreeSet<String>, place: &str) -> Vec<String> {
    let listed: BTreeSet<&String> = rows.iter().map(|(_, name)| name).collect();
    let lacking = names
        .iter()
        .filter(|name| !listed.contains(name))
        .map(|name| page.at(1, &format!("does not list {}{place}", shown(name))));
    let surplus = rows
        .iter()
        .filter(|(_, name)| !names.contains(name))
        .map(|(number, name)| page.at(*number, &format!("lists {}, which does not exist{place}", shown(name))));
    lacking.chain(surplus).collect()
}

/// Formats `name 7` as `` `name` 7 ``.
fn shown(name: &str) -> String {
    match name.split_once(' ') {
        Some((name, rest)) => format!("`{name}` {rest}"),
        None => format!("`{name}`"),
    }
}

fn rows_of<'a>(page: &'a Page, headers: &[&str]) -> Vec<Row<'a>> {
    page.rows()
        .into_iter()
        .filter(|row| headers.contains(&row.header))
        .collect()
}

fn verdicts(page: &Page, facts: &Facts) -> Vec<String> {
    let rows: Vec<_> = rows_of(page, &["reason", "verdict"])
        .iter()
        .map(|row| {
            (
                row.number,
                format!("{} {}", row.name, row.second.trim_end_matches('|').trim()),
            )
        })
        .collect();
    let names = facts
        .verdicts
        .iter()
        .map(|(name, code)| format!("{name} {code}"))
        .collect();
    compare(page, &rows, &names, "")
}

fn metrics(page: &Page, facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let rows = rows_of(page, &["metric"]);
    let is_of = |name: &str, family: &str| SUFFIXES.iter().any(|suffix| name.strip_suffix(suffix) == Some(family));
    for family in &facts.metrics {
        let count = rows.iter().filter(|row| is_of(row.name, family)).count();
        // A family may be the prefix of another one, as with `_seconds`.
        if count == 0 {
            found.push(page.at(1, &format!("does not list `{family}`")));
        }
    }
    let unknown = rows
        .iter()
        .filter(|row| !facts.metrics.iter().any(|family| is_of(row.name, family)));
    found.extend(unknown.map(|row| page.at(row.number, &format!("lists `{}`, which does not exist", row.name))));
    found
}

fn keys(page: &Page, facts: &Facts) -> Vec<String> {
    let rows = rows_of(page, &["name"]);
    // A name that ends in capitals is a prefix: `kni.dev/network-NAME`.
    let plain = |row: &Row<'_>| {
        row.name
            .trim_end_matches(|char: char| char.is_ascii_uppercase())
            .to_owned()
    };
    let (ours, others): (Vec<_>, Vec<_>) = rows
        .iter()
        .map(|row| (row.number, plain(row)))
        .partition(|(_, name)| facts.keys.contains(name));
    let mut found = compare(page, &ours, &facts.keys, "");
    let unknown = others.iter().filter(|(_, name)| !facts.sources.contains(name.as_str()));
    found.extend(unknown.map(|(number, name)| page.at(*number, &format!("lists `{name}`, which does not exist"))));
    found
}

fn objects(page: &Page, facts: &Facts) -> Vec<String> {
    let mut expected: Vec<(&str, BTreeSet<String>)> =
        SHARED.iter().map(|(_, section)| (*section, BTreeSet::new())).collect();
    for (kind, fields) in &facts.fields {
        let mut own = BTreeSet::new();
        for field in fields {
            let shared = SHARED
                .iter()
                .find_map(|(mark, section)| Some((field.split_once(mark)?.1, *section)));
            match shared {
                Some((rest, section)) => {
                    for (_, names) in expected.iter_mut().filter(|(name, _)| *name == section) {
                        names.insert(rest.to_owned());
                    }
                }
                None => {
                    own.insert(field.clone());
                }
            }
        }
        expected.push((kind, own));
    }
    let rows = rows_of(page, &["field"]);
    let mut found = Vec::new();
    for (section, names) in &expected {
        let own: Vec<_> = rows
            .iter()
            .filter(|row| row.section == *section)
            .map(|row| (row.number, row.name.to_owned()))
            .collect();
        found.extend(compare(page, &own, names, &format!(" in {section}")));
    }
    found
}

fn options(page: &Page, facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for section in page.headings() {
        let Some(command) = facts.programs.iter().find_map(|program| program.find(section)) else {
            continue;
        };
        let rows = |header: &str| -> Vec<(usize, String)> {
            let all = rows_of(page, &[header])
                .into_iter()
                .filter(|row| row.section == section);
            all.map(|row| (row.number, row.name.to_owned())).collect()
        };
        let (options, commands) = (rows("option"), rows("name"));
        // A section without a list describes its options in prose.
        if !options.is_empty() {
            let sections: Vec<&str> = page.headings().collect();
            found.extend(compare(
                page,
                &options,
                &command.listed(&sections),
                &format!(" in {section}"),
            ));
        }
        if !commands.is_empty() {
            let names = command.commands.iter().map(|command| command.name.clone()).collect();
            found.extend(compare(page, &commands, &names, &format!(" in {section}")));
        }
    }
    found
}

impl Command {
    /// Its options, and those of its sub-commands without a separate section.
    fn listed(&self, sections: &[&str]) -> BTreeSet<String> {
        let own = self
            .options
            .iter()
            .filter(|option| !matches!(option.as_str(), "help" | "version"));
        let mut names: BTreeSet<String> = own.map(|option| format!("--{option}")).collect();
        for command in self
            .commands
            .iter()
            .filter(|command| command.full.starts_with(&self.full) && !sections.contains(&command.full.as_str()))
        {
            names.extend(command.listed(sections));
        }
        names
    }

    /// It or its sub-command with the full name `full`.
    fn find(&self, full: &str) -> Option<&Self> {
        if self.full == full {
            return Some(self);
        }
        self.commands.iter().find_map(|command| command.find(full))
    }
}
