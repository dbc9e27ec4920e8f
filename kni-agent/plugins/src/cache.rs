//! Stores entries: one file per attachment with the input of DEL, and a lock that running plugins hold.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fnv::FnvHasher;
use kni_model::{IfName, NetworkName, SandboxId};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, Flock, FlockArg, fcntl},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Call, CniError, Configuration};

/// Version of the entries.
const VERSION: u32 = 1;
/// File name extensions of an entry, of its lock and of an unfinished write.
const ENTRY: &str = "json";
const LOCK: &str = "lock";
const UNFINISHED: &str = "new";
/// How long DEL waits for running plugins of an earlier agent.
const LOCK_WAIT: Duration = Duration::from_secs(70);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Everything that DEL needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Entry {
    version: u32,
    /// The configuration at the time of ADD.
    configuration: Value,
    pub(super) bin_dirs: Vec<PathBuf>,
    pub(super) container: String,
    pub(super) ifname: String,
    pub(super) arguments: String,
    pub(super) capabilities: Map<String, Value>,
    /// The result of the last plugin; none before it.
    result: Option<Value>,
}

/// The name of an entry's file, with a hash, as ids of sandboxes may be longer than file names.
pub(super) fn file_name(network: &NetworkName, sandbox: &SandboxId, ifname: &IfName) -> String {
    use std::hash::Hasher as _;
    let mut hasher = FnvHasher::default();
    hasher.write(sandbox.as_str().as_bytes());
    let start: String = sandbox
        .as_str()
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .take(64)
        .collect();
    format!("{network}-{start}-{:016x}-{ifname}.{ENTRY}", hasher.finish())
}

/// All entries of a folder; empty if the folder does not exist.
pub(super) fn list(dir: &Path) -> Result<Vec<PathBuf>, CniError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(dir)(error)),
    };
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    Ok(paths
        .filter(|path| path.extension().is_some_and(|extension| extension == ENTRY))
        .collect())
}

/// Removes an entry. Idempotent.
pub(super) async fn remove(path: &Path) -> Result<(), CniError> {
    blocking(path, |path| {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        sync_folder(path)
    })
    .await
}

impl Entry {
    pub(super) fn new(configuration: &Configuration, bin_dirs: &[PathBuf], call: &Call) -> Self {
        Self {
            version: VERSION,
            configuration: configuration.whole().clone(),
            bin_dirs: bin_dirs.to_vec(),
            container: call.container.clone(),
            ifname: call.ifname.to_string(),
            arguments: call.arguments(),
            capabilities: call.capability_values(),
            result: None,
        }
    }

    pub(super) fn configuration(&self) -> Result<Configuration, CniError> {
        Configuration::read(&self.configuration).map_err(|source| CniError::Invalid {
            file: PathBuf::from("the cached configuration"),
            source,
        })
    }

    pub(super) fn result(&self) -> Option<&Value> {
        self.result.as_ref()
    }

    pub(super) fn set_result(&mut self, result: Value) {
        self.result = Some(result);
    }

