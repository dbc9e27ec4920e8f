//! Creates and removes named network namespaces.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use kni_model::NetnsIdentity;
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    sys::statfs::{NSFS_MAGIC, statfs},
};

use super::{OWN_NAMESPACE, identity, on_own_thread};
use crate::{
    Result,
    error::{Error, Existing, Place},
};

/// Retries of the removal of a busy file, and the pause between them.
const BUSY_TRIES: u32 = 20;
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// A path with more mounts than this is not KNI's.
const STACKED_MOUNTS: u32 = 8;

/// Creates a network namespace and binds it to `path`, which must not exist ([`Existing::File`]); its directory is
/// created (0755) and becomes a shared mount, as with `ip netns`, so that other mount namespaces see the name. A
/// failure leaves nothing but the directory. The loopback interface is down. Costs about 1 ms.
pub async fn create(path: &Path) -> Result<NetnsIdentity> {
    let owned = path.to_owned();
    on_own_thread(&place("create namespace", path), move || create_here(&owned)).await?
}

/// As [`remove_here`], on a thread that may block.
pub async fn remove(path: &Path) -> Result<bool> {
    let place = place("remove namespace", path);
    let owned = path.to_owned();
    tokio::task::spawn_blocking(move || remove_here(&owned))
        .await
        .map_err(|_ended| Error::Ended {
            place,
            what: "the thread",
        })?
}

fn place(operation: &'static str, path: &Path) -> Place {
    Place::new(operation).path(path)
}

/// Changes the namespace of the calling thread, which must end afterwards.
fn create_here(path: &Path) -> Result<NetnsIdentity> {
    let operation = "create namespace";
    if let Some(directory) = path.parent() {
        prepare_directory(directory)?;
    }
    match File::options().write(true).create_new(true).mode(0o444).open(path) {
        Ok(_file) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(Error::Exists {
                place: place(operation, path),
                what: Existing::File(path.to_owned()),
            });
        }
        Err(error) => return Err(place(operation, path).refused(error)),
    }
    let bound = unshare(CloneFlags::CLONE_NEWNET)
        .and_then(|()| mount(Some(OWN_NAMESPACE), path, None::<&str>, MsFlags::MS_BIND, None::<&str>))
        .map_err(|errno| place(operation, path).refused(errno))
        .and_then(|()| identity(path));
    if bound.is_err() {
        // The cause is more important than a failure to remove an empty file.
        umount2(path, MntFlags::MNT_DETACH).ok();
        fs::remove_file(path).ok();
    }
    bound
}

/// Creates `directory` and makes it a mount point whose mounts propagate.
fn prepare_directory(directory: &Path) -> Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let place = || place("prepare the directory of namespaces", directory);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .map_err(|error| place().refused(error))?;
    let share = || mount(None::<&str>, directory, None::<&str>, MsFlags::MS_SHARED, None::<&str>);
    match share() {
        // Not a mount point yet.
        Err(Errno::EINVAL) => mount(
            Some(directory),
            directory,
            None::<&str>,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            None::<&str>,
        )
        .and_then(|()| share()),
        other => other,
    }
    .map_err(|errno| place().refused(errno))
}

/// Removes the name `path` of a network namespace, which is deleted with its last user. Idempotent: returns whether the
/// name existed. Removes nothing but a mounted network namespace or an empty file. Blocks for about 1 ms: unmounting
/// waits until no CPU reads the list of mounts (`namespace_unlock` in `fs/namespace.c`).
pub fn remove_here(path: &Path) -> Result<bool> {
    let operation = "remove namespace";
    let refused = |error: io::Error| place(operation, path).refused(error);
    let mut existed = false;
    for _mount in 0..STACKED_MOUNTS {
        let status = match fs::symlink_metadata(path) {
            Ok(status) => status,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(existed),
            Err(error) => return Err(refused(error)),
        };
        existed = true;
        if !status.is_file() {
            return Err(foreign(path, "it is not a regular file"));
        }
        if !is_nsfs(path)? {
            if status.len() > 0 {
                return Err(foreign(path, "the file is not empty"));
            }
            return unlink(path).map(|()| true);
        }
        identity(path)?;
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // EINVAL, ENOENT: another process has unmounted or removed it.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(errno) => return Err(place(operation, path).refused(errno)),
        }
    }
    Err(foreign(path, "it has too many mounts"))
}

fn is_nsfs(path: &Path) -> Result<bool> {
    match statfs(path) {
        Ok(kind) => Ok(kind.filesystem_type() == NSFS_MAGIC),
        Err(Errno::ENOENT) => Ok(false),
        Err(errno) => Err(place("remove namespace", path).refused(errno)),
    }
}

fn foreign(path: &Path, reason: &str) -> Error {
    Error::Foreign {
        place: place("remove namespace", path),
        reason: reason.to_owned(),
    }
}

/// Removes the file, with retries: the kernel refuses temporarily while it is a mount point in another mount namespace.
fn unlink(path: &Path) -> Result<()> {
    let mut tries = 0;
    loop {
        match fs::remove_file(path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries < BUSY_TRIES => {
                tries += 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(error) => return Err(place("remove namespace", path).refused(error)),
        }
    }
}
