//! Drives the redb file: opens it, keeps an unreadable one aside, reads and writes rows.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nix::fcntl::{FallocateFlags, fallocate};
use redb::{
    Database, DatabaseError, ReadableDatabase as _, ReadableTable as _, StorageError, TableDefinition, TableError,
};

use super::{
    error::StoreError,
    row::{Edit, QUARANTINE, REMOVALS, RowId, Rows, TABLES},
};

/// Name of the file in the folder of the state.
pub(super) const NAME: &str = "state.redb";
/// Pause between two attempts to lock the file.
const LOCK_PAUSE: Duration = Duration::from_millis(100);
/// Space that is reserved for the file, so that commits of the usual size need none: some thousand rows.
const RESERVED: i64 = 4 << 20;
/// Memory for pages of the file, in bytes: those of some commits. Without a bound, every page that was ever written
/// would stay in memory, although rows are read only when the file is opened.
const CACHE: usize = 256 << 10;
/// Table with the properties of the file, and its keys.
const META: TextTable = TableDefinition::new("meta");
const SEQUENCE: &str = "sequence";
const BOOT: &str = "boot_id";

type TextTable = TableDefinition<'static, &'static str, &'static [u8]>;
type NumberTable = TableDefinition<'static, u32, &'static [u8]>;

/// The contents of a file.
#[derive(Debug, Default)]
pub(super) struct FileContents {
    pub(super) rows: Rows,
    /// Number of the last change; 0 for files of agents that did not count.
    pub(super) sequence: u64,
    /// Boot of the node in which it was written; `None` for files of agents that did not record it.
    pub(super) boot: Option<String>,
}

/// How a file was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// There was none; a new one is in its place.
    Missing,
    /// It was readable.
    Readable,
    /// It was not readable and is kept under another name; a new one is in its place.
    SetAside { kept: PathBuf, reason: String },
}

/// Why a file could not be opened.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Another agent has it open.
    InUse,
    /// Its content makes no sense.
    Unreadable(String),
    /// The file system refuses, perhaps only for now.
    Io(String),
}

impl From<DatabaseError> for Refusal {
    fn from(error: DatabaseError) -> Self {
        if matches!(error, DatabaseError::DatabaseAlreadyOpen) {
            Self::InUse
        } else if let DatabaseError::Storage(error) = error {
            error.into()
        } else {
            Self::Unreadable(error.to_string())
        }
    }
}

impl From<StorageError> for Refusal {
    fn from(error: StorageError) -> Self {
        if let StorageError::Io(source) = &error {
            source.into()
        } else {
            Self::Unreadable(error.to_string())
        }
    }
}

impl From<&io::Error> for Refusal {
    fn from(error: &io::Error) -> Self {
        if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) {
            Self::Unreadable(error.to_string())
        } else {
            Self::Io(error.to_string())
        }
    }
}

/// An open file.
#[derive(Debug)]
pub(super) struct StateFile {
    database: Database,
    path: PathBuf,
    inode: u64,
}

impl StateFile {
    /// Opens the file in `dir`, or makes it. Waits for another agent to close it.
    pub(super) fn open(dir: &Path, wait: Duration) -> Result<(Self, Found, FileContents), Refusal> {
        let path = dir.join(NAME);
        // An empty file is one whose creation was interrupted, or a truncated one.
        let existed = fs::metadata(&path).is_ok_and(|found| found.len() > 0);
        match Self::open_at(&path, wait) {
            Ok((file, contents)) => {
                let found = if existed { Found::Readable } else { Found::Missing };
                Ok((file, found, contents))
            }
            Err(Refusal::Unreadable(reason)) => {
                let kept = set_aside(&path).map_err(|error| Refusal::Io(error.to_string()))?;
                let (file, contents) = Self::open_at(&path, wait)?;
                Ok((file, Found::SetAside { kept, reason }, contents))
            }
            Err(refusal) => Err(refusal),
        }
    }

    fn open_at(path: &Path, wait: Duration) -> Result<(Self, FileContents), Refusal> {
        reserve(path).map_err(|error| Refusal::from(&error))?;
        let deadline = Instant::now() + wait;
        let database = loop {
            // redb asserts properties of the file that a damaged one does not have.
            let opened = catch_unwind(AssertUnwindSafe(|| {
                Database::builder().set_cache_size(CACHE).create(path)
            }));
            match opened.map_err(|_panic| Refusal::Unreadable("the database panics on it".to_owned()))? {
                Err(DatabaseError::DatabaseAlreadyOpen) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
                other => break other?,
            }
        };
        let inode = fs::metadata(path).map_err(|error| Refusal::from(&error))?.ino();
        let file = Self {
            database,
            path: path.to_owned(),
            inode,
        };
        let contents = catch_unwind(AssertUnwindSafe(|| file.read()));
        let contents = contents.map_err(|_panic| Refusal::Unreadable("the database panics on a row".to_owned()))?;
        Ok((file, contents?))
    }

