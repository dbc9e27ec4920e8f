//! Chooses between the file and the copy at the start.

use super::{
    copy::CopiedRows,
    file::{FileContents, Found},
    row::{Edit, RowId, Rows},
};

/// Table and key of the row by which the copy knows the number of the last change in the file. Only the copy has it.
const IN_FILE: (&str, &str) = ("meta", "in_file");

/// Notes in the copy which change is the last one in the file.
pub(super) fn in_file_edit(sequence: u64) -> Edit {
    Edit::put(RowId::new(IN_FILE.0, IN_FILE.1), sequence.to_string().into_bytes())
}

/// Takes the note out of the rows of the copy. Without one, the file has all changes of the copy.
fn take_in_file(copy: &mut CopiedRows) -> u64 {
    let noted = copy.rows.remove(&RowId::new(IN_FILE.0, IN_FILE.1));
    let noted = noted.and_then(|row| String::from_utf8(row).ok()?.parse().ok());
    noted.unwrap_or(copy.sequence)
}

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
    let mut copy = copy.filter(|copy| copy.sequence > 0);
    let in_file = copy.as_mut().map_or(0, take_in_file);
    match (unusable, copy) {
        // The agent ended before it had written the last changes to the file.
        (None, Some(copy)) if copy.sequence > file.sequence && file.sequence >= in_file => Chosen {
            rows: copy.rows,
            sequence: copy.sequence,
            origin: Origin::File,
            spare: None,
        },
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
