//! Opens and pins objects by descriptor, finds the interface of a link and detaches links, which aya does not support.

use std::{
    ffi::CString,
    io,
    mem::size_of,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use super::{Command, sys_bpf};

/// `enum bpf_link_type` (linux/bpf.h).
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

/// The beginning of `struct bpf_link_info`, as XDP and TCX links fill it.
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

    /// Whether it is a link of an interface that is gone, or that it was detached from.
    pub(crate) fn is_detached(&self) -> bool {
        self.is_of_interface() && self.ifindex == 0
    }

    /// Whether it runs the program at the interface.
    pub(crate) fn runs(&self, program: u32, ifindex: u32) -> bool {
        self.is_of_interface() && self.program == program && self.ifindex == ifindex
    }
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

/// Index of the interface of a pinned XDP or TCX link. `None` where there is no pin, the link is of another kind, or its
/// interface is gone.
pub(crate) fn ifindex(path: &Path) -> io::Result<Option<u32>> {
    let fd = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let info = info(&fd)?;
    Ok(Some(info.ifindex).filter(|index| info.is_of_interface() && *index != 0))
}

/// Detaches a pinned link from its interface (Linux 5.9). Unpinning alone detaches it only some time later, and until
/// then the interface accepts no other XDP link. A missing pin, or a link that is detached already, is not an error.
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
