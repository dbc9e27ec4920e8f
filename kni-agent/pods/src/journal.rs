//! Replays deletes that CNI plugins recorded while the agent was away.
//!
//! A plugin writes a file for each interface and exits with success, so the agent must perform the delete. A file that
//! exists when an interface is added is older than that call, since runtimes never run two calls for one container at
//! once: its delete is performed first. A file that appears later is newer.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use kni_model::{InvalidId, SandboxId};
use kni_proto::cni::PendingDelete;
use tokio::sync::Mutex;

use crate::{
    error::{AttachError, Subject},
    registry::Registry,
    sandboxes::Sandboxes,
};

/// How often the agent looks for files while it runs: plugins whose calls to the agent timed out write them too.
const INTERVAL: Duration = Duration::from_secs(1);
/// Unfinished files have names with a dot in front; older ones belong to plugins that were killed.
const UNFINISHED_FOR: Duration = Duration::from_mins(10);

/// The pending deletes of one node.
pub(crate) struct DeleteJournal {
    sandboxes: Arc<Sandboxes>,
    state_dir: PathBuf,
    /// Held from before a file is read until it is removed, so that no delete is performed twice.
    one_at_a_time: Mutex<()>,
}

impl DeleteJournal {
    /// The files below `state_dir`, which may be missing.
    pub(crate) fn new(sandboxes: &Arc<Sandboxes>, state_dir: PathBuf) -> Self {
        Self {
            sandboxes: Arc::clone(sandboxes),
            state_dir,
            one_at_a_time: Mutex::default(),
        }
    }

    /// Performs all pending deletes. Failed ones stay for the next time, unreadable ones are moved aside.
    pub(crate) async fn replay(&self) {
        let files = match files(&PendingDelete::folder(&self.state_dir)) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                tracing::error!(dir = %self.state_dir.display(), %error, "cannot look for deletes of CNI plugins");
                return;
            }
        };
        for file in files {
            kni_tasks::progress();
            if let Err(error) = self.complete_file(&file).await {
                tracing::warn!(file = %file.display(), %error, "cannot do a delete of a CNI plugin yet");
            }
        }
    }

    /// Performs the pending delete of a sandbox that is about to be attached. Costs one system call if there is none.
    pub(crate) async fn complete(&self, sandbox: &SandboxId) -> Result<(), AttachError> {
        let file = PendingDelete::file(&self.state_dir, sandbox.as_str());
        // The file is removed after its delete is performed: a missing file needs no lock.
        if file.exists() {
            self.complete_file(&file).await
        } else {
            Ok(())
        }
    }

    /// Looks for new files until the agent stops.
    pub(crate) async fn follow(self: Arc<Self>, registry: Arc<Registry>) {
        let mut ticks = tokio::time::interval(INTERVAL);
        while !registry.is_stopping() {
            kni_tasks::waiting(ticks.tick()).await;
            self.replay().await;
        }
    }

    async fn complete_file(&self, file: &Path) -> Result<(), AttachError> {
        let _one_at_a_time = self.one_at_a_time.lock().await;
        let bytes = match fs::read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                move_aside(file, &error.to_string());
                return Ok(());
            }
        };
        let (pending, sandbox) = match read(file, &bytes) {
            Ok(read) => read,
            Err(rejection) => {
                move_aside(file, &rejection.to_string());
                return Ok(());
            }
        };
        let (sandboxes, detached) = (Arc::clone(&self.sandboxes), sandbox.clone());
        // On a task of its own: a panic leaves the file for the next round and does not end the rounds.
        let detach = tokio::spawn(async move {
            match pending.invocation {
                Some(invocation) => sandboxes.undo_invocation(&detached, &invocation).await,
                None => sandboxes.detach(&detached).await,
            }
        });
        detach
            .await
            .unwrap_or_else(|ended| Err(Subject::node().ended(&ended)))?;
        if let Err(error) = fs::remove_file(file) {
            tracing::error!(file = %file.display(), %error, "a delete is done, but its file stays");
        }
        tracing::info!(%sandbox, "did a delete that a CNI plugin had written down");
        Ok(())
    }
}

/// Removes all files, whose interfaces are gone already, and the folders that become empty.
pub fn remove_pending_deletes(state_dir: &Path) {
    let folder = PendingDelete::folder(state_dir);
    for file in files(&folder).unwrap_or_default() {
        if let Err(error) = fs::remove_file(&file) {
            tracing::warn!(file = %file.display(), %error, "left in place");
        }
    }
    for folder in folder.ancestors().take(2) {
        // A folder with other files stays.
        fs::remove_dir(folder).ok();
    }
}