    /// Writes it atomically; it is on disk when this returns.
    pub(super) async fn write(&self, path: &Path) -> Result<(), CniError> {
        let entry = self.clone();
        blocking(path, move |path| {
            let bytes = serde_json::to_vec(&entry)?;
            make_folder(path)?;
            let unfinished = path.with_extension(UNFINISHED);
            let mut file = File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&unfinished)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&unfinished, path)?;
            sync_folder(path)
        })
        .await
    }

    /// `None` without an entry.
    pub(super) async fn read(path: &Path) -> Result<Option<Self>, CniError> {
        let read = blocking(path, |path| match fs::read(path) {
            Ok(bytes) => Ok(Some(serde_json::from_slice::<Self>(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        });
        match read.await? {
            Some(entry) if entry.version != VERSION => {
                let reason = format!("version {}, this agent reads {VERSION}", entry.version);
                Err(failed(path)(io::Error::other(reason)))
            }
            read => Ok(read),
        }
    }
}

/// The lock of an entry, held while plugins run, also by the plugins themselves: they inherit the descriptor.
#[derive(Debug)]
pub(super) struct Lock {
    file: Flock<File>,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock; waits for plugins of an earlier agent, up to [`LOCK_WAIT`].
    pub(super) async fn take(entry: &Path) -> Result<Self, CniError> {
        let path = entry.with_extension(LOCK);
        let mut file = blocking(&path, |path| {
            make_folder(path)?;
            File::options()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
        })
        .await?;
        let deadline = Instant::now() + LOCK_WAIT;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => return Ok(Self { file, path }),
                Err((_file, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                    let reason = "plugins of an earlier call for this attachment are still running";
                    return Err(failed(&path)(io::Error::other(reason)));
                }
                Err((again, Errno::EWOULDBLOCK | Errno::EINTR)) => {
                    file = again;
                    tokio::time::sleep(LOCK_PAUSE).await;
                }
                Err((_file, errno)) => return Err(failed(&path)(errno.into())),
            }
        }
    }

    /// Runs `spawn` while child processes inherit the descriptor. A process that another thread starts meanwhile may
    /// inherit it too, which only prolongs the lock.
    pub(super) fn inherited<T>(&self, spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        set_flags(&self.file, FdFlag::empty())?;
        let spawned = spawn();
        set_flags(&self.file, FdFlag::FD_CLOEXEC)?;
        spawned
    }

    /// Removes the file with the lock held. There is no waiter: each attachment has one caller at a time.
    pub(super) fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "cannot remove the lock of an entry");
        }
    }
}

fn set_flags(file: &File, flags: FdFlag) -> io::Result<()> {
    fcntl(file, FcntlArg::F_SETFD(flags)).map(drop).map_err(io::Error::from)
}

fn make_folder(path: &Path) -> io::Result<()> {
    let Some(dir) = path.parent() else { return Ok(()) };
    if dir.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(0o700))
}

fn sync_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> CniError {
    let path = path.to_owned();
    move |source| CniError::Entry { path, source }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, CniError> {
    let owned = path.to_owned();
    tokio::task::spawn_blocking(move || work(&owned))
        .await
        .unwrap_or_else(|ended| Err(io::Error::other(ended)))
        .map_err(failed(path))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use serde_json::json;

    use super::*;

    fn entry() -> Entry {
        let whole = json!({ "cniVersion": "1.0.0", "name": "a", "type": "bridge" });
        let configuration = Configuration::read(&whole).unwrap();
        Entry::new(
            &configuration,
            &["/opt/cni/bin".into()],
            &super::super::call::tests::call(),
        )
    }

    #[tokio::test]
    async fn an_entry_is_read_as_written_and_only_root_has_access() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        let name = |id: &str| file_name(&"blue".parse().unwrap(), &id.parse().unwrap(), &"eth0".parse().unwrap());
        assert_ne!(name("a-b"), name("ab"));
        let path = folder.join(name(&"x".repeat(253)));
        assert!(Entry::read(&path).await.unwrap().is_none());
        let mut entry = entry();
        entry.set_result(json!({ "ips": [] }));
        entry.write(&path).await.unwrap();
        let read = Entry::read(&path).await.unwrap().unwrap();
        assert_eq!(
            serde_json::to_value(&read).unwrap(),
            serde_json::to_value(&entry).unwrap()
        );
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&path)), (0o700, 0o600));
        assert_eq!(list(&folder).unwrap(), std::slice::from_ref(&path));
        remove(&path).await.unwrap();
        remove(&path).await.unwrap();
        assert!(list(&folder).unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_lock_waits_for_processes_that_inherited_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        let lock = Lock::take(&path).await.unwrap();
        let mut child = lock
            .inherited(|| std::process::Command::new("sleep").arg("0.3").spawn())
            .unwrap();
        let started = Instant::now();
        // As after the agent was killed: its descriptor is closed, the child's is not. Unlocking would release both.
        let descriptor = lock.file.as_raw_fd();
        std::mem::forget(lock);
        nix::unistd::close(descriptor).unwrap();
        Lock::take(&path).await.unwrap();
        assert!(
            started.elapsed() >= Duration::from_millis(200),
            "{:?}",
            started.elapsed()
        );
        child.wait().unwrap();
    }
}
