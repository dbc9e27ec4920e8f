//! Opens and identifies network namespaces by path, and runs code inside.

mod lifecycle;

use std::{
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::Arc,
    thread,
};

use kni_model::NetnsIdentity;
pub use lifecycle::{create, remove, remove_here};
use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
    sys::statfs::{NSFS_MAGIC, fstatfs, statfs},
};
use tokio::sync::oneshot;

use super::{
    Result,
    error::{Error, Place},
};

/// The namespace of the calling thread, as a path.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// An open network namespace. The namespace lives at least as long as the value or any clone of it.
#[derive(Debug, Clone)]
pub struct Netns {
    fd: Arc<OwnedFd>,
    identity: NetnsIdentity,
    path: Arc<Path>,
}

impl Netns {
    /// The namespace of the calling thread.
    pub fn current() -> Result<Self> {
        open(Path::new(OWN_NAMESPACE))
    }

    /// The kernel's identity of the namespace.
    pub fn id(&self) -> NetnsIdentity {
        self.identity
    }

    /// The path by which it was opened; it may have been removed since.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn shared_path(&self) -> Arc<Path> {
        Arc::clone(&self.path)
    }

    /// Runs `work` inside the namespace, on a thread of its own, so that no other code ever runs in the wrong
    /// namespace. `work` cannot await, and continues if the returned future is dropped.
    pub async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let place = Place::new("enter namespace").path(&self.path);
        let fd = Arc::clone(&self.fd);
        let entered = on_own_thread(&place, move || {
            setns(fd.as_fd(), CloneFlags::CLONE_NEWNET).map(|()| work())
        })
        .await?;
        entered.map_err(|errno| place.refused(errno))
    }

    /// Moves the calling thread into the namespace, where it stays.
    pub(super) fn enter_here(&self) -> Result<()> {
        let place = || Place::new("enter namespace").path(&self.path);
        setns(self.fd.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|errno| place().refused(errno))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens the namespace at `path`; symbolic links such as `/proc/PID/ns/net` are followed. Never blocks on a FIFO.
///
/// [`Error::NotANamespace`] if the file has another type.
pub fn open(path: &Path) -> Result<Netns> {
    let place = || Place::new("open namespace").path(path);
    let refuse = |found| Error::NotANamespace {
        path: path.to_owned(),
        found,
    };
    // Checked before opening: opening a device or a FIFO can have side effects.
    let kind = statfs(path).map_err(|errno| place().refused(errno))?;
    if kind.filesystem_type() != NSFS_MAGIC {
        return Err(refuse("a file of another kind"));
    }
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| place().refused(error))?;
    let kind = fstatfs(&file).map_err(|errno| place().refused(errno))?;
    if kind.filesystem_type() != NSFS_MAGIC {
        return Err(refuse("a file of another kind"));
    }
    if namespace_type(&file).map_err(|errno| place().refused(errno))? != libc::CLONE_NEWNET {
        return Err(refuse("a namespace of another type"));
    }
    let status = file.metadata().map_err(|error| place().refused(error))?;
    let identity = NetnsIdentity {
        dev: status.dev(),
        inode: status.ino(),
    };
    Ok(Netns {
        fd: Arc::new(file.into()),
        identity,
        path: path.into(),
    })
}

/// The identity of the namespace at `path`; errors as [`open`].
pub fn identity(path: &Path) -> Result<NetnsIdentity> {
    open(path).map(|netns| netns.identity)
}

/// The `CLONE_NEW*` constant of an open nsfs file.
fn namespace_type(file: &File) -> nix::Result<i32> {
    // SAFETY: NS_GET_NSTYPE takes no argument and only reads; the descriptor is open for the duration of the call.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), libc::NS_GET_NSTYPE) };
    Errno::result(answer)
}

/// Runs blocking work on a thread of its own without blocking the runtime.
pub(super) async fn on_own_thread<T: Send + 'static>(
    place: &Place,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let (answer, result) = oneshot::channel();
    thread::Builder::new()
        .name("netns".to_owned())
        .spawn(move || drop(answer.send(work())))
        .map_err(|error| place.clone().refused(error))?;
    result.await.map_err(|_ended| Error::Ended {
        place: place.clone(),
        what: "the thread",
    })
}
