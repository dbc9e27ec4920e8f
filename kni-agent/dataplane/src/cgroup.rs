//! Finds the root of cgroup2, and reads the cookie of the network namespace.

use std::{
    fs::File,
    io,
    net::{Ipv4Addr, UdpSocket},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use super::DataplaneError;

/// Where the container of the agent has the machine's `/sys/fs/cgroup`: its own one shows only its own group.
const OF_MACHINE: &str = "/host/sys/fs/cgroup";
/// Where a machine has cgroup2; in the second place where it has version 1, too.
const USUAL: &str = "/sys/fs/cgroup";
const BESIDE_VERSION_1: &str = "unified";
/// A file that every group but the root has.
const NOT_IN_ROOT: &str = "cgroup.type";

/// A control group that all processes of the node are in.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) path: PathBuf,
    pub(super) folder: File,
    /// The kernel's number of the group.
    pub(super) number: u64,
}

/// The root of cgroup2, if it is mounted.
pub(super) fn root() -> Result<Root, DataplaneError> {
    let is_root = |path: &&PathBuf| !path.join(NOT_IN_ROOT).exists();
    let of_machine = places(OF_MACHINE).into_iter().find(|path| is_cgroup2(path));
    let path = of_machine.or_else(|| {
        places(USUAL)
            .into_iter()
            .filter(|path| is_cgroup2(path))
            .find(|path| is_root(&path))
    });
    let path = path.ok_or(DataplaneError::NoCgroup)?;
    let opened = File::open(&path).and_then(|folder| Ok((folder.metadata()?.ino(), folder)));
    let (number, folder) = opened.map_err(DataplaneError::pin(&path, "opening the root of cgroup2"))?;
    Ok(Root { path, folder, number })
}

fn places(folder: &str) -> [PathBuf; 2] {
    let folder = PathBuf::from(folder);
    [folder.clone(), folder.join(BESIDE_VERSION_1)]
}

fn is_cgroup2(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// The kernel's number of the calling thread's network namespace (`SO_NETNS_COOKIE`), not 0 and not used again until
/// the next boot.
pub(super) fn namespace_cookie() -> Result<u64, DataplaneError> {
    let failed = |error: io::Error| DataplaneError::Kernel(format!("cookie of the network namespace: {error}"));
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).unwrap_or(0);
    // SAFETY: `cookie` has the length that is passed, and any bytes are valid in it.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(cookie)
    } else {
        Err(failed(io::Error::last_os_error()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cookie_belongs_to_the_namespace() {
        let cookie = namespace_cookie().unwrap();
        assert_ne!(cookie, 0);
        assert_eq!(namespace_cookie().unwrap(), cookie);
    }
}
