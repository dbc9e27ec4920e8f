//! Reads every row of a pinned map as bytes, whatever its types are.

use std::{
    ffi::CString,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

use anyhow::{Context as _, Result, ensure};

use super::map::Map;
use crate::syscall::bpf;

const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_OBJ_GET: libc::c_long = 7;

/// The start of `union bpf_attr` of these commands.
#[repr(C)]
#[derive(Default)]
struct Element {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct Pin {
    path: u64,
    descriptor: u32,
    flags: u32,
}

/// Copies every row of the pinned map into `to`, whose keys and values must be as long.
pub(super) fn copy(pin: &Path, to: &mut Map) -> Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut named = Pin {
        path: path.as_ptr() as u64,
        ..Pin::default()
    };
    let descriptor = i32::try_from(bpf(BPF_OBJ_GET, &mut named).context("open")?)?;
    // SAFETY: the kernel has just returned the descriptor, so it has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()))?;
    for (field, expected) in [("key_size:", to.key_size), ("value_size:", to.value_size)] {
        let found = info.lines().find_map(|line| line.strip_prefix(field));
        let found: usize = found.context("the kernel's description")?.trim().parse()?;
        ensure!(found == expected, "{field} {found}, and the object declares {expected}");
    }
    let map = u32::try_from(descriptor.as_raw_fd())?;
    let (mut key, mut next, mut value) = (None, vec![0; to.key_size], vec![0; to.value_size]);
    loop {
        let mut step = Element {
            map,
            key: key.as_ref().map_or(0, |key: &Vec<u8>| key.as_ptr() as u64),
            value: next.as_mut_ptr() as u64,
            ..Element::default()
        };
        match bpf(BPF_MAP_GET_NEXT_KEY, &mut step) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
            result => result.context("the next row")?,
        };
        let mut read = Element {
            map,
            key: next.as_ptr() as u64,
            value: value.as_mut_ptr() as u64,
            ..Element::default()
        };
        bpf(BPF_MAP_LOOKUP_ELEM, &mut read).context("a row")?;
        ensure!(to.update(&next, &value, 0)? == 0, "more rows than the object declares");
        key = Some(next.clone());
    }
}
