//! Implements the map commands for single elements, over the same buffers as the batch commands.

use std::{borrow::Borrow, io, mem::size_of_val};

use aya::{Pod, maps::MapData};
use zerocopy::{Immutable, IntoBytes};

use super::{
    Command,
    batch::{Batch, BatchCursor, BatchMap, check},
    sys_bpf,
};

/// `union bpf_attr`, the struct of the `BPF_MAP_*_ELEM` commands.
#[repr(C)]
pub(super) struct ElementAttr {
    pub(super) map_fd: u32,
    pub(super) padding: u32,
    pub(super) key: u64,
    pub(super) value: u64,
    pub(super) flags: u64,
}

impl<T: Borrow<MapData>> BatchMap<T> {
    fn element<K>(&self, key: &[K]) -> io::Result<ElementAttr> {
        check(size_of_val(key), self.key_size())?;
        Ok(ElementAttr {
            map_fd: self.map_fd(),
            padding: 0,
            key: key.as_ptr() as u64,
            value: 0,
            flags: 0,
        })
    }

    /// Reads an element into `value`; false when there is none.
    pub(crate) fn lookup<K: Pod, V: Pod>(&self, key: &[K], value: &mut [V]) -> io::Result<bool> {
        check(size_of_val(value), self.value_size())?;
        let mut attr = self.element(key)?;
        attr.value = value.as_mut_ptr() as u64;
        // SAFETY: both slices have the map's sizes; `value` is ours to write and, being `Pod`, valid with any bytes.
        exists(unsafe { sys_bpf(Command::MapLookupElem, &mut attr) })
    }

    /// Inserts or replaces an element.
    pub(crate) fn update<K: Pod, V: Pod>(&self, key: &[K], value: &[V]) -> io::Result<()> {
        check(size_of_val(value), self.value_size())?;
        let mut attr = self.element(key)?;
        attr.value = value.as_ptr() as u64;
        // SAFETY: both slices have the map's sizes; the kernel only reads them.
        unsafe { sys_bpf(Command::MapUpdateElem, &mut attr) }.map(drop)
    }

    /// Inserts an element; false when there is one with the key.
    pub(crate) fn insert<K: Pod, V: Pod>(&self, key: &[K], value: &[V]) -> io::Result<bool> {
        const BPF_NOEXIST: u64 = 1;
        check(size_of_val(value), self.value_size())?;
        let mut attr = self.element(key)?;
        attr.value = value.as_ptr() as u64;
        attr.flags = BPF_NOEXIST;
        // SAFETY: both slices have the map's sizes; the kernel only reads them.
        match unsafe { sys_bpf(Command::MapUpdateElem, &mut attr) } {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes an element; false when there was none.
    pub(crate) fn delete<K: Pod>(&self, key: &[K]) -> io::Result<bool> {
        let mut attr = self.element(key)?;
        // SAFETY: the slice has the map's size of a key.
        exists(unsafe { sys_bpf(Command::MapDeleteElem, &mut attr) })
    }

    /// The key after the bytes of `key`, or the first one; false at the end.
    fn next_key<K: Pod>(&self, key: Option<&[u8]>, next: &mut [K]) -> io::Result<bool> {
        check(size_of_val(next), self.key_size())?;
        let mut attr = match key {
            Some(key) => self.element(key)?,
            None => ElementAttr {
                key: 0,
                ..self.element(next)?
            },
        };
        attr.value = next.as_mut_ptr() as u64;
        // SAFETY: both slices have the map's size of a key; `next` is ours to write and, being `Pod`, valid with any
        // bytes.
        exists(unsafe { sys_bpf(Command::MapGetNextKey, &mut attr) })
    }

    /// As [`Self::lookup_batch`], one element at a time, for map types without that command.
    pub(crate) fn lookup_next<K: Pod + IntoBytes + Immutable, V: Pod>(
        &self,
        cursor: &mut BatchCursor,
        key: &mut [K],
        value: &mut [V],
    ) -> io::Result<Batch> {
        loop {
            if !self.next_key(cursor.0.as_deref(), key)? {
                return Ok(Batch {
                    elements: 0,
                    is_last: true,
                });
            }
            cursor.0 = Some(key.as_bytes().to_vec());
            // The element may be deleted between the two calls.
            if self.lookup(key, value)? {
                return Ok(Batch {
                    elements: 1,
                    is_last: false,
                });
            }
        }
    }
}

fn exists(result: io::Result<i32>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
