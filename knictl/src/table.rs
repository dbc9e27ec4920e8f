//! Formats rows as columns, and facts as sheets, like kubectl.

use comfy_table::{Table, presets::NOTHING};

use crate::escape::escaped;

/// Text of an empty cell.
pub(crate) const NONE: &str = "<none>";

/// Spaces between columns.
const GAP: u16 = 3;

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

/// The table of `rows`: a header line, then a line for each.
pub(crate) fn table<T>(columns: &[Column<T>], rows: &[T], wide: bool) -> String {
    let shown: Vec<&Column<T>> = columns.iter().filter(|column| wide || !column.wide).collect();
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(shown.iter().map(|column| column.header));
    for row in rows {
        table.add_row(shown.iter().map(|column| cell(&(column.cell)(row))));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP));
    }
    table.trim_fmt() + "\n"
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
            table(COLUMNS, &rows, false),
            "NAME          SIZE\na-long-name   1\n<none>        20\n"
        );
        assert_eq!(
            table(COLUMNS, &rows, true),
            "NAME          SIZE   TWICE\na-long-name   1      2\n<none>        20     40\n"
        );
    }

    #[test]
    fn hostile_cells_stay_on_their_line() {
        let text = table(COLUMNS, &[("x\n\u{1b}[2J", 1)], false);
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
