//! Opens network namespaces and runs code inside, each time on a thread of its own.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::Arc,
    thread,
};

use nix::{
    mount::{MntFlags, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::statfs::{NSFS_MAGIC, statfs},
};
use tokio::sync::oneshot;

use crate::error::{During as _, Failure, Result, require};

const OWN: &str = "/proc/thread-self/ns/net";

/// An open network namespace, which lives at least as long as the value: the sandbox process of a pod has the same
/// effect.
#[derive(Debug, Clone)]
pub(crate) struct Netns {
    file: Arc<File>,
    identity: (u64, u64),
}

impl Netns {
    /// The namespace of the calling thread.
    pub(crate) fn current() -> Result<Self> {
        Self::of_file(File::open(OWN).during("open the own network namespace")?)
    }

    /// A new namespace, with the interfaces that the kernel gives to every one.
    pub(crate) async fn fresh() -> Result<Self> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).during("make a network namespace")?;
            Self::current()
        })
        .await?
    }

    /// The namespace that is mounted at `path`, which must be absolute and no symbolic link.
    pub(crate) async fn mounted(path: &str) -> Result<Self> {
        require!(path.starts_with('/'), "the namespace path {path:?} is not absolute");
        let kind = fs::symlink_metadata(path).during(format!("namespace path {path}"))?;
        require!(
            kind.is_file(),
            "{path} is no mounted namespace but {:?}",
            kind.file_type()
        );
        let system = statfs(path).during(format!("namespace path {path}"))?;
        require!(
            system.filesystem_type() == NSFS_MAGIC,
            "no namespace is mounted at {path}: it is an ordinary file"
        );
        let netns = Self::of_file(File::open(path).during(format!("open {path}"))?)?;
        // The kernel refuses to enter a namespace of another type.
        netns.run(|| ()).await.map_err(|failure| failure.about(path))?;
        Ok(netns)
    }

    fn of_file(file: File) -> Result<Self> {
        let status = file.metadata().during("identify a namespace")?;
        Ok(Self {
            file: Arc::new(file),
            identity: (status.dev(), status.ino()),
        })
    }

    /// Whether both are the same namespace.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Runs `work` inside. Sockets that it returns stay inside.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let file = Arc::clone(&self.file);
        on_thread(move || setns(&*file, CloneFlags::CLONE_NEWNET).map(|()| work()))
            .await?
            .during("enter a network namespace")
    }
}

/// Removes the name of a network namespace; anything else at the path stays.
pub(crate) fn unmount(path: &str) {
    let is_namespace = statfs(path).is_ok_and(|system| system.filesystem_type() == NSFS_MAGIC);
    // What cannot be removed stays: this is a cleanup after a server that has failed.
    if is_namespace && umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_ok() {
        fs::remove_file(Path::new(path)).ok();
    }
}

async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (answer, result) = oneshot::channel();
    thread::Builder::new()
        .name("netns".to_owned())
        .spawn(move || drop(answer.send(work())))
        .during("start a thread")?;
    result
        .await
        .map_err(|_ended| Failure::Wrong("a thread of the suite panicked".to_owned()))
}
