//! Finds the interface of a pinned link and detaches links, which aya does not support.

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
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    padding: u32,
    ifindex: u32,
    rest: [u32; 3],
}

fn open(path: &Path) -> io::Result<OwnedFd> {
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

/// Index of the interface of a pinned XDP or TCX link. `None` where there is no pin, the link is of another kind, or its
/// interface is gone.
pub(crate) fn ifindex(path: &Path) -> io::Result<Option<u32>> {
    let fd = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut info = LinkInfo::default();
    let mut attr = InfoAttr {
        fd: fd.as_raw_fd().cast_unsigned(),
        length: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info).addr() as u64,
    };
    // SAFETY: the address is that of `info`, which has the length in the attribute and is valid with any bytes.
    unsafe { sys_bpf(Command::ObjGetInfoByFd, &mut attr) }?;
    Ok(Some(info.ifindex).filter(|index| matches!(info.kind, XDP | TCX) && *index != 0))
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
