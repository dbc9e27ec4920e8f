//! Batch commands for maps of aya: lookup, update and deletion of many elements in one system call.
//!
//! Intended for upstream (aya issue 1124): it depends only on aya, libc and [`sys_bpf`], which aya has itself, and on
//! no other part of this crate.
//!
//! | command | array | hash, LRU hash | LPM trie | per-CPU array, per-CPU hash |
//! |---|---|---|---|---|
//! | `BPF_MAP_LOOKUP_BATCH` | 5.6 | 5.6 | 5.13 | 5.13, 5.6 |
//! | `BPF_MAP_UPDATE_BATCH` | 5.6 | 5.6 | 5.13 | 5.13, 5.6 |
//! | `BPF_MAP_DELETE_BATCH` | never | 5.6 | 5.13 | never, 5.6 |
//!
//! The numbers are the first Linux version that has the command for the map type (commits cb4d03ab499d, e9bd8cbd970b,
//! f008d732ab18); [`is_unsupported`] recognises its refusal elsewhere. Keys and values are slices of any [`Pod`] type
//! whose bytes, taken together, are those of whole keys and values: `[K]` and `[V]` of the map, or `[u8]`. The values
//! of a per-CPU map are those of all possible CPUs, each padded to 8 bytes.

use std::{
    borrow::Borrow,
    io,
    mem::{size_of, size_of_val},
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::{
    Pod,
    maps::{MapData, MapError, MapType},
    util::nr_cpus,
};

use super::{Command, sys_bpf};

/// The kernel's internal ENOTSUPP, which reaches user space for map types without batch commands.
const ENOTSUPP: i32 = 524;

/// `union bpf_attr`, the struct of the `BPF_MAP_*_BATCH` commands.
#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// The position of a lookup in batches: opaque, as large as a key, or the number of a hash bucket.
#[derive(Debug, Default)]
pub(crate) struct BatchCursor(pub(super) Option<Vec<u8>>);

/// The result of one lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Elements at the start of the buffers.
    pub(crate) elements: usize,
    /// Whether the map has no more.
    pub(crate) is_last: bool,
}

/// A batch that was not completed.
#[derive(Debug, thiserror::Error)]
#[error("batch failed after {completed} elements")]
pub(crate) struct BatchError {
    /// Elements before the first one that failed: they are written or deleted.
    pub(crate) completed: usize,
    /// Why that one failed.
    #[source]
    pub(crate) source: io::Error,
}

/// A map of keys and values whose elements are transferred in batches. Each buffer is checked against the sizes of the
/// map, so that the kernel never accesses memory outside of one.
#[derive(Debug)]
pub(crate) struct BatchMap<T> {
    inner: T,
    key_size: usize,
    value_size: usize,
    cpus: Option<usize>,
    max_entries: u32,
}

impl<T: Borrow<MapData>> BatchMap<T> {
    /// The map, if its type has keys and values.
    pub(crate) fn new(map: T) -> Result<Self, MapError> {
        let info = map.borrow().info()?;
        let kind = info.map_type()?;
        let per_cpu = matches!(
            kind,
            MapType::PerCpuArray | MapType::PerCpuHash | MapType::LruPerCpuHash
        );
        let plain = matches!(
            kind,
            MapType::Array | MapType::Hash | MapType::LruHash | MapType::LpmTrie
        );
        if !per_cpu && !plain {
            return Err(MapError::InvalidMapType { map_type: kind as u32 });
        }
        let one = info.value_size() as usize;
        let cpus = if per_cpu {
            Some(nr_cpus().map_err(|(_, error)| MapError::IoError(error))?)
        } else {
            None
        };
        Ok(Self {
            key_size: info.key_size() as usize,
            value_size: cpus.map_or(one, |cpus| one.next_multiple_of(8) * cpus),
            cpus,
            max_entries: info.max_entries(),
            inner: map,
        })
    }

    /// Bytes of a key.
    pub(crate) const fn key_size(&self) -> usize {
        self.key_size
    }

    /// Bytes of a value as system calls exchange it: of all CPUs where each has its own.
    pub(crate) const fn value_size(&self) -> usize {
        self.value_size
    }

    /// Number of possible CPUs, if each has its own value.
    pub(crate) const fn cpus(&self) -> Option<usize> {
        self.cpus
    }

    /// Elements that fit.
    pub(crate) const fn max_entries(&self) -> u32 {
        self.max_entries
    }

    #[expect(clippy::cast_sign_loss, reason = "an open descriptor is not negative")]
    pub(super) fn map_fd(&self) -> u32 {
        self.inner.borrow().fd().as_fd().as_raw_fd() as u32
    }

