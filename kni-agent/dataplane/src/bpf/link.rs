//! Opens and pins objects by descriptor, finds what a link is attached to, switches and detaches links, which aya does
//! not support.

use std::{
    ffi::CString,
    io,
    mem::size_of,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use super::{Command, sys_bpf};

/// `enum bpf_link_type` (linux/bpf.h).
const CGROUP: u32 = 3;
const XDP: u32 = 6;
const TCX: u32 = 11;

/// `union bpf_attr`, the struct of `BPF_OBJ_GET`.
#[repr(C)]
struct ObjectAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// `union bpf_attr`, the struct of `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct InfoAttr {
    fd: u32,
    length: u32,
    info: u64,
}

/// `union bpf_attr`, the struct of `BPF_LINK_DETACH`.
#[repr(C)]
struct DetachAttr {
    fd: u32,
}

/// `union bpf_attr`, the struct of `BPF_LINK_UPDATE`.
#[repr(C)]
struct UpdateAttr {
    fd: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// The beginning of `struct bpf_link_info`, as XDP and TCX links fill it. A link of a control group has the number of
/// the group, of 64 bits, in the place of `ifindex` and the following word.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    ifindex: u32,
    rest: [u32; 3],
}

impl LinkInfo {
    fn is_of_interface(&self) -> bool {
        matches!(self.kind, XDP | TCX)
    }

    /// The program that runs, where it is a link of the control group with that number.
    pub(crate) fn program_at_cgroup(&self, cgroup: u64) -> Option<u32> {
        let [high, ..] = self.rest;
        let found = cgroup_number(self.ifindex, high);
        (self.kind == CGROUP && found == cgroup && cgroup != 0).then_some(self.program)
    }

    /// Whether it is a link of an interface that is gone, or that it was detached from.
    pub(crate) fn is_detached(&self) -> bool {
        self.is_of_interface() && self.ifindex == 0
    }

    /// Whether it runs the program at the interface.
    pub(crate) fn runs(&self, program: u32, ifindex: u32) -> bool {
        self.is_of_interface() && self.program == program && self.ifindex == ifindex
    }
}

/// The number of a control group from its two words in memory.
fn cgroup_number(first: u32, second: u32) -> u64 {
    let mut bytes = [0; 8];
    for (half, word) in bytes.chunks_exact_mut(4).zip([first, second]) {
        half.copy_from_slice(&word.to_ne_bytes());
    }
    u64::from_ne_bytes(bytes)
}

/// Opens a pinned object.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    // SAFETY: the address is that of a zero-terminated string, which lives until the call ends.
    let fd = unsafe { sys_bpf(Command::ObjGet, &mut attr) }?;
    // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins an object; the path must not exist.
pub(crate) fn pin(object: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr {
        path: path.as_ptr().addr() as u64,
        fd: object.as_raw_fd().cast_unsigned(),
        flags: 0,
    };
    // SAFETY: the address is that of a zero-terminated string, which lives until the call ends.
    unsafe { sys_bpf(Command::ObjPin, &mut attr) }.map(drop)
}

/// Raises the limit of open descriptors as far as the process may; returns the limit.
pub(crate) fn raise_descriptor_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is ours to write.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return 0;
    }
    let raised = libc::rlimit {
        rlim_cur: limit.rlim_max,
        ..limit
    };
    // SAFETY: the kernel only reads `raised`.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
        raised.rlim_cur
    } else {
        limit.rlim_cur
    }
}

/// The properties of a link; of another object, an error or properties that no link of an interface has.
pub(crate) fn info(link: &OwnedFd) -> io::Result<LinkInfo> {
    let mut info = LinkInfo::default();
    let mut attr = InfoAttr {
        fd: link.as_raw_fd().cast_unsigned(),
        length: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    // SAFETY: the address is that of `info`, which has the length in the attribute and is valid with any bytes.
    unsafe { sys_bpf(Command::ObjGetInfoByFd, &mut attr) }?;
    Ok(info)
}

/// Index of the interface of a pinned XDP or TCX link. `None` where there is no pin, the link is of another kind, or
/// its interface is gone.
pub(crate) fn ifindex(path: &Path) -> io::Result<Option<u32>> {
    let fd = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let info = info(&fd)?;
    Ok(Some(info.ifindex).filter(|index| info.is_of_interface() && *index != 0))
}

/// Moves a link to another program of the same kind, atomically.
pub(crate) fn update(link: &OwnedFd, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = UpdateAttr {
        fd: link.as_raw_fd().cast_unsigned(),
        program: program.as_raw_fd().cast_unsigned(),
        flags: 0,
        old_program: 0,
    };
    // SAFETY: the attribute holds no address.
    unsafe { sys_bpf(Command::LinkUpdate, &mut attr) }.map(drop)
}

/// Detaches a pinned link from its interface or control group (Linux 5.9). Unpinning alone detaches it only some time
/// later, and until then the interface accepts no other XDP link. A missing pin, or a link that is detached already, is
/// not an error.
pub(crate) fn detach(path: &Path) {
    let Ok(fd) = open(path) else { return };
    let mut attr = DetachAttr {
        fd: fd.as_raw_fd().cast_unsigned(),
    };
    // SAFETY: the attribute holds no address.
    if let Err(error) = unsafe { sys_bpf(Command::LinkDetach, &mut attr) } {
        tracing::debug!(path = %path.display(), %error, "cannot detach a link before it is unpinned");
    }
}
