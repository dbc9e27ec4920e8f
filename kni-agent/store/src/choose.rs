//! Chooses between the file and the copy at the start.

use super::{
    copy::CopiedRows,
    file::{FileContents, Found},
    row::Rows,
};

/// Where the rows come from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The file.
    File,
    /// The copy, because of this about the file.
    Copy(String),
    /// Neither could be used, because of this about the file.
    Nothing(String),
}

/// The rows to start with.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) rows: Rows,
    pub(super) sequence: u64,
    pub(super) origin: Origin,
    /// The copy after the same change, for rows that are damaged in the file.
    pub(super) spare: Option<Rows>,
}

/// The copy never outlives a boot; a file may, and describes namespaces and interfaces that are gone.
pub(super) fn choose(found: &Found, file: FileContents, copy: Option<CopiedRows>, boot: &str) -> Chosen {
    let stale = file.boot.as_deref().filter(|of| *of != boot && !boot.is_empty());
    let unusable = match (found, stale) {
        (Found::Missing, _) => Some("the file is missing or empty".to_owned()),
        (Found::SetAside { kept, reason }, _) => Some(format!(
            "the file cannot be read ({reason}); it is kept as {}",
            kept.display()
        )),
        (Found::Readable, Some(_)) => Some("the file is of another boot of the node".to_owned()),
        (Found::Readable, None) => None,
    };
    let copy = copy.filter(|copy| copy.sequence > 0);
    match (unusable, copy) {
        (None, Some(copy)) if copy.sequence > file.sequence => {
            let reason = format!(
                "the file is older than its copy (change {} instead of {})",
                file.sequence, copy.sequence
            );
            from_copy(copy, reason)
        }
        (None, copy) => Chosen {
            sequence: file.sequence,
            spare: copy.filter(|copy| copy.sequence == file.sequence).map(|copy| copy.rows),
            rows: file.rows,
            origin: Origin::File,
        },
        (Some(reason), Some(copy)) => from_copy(copy, reason),
        (Some(reason), None) => Chosen {
            rows: Rows::new(),
            sequence: 0,
            origin: Origin::Nothing(reason),
            spare: None,
        },
    }
}

fn from_copy(copy: CopiedRows, reason: String) -> Chosen {
    Chosen {
        rows: copy.rows,
        sequence: copy.sequence,
        origin: Origin::Copy(reason),
        spare: None,
    }
}