    /// Whether the path still leads to this file.
    pub(super) fn is_in_place(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode)
    }

    fn read(&self) -> Result<FileContents, Refusal> {
        let failed = |error: redb::Error| Refusal::Unreadable(error.to_string());
        let read = self.database.begin_read().map_err(|error| failed(error.into()))?;
        let mut contents = FileContents::default();
        let names = TABLES.into_iter().chain([QUARANTINE]);
        for name in names.filter(|name| *name != REMOVALS.name) {
            let table = match read.open_table(TextTable::new(name)) {
                Err(TableError::TableDoesNotExist(_)) => continue,
                other => other.map_err(|error| failed(error.into()))?,
            };
            for row in table.iter()? {
                let (key, value) = row?;
                contents
                    .rows
                    .insert(RowId::new(name, key.value()), value.value().to_vec());
            }
        }
        match read.open_table(NumberTable::new(REMOVALS.name)) {
            Err(TableError::TableDoesNotExist(_)) => {}
            other => {
                for row in other.map_err(|error| failed(error.into()))?.iter()? {
                    let (key, value) = row?;
                    contents
                        .rows
                        .insert(REMOVALS.id(key.value().to_string()), value.value().to_vec());
                }
            }
        }
        match read.open_table(META) {
            Err(TableError::TableDoesNotExist(_)) => {}
            other => {
                let meta = other.map_err(|error| failed(error.into()))?;
                let text = |key| -> Result<Option<String>, Refusal> {
                    let value = meta.get(key)?;
                    Ok(value.map(|value| String::from_utf8_lossy(value.value()).into_owned()))
                };
                contents.sequence = text(SEQUENCE)?.and_then(|number| number.parse().ok()).unwrap_or(0);
                contents.boot = text(BOOT)?;
            }
        }
        Ok(contents)
    }

    /// Applies edits in one transaction; they are durable when this returns. After an error the file has either all or
    /// none of them, and must be opened again.
    pub(super) fn write(&self, edits: &[Edit], sequence: u64, boot: &str) -> Result<(), StoreError> {
        let written = catch_unwind(AssertUnwindSafe(|| self.write_rows(edits, sequence, boot)));
        written.unwrap_or_else(|_panic| Err(StoreError::Unwritable("the database panics on a write".to_owned())))
    }

    fn write_rows(&self, edits: &[Edit], sequence: u64, boot: &str) -> Result<(), StoreError> {
        let transaction = self.database.begin_write()?;
        for Edit { id, row } in edits {
            if id.table == REMOVALS.name {
                let mut table = transaction.open_table(NumberTable::new(REMOVALS.name))?;
                // Keys of this table are numbers; a quarantined row keeps its own.
                let Ok(key) = id.key.parse::<u32>() else { continue };
                match row {
                    Some(row) => table.insert(key, row.as_slice())?,
                    None => table.remove(key)?,
                };
                continue;
            }
            let Some(name) = TABLES.into_iter().chain([QUARANTINE]).find(|name| id.table == *name) else {
                continue;
            };
            let mut table = transaction.open_table(TextTable::new(name))?;
            match row {
                Some(row) => table.insert(id.key.as_str(), row.as_slice())?,
                None => table.remove(id.key.as_str())?,
            };
        }
        {
            let mut meta = transaction.open_table(META)?;
            meta.insert(SEQUENCE, sequence.to_string().as_bytes())?;
            meta.insert(BOOT, boot.as_bytes())?;
        }
        Ok(transaction.commit()?)
    }
}

/// Makes the file, for root alone, and allocates its space. The latter is best effort: without it a full file system
/// stops attaches earlier.
fn reserve(path: &Path) -> io::Result<()> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    let length = i64::try_from(file.metadata()?.len()).unwrap_or(RESERVED);
    let reserved = fallocate(
        &file,
        FallocateFlags::FALLOC_FL_KEEP_SIZE,
        0,
        length.saturating_add(RESERVED / 4).max(RESERVED),
    );
    if let Err(error) = reserved {
        tracing::debug!(path = %path.display(), %error, "cannot reserve space for the state");
    }
    Ok(())
}

/// Renames a file that cannot be used, so that it can be inspected.
pub(super) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let mut number = seconds;
    let kept = loop {
        let kept = path.with_file_name(format!("{NAME}.unreadable-{number}"));
        if !kept.exists() {
            break kept;
        }
        number += 1;
    };
    fs::rename(path, &kept)?;
    Ok(kept)
}
