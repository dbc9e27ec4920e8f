//! Keeps the agent's records across restarts of the agent, but not of the node.
//! Layer: driver.
//!
//! One redb file on tmpfs, and a copy in memory of the kernel ([`RecordCopy`]). Each row is JSON with a version, so
//! that a newer agent can read an older one's rows. A commit is complete when the call returns: killing the agent at
//! any time loses nothing (I5). The copy has it then, which costs microseconds; the file gets the changes of some time
//! in one transaction ([`Store::write_file`]), because each of its transactions costs a tenth of a millisecond or more.
//! Both live in memory of the node, for as long as the node runs. Where there is no copy, or it cannot be written, a
//! change waits for the file. A file that is lost, damaged or older than it was is replaced by the copy; rows that
//! cannot be decoded are quarantined.

mod change;
mod choose;
mod copy;
mod error;
mod file;
mod held;
mod quarantine;
mod record;
mod row;

use std::{
    fmt, fs,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub use copy::{CopiedRows, RecordCopy};
pub use error::StoreError;
use kni_model::{Network, Sandbox};
pub use quarantine::{Quarantined, SandboxParts};
pub use record::{AddressRest, NamespaceRecord, NamespaceUse, Removal, UplinkRecord, WarmInterface};
pub use row::{Edit, RowId, Rows};

use self::{
    choose::{Origin, choose},
    file::{FileContents, Found, Refusal, StateFile},
    held::Held,
    row::{NAMESPACES, NETWORKS, REMOVALS, RESTS, SANDBOXES},
};
pub use change::Change;

/// How long a starting agent waits for its predecessor to close the file (rolling update).
const LOCK_WAIT: Duration = Duration::from_secs(10);
/// With more changes than this that the file does not have, a change waits for the file.
const MOST_UNWRITTEN: usize = 4096;

/// All records, as read at start.
#[derive(Debug, Default)]
pub struct Contents {
    /// Sandboxes by id.
    pub sandboxes: Vec<Sandbox>,
    /// Namespaces that the agent created.
    pub namespaces: Vec<NamespaceRecord>,
    /// Interfaces that remain to be removed.
    pub removals: Vec<Removal>,
    /// Networks as last applied, including deleted ones: their numbers are never assigned again.
    pub networks: Vec<Network>,
    /// Addresses that no other pod may have yet.
    pub rests: Vec<AddressRest>,
    /// The agent's configuration of the uplink.
    pub uplink: UplinkRecord,
    /// Rows that this agent cannot decode.
    pub quarantined: Vec<Quarantined>,
    /// Why the file could not be used and the records come from the copy.
    pub lost: Option<String>,
    /// Why records may be missing: the file could not be used, and there is no copy. Nothing that carries the agent's
    /// marks may be removed then. A node without such objects never had an agent.
    pub incomplete: Option<String>,
}

/// The state. Clones share it.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("dir", &self.inner.dir)
            .finish_non_exhaustive()
    }
}

struct Inner {
    dir: PathBuf,
    boot: String,
    /// Held while the file is written, opened or given up. Taken before `held`, which is free meanwhile where that is
    /// possible.
    file_turn: Mutex<()>,
    held: Mutex<Held>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.write_behind();
    }
}