    /// How many keys the slice holds, and an attribute for so many.
    fn batch<K>(&self, keys: &[K]) -> io::Result<(usize, BatchAttr)> {
        let count = size_of_val(keys) / self.key_size;
        check(size_of_val(keys), count * self.key_size)?;
        let attr = BatchAttr {
            in_batch: 0,
            out_batch: 0,
            keys: 0,
            values: 0,
            count: u32::try_from(count).map_err(io::Error::other)?,
            map_fd: self.map_fd(),
            elem_flags: 0,
            flags: 0,
        };
        Ok((count, attr))
    }

    /// Inserts or replaces elements in order.
    pub(crate) fn update_batch<K: Pod, V: Pod>(&self, keys: &[K], values: &[V]) -> Result<(), BatchError> {
        let prepared = self.batch(keys).and_then(|(count, attr)| {
            check(size_of_val(values), count * self.value_size)?;
            Ok((count, attr))
        });
        let (count, mut attr) = prepared.map_err(not_begun)?;
        attr.keys = keys.as_ptr() as u64;
        attr.values = values.as_ptr() as u64;
        // SAFETY: both slices have `count` elements of the map's sizes; the kernel only reads them.
        let result = unsafe { sys_bpf(Command::MapUpdateBatch, &mut attr) };
        finished(&attr, count, result)
    }

    /// Deletes elements in order, up to the first one that does not exist.
    pub(crate) fn delete_batch<K: Pod>(&self, keys: &[K]) -> Result<(), BatchError> {
        let (count, mut attr) = self.batch(keys).map_err(not_begun)?;
        attr.keys = keys.as_ptr() as u64;
        // SAFETY: the slice has `count` keys of the map's size; the kernel only reads them.
        let result = unsafe { sys_bpf(Command::MapDeleteBatch, &mut attr) };
        finished(&attr, count, result)
    }

    /// Reads the elements after the cursor, as many as fit. ENOSPC means that the buffers are shorter than one bucket
    /// of a hash map; the cursor does not move then.
    pub(crate) fn lookup_batch<K: Pod, V: Pod>(
        &self,
        cursor: &mut BatchCursor,
        keys: &mut [K],
        values: &mut [V],
    ) -> io::Result<Batch> {
        let (count, mut attr) = self.batch(keys)?;
        check(size_of_val(values), count * self.value_size)?;
        // Hash maps write the number of a bucket, four bytes; all others write a key.
        let mut next = vec![0_u8; self.key_size.max(size_of::<u32>())];
        attr.in_batch = cursor.0.as_ref().map_or(0, |at| at.as_ptr() as u64);
        attr.out_batch = next.as_mut_ptr() as u64;
        attr.keys = keys.as_mut_ptr() as u64;
        attr.values = values.as_mut_ptr() as u64;
        // SAFETY: the slices have `count` elements of the map's sizes, are ours to write and, being `Pod`, valid with
        // any bytes. `next` is as large as a key and no smaller than a bucket's number; the cursor comes from such a
        // `next`.
        let result = unsafe { sys_bpf(Command::MapLookupBatch, &mut attr) };
        let elements = (attr.count as usize).min(count);
        match result {
            Ok(_) => {
                cursor.0 = Some(next);
                Ok(Batch {
                    elements,
                    is_last: false,
                })
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Batch {
                elements,
                is_last: true,
            }),
            Err(error) => Err(error),
        }
    }
}

/// Whether the kernel lacks the batch command for this map type. An invalid element also fails with EINVAL: a retry of
/// it alone distinguishes the two.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(ENOTSUPP | libc::EINVAL | libc::EOPNOTSUPP))
}

pub(super) fn check(found: usize, expected: usize) -> io::Result<()> {
    if found == expected {
        Ok(())
    } else {
        let text = format!("{found} bytes instead of the map's {expected}");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }
}

const fn not_begun(source: io::Error) -> BatchError {
    BatchError { completed: 0, source }
}

/// Older kernels leave the count unchanged when they refuse before the first element.
fn finished(attr: &BatchAttr, count: usize, result: io::Result<i32>) -> Result<(), BatchError> {
    result.map(drop).map_err(|source| {
        let done = (attr.count as usize).min(count);
        BatchError {
            completed: if done == count { 0 } else { done },
            source,
        }
    })
}

#[cfg(test)]
mod tests {
    use aya::maps::{Array, HashMap, IterableMap as _, PerCpuHashMap};

    use super::*;

