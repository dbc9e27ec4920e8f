//! Formats rows as columns, and facts as sheets, like kubectl.

use comfy_table::{Table, presets::NOTHING};

use crate::escape::escaped;

/// Text of an empty cell.
pub(crate) const NONE: &str = "<none>";

/// Spaces between columns.
const GAP: u16 = 3;

/// Columns with at most this number of characters are never cut.
const LEAST: usize = 8;

/// One column of a table of `T`s.
pub(crate) struct Column<T> {
    header: &'static str,
    wide: bool,
    cell: fn(&T) -> String,
}

impl<T> Column<T> {
    /// A column that is always shown. The text that `cell` returns is escaped here.
    pub(crate) const fn new(header: &'static str, cell: fn(&T) -> String) -> Self {
        Self {
            header,
            wide: false,
            cell,
        }
    }

    /// A column of the wide form only.
    pub(crate) const fn wide(header: &'static str, cell: fn(&T) -> String) -> Self {
        Self {
            header,
            wide: true,
            cell,
        }
    }
}

/// The table of `rows`: a header line, then a line for each. With a width of a screen, the longest columns are cut so
/// that lines fit.
pub(crate) fn table<T>(columns: &[Column<T>], rows: &[T], wide: bool, screen: Option<usize>) -> String {
    let shown: Vec<&Column<T>> = columns.iter().filter(|column| wide || !column.wide).collect();
    let header = shown.iter().map(|column| column.header.to_owned()).collect();
    let of_row = |row: &T| shown.iter().map(|column| cell(&(column.cell)(row))).collect();
    let mut lines: Vec<Vec<String>> = vec![header];
    lines.extend(rows.iter().map(of_row));
    if let Some(screen) = screen {
        let limit = column_limit(&lines, screen);
        lines.iter_mut().flatten().for_each(|cell| *cell = cut(cell, limit));
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    let mut lines = lines.into_iter();
    table.set_header(lines.next().unwrap_or_default());
    table.add_rows(lines);
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    let text = table.trim_fmt();
    let text: Vec<String> = text
        .lines()
        .map(|line| cut(line, screen.unwrap_or(usize::MAX)))
        .collect();
    text.join("\n") + "\n"
}

/// The most characters of a cell with which the lines fit into `screen`, if columns of [`LEAST`] characters do.
fn column_limit(lines: &[Vec<String>], screen: usize) -> usize {
    let mut widths: Vec<usize> = Vec::new();
    for line in lines {
        widths.resize(widths.len().max(line.len()), 0);
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let gaps = usize::from(GAP) * widths.len().saturating_sub(1);
    let fits = |limit: &usize| widths.iter().map(|width| width.min(limit)).sum::<usize>() + gaps <= screen;
    let longest = widths.iter().copied().max().unwrap_or(0);
    (LEAST..=longest).rev().find(fits).unwrap_or(LEAST)
}

/// `text` in at most `limit` characters, the last of which shows what is missing.
pub(crate) fn cut(text: &str, limit: usize) -> String {
    match text.chars().nth(limit) {
        None => text.to_owned(),
        Some(_) => text.chars().take(limit.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// Aligned `Key: value` lines; further values of a key are listed below its first.
pub(crate) fn sheet(facts: &[(&str, Vec<String>)]) -> String {
    let width = facts.iter().map(|(key, _)| key.len()).max().unwrap_or(0) + 1 + usize::from(GAP);
    let mut lines = Vec::new();
    for (key, values) in facts {
        let label = format!("{key}:");
        let first = values.first().map_or("", String::as_str);
        lines.push(format!("{label:width$}{}\n", cell(first)));
        lines.extend(
            values
                .iter()
                .skip(1)
                .map(|value| format!("{:width$}{}\n", "", cell(value))),
        );
    }
    lines.concat()
}

/// One value as the text of a cell: escaped, and never empty.
pub(crate) fn cell(value: &str) -> String {
    if value.is_empty() {
        NONE.to_owned()
    } else {
        escaped(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column<(&str, u32)>] = &[
        Column::new("NAME", |row| row.0.to_owned()),
        Column::new("SIZE", |row| row.1.to_string()),
        Column::wide("TWICE", |row| (row.1 * 2).to_string()),
    ];

    #[test]
    fn columns_align_and_empty_cells_show() {
        let rows = [("a-long-name", 1), ("", 20)];
        assert_eq!(
            table(COLUMNS, &rows, false, None),
            "NAME          SIZE\na-long-name   1\n<none>        20\n"
        );
        assert_eq!(
            table(COLUMNS, &rows, true, None),
            "NAME          SIZE   TWICE\na-long-name   1      2\n<none>        20     40\n"
        );
    }

    #[test]
    fn the_longest_columns_are_cut_to_fit_a_screen() {
        let rows = [("a-name-that-is-longer-than-the-screen", 1), ("short", 20)];
        assert_eq!(
            table(COLUMNS, &rows, false, Some(20)),
            "NAME            SIZE\na-name-that-…   1\nshort           20\n"
        );
        assert_eq!(
            table(COLUMNS, &rows, false, Some(80)),
            table(COLUMNS, &rows, false, None)
        );
        assert_eq!(
            table(COLUMNS, &rows, false, Some(10)),
            "NAME     …\na-name-… …\nshort    …\n"
        );
    }

    #[test]
    fn hostile_cells_stay_on_their_line() {
        let text = table(COLUMNS, &[("x\n\u{1b}[2J", 1)], false, None);
        assert_eq!(text, "NAME           SIZE\nx\\n\\u{1b}[2J   1\n");
    }

    #[test]
    fn sheet_lists_values_below_each_other() {
        let facts = [
            ("Ready", vec!["false".to_owned()]),
            ("Why", vec!["a".to_owned(), "b\r".to_owned()]),
            ("Hook", vec![]),
        ];
        assert_eq!(
            sheet(&facts),
            "Ready:   false\nWhy:     a\n         b\\r\nHook:    <none>\n"
        );
    }
}