/// The complete files, in the order of their names. Removes old unfinished ones.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            files.push(entry.path());
            continue;
        }
        let age = entry
            .metadata()?
            .modified()
            .map(|at| SystemTime::now().duration_since(at));
        if matches!(age, Ok(Ok(age)) if age > UNFINISHED_FOR) {
            fs::remove_file(entry.path())?;
        }
    }
    files.sort();
    Ok(files)
}

/// Why a file is not a valid pending delete.
#[derive(Debug, thiserror::Error)]
enum Rejection {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("version {0} is not {version}", version = PendingDelete::VERSION)]
    Version(u32),
    #[error(transparent)]
    Sandbox(#[from] InvalidId),
    #[error("it is about sandbox {0}, unlike its name")]
    Name(SandboxId),
}

fn read(file: &Path, bytes: &[u8]) -> Result<(PendingDelete, SandboxId), Rejection> {
    let pending: PendingDelete = serde_json::from_slice(bytes)?;
    if pending.version != PendingDelete::VERSION {
        return Err(Rejection::Version(pending.version));
    }
    let sandbox: SandboxId = pending.sandbox().parse()?;
    let named = PendingDelete::file(Path::new(""), sandbox.as_str());
    if file.file_name() != named.file_name() {
        return Err(Rejection::Name(sandbox));
    }
    Ok((pending, sandbox))
}

/// Renames the file so that it is not read again, and keeps it for inspection.
fn move_aside(file: &Path, reason: &str) {
    tracing::error!(file = %file.display(), reason, "not a delete of a CNI plugin; moved aside");
    let aside = file.parent().and_then(Path::parent).map(|dir| dir.join("rejected"));
    let (Some(aside), Some(name)) = (aside, file.file_name()) else {
        return;
    };
    let moved = fs::create_dir_all(&aside).and_then(|()| fs::rename(file, aside.join(name)));
    if let Err(error) = moved {
        tracing::error!(file = %file.display(), %error, "cannot move it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(container: &str, ifname: &str) -> PendingDelete {
        PendingDelete {
            version: PendingDelete::VERSION,
            container: container.into(),
            ifname: ifname.into(),
            network: "kni".into(),
            invocation: None,
        }
    }

    #[test]
    fn a_file_says_which_sandbox_goes() {
        let bytes = serde_json::to_vec(&pending("abc", "net1")).unwrap();
        let (read_back, sandbox) = read(Path::new("/x/abc:net1.json"), &bytes).unwrap();
        assert_eq!((read_back, sandbox.as_str()), (pending("abc", "net1"), "abc:net1"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let newer = PendingDelete {
            version: 2,
            ..pending("abc", "eth0")
        };
        for (name, bytes, part) in [
            ("abc.json", b"{".to_vec(), "EOF"),
            ("abc.json", b"{\"version\":1}".to_vec(), "missing field"),
            ("abc.json", serde_json::to_vec(&newer).unwrap(), "version 2"),
            (
                "abd.json",
                serde_json::to_vec(&pending("abc", "eth0")).unwrap(),
                "unlike its name",
            ),
            (
                "a/b.json",
                serde_json::to_vec(&pending("a/b", "eth0")).unwrap(),
                "sandbox id",
            ),
        ] {
            let reason = read(Path::new(name), &bytes).unwrap_err().to_string();
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn unfinished_files_are_none_and_go_when_they_are_old() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.json", "a.json", ".1-a", ".2-b"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let old = fs::File::options().write(true).open(dir.path().join(".2-b")).unwrap();
        old.set_modified(SystemTime::now() - Duration::from_hours(1)).unwrap();
        let found = files(dir.path()).unwrap();
        assert_eq!(found, [dir.path().join("a.json"), dir.path().join("b.json")]);
        assert!(dir.path().join(".1-a").exists() && !dir.path().join(".2-b").exists());
    }

    #[test]
    fn what_is_moved_aside_keeps_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let folder = PendingDelete::folder(dir.path());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("x.json"), "?").unwrap();
        move_aside(&folder.join("x.json"), "why");
        assert_eq!(fs::read(dir.path().join("cni/rejected/x.json")).unwrap(), b"?");
        remove_pending_deletes(dir.path());
        assert!(!folder.exists() && dir.path().join("cni").exists());
    }
}
