//! Asks the kernel which interface a pinned link belongs to, and takes links off at once: the library does neither.

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

const BPF_OBJ_GET: i32 = 7;
const BPF_OBJ_GET_INFO_BY_FD: i32 = 15;
const BPF_LINK_DETACH: i32 = 34;
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

fn bpf<T>(command: i32, attr: &mut T) -> io::Result<i32> {
    // SAFETY: the attribute is valid for its own size, and every address in it is that of a buffer of the caller's that
    // is as long as the attribute says.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    match i32::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjectAttr {
        path: path.as_ptr().addr() as u64,
        fd: 0,
        flags: 0,
    };
    let fd = bpf(BPF_OBJ_GET, &mut attr)?;
    // SAFETY: the kernel has just made the descriptor, for nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Index of the interface of a pinned XDP or TCX link. `None` where nothing is pinned, or the link is of another kind, or
/// its interface is gone.
pub(super) fn ifindex(path: &Path) -> io::Result<Option<u32>> {
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
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(Some(info.ifindex).filter(|index| matches!(info.kind, XDP | TCX) && *index != 0))
}

/// Takes a pinned link off its interface (Linux 5.9). Unpinning alone does so only when the kernel gets round to it, and
/// until then an interface has no room for another XDP link. One that is not there, or off already, is no error.
pub(super) fn detach(path: &Path) {
    let Ok(fd) = open(path) else { return };
    let mut attr = DetachAttr {
        fd: fd.as_raw_fd().cast_unsigned(),
    };
    if let Err(error) = bpf(BPF_LINK_DETACH, &mut attr) {
        tracing::debug!(path = %path.display(), %error, "a link goes later");
    }
}