    /// Reads all elements, a few at a time.
    fn read_all<T: Borrow<MapData>>(map: &BatchMap<T>) -> Vec<(u32, u64)> {
        let (mut keys, mut values) = (vec![0_u32; 512], vec![0_u64; 512]);
        let mut cursor = BatchCursor::default();
        let mut found = Vec::new();
        loop {
            let batch = map.lookup_batch(&mut cursor, &mut keys, &mut values).unwrap();
            found.extend(keys.iter().copied().zip(values.iter().copied()).take(batch.elements));
            if batch.is_last {
                found.sort_unstable();
                return found;
            }
        }
    }

    #[test]
    fn elements_of_a_hash_map_are_updated_read_and_deleted() {
        let map = HashMap::<MapData, u32, u64>::create(2000, 1).unwrap();
        let map = BatchMap::new(map.map()).unwrap();
        let keys: Vec<u32> = (0..1000).collect();
        let values: Vec<u64> = keys.iter().map(|key| u64::from(*key) << 40).collect();
        map.update_batch(&keys, &values).unwrap();
        let expected: Vec<(u32, u64)> = keys.iter().copied().zip(values.iter().copied()).collect();
        assert_eq!(read_all(&map), expected);
        map.delete_batch(&keys[..400]).unwrap();
        assert_eq!(read_all(&map), expected[400..]);
        // The first 100 exist, the next one does not.
        let some: Vec<u32> = (900..1000).chain(0..10).collect();
        let error = map.delete_batch(&some).unwrap_err();
        assert_eq!(
            (error.completed, error.source.raw_os_error()),
            (100, Some(libc::ENOENT))
        );
    }

    #[test]
    fn a_full_map_reports_the_elements_that_fitted() {
        let map = HashMap::<MapData, u32, u64>::create(100, 1).unwrap();
        let map = BatchMap::new(map.map()).unwrap();
        let keys: Vec<u32> = (0..150).collect();
        let error = map.update_batch(&keys, &[1_u64; 150]).unwrap_err();
        assert_eq!((error.completed, error.source.raw_os_error()), (100, Some(libc::E2BIG)));
    }

    #[test]
    fn arrays_have_no_deletion() {
        let map = Array::<MapData, u64>::create(4, 0).unwrap();
        let map = BatchMap::new(map.map()).unwrap();
        map.update_batch(&[0_u32, 1, 2, 3], &[5_u64, 6, 7, 8]).unwrap();
        assert_eq!(read_all(&map), [(0, 5), (1, 6), (2, 7), (3, 8)]);
        assert!(is_unsupported(&map.delete_batch(&[1_u32]).unwrap_err().source));
    }

    #[test]
    fn values_of_a_per_cpu_map_are_those_of_all_cpus() {
        let map = PerCpuHashMap::<MapData, u32, u64>::create(4, 1).unwrap();
        let map = BatchMap::new(map.map()).unwrap();
        let cpus = map.cpus().unwrap();
        assert_eq!(map.value_size(), 8 * cpus);
        let written: Vec<u64> = (0..2 * cpus as u64).collect();
        map.update_batch(&[7_u32, 9], &written).unwrap();
        let (mut keys, mut values) = (vec![0_u32; 64], vec![0_u64; 64 * cpus]);
        let batch = map.lookup_batch(&mut BatchCursor::default(), &mut keys, &mut values);
        assert_eq!(batch.unwrap().elements, 2);
        assert_eq!(keys[..2].iter().sum::<u32>(), 16);
        assert_eq!(values.iter().sum::<u64>(), written.iter().sum::<u64>());
    }

    #[test]
    fn buffers_of_other_sizes_are_refused() {
        let map = HashMap::<MapData, u64, u64>::create(4, 1).unwrap();
        let map = BatchMap::new(map.map()).unwrap();
        assert!(map.update_batch(&[1_u64, 2], &[1_u64]).is_err(), "too few values");
        assert!(map.update_batch(&[1_u32, 2, 3], &[1_u64]).is_err(), "half a key");
        assert!(map.delete_batch(&[1_u32]).is_err(), "half a key");
        let mut cursor = BatchCursor::default();
        assert!(map.lookup_batch(&mut cursor, &mut [0_u64; 2], &mut [0_u64; 3]).is_err());
        assert!(read_empty(&map));
    }

    fn read_empty<T: Borrow<MapData>>(map: &BatchMap<T>) -> bool {
        let batch = map.lookup_batch(&mut BatchCursor::default(), &mut [0_u64; 8], &mut [0_u64; 8]);
        batch.unwrap().elements == 0
    }
}
