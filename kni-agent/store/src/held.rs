//! Holds the rows in memory, and knows which changes the file and the copy do not have yet.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    choose,
    copy::{CopiedRows, RecordCopy},
    error::StoreError,
    file::{FileContents, Found, StateFile},
    record::UplinkRecord,
    row::{self, Edit, Rows, UPLINK},
};

/// Pause after the first failed attempt to open the file again; each additional one doubles it.
const SHORTEST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The rows, and where they are kept.
#[derive(Default)]
pub(super) struct Held {
    pub(super) rows: Rows,
    /// Number of the last change.
    pub(super) sequence: u64,
    /// `None` while it cannot be written.
    pub(super) file: Option<Arc<StateFile>>,
    /// Changes that the copy has and the file does not have yet, in order.
    pub(super) unwritten: Vec<Edit>,
    /// Number of the last change in the file.
    pub(super) in_file: u64,
    failure: Option<Failure>,
    pub(super) copy: Option<Box<dyn RecordCopy>>,
    /// The copy lacks a change and is written anew with the next one.
    pub(super) copy_is_behind: bool,
    /// As the file was found, until [`super::Store::load`].
    pub(super) opened: Option<(Found, FileContents)>,
}

/// Why the file cannot be written, and when it is tried again.
struct Failure {
    reason: String,
    retry_at: Instant,
    pause: Duration,
}

impl Held {
    pub(super) fn refuse_without_file(&self) -> Result<(), StoreError> {
        match self.file {
            Some(_) => Ok(()),
            None => Err(StoreError::Unwritable(self.problem().unwrap_or_default())),
        }
    }

    pub(super) fn uplink(&self) -> UplinkRecord {
        UPLINK.records(&self.rows).pop().unwrap_or_default()
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.failure.as_ref().map(|failure| failure.reason.clone())
    }

    /// Whether the file is to be opened again.
    pub(super) fn is_retry_due(&self) -> bool {
        let failure = self.failure.as_ref();
        failure.is_some_and(|failure| failure.retry_at <= Instant::now())
    }

    /// Has the file opened again without a pause.
    pub(super) fn retry_now(&mut self) {
        if let Some(failure) = &mut self.failure {
            failure.retry_at = Instant::now();
        }
    }

    /// The file can be written again.
    pub(super) fn recovered(&mut self) {
        self.failure = None;
        // Whatever the copy missed meanwhile.
        self.copy_is_behind = true;
    }

    /// Writes the file, where it can be written. Returns the reason of a failure.
    pub(super) fn write_file(&mut self, edits: &[Edit], boot: &str) -> Option<String> {
        match self.file.as_ref()?.write(edits, self.sequence, boot) {
            Ok(()) => {
                self.in_file = self.sequence;
                None
            }
            Err(error) => {
                let reason = kni_model::error_chain(&error);
                self.fail(reason.clone());
                Some(reason)
            }
        }
    }

    /// The database refuses everything after one failure, so that it is closed here and opened again later.
    pub(super) fn fail(&mut self, reason: String) {
        let known = self.failure.as_ref();
        if known.is_none_or(|known| known.reason != reason) {
            tracing::error!(reason, "the state cannot be written");
        }
        let pause = known.map_or(SHORTEST_PAUSE, |known| known.pause.saturating_mul(2).min(LONGEST_PAUSE));
        self.file = None;
        self.unwritten.clear();
        self.failure = Some(Failure {
            reason,
            retry_at: Instant::now() + pause,
            pause,
        });
    }

    /// Writes a change to the copy alone. Whether it is there now.
    pub(super) fn write_copy_first(&mut self, edits: &[Edit]) -> bool {
        if self.copy_is_behind {
            return false;
        }
        match self.copy.as_ref().map(|copy| copy.write(self.sequence, edits)) {
            Some(Ok(())) => true,
            // Tried again as a whole, after the file.
            Some(Err(reason)) => {
                tracing::error!(reason, "the copy of the state in the kernel cannot be written");
                self.copy_is_behind = true;
                false
            }
            None => false,
        }
    }

    /// Writes the copy, with the number of the last change in the file; anew as a whole where it lacks an earlier
    /// change.
    pub(super) fn write_copy(&mut self, edits: &[Edit]) {
        let Some(copy) = &self.copy else { return };
        let in_file = choose::in_file_edit(self.in_file);
        let written = if self.copy_is_behind {
            let mut rows = self.rows.clone();
            row::apply(&mut rows, &[in_file]);
            copy.replace(&CopiedRows {
                sequence: self.sequence,
                rows,
            })
        } else {
            let edits: Vec<Edit> = edits.iter().cloned().chain([in_file]).collect();
            copy.write(self.sequence, &edits)
        };
        let was_behind = std::mem::replace(&mut self.copy_is_behind, written.is_err());
        if let Err(reason) = written
            && !was_behind
        {
            tracing::error!(reason, "the copy of the state in the kernel cannot be written");
        }
    }
}
