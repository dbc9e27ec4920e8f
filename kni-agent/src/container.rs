//! Corrects what differs between a container and the node itself, before the agent starts.
//! Layer: root.

use std::env;

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    sys::{
        statfs::{BPF_FS_MAGIC, statfs},
        statvfs::{FsFlags, statvfs},
    },
};

/// Kernel settings; a container without the flag `privileged` has a read-only view of them.
const SYSCTLS: &str = "/proc/sys";
/// Folder of the pins.
const BPFFS: &str = "/sys/fs/bpf";

/// Why the agent cannot work in this container.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The mount may not be changed.
    #[error(
        "{SYSCTLS} is read-only and cannot be made writable ({source}): the container needs CAP_SYS_ADMIN, and a profile \
         of AppArmor or SELinux that lets it mount"
    )]
    ReadOnly {
        /// The kernel's error.
        source: Errno,
    },
    /// The mount could not be examined.
    #[error("looking at {SYSCTLS}: {source}")]
    Unknown {
        /// The kernel's error.
        source: Errno,
    },
    /// Pins would be lost with the container.
    #[error(
        "no bpffs is mounted at {BPFFS} of the node: mount it there (systemd does), or pods would lose their programs \
         with this container"
    )]
    NoBpffs,
}

/// Makes `/proc/sys` writable where it is not, in this container's mount namespace alone: the agent configures the
/// namespaces of pods through it. Mounting needs `CAP_SYS_ADMIN`.
pub fn make_sysctls_writable() -> Result<(), ContainerError> {
    let found = statvfs(SYSCTLS).map_err(|source| ContainerError::Unknown { source })?;
    if !found.flags().contains(FsFlags::ST_RDONLY) {
        return Ok(());
    }
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    for (is, keep) in [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
    ] {
        if found.flags().contains(is) {
            flags |= keep;
        }
    }
    let none = None::<&str>;
    mount(none, SYSCTLS, none, flags, none).map_err(|source| ContainerError::ReadOnly { source })
}

/// Refuses a pod in which bpffs would have to be mounted: the mount would be lost with the pod.
pub fn check_bpffs() -> Result<(), ContainerError> {
    let has_bpffs = statfs(BPFFS).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC);
    // The kubelet sets this variable in every container of every pod.
    if has_bpffs || env::var_os("KUBERNETES_SERVICE_HOST").is_none() {
        return Ok(());
    }
    Err(ContainerError::NoBpffs)
}
