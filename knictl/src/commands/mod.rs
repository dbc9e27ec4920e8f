//! Implements the commands, one module each, and their common list output.

pub(crate) mod doctor;
pub(crate) mod drops;
pub(crate) mod explain;
pub(crate) mod flows;
pub(crate) mod interfaces;
pub(crate) mod maps;
pub(crate) mod networks;
pub(crate) mod policy;
pub(crate) mod services;
pub(crate) mod status;
mod stream;

use serde::Serialize;

use crate::{
    cli::Format,
    document,
    error::Error,
    table::{self, Column},
    terminal::Terminal,
};

/// The outcome of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It succeeded.
    Done,
    /// It found the agent not ready, or something that does not work.
    NotReady,
    /// It ran in an agent's pod and ended there with this code.
    Ended(u8),
}

/// A list in all output formats.
pub(crate) struct List<'a, D, R> {
    /// The whole answer, for programs.
    pub(crate) document: &'a D,
    /// The rows of the table.
    pub(crate) rows: &'a [R],
    pub(crate) columns: &'a [Column<R>],
    /// What the rows represent, in plural.
    pub(crate) noun: &'a str,
}

impl<D: Serialize, R> List<'_, D, R> {
    /// Writes the list. An empty table has no header: a remark reports that it is empty.
    pub(crate) fn show(&self, format: Format, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
        let wide = format == Format::Wide;
        let screen = terminal.width().filter(|_| !wide);
        match format {
            Format::Json => terminal.text(&document::json(self.document)?)?,
            Format::Yaml => terminal.text(&document::yaml(self.document)?)?,
            Format::Table | Format::Wide if self.rows.is_empty() => terminal.note(&format!("No {} found.", self.noun)),
            Format::Table | Format::Wide => terminal.text(&table::table(self.columns, self.rows, wide, screen))?,
        }
        Ok(Outcome::Done)
    }
}
