//! Makes a map of maps, whose updates wait for running programs; aya cannot create one without an object.

use std::{
    io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use super::{Command, element::ElementAttr, sys_bpf};

/// `enum bpf_map_type` (linux/bpf.h).
pub(super) const ARRAY: u32 = 2;
const ARRAY_OF_MAPS: u32 = 12;

/// `union bpf_attr`, the beginning of the struct of `BPF_MAP_CREATE`.
#[repr(C)]
struct CreateAttr {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map_fd: u32,
}

/// An array of one map.
pub(crate) struct NestedMap {
    inner: OwnedFd,
    outer: OwnedFd,
}

impl NestedMap {
    /// Makes both maps (Linux 4.12).
    pub(crate) fn new() -> io::Result<Self> {
        let inner = create(ARRAY, 0)?;
        let outer = create(ARRAY_OF_MAPS, inner.as_raw_fd().cast_unsigned())?;
        Ok(Self { inner, outer })
    }

    /// Writes the entry. Returns when every program that ran at the call has ended.
    pub(crate) fn replace(&self) -> io::Result<()> {
        update(&self.outer, self.inner.as_raw_fd().cast_unsigned())
    }
}

pub(super) fn create(kind: u32, inner_map_fd: u32) -> io::Result<OwnedFd> {
    let mut attr = CreateAttr {
        kind,
        key_size: 4,
        value_size: 4,
        max_entries: 1,
        flags: 0,
        inner_map_fd,
    };
    // SAFETY: the attribute holds no address.
    let fd = unsafe { sys_bpf(Command::MapCreate, &mut attr) }?;
    // SAFETY: the kernel has just made the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn update(map: &OwnedFd, value: u32) -> io::Result<()> {
    let key = 0_u32;
    let mut attr = ElementAttr {
        map_fd: map.as_raw_fd().cast_unsigned(),
        padding: 0,
        key: std::ptr::from_ref(&key).addr() as u64,
        value: std::ptr::from_ref(&value).addr() as u64,
        flags: 0,
    };
    // SAFETY: key and value have the four bytes that both maps were made with, and the kernel only reads them.
    unsafe { sys_bpf(Command::MapUpdateElem, &mut attr) }.map(drop)
}
