//! Defines the errors of the store.

use std::path::PathBuf;

/// Failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another agent has the file open.
    #[error("{}: another kni-agent uses it", .0.display())]
    InUse(PathBuf),
    /// The folder or file cannot be created.
    #[error("{}: {source}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The database failed.
    #[error("state database: {0}")]
    Database(#[source] Box<redb::Error>),
    /// The file cannot be written, so nothing that must be recorded first may begin.
    #[error("state cannot be written: {0}")]
    Unwritable(String),
    /// A row cannot be read or written.
    #[error("state row {table}/{key}: {reason}")]
    Record {
        /// Table.
        table: &'static str,
        /// Key.
        key: String,
        /// The cause.
        reason: String,
    },
}

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self::Database(Box::new(error.into()))
    }
}
