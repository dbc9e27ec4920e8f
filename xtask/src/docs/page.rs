//! Parses a Markdown page into headings, prose, code and tables, with their lines.

use std::path::{Path, PathBuf};

/// A page.
#[derive(Debug)]
pub(super) struct Page {
    /// Relative to the root of the repository.
    pub(super) path: PathBuf,
    /// Its lines.
    pub(super) lines: Vec<Line>,
}

/// A line of a page.
#[derive(Debug)]
pub(super) struct Line {
    /// From 1.
    pub(super) number: usize,
    /// As written.
    pub(super) text: String,
    /// The language of the enclosing code block; empty if the block has no language.
    pub(super) block: Option<String>,
}

/// A row of a table.
#[derive(Debug)]
pub(super) struct Row<'a> {
    /// Its line.
    pub(super) number: usize,
    /// The text of the heading above, without marks.
    pub(super) section: &'a str,
    /// The first cell of the table's header.
    pub(super) header: &'a str,
    /// The name in its first cell, without backquotes.
    pub(super) name: &'a str,
    /// Its second cell.
    pub(super) second: &'a str,
}

impl Page {
    /// Reads `text`, of the page at `path`.
    pub(super) fn new(path: &Path, text: &str) -> Self {
        let mut block: Option<String> = None;
        let mut lines = Vec::new();
        for (index, text) in text.lines().enumerate() {
            if let Some(language) = text.trim_start().strip_prefix("```") {
                block = match block {
                    Some(_) => None,
                    None => Some(language.trim().to_owned()),
                };
                continue;
            }
            lines.push(Line {
                number: index + 1,
                text: text.to_owned(),
                block: block.clone(),
            });
        }
        Self {
            path: path.to_owned(),
            lines,
        }
    }

    /// Formats a finding on a line of this page.
    pub(super) fn at(&self, number: usize, what: &str) -> String {
        format!("{}:{number}: {what}", self.path.display())
    }

    /// The lines outside of code blocks.
    pub(super) fn prose(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| line.block.is_none())
    }

    /// The pieces of inline code, with their lines.
    pub(super) fn inline_code(&self) -> impl Iterator<Item = (usize, &str)> {
        self.prose()
            .flat_map(|line| line.text.split('`').skip(1).step_by(2).map(|code| (line.number, code)))
    }

    /// The text of every heading, without its marks.
    pub(super) fn headings(&self) -> impl Iterator<Item = &str> {
        self.prose().filter_map(|line| heading(&line.text))
    }

    /// The anchors of the headings, as GitHub makes them.
    pub(super) fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for heading in self.headings() {
            let base = anchor(heading);
            let before = anchors.iter().filter(|other| {
                other
                    .trim_end_matches(|c: char| c.is_ascii_digit())
                    .trim_end_matches('-')
                    == base
                    || **other == base
            });
            let count = before.count();
            anchors.push(if count == 0 { base } else { format!("{base}-{count}") });
        }
        anchors
    }

    /// The rows of all tables.
    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        let mut found = Vec::new();
        let (mut section, mut header, mut is_body) = ("", "", false);
        for line in self.prose() {
            if let Some(text) = heading(&line.text) {
                section = text;
            }
            let Some(cells) = line.text.trim().strip_prefix('|') else {
                is_body = false;
                continue;
            };
            let mut cells = cells.split(" |").map(str::trim);
            let (first, second) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
            if first.starts_with("---") || first.starts_with(":--") {
                is_body = true;
            } else if is_body {
                found.push(Row {
                    number: line.number,
                    section,
                    header,
                    name: first.trim_matches('`'),
                    second,
                });
            } else {
                header = first;
            }
        }
        found
    }
}

fn heading(line: &str) -> Option<&str> {
    let text = line.trim_start_matches('#');
    (text.len() < line.len())
        .then(|| text.strip_prefix(' '))
        .flatten()
        .map(str::trim)
}

fn anchor(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'))
        .map(|char| if char == ' ' { '-' } else { char })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_those_of_github() {
        let page = Page::new(
            Path::new("a.md"),
            "# A b: `c`/d\n```\n# no\n```\n## Same\n## Same\n## Two_x - y\n",
        );
        assert_eq!(page.anchors(), ["a-b-cd", "same", "same-1", "two_x---y"]);
    }

    #[test]
    fn rows_know_their_table_and_section() {
        let page = Page::new(
            Path::new("a.md"),
            "## S\n| name | x |\n|---|---|\n| `a` | 1 |\n| `b` | |\ntext\n| topic |\n|---|\n| c |\n",
        );
        let rows: Vec<_> = page
            .rows()
            .iter()
            .map(|row| (row.section, row.header, row.name, row.second))
            .collect();
        assert_eq!(
            rows,
            [("S", "name", "a", "1"), ("S", "name", "b", ""), ("S", "topic", "c", "")]
        );
    }
}