impl Store {
    /// Opens or creates the file `state.redb` in `dir` (0700). Waits up to 10 s for another agent to end. A file that
    /// cannot be read is kept under another name.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        make_folder(dir).map_err(|source| StoreError::Path {
            path: dir.to_owned(),
            source,
        })?;
        let mut held = Held::default();
        match StateFile::open(dir, LOCK_WAIT) {
            Ok((file, found, contents)) => {
                if let Found::SetAside { kept, reason } = &found {
                    tracing::error!(reason, kept = %kept.display(), "the state cannot be read; the file is kept aside");
                }
                held.file = Some(Arc::new(file));
                held.opened = Some((found, contents));
            }
            Err(Refusal::InUse) => return Err(StoreError::InUse(dir.join(file::NAME))),
            Err(Refusal::Io(reason) | Refusal::Unreadable(reason)) => held.fail(reason),
        }
        Ok(Self {
            inner: Arc::new(Inner {
                dir: dir.to_owned(),
                boot: boot_id(),
                file_turn: Mutex::default(),
                held: Mutex::new(held),
            }),
        })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.inner.held()
    }

    /// Reads all records, from the file or from the copy, whichever is newer, and brings the other up to date. Call it
    /// once, before any commit.
    pub fn load(&self, copy: Option<Box<dyn RecordCopy>>) -> Result<Contents, StoreError> {
        let _turn = self.inner.file_turn();
        let mut held = self.held();
        let (copied, unread) = match copy.as_ref().map(|copy| copy.read()) {
            Some(Ok(rows)) => (rows, None),
            Some(Err(reason)) => {
                tracing::error!(reason, "the copy of the state in the kernel cannot be read");
                (
                    None,
                    Some(format!(
                        "its copy cannot be read ({reason}), which may have later changes"
                    )),
                )
            }
            None => (None, None),
        };
        let (found, contents) = match held.opened.take() {
            Some(opened) => opened,
            // Another file system may be full: nothing was there. A file that exists must not be ignored.
            None if copied.is_some() || !self.inner.dir.join(file::NAME).exists() => {
                (Found::Missing, FileContents::default())
            }
            None => return Err(StoreError::Unwritable(held.problem().unwrap_or_default())),
        };
        let before = contents.rows.clone();
        let chosen = choose(&found, contents, copied, &self.inner.boot);
        let mut rows = chosen.rows;
        let quarantined = quarantine::sort_out(&mut rows, chosen.spare.as_ref());
        held.rows = rows;
        held.sequence = chosen.sequence.saturating_add(1);
        held.copy = copy;
        held.copy_is_behind = true;
        let edits = row::difference(&before, &held.rows);
        held.write_file(&edits, &self.inner.boot);
        held.write_copy(&[]);
        let (lost, incomplete) = match chosen.origin {
            Origin::File => (unread, None),
            Origin::Copy(reason) => (Some(reason), None),
            Origin::Nothing(reason) => (None, Some(reason)),
        };
        if let Some(reason) = &lost {
            tracing::error!(reason, "the state was lost; its copy in the kernel is used");
        }
        Ok(Contents {
            sandboxes: SANDBOXES.records(&held.rows),
            namespaces: NAMESPACES.records(&held.rows),
            removals: REMOVALS.records(&held.rows),
            networks: NETWORKS.records(&held.rows),
            rests: RESTS.records(&held.rows),
            uplink: held.uplink(),
            quarantined,
            lost,
            incomplete,
        })
    }

    /// The agent's configuration of the uplink.
    pub fn uplink(&self) -> UplinkRecord {
        self.held().uplink()
    }

    /// Applies a change; it is durable when this returns. [`StoreError::Unwritable`] while the file cannot be written:
    /// then nothing is changed, and the effect that it would record must not happen (I5).
    pub fn commit(&self, change: Change) -> Result<(), StoreError> {
        self.apply(change, true)
    }

    /// Applies a change that must not wait for the file, such as the end of a sandbox: at once in memory and in the
    /// copy, and in the file as soon as that can be written.
    pub fn commit_deferred(&self, change: Change) -> Result<(), StoreError> {
        self.apply(change, false)
    }

    /// `needs_file`: refused while the file cannot be written.
    fn apply(&self, change: Change, needs_file: bool) -> Result<(), StoreError> {
        let edits = {
            let mut held = self.held();
            let edits = change.edits(&held.rows)?;
            if needs_file {
                held.refuse_without_file()?;
            }
            held.sequence = held.sequence.saturating_add(1);
            if held.unwritten.len() < MOST_UNWRITTEN && held.write_copy_first(&edits) {
                row::apply(&mut held.rows, &edits);
                if held.file.is_some() {
                    held.unwritten.extend(edits);
                }
                return Ok(());
            }
            edits
        };
        let _turn = self.inner.file_turn();
        let mut held = self.held();
        if needs_file {
            held.refuse_without_file()?;
        }
        held.sequence = held.sequence.saturating_add(1);
        let earlier = std::mem::take(&mut held.unwritten);
        let all: Vec<Edit> = earlier.into_iter().chain(edits.iter().cloned()).collect();
        // After a failure the rows, with the earlier changes, are compared with the file when it is opened again.
        if let Some(reason) = held.write_file(&all, &self.inner.boot)
            && needs_file
        {
            return Err(StoreError::Unwritable(reason));
        }
        row::apply(&mut held.rows, &edits);
        held.write_copy(&edits);
        Ok(())
    }

    /// Why the file cannot be written.
    pub fn problem(&self) -> Option<String> {
        self.held().problem()
    }

    /// Writes to the file what it does not have yet. Blocks for as long as a transaction takes.
    pub fn write_file(&self) {
        let _turn = self.inner.file_turn();
        self.inner.write_behind();
    }

    /// Writes to the file what it does not have yet. Looks after it: opens it again after a failure, with increasing
    /// pauses, compares it with the rows in memory and writes the differences; replaces a file that was removed or
    /// replaced. Call it a few times per second. Blocks.
    pub fn maintain(&self) {
        let _turn = self.inner.file_turn();
        self.inner.write_behind();
        let mut held = self.held();
        if held.file.as_ref().is_some_and(|file| !file.is_in_place()) {
            held.fail("the file was removed or replaced".to_owned());
            held.retry_now();
        }
        if held.is_retry_due() {
            self.reopen(&mut held);
        }
        if held.copy_is_behind {
            held.write_copy(&[]);
        }
    }

    fn reopen(&self, held: &mut Held) {
        if let Err(error) = make_folder(&self.inner.dir) {
            return held.fail(error.to_string());
        }
        let (file, found, contents) = match StateFile::open(&self.inner.dir, Duration::ZERO) {
            Ok(opened) => opened,
            Err(Refusal::InUse) => return held.fail("another process has the file open".to_owned()),
            Err(Refusal::Io(reason) | Refusal::Unreadable(reason)) => return held.fail(reason),
        };
        if let Found::SetAside { kept, reason } = found {
            tracing::error!(reason, kept = %kept.display(), "the state file cannot be read; it is kept aside");
        }
        held.file = Some(Arc::new(file));
        held.unwritten.clear();
        let edits = row::difference(&contents.rows, &held.rows);
        held.sequence = held.sequence.saturating_add(1);
        if held.write_file(&edits, &self.inner.boot).is_none() {
            held.recovered();
            tracing::info!(rows = edits.len(), "the state can be written again");
        }
    }
}

