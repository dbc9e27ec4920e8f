//! Wraps the commands of bpf(2) that aya lacks.

pub(super) mod batch;
mod element;
pub(super) mod link;
pub(super) mod nested;
#[cfg(test)]
pub(super) mod slow;

use std::{io, mem::size_of};

/// `enum bpf_cmd` (linux/bpf.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Command {
    MapCreate = 0,
    MapLookupElem = 1,
    MapUpdateElem = 2,
    MapDeleteElem = 3,
    MapGetNextKey = 4,
    #[cfg(test)]
    ProgLoad = 5,
    ObjPin = 6,
    ObjGet = 7,
    #[cfg(test)]
    ProgTestRun = 10,
    ObjGetInfoByFd = 15,
    MapLookupBatch = 24,
    MapUpdateBatch = 26,
    MapDeleteBatch = 27,
    LinkUpdate = 29,
    LinkDetach = 34,
}

/// The only call of bpf(2). Returns the kernel's non-negative result: a descriptor for the commands that make or
/// open an object, else 0.
///
/// # Safety
/// `attr` must be the struct of `union bpf_attr` that belongs to the command. Every address in it must be valid for as
/// many bytes as the kernel reads or writes there, given the sizes of the map and the lengths in the attribute.
unsafe fn sys_bpf<T>(command: Command, attr: &mut T) -> io::Result<i32> {
    // SAFETY: the attribute is valid for its own size; the caller vouches for its content.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as i32, std::ptr::from_mut(attr), size_of::<T>()) };
    match i32::try_from(result) {
        Ok(result) if result >= 0 => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}
