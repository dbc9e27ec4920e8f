//! Typed maps that are read, written and cleared many rows at a time.

use std::{io, marker::PhantomData, mem::size_of, os::fd::AsFd as _, path::Path, time::Duration};

use aya::{
    maps::{MapData, MapError},
    sys::SyscallError,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    DataplaneError,
    syscall::{Cursor, RawTable, is_unsupported},
};

/// Rows that one system call reads: its cost is small beside theirs, and the buffers stay below half a megabyte.
const ROWS_PER_CALL: usize = 4096;

/// How often, and after which pause, a row is tried again for which the kernel had no memory at hand: it refills its
/// caches in the background.
const MEMORY_RETRIES: u32 = 50;
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// What can be a key or a value: plain bytes, any of them valid, none of them padding.
pub(super) trait Row: FromBytes + IntoBytes + Immutable + Copy + Default {}
impl<T: FromBytes + IntoBytes + Immutable + Copy + Default> Row for T {}

/// A map with one value per key.
#[derive(Debug)]
pub(super) struct Table<K, V> {
    name: &'static str,
    raw: RawTable,
    types: PhantomData<fn(K) -> V>,
}

/// A map with a value per key and CPU.
#[derive(Debug)]
pub(super) struct PerCpuTable<K, V>(Table<K, V>);

/// Bytes of a value as system calls exchange it, beside another one.
const fn stride<V>() -> usize {
    size_of::<V>().next_multiple_of(8)
}

fn failed(map: &'static str, operation: &'static str, capacity: u32) -> impl FnOnce(io::Error) -> DataplaneError {
    move |io_error| match io_error.raw_os_error() {
        Some(libc::E2BIG | libc::ENOSPC) => DataplaneError::Full { map, capacity },
        _ => DataplaneError::map(map, operation)(MapError::SyscallError(SyscallError { call: "bpf", io_error })),
    }
}

/// Opens a pinned map as bytes.
pub(super) fn open_pin(name: &'static str, path: &Path) -> Result<RawTable, DataplaneError> {
    let map = MapData::from_pin(path).map_err(DataplaneError::map(name, "opening the pin"))?;
    let info = map.info().map_err(DataplaneError::map(name, "asking for its layout"))?;
    let fd = map
        .fd()
        .as_fd()
        .try_clone_to_owned()
        .map_err(failed(name, "opening", 0))?;
    RawTable::new(fd, &info).map_err(failed(name, "opening", 0))
}

/// Counts the rows of a map without looking at them.
pub(super) fn count(name: &'static str, raw: &RawTable) -> Result<u32, DataplaneError> {
    let mut total = 0_usize;
    let mut keys = vec![0; ROWS_PER_CALL * raw.key_size()];
    let mut values = vec![0; ROWS_PER_CALL * raw.value_size()];
    walk(name, raw, &mut keys, &mut values, &mut |_, _, rows| {
        total += rows;
        Ok(())
    })?;
    // A trie that loses the row where the walk stands is walked from its start again.
    Ok(u32::try_from(total).unwrap_or(u32::MAX).min(raw.capacity()))
}

/// What is done with the rows that a walk has read: the start of both buffers, and how many there are.
type Visit<'a> = dyn FnMut(&[u8], &[u8], usize) -> Result<(), DataplaneError> + 'a;