impl Inner {
    fn held(&self) -> MutexGuard<'_, Held> {
        // A panic while it was held is a bug; the rows are changed only after every step that can fail.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file_turn(&self) -> MutexGuard<'_, ()> {
        self.file_turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what the file does not have yet, in one transaction. The caller has the turn; commits continue meanwhile.
    fn write_behind(&self) {
        let (file, edits, sequence) = {
            let mut held = self.held();
            let edits = std::mem::take(&mut held.unwritten);
            match &held.file {
                Some(file) if !edits.is_empty() => (Arc::clone(file), edits, held.sequence),
                _ => return,
            }
        };
        let written = file.write(&edits, sequence, &self.boot);
        let mut held = self.held();
        match written {
            Ok(()) => {
                held.in_file = sequence;
                held.write_copy(&[]);
            }
            Err(error) => held.fail(kni_model::error_chain(&error)),
        }
    }
}

fn make_folder(dir: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Identifies this boot of the node; empty where the kernel does not report it.
fn boot_id() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

/// Whether a file in the folder of the state is one that the store made, under its own name or kept aside.
pub fn is_state_file(name: &str) -> bool {
    name == file::NAME || name.starts_with(&format!("{}.unreadable-", file::NAME))
}

#[cfg(test)]
mod tests;
