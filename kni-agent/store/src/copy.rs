//! Defines the second copy of the rows, which outlives the file.

use super::row::{Edit, Rows};

/// The rows of a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopiedRows {
    /// Number of the last complete change; higher is newer.
    pub sequence: u64,
    /// The rows after that change, and one that contains the number of the last change in the file.
    pub rows: Rows,
}

/// A copy of the rows outside of the state's file system. It lives as long as the pinned programs and maps of the
/// interfaces, so that a lost file never means lost records. A failure of it does not fail a change of the file.
pub trait RecordCopy: Send + Sync {
    /// The rows, without those of a change that was interrupted; `None` if there is no copy yet.
    fn read(&self) -> Result<Option<CopiedRows>, String>;

    /// Applies a change as a whole or not at all, also if the process is killed meanwhile.
    fn write(&self, sequence: u64, edits: &[Edit]) -> Result<(), String>;

    /// Replaces all rows.
    fn replace(&self, rows: &CopiedRows) -> Result<(), String>;
}