/// Reads all rows into the buffers, as many at a time as fit.
fn walk(
    name: &'static str,
    raw: &RawTable,
    keys: &mut Vec<u8>,
    values: &mut Vec<u8>,
    visit: &mut Visit<'_>,
) -> Result<(), DataplaneError> {
    let mut cursor = Cursor::default();
    let mut one_by_one = false;
    loop {
        let read = if one_by_one {
            let (key, value) = (keys.get_mut(..raw.key_size()), values.get_mut(..raw.value_size()));
            raw.lookup_next(&mut cursor, key.unwrap_or_default(), value.unwrap_or_default())
        } else {
            raw.lookup_batch(&mut cursor, keys, values)
        };
        match read {
            Ok((rows, end)) => {
                visit(keys, values, rows)?;
                if end {
                    return Ok(());
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            // More rows in one bucket than fit.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                keys.resize(keys.len() * 2, 0);
                values.resize(values.len() * 2, 0);
            }
            Err(error) if !one_by_one && is_unsupported(&error) => one_by_one = true,
            Err(error) => return Err(failed(name, "reading rows", raw.capacity())(error)),
        }
    }
}

impl<K: Row, V: Row> Table<K, V> {
    /// The pinned map, which must have the sizes of these types.
    pub(super) fn open(name: &'static str, path: &Path) -> Result<Self, DataplaneError> {
        Self::from_raw(name, open_pin(name, path)?)
    }

    fn from_raw(name: &'static str, raw: RawTable) -> Result<Self, DataplaneError> {
        let refuse = |error| Err(DataplaneError::map(name, "opening")(error));
        let (size, expected) = (raw.key_size(), size_of::<K>());
        if size != expected {
            return refuse(MapError::InvalidKeySize { size, expected });
        }
        let (size, expected) = (
            raw.value_size(),
            raw.cpus().map_or(size_of::<V>(), |cpus| cpus * stride::<V>()),
        );
        if size != expected {
            return refuse(MapError::InvalidValueSize { size, expected });
        }
        Ok(Self {
            name,
            raw,
            types: PhantomData,
        })
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(io::Error) -> DataplaneError {
        failed(self.name, operation, self.raw.capacity())
    }

    /// Rows that fit.
    pub(super) fn capacity(&self) -> u32 {
        self.raw.capacity()
    }

    /// One row.
    pub(super) fn get(&self, key: &K) -> Result<Option<V>, DataplaneError> {
        let mut value = V::default();
        let found = self.raw.lookup(key.as_bytes(), value.as_mut_bytes());
        Ok(found.map_err(self.failed("reading a row"))?.then_some(value))
    }

    /// Writes one row.
    pub(super) fn put(&self, key: &K, value: &V) -> Result<(), DataplaneError> {
        let written = self.raw.update(key.as_bytes(), value.as_bytes());
        written.map_err(self.failed("writing a row"))
    }

    /// Removes one row; one that is gone already is what was wanted.
    pub(super) fn forget(&self, key: &K) -> Result<(), DataplaneError> {
        let removed = self.raw.delete(key.as_bytes());
        removed.map(|_was_there| ()).map_err(self.failed("removing a row"))
    }

    /// Writes rows in order. Others see each row old or new, never half; after an error an unknown number of the first
    /// ones is written.
    pub(super) fn write(&self, rows: &[(K, V)]) -> Result<(), DataplaneError> {
        let keys: Vec<K> = rows.iter().map(|(key, _)| *key).collect();
        let values: Vec<V> = rows.iter().map(|(_, value)| *value).collect();
        self.write_bytes(keys.as_slice().as_bytes(), values.as_slice().as_bytes())
    }

    fn write_bytes(&self, mut keys: &[u8], mut values: &[u8]) -> Result<(), DataplaneError> {
        let mut retries = 0;
        while !keys.is_empty() {
            let (rows, result) = self.raw.update_batch(keys, values);
            keys = keys.get(rows * self.raw.key_size()..).unwrap_or_default();
            values = values.get(rows * self.raw.value_size()..).unwrap_or_default();
            let result = match result {
                Err(error) if is_unsupported(&error) => {
                    let (key, value) = (
                        keys.get(..self.raw.key_size()).unwrap_or_default(),
                        values.get(..self.raw.value_size()).unwrap_or_default(),
                    );
                    let one = self.raw.update(key, value);
                    if one.is_ok() {
                        keys = keys.get(key.len()..).unwrap_or_default();
                        values = values.get(value.len()..).unwrap_or_default();
                    }
                    one
                }
                other => other,
            };
            retries = if rows > 0 { 0 } else { retries + 1 };
            match result {
                Ok(()) => retries = 0,
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && retries < MEMORY_RETRIES => {
                    std::thread::sleep(MEMORY_PAUSE);
                }
                Err(error) => return Err(self.failed("writing rows")(error)),
            }
        }
        Ok(())
    }

    /// Removes rows; those that are gone already are what was wanted.
    pub(super) fn remove(&self, keys: &[K]) -> Result<(), DataplaneError> {
        let mut keys = keys.as_bytes();
        while !keys.is_empty() {
            let (rows, result) = self.raw.delete_batch(keys);
            keys = keys.get(rows * self.raw.key_size()..).unwrap_or_default();
            match result {
                Ok(()) => {}
                // It stopped at a row that is not there, or it never began.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) || is_unsupported(&error) => {
                    let (key, rest) = keys.split_at_checked(self.raw.key_size()).unwrap_or_default();
                    self.raw.delete(key).map_err(self.failed("removing a row"))?;
                    keys = rest;
                }
                Err(error) => return Err(self.failed("removing rows")(error)),
            }
        }
        Ok(())
    }

    /// Shows all rows, a few thousand at a time. Rows that come or go meanwhile may or may not be among them.
    pub(super) fn walk(
        &self,
        mut visit: impl FnMut(&[K], &[V]) -> Result<(), DataplaneError>,
    ) -> Result<(), DataplaneError> {
        let mut keys = vec![0; ROWS_PER_CALL * self.raw.key_size()];
        let mut values = vec![0; ROWS_PER_CALL * self.raw.value_size()];
        // Copied, as the buffers of bytes need not lie where the types may.
        let (mut typed_keys, mut typed_values) = (Vec::new(), Vec::new());
        walk(
            self.name,
            &self.raw,
            &mut keys,
            &mut values,
            &mut |keys, values, rows| {
                typed_keys.resize(rows, K::default());
                typed_values.resize(rows, V::default());
                copy(typed_keys.as_mut_slice(), keys);
                copy(typed_values.as_mut_slice(), values);
                visit(&typed_keys, &typed_values)
            },
        )
    }

    /// All rows.
    pub(super) fn rows(&self) -> Result<Vec<(K, V)>, DataplaneError> {
        let mut rows = Vec::new();
        self.walk(|keys, values| {
            rows.extend(keys.iter().copied().zip(values.iter().copied()));
            Ok(())
        })?;
        Ok(rows)
    }
}

fn copy<T: Row>(to: &mut [T], from: &[u8]) {
    let to = to.as_mut_bytes();
    if let Some(from) = from.get(..to.len()) {
        to.copy_from_slice(from);
    }
}

impl<K: Row, V: Row> PerCpuTable<K, V> {
    /// The pinned map, which must have the sizes of these types.
    pub(super) fn open(name: &'static str, path: &Path) -> Result<Self, DataplaneError> {
        Table::open(name, path).map(Self)
    }

    /// One row's values; none where there is no such row.
    pub(super) fn get(&self, key: &K) -> Result<Vec<V>, DataplaneError> {
        let mut bytes = vec![0; self.0.raw.value_size()];
        let found = self.0.raw.lookup(key.as_bytes(), &mut bytes);
        let found = found.map_err(self.0.failed("reading a row"))?;
        Ok(if found { split(&bytes) } else { Vec::new() })
    }

    /// Writes zeros on every CPU.
    pub(super) fn clear(&self, keys: &[K]) -> Result<(), DataplaneError> {
        let zeros = vec![0; keys.len() * self.0.raw.value_size()];
        self.0.write_bytes(keys.as_bytes(), &zeros)
    }

    /// As [`Table::forget`].
    pub(super) fn forget(&self, key: &K) -> Result<(), DataplaneError> {
        self.0.forget(key)
    }

    /// As [`Table::remove`].
    pub(super) fn remove(&self, keys: &[K]) -> Result<(), DataplaneError> {
        self.0.remove(keys)
    }

    /// All rows, with a value for each CPU.
    pub(super) fn rows(&self) -> Result<Vec<(K, Vec<V>)>, DataplaneError> {
        let raw = &self.0.raw;
        let mut rows = Vec::new();
        let mut keys = vec![0; ROWS_PER_CALL * raw.key_size()];
        let mut values = vec![0; ROWS_PER_CALL * raw.value_size()];
        walk(self.0.name, raw, &mut keys, &mut values, &mut |keys, values, found| {
            let keys = keys.chunks_exact(raw.key_size());
            let values = values.chunks_exact(raw.value_size());
            for (key, values) in keys.zip(values).take(found) {
                if let Ok(key) = K::read_from_bytes(key) {
                    rows.push((key, split(values)));
                }
            }
            Ok(())
        })?;
        Ok(rows)
    }
}

/// The values of one row, one per CPU.
fn split<V: Row>(bytes: &[u8]) -> Vec<V> {
    let each = bytes.chunks_exact(stride::<V>());
    each.filter_map(|bytes| Some(V::read_from_prefix(bytes).ok()?.0))
        .collect()
}

/// Maps for tests, without a pin.
#[cfg(test)]
pub(super) mod fixture {
    use aya::{
        Pod,
        maps::{Array, HashMap, IterableMap as _, LpmTrie, PerCpuHashMap, lpm_trie::Key},
    };

    use super::*;

    /// `BPF_F_NO_PREALLOC`, as the dataplane's hash maps have it and as tries must.
    const NO_PREALLOC: u32 = 1;

    fn raw(map: &MapData) -> RawTable {
        let fd = map.fd().as_fd().try_clone_to_owned().unwrap();
        RawTable::new(fd, &map.info().unwrap()).unwrap()
    }

    pub(crate) fn hash<K: Row + Pod, V: Row + Pod>(entries: u32) -> Table<K, V> {
        let map = HashMap::<MapData, K, V>::create(entries, NO_PREALLOC).unwrap();
        Table::from_raw("HASH", raw(map.map())).unwrap()
    }

    pub(crate) fn array<V: Row + Pod>(entries: u32) -> Table<u32, V> {
        let map = Array::<MapData, V>::create(entries, 0).unwrap();
        Table::from_raw("ARRAY", raw(map.map())).unwrap()
    }

    /// `K` is the whole key, `D` its data behind the length.
    pub(crate) fn trie<K: Row, D: Pod, V: Row + Pod>(entries: u32) -> Table<K, V> {
        assert_eq!(size_of::<K>(), size_of::<Key<D>>());
        let map = LpmTrie::<MapData, D, V>::create(entries, NO_PREALLOC).unwrap();
        Table::from_raw("TRIE", raw(map.map())).unwrap()
    }

    pub(crate) fn per_cpu<K: Row + Pod, V: Row + Pod>(entries: u32) -> PerCpuTable<K, V> {
        let map = PerCpuHashMap::<MapData, K, V>::create(entries, NO_PREALLOC).unwrap();
        PerCpuTable(Table::from_raw("PER_CPU", raw(map.map())).unwrap())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aya::{
        Pod,
        maps::{IterableMap as _, PerCpuArray},
    };
    use kni_common::policy::{PREFIX_ANY_PORT, PREFIX_PORT, PolicyKey, PolicyValue, PortData, PortKey, PortValue};

    use super::*;

    fn policy(rows: u32) -> Vec<(PolicyKey, PolicyValue)> {
        let row = |number: u32| {
            let key = PolicyKey {
                set: number / 7,
                identity: number % 7,
                direction: number % 3,
            };
            (key, PolicyValue { ports: 1, rule: number })
        };
        (0..rows).map(row).collect()
    }

    fn ports(rows: u32) -> Vec<(PortKey, PortValue)> {
        let row = |number: u32| {
            let low = u8::try_from(number % 16).unwrap();
            let (prefix_length, port) = if low == 0 {
                (PREFIX_ANY_PORT, [0; 2])
            } else {
                (PREFIX_PORT, [1, low])
            };
            let key = PortKey {
                prefix_length,
                data: PortData {
                    ports: (number / 16).to_be_bytes(),
                    protocol: 6,
                    zero: 0,
                    port,
                },
            };
            let ordinal = u16::try_from(number).unwrap();
            (key, PortValue { ordinal, allow: 1 })
        };
        (0..rows).map(row).collect()
    }

    fn write_read_remove<K: Row + Ord + std::fmt::Debug, V: Row + Ord + std::fmt::Debug>(
        table: &Table<K, V>,
        rows: &[(K, V)],
    ) {
        assert!(table.rows().unwrap().is_empty());
        table.write(rows).unwrap();
        let expected: BTreeMap<K, V> = rows.iter().copied().collect();
        let found = table.rows().unwrap();
        assert_eq!(found.len(), expected.len(), "each row once");
        assert_eq!(found.into_iter().collect::<BTreeMap<_, _>>(), expected);
        assert_eq!(count("TEST", &table.raw).unwrap() as usize, expected.len());
        let (key, value) = rows[rows.len() / 2];
        assert_eq!(table.get(&key).unwrap(), expected.get(&key).copied());
        assert_eq!(expected[&key], value);
        // Every third one goes first, so that the removal of all meets rows that are gone, also at both ends.
        let third: Vec<K> = rows.iter().step_by(3).map(|(key, _)| *key).collect();
        table.remove(&third).unwrap();
        let left = table.rows().unwrap();
        assert_eq!(left.len(), rows.len() - third.len());
        assert!(left.iter().all(|(key, _)| !third.contains(key)));
        table
            .remove(&rows.iter().map(|(key, _)| *key).collect::<Vec<_>>())
            .unwrap();
        assert!(table.rows().unwrap().is_empty());
        table.remove(&third).unwrap();
    }

    #[test]
    fn hash_rows_are_written_read_and_removed_in_batches() {
        write_read_remove(&fixture::hash(20_000), &policy(10_000));
    }

    #[test]
    fn trie_rows_are_written_read_and_removed_in_batches() {
        write_read_remove(&fixture::trie::<PortKey, PortData, PortValue>(20_000), &ports(10_000));
    }

    #[test]
    fn a_full_map_says_so_and_keeps_what_fitted() {
        let table = fixture::hash::<PolicyKey, PolicyValue>(100);
        assert!(matches!(
            table.write(&policy(150)),
            Err(DataplaneError::Full {
                map: "HASH",
                capacity: 100
            })
        ));
        assert_eq!(table.rows().unwrap().len(), 100);
        let trie = fixture::trie::<PortKey, PortData, PortValue>(100);
        assert!(matches!(
            trie.write(&ports(150)),
            Err(DataplaneError::Full {
                map: "TRIE",
                capacity: 100
            })
        ));
    }

    #[test]
    fn array_rows_beyond_the_first_call_are_read_too() {
        let table = fixture::array::<u64>(10_000);
        let rows: Vec<(u32, u64)> = (0..10_000).map(|index| (index, u64::from(index) * 3)).collect();
        table.write(&rows).unwrap();
        assert_eq!(table.rows().unwrap(), rows);
        assert_eq!(table.get(&10_000).unwrap(), None);
    }

    #[test]
    fn a_bucket_with_more_rows_than_asked_for_is_read_in_full() {
        // One bucket per entry as a rule: buffers of one row meet buckets of several.
        let table = fixture::hash::<PolicyKey, PolicyValue>(2000);
        table.write(&policy(2000)).unwrap();
        let mut found = 0;
        let (mut keys, mut values) = (vec![0; table.raw.key_size()], vec![0; table.raw.value_size()]);
        walk("HASH", &table.raw, &mut keys, &mut values, &mut |_, _, rows| {
            found += rows;
            Ok(())
        })
        .unwrap();
        assert_eq!(found, 2000);
        assert!(keys.len() > table.raw.key_size(), "the buffers had to grow");
    }

    #[test]
    fn rows_can_be_read_one_by_one() {
        let table = fixture::hash::<PolicyKey, PolicyValue>(100);
        table.write(&policy(50)).unwrap();
        let (mut cursor, mut found) = (Cursor::default(), BTreeMap::new());
        loop {
            let (mut key, mut value) = (PolicyKey::default(), PolicyValue::default());
            let read = table
                .raw
                .lookup_next(&mut cursor, key.as_mut_bytes(), value.as_mut_bytes());
            match read.unwrap() {
                (1, false) => assert_eq!(found.insert(key, value), None),
                (0, true) => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(found, policy(50).into_iter().collect());
    }

    #[test]
    fn values_of_all_cpus_are_read_and_removed() {
        let table = fixture::per_cpu::<u32, u64>(5000);
        let cpus = aya::util::nr_cpus().unwrap();
        assert_eq!(table.get(&1).unwrap(), [0_u64; 0]);
        let mut values = Vec::new();
        for key in 0..5000_u64 {
            values.extend((0..cpus as u64).map(|cpu| key * 10 + cpu));
        }
        let keys: Vec<u32> = (0..5000).collect();
        table.0.write_bytes(keys.as_bytes(), values.as_bytes()).unwrap();
        let rows: BTreeMap<u32, Vec<u64>> = table.rows().unwrap().into_iter().collect();
        assert_eq!(rows.len(), 5000);
        for (key, values) in &rows {
            let expected: Vec<u64> = (0..cpus as u64).map(|cpu| u64::from(*key) * 10 + cpu).collect();
            assert_eq!(*values, expected);
            assert_eq!(table.get(key).unwrap(), expected);
        }
        table.clear(&[7]).unwrap();
        assert_eq!(table.get(&7).unwrap(), vec![0; cpus]);
        table.forget(&7).unwrap();
        table.remove(&keys).unwrap();
        assert!(table.rows().unwrap().is_empty());
    }

    #[test]
    fn values_that_are_no_multiple_of_eight_bytes_keep_apart() {
        // As the programs' arrays: each CPU's value is padded.
        let map = PerCpuArray::<MapData, Odd>::create(4, 0).unwrap();
        let fd = map_fd(map.map());
        let raw = RawTable::new(fd, &map.map().info().unwrap()).unwrap();
        assert_eq!(raw.value_size(), 16 * aya::util::nr_cpus().unwrap());
        let table = PerCpuTable::<u32, Odd>(Table::from_raw("ARRAY", raw).unwrap());
        assert_eq!(table.get(&3).unwrap(), vec![[0; 3]; aya::util::nr_cpus().unwrap()]);
    }

    type Odd = [u32; 3];

    fn map_fd(map: &MapData) -> std::os::fd::OwnedFd {
        map.fd().as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn a_map_of_other_sizes_is_refused() {
        let raw = fixture::hash::<PolicyKey, PolicyValue>(10).raw;
        assert!(Table::<u32, PolicyValue>::from_raw("HASH", raw).is_err());
        let raw = fixture::hash::<PolicyKey, PolicyValue>(10).raw;
        assert!(Table::<PolicyKey, u32>::from_raw("HASH", raw).is_err());
        let raw = fixture::per_cpu::<u32, u64>(10).0.raw;
        assert!(Table::<u32, [u64; 2]>::from_raw("PER_CPU", raw).is_err());
        let table = fixture::hash::<PolicyKey, PolicyValue>(10);
        assert!(table.raw.lookup(&[0; 4], &mut [0; 8]).is_err(), "a short key");
        assert!(table.raw.update_batch(&[0; 24], &[0; 8]).1.is_err(), "too few values");
    }

    fn percentile(times: &mut [Duration], percent: usize) -> Duration {
        times.sort_unstable();
        times[(times.len() * percent / 100).min(times.len() - 1)]
    }

    fn measure<K: Row + Pod, V: Row + Pod>(what: &str, table: &Table<K, V>, rows: &[(K, V)]) {
        let keys: Vec<K> = rows.iter().map(|(key, _)| *key).collect();
        let (mut writes, mut removals) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let begun = std::time::Instant::now();
            table.write(rows).unwrap();
            writes.push(begun.elapsed());
            let begun = std::time::Instant::now();
            table.remove(&keys).unwrap();
            removals.push(begun.elapsed());
        }
        for (verb, times) in [("write", &mut writes), ("remove", &mut removals)] {
            let (p50, p99) = (percentile(times, 50), percentile(times, 99));
            println!("{what}: {verb} {} rows: p50 {p50:?}, p99 {p99:?}", rows.len());
        }
    }

    /// Prints what the documents tell: `cargo test -p kni-agent --release costs_of_rows -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn costs_of_rows() {
        for rows in [1000, 16_000] {
            measure("hash", &fixture::hash(65_536), &policy(rows));
            measure(
                "trie",
                &fixture::trie::<PortKey, PortData, PortValue>(65_536),
                &ports(rows),
            );
        }
    }
}
