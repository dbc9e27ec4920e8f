//! The commands, one module each, and the way all of them show a list.

pub(crate) mod drops;
pub(crate) mod interfaces;
pub(crate) mod maps;
pub(crate) mod networks;
pub(crate) mod status;

use serde::Serialize;

use crate::{
    cli::Format,
    document,
    error::Error,
    table::{self, Column},
    terminal::Terminal,
};

/// How a command ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It did what was asked.
    Done,
    /// It found the agent not ready.
    NotReady,
}

/// A list in each of its forms.
struct List<'a, D, R> {
    /// All of the answer, for programs.
    document: &'a D,
    /// What the table shows of it.
    rows: &'a [R],
    columns: &'a [Column<R>],
    /// What the rows are, in plural.
    noun: &'a str,
}

impl<D: Serialize, R> List<'_, D, R> {
    /// Writes the list. An empty table has no header: a remark says that there is nothing.
    fn show(&self, format: Format, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
        let wide = format == Format::Wide;
        match format {
            Format::Json => terminal.text(&document::json(self.document)?)?,
            Format::Yaml => terminal.text(&document::yaml(self.document)?)?,
            Format::Table | Format::Wide if self.rows.is_empty() => terminal.note(&format!("No {} found.", self.noun)),
            Format::Table | Format::Wide => terminal.text(&table::table(self.columns, self.rows, wide))?,
        }
        Ok(Outcome::Done)
    }
}
