//! Holds the two streams a command writes to: the answer, and remarks about it.

use std::io::Write;

use crate::{error::Error, escape::escaped};

/// Where a command writes.
pub(crate) struct Terminal<'a> {
    out: &'a mut dyn Write,
    err: &'a mut dyn Write,
    width: Option<usize>,
}

impl<'a> Terminal<'a> {
    /// Answers go to `out`, remarks to `err`.
    pub(crate) fn new(out: &'a mut dyn Write, err: &'a mut dyn Write) -> Self {
        Self { out, err, width: None }
    }

    /// Answers are shown on a screen with this number of columns, if at all on one.
    pub(crate) fn on_screen(self, width: Option<usize>) -> Self {
        Self { width, ..self }
    }

    /// The number of columns of the screen; `None` where the answer goes into a pipe or a file.
    pub(crate) fn width(&self) -> Option<usize> {
        self.width
    }

    /// Writes a finished part of the answer and flushes it. The text is already escaped and contains its newlines.
    pub(crate) fn text(&mut self, text: &str) -> Result<(), Error> {
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Writes a remark, escaped, as one line.
    pub(crate) fn note(&mut self, remark: &str) {
        // There is no other place to report that remarks cannot be written.
        writeln!(self.err, "{}", escaped(remark)).unwrap_or_default();
    }
}
