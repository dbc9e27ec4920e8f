//! Provides typed maps: reads, writes and removes many rows per system call.

use std::{io, marker::PhantomData, mem::size_of, path::Path, slice, time::Duration};

use aya::{
    Pod,
    maps::{MapData, MapError},
    sys::SyscallError,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    DataplaneError,
    bpf::batch::{BatchCursor, BatchMap, is_unsupported},
};

/// Rows per system call: its cost is small beside theirs, and the buffers stay below half a megabyte.
const ROWS_PER_CALL: usize = 4096;

/// Retries, and the pause between them, of a row for which the kernel had no free memory: it refills its caches in the
/// background.
const MEMORY_RETRIES: u32 = 50;
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// A type of keys or values: plain bytes, any of them valid, none of them padding.
pub(super) trait Row: FromBytes + IntoBytes + Immutable + Pod + Default {}
impl<T: FromBytes + IntoBytes + Immutable + Pod + Default> Row for T {}

/// A map with one value per key.
#[derive(Debug)]
pub(super) struct Table<K, V> {
    name: &'static str,
    map: BatchMap<MapData>,
    types: PhantomData<fn(K) -> V>,
}

/// A map with a value per key and CPU.
#[derive(Debug)]
pub(super) struct PerCpuTable<K, V>(Table<K, V>);

/// Bytes of one CPU's value among those of all CPUs.
const fn stride<V>() -> usize {
    size_of::<V>().next_multiple_of(8)
}

fn failed(map: &'static str, operation: &'static str, capacity: u32) -> impl FnOnce(io::Error) -> DataplaneError {
    move |io_error| match io_error.raw_os_error() {
        Some(libc::E2BIG | libc::ENOSPC) => DataplaneError::Full { map, capacity },
        _ => DataplaneError::map(map, operation)(MapError::SyscallError(SyscallError { call: "bpf", io_error })),
    }
}

fn open_pin(name: &'static str, path: &Path) -> Result<BatchMap<MapData>, DataplaneError> {
    let map = MapData::from_pin(path).map_err(DataplaneError::map(name, "opening the pin"))?;
    BatchMap::new(map).map_err(DataplaneError::map(name, "reading its layout"))
}

/// Counts the rows of a pinned map of any types.
pub(super) fn count(name: &'static str, path: &Path) -> Result<u32, DataplaneError> {
    count_rows(name, &open_pin(name, path)?)
}

fn count_rows(name: &'static str, map: &BatchMap<MapData>) -> Result<u32, DataplaneError> {
    let mut total = 0_usize;
    walk::<u8, u8>(name, map, ROWS_PER_CALL, &mut |keys, _| {
        total += keys.len() / map.key_size();
        Ok(())
    })?;
    // A trie that loses the row at the cursor is walked from its start again.
    Ok(u32::try_from(total).unwrap_or(u32::MAX).min(map.max_entries()))
}

/// Receives the keys and values that one call has read.
type Visit<'a, K, V> = dyn FnMut(&[K], &[V]) -> Result<(), DataplaneError> + 'a;

/// Reads all rows, `rows_per_call` at a time or more where a bucket has more. Returns the final size of the buffers in
/// rows. A key is one `K` or several, a value likewise.
fn walk<K: Row, V: Row>(
    name: &'static str,
    map: &BatchMap<MapData>,
    rows_per_call: usize,
    visit: &mut Visit<'_, K, V>,
) -> Result<usize, DataplaneError> {
    let (per_key, per_value) = (map.key_size() / size_of::<K>(), map.value_size() / size_of::<V>());
    let mut keys = vec![K::default(); rows_per_call * per_key];
    let mut values = vec![V::default(); rows_per_call * per_value];
    let mut cursor = BatchCursor::default();
    let mut one_by_one = false;
    loop {
        let read = if one_by_one {
            let (key, value) = (keys.get_mut(..per_key), values.get_mut(..per_value));
            map.lookup_next(&mut cursor, key.unwrap_or_default(), value.unwrap_or_default())
        } else {
            map.lookup_batch(&mut cursor, &mut keys, &mut values)
        };
        match read {
            Ok(batch) => {
                let found = keys.get(..batch.elements * per_key).unwrap_or_default();
                visit(found, values.get(..batch.elements * per_value).unwrap_or_default())?;
                if batch.is_last {
                    return Ok(keys.len() / per_key);
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            // One bucket has more rows than the buffers.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                keys.resize(keys.len() * 2, K::default());
                values.resize(values.len() * 2, V::default());
            }
            Err(error) if !one_by_one && is_unsupported(&error) => one_by_one = true,
            Err(error) => return Err(failed(name, "reading rows", map.max_entries())(error)),
        }
    }
}

impl<K: Row, V: Row> Table<K, V> {
    /// The pinned map, which must have the sizes of these types.
    pub(super) fn open(name: &'static str, path: &Path) -> Result<Self, DataplaneError> {
        Self::from_map(name, open_pin(name, path)?)
    }

    fn from_map(name: &'static str, map: BatchMap<MapData>) -> Result<Self, DataplaneError> {
        let refuse = |error| Err(DataplaneError::map(name, "opening")(error));
        let (size, expected) = (map.key_size(), size_of::<K>());
        if size != expected {
            return refuse(MapError::InvalidKeySize { size, expected });
        }
        let (size, expected) = (
            map.value_size(),
            map.cpus().map_or(size_of::<V>(), |cpus| cpus * stride::<V>()),
        );
        if size != expected {
            return refuse(MapError::InvalidValueSize { size, expected });
        }
        Ok(Self {
            name,
            map,
            types: PhantomData,
        })
    }

    fn failed(&self, operation: &'static str) -> impl FnOnce(io::Error) -> DataplaneError {
        failed(self.name, operation, self.map.max_entries())
    }

    /// Rows that fit.
    pub(super) fn capacity(&self) -> u32 {
        self.map.max_entries()
    }

    /// One row.
    pub(super) fn get(&self, key: &K) -> Result<Option<V>, DataplaneError> {
        let mut value = V::default();
        let found = self.map.lookup(slice::from_ref(key), slice::from_mut(&mut value));
        Ok(found.map_err(self.failed("reading a row"))?.then_some(value))
    }

    /// Writes one row.
    pub(super) fn put(&self, key: &K, value: &V) -> Result<(), DataplaneError> {
        let written = self.map.update(slice::from_ref(key), slice::from_ref(value));
        written.map_err(self.failed("writing a row"))
    }

    /// Writes a row unless its key has one; whether it was written.
    pub(super) fn insert(&self, key: &K, value: &V) -> Result<bool, DataplaneError> {
        let written = self.map.insert(slice::from_ref(key), slice::from_ref(value));
        written.map_err(self.failed("adding a row"))
    }

    /// Removes one row. Idempotent.
    pub(super) fn remove(&self, key: &K) -> Result<(), DataplaneError> {
        let removed = self.map.delete(slice::from_ref(key));
        removed.map(|_existed| ()).map_err(self.failed("removing a row"))
    }

    /// Writes rows in order. A reader sees each row either old or new; after an error an unknown number of the first
    /// rows is written.
    pub(super) fn put_all(&self, rows: &[(K, V)]) -> Result<(), DataplaneError> {
        let keys: Vec<K> = rows.iter().map(|(key, _)| *key).collect();
        let values: Vec<V> = rows.iter().map(|(_, value)| *value).collect();
        self.write(&keys, &values)
    }

    /// A row's value is one `P` or several.
    fn write<P: Row>(&self, mut keys: &[K], mut values: &[P]) -> Result<(), DataplaneError> {
        if keys.is_empty() {
            // Most changes have rows for one of several tables.
            return Ok(());
        }
        let per_value = self.map.value_size() / size_of::<P>();
        let mut retries = 0;
        while let Err(refused) = self.map.update_batch(keys, values) {
            keys = keys.get(refused.completed..).unwrap_or_default();
            values = values.get(refused.completed * per_value..).unwrap_or_default();
            let mut error = refused.source;
            retries = if refused.completed > 0 { 0 } else { retries + 1 };
            if is_unsupported(&error) {
                let (key, value) = (keys.get(..1), values.get(..per_value));
                match self.map.update(key.unwrap_or_default(), value.unwrap_or_default()) {
                    Ok(()) => {
                        keys = keys.get(1..).unwrap_or_default();
                        values = values.get(per_value..).unwrap_or_default();
                        retries = 0;
                        continue;
                    }
                    Err(alone) => error = alone,
                }
            }
            if error.raw_os_error() != Some(libc::ENOMEM) || retries >= MEMORY_RETRIES {
                return Err(self.failed("writing rows")(error));
            }
            std::thread::sleep(MEMORY_PAUSE);
        }
        Ok(())
    }

    /// Removes rows. Idempotent.
    pub(super) fn remove_all(&self, mut keys: &[K]) -> Result<(), DataplaneError> {
        if keys.is_empty() {
            return Ok(());
        }
        while let Err(refused) = self.map.delete_batch(keys) {
            keys = keys.get(refused.completed..).unwrap_or_default();
            // The batch stopped at a missing row, or the kernel lacks this batch command.
            if refused.source.raw_os_error() != Some(libc::ENOENT) && !is_unsupported(&refused.source) {
                return Err(self.failed("removing rows")(refused.source));
            }
            let Some((key, rest)) = keys.split_first() else {
                return Ok(());
            };
            self.remove(key)?;
            keys = rest;
        }
        Ok(())
    }

    /// Writes rows that replace others, then new ones, then removes others. Where not all fit, the removal comes before
    /// the new ones: after an error only these may be missing, unless the kernel refused more than room.
    pub(super) fn exchange(&self, replaced: &[(K, V)], added: &[(K, V)], gone: &[K]) -> Result<(), DataplaneError> {
        if self.put_all(replaced).and_then(|()| self.put_all(added)).is_ok() {
            return self.remove_all(gone);
        }
        self.remove_all(gone)?;
        // A full trie takes no row in place of another before Linux 6.13.
        if self.put_all(replaced).is_err() {
            let keys: Vec<K> = replaced.iter().map(|(key, _)| *key).collect();
            self.remove_all(&keys)?;
            self.put_all(replaced)?;
        }
        self.put_all(added)
    }

    /// Passes all rows on, a few thousand at a time. Rows that are added or removed meanwhile may or may not be
    /// included.
    pub(super) fn walk(
        &self,
        mut visit: impl FnMut(&[K], &[V]) -> Result<(), DataplaneError>,
    ) -> Result<(), DataplaneError> {
        walk(self.name, &self.map, ROWS_PER_CALL, &mut visit).map(drop)
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

impl<K: Row, V: Row> PerCpuTable<K, V> {
    /// The pinned map, which must have the sizes of these types.
    pub(super) fn open(name: &'static str, path: &Path) -> Result<Self, DataplaneError> {
        Table::open(name, path).map(Self)
    }

    /// One row's values; empty if there is no such row.
    pub(super) fn get(&self, key: &K) -> Result<Vec<V>, DataplaneError> {
        let mut bytes = vec![0_u8; self.0.map.value_size()];
        let found = self.0.map.lookup(slice::from_ref(key), &mut bytes);
        let found = found.map_err(self.0.failed("reading a row"))?;
        Ok(if found { split(&bytes) } else { Vec::new() })
    }

    /// Writes zeros on every CPU.
    pub(super) fn clear(&self, keys: &[K]) -> Result<(), DataplaneError> {
        self.0.write(keys, &vec![0_u8; keys.len() * self.0.map.value_size()])
    }

    /// As [`Table::remove`].
    pub(super) fn remove(&self, key: &K) -> Result<(), DataplaneError> {
        self.0.remove(key)
    }

    /// As [`Table::remove_all`].
    pub(super) fn remove_all(&self, keys: &[K]) -> Result<(), DataplaneError> {
        self.0.remove_all(keys)
    }

    /// All rows, with a value for each CPU.
    pub(super) fn rows(&self) -> Result<Vec<(K, Vec<V>)>, DataplaneError> {
        let mut rows = Vec::new();
        walk::<K, u8>(self.0.name, &self.0.map, ROWS_PER_CALL, &mut |keys, values| {
            let values = values.chunks_exact(self.0.map.value_size()).map(split);
            rows.extend(keys.iter().copied().zip(values));
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
    use std::os::fd::AsFd as _;

    use aya::{
        Pod,
        maps::{Array, HashMap, IterableMap as _, LpmTrie, PerCpuHashMap, lpm_trie::Key},
    };

    use super::*;

    /// `BPF_F_NO_PREALLOC`, as the dataplane's hash maps have it and as tries must.
    const NO_PREALLOC: u32 = 1;

    /// Another handle of the map, which outlives this one.
    pub(super) fn handle(map: &MapData) -> BatchMap<MapData> {
        let fd = map.fd().as_fd().try_clone_to_owned().unwrap();
        BatchMap::new(MapData::from_fd(fd).unwrap()).unwrap()
    }

    pub(crate) fn hash<K: Row + Pod, V: Row + Pod>(entries: u32) -> Table<K, V> {
        let map = HashMap::<MapData, K, V>::create(entries, NO_PREALLOC).unwrap();
        Table::from_map("HASH", handle(map.map())).unwrap()
    }

    pub(crate) fn array<V: Row + Pod>(entries: u32) -> Table<u32, V> {
        let map = Array::<MapData, V>::create(entries, 0).unwrap();
        Table::from_map("ARRAY", handle(map.map())).unwrap()
    }

    /// `K` is the whole key, `D` its data after the length.
    pub(crate) fn trie<K: Row, D: Pod, V: Row + Pod>(entries: u32) -> Table<K, V> {
        assert_eq!(size_of::<K>(), size_of::<Key<D>>());
        let map = LpmTrie::<MapData, D, V>::create(entries, NO_PREALLOC).unwrap();
        Table::from_map("TRIE", handle(map.map())).unwrap()
    }

    pub(crate) fn per_cpu<K: Row + Pod, V: Row + Pod>(entries: u32) -> PerCpuTable<K, V> {
        let map = PerCpuHashMap::<MapData, K, V>::create(entries, NO_PREALLOC).unwrap();
        PerCpuTable(Table::from_map("PER_CPU", handle(map.map())).unwrap())
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
        table.put_all(rows).unwrap();
        let expected: BTreeMap<K, V> = rows.iter().copied().collect();
        let found = table.rows().unwrap();
        assert_eq!(found.len(), expected.len(), "each row once");
        assert_eq!(found.into_iter().collect::<BTreeMap<_, _>>(), expected);
        assert_eq!(count_rows("TEST", &table.map).unwrap() as usize, expected.len());
        let (key, value) = rows[rows.len() / 2];
        assert_eq!(table.get(&key).unwrap(), expected.get(&key).copied());
        assert_eq!(expected[&key], value);
        // Every third row is removed first, so that the removal of all meets missing rows, also at both ends.
        let third: Vec<K> = rows.iter().step_by(3).map(|(key, _)| *key).collect();
        table.remove_all(&third).unwrap();
        let left = table.rows().unwrap();
        assert_eq!(left.len(), rows.len() - third.len());
        assert!(left.iter().all(|(key, _)| !third.contains(key)));
        table
            .remove_all(&rows.iter().map(|(key, _)| *key).collect::<Vec<_>>())
            .unwrap();
        assert!(table.rows().unwrap().is_empty());
        table.remove_all(&third).unwrap();
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
    fn a_full_map_is_an_error_and_keeps_the_rows_that_fitted() {
        let table = fixture::hash::<PolicyKey, PolicyValue>(100);
        assert!(matches!(
            table.put_all(&policy(150)),
            Err(DataplaneError::Full {
                map: "HASH",
                capacity: 100
            })
        ));
        assert_eq!(table.rows().unwrap().len(), 100);
        let trie = fixture::trie::<PortKey, PortData, PortValue>(100);
        assert!(matches!(
            trie.put_all(&ports(150)),
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
        table.put_all(&rows).unwrap();
        assert_eq!(table.rows().unwrap(), rows);
        assert_eq!(table.get(&10_000).unwrap(), None);
    }

    #[test]
    fn a_bucket_with_more_rows_than_asked_for_is_read_in_full() {
        // Usually one entry per bucket: buffers of one row meet buckets of several.
        let table = fixture::hash::<PolicyKey, PolicyValue>(2000);
        table.put_all(&policy(2000)).unwrap();
        let mut found = 0;
        let buffered = walk::<PolicyKey, PolicyValue>("HASH", &table.map, 1, &mut |keys, _| {
            found += keys.len();
            Ok(())
        });
        assert_eq!(found, 2000);
        assert!(buffered.unwrap() > 1, "the buffers had to grow");
    }

    #[test]
    fn rows_can_be_read_one_by_one() {
        let table = fixture::hash::<PolicyKey, PolicyValue>(100);
        table.put_all(&policy(50)).unwrap();
        let (mut cursor, mut found) = (BatchCursor::default(), BTreeMap::new());
        loop {
            let (mut key, mut value) = ([PolicyKey::default()], [PolicyValue::default()]);
            let batch = table.map.lookup_next(&mut cursor, &mut key, &mut value).unwrap();
            match (batch.elements, batch.is_last) {
                (1, false) => assert_eq!(found.insert(key[0], value[0]), None),
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
        table.0.write(&keys, values.as_bytes()).unwrap();
        let rows: BTreeMap<u32, Vec<u64>> = table.rows().unwrap().into_iter().collect();
        assert_eq!(rows.len(), 5000);
        for (key, values) in &rows {
            let expected: Vec<u64> = (0..cpus as u64).map(|cpu| u64::from(*key) * 10 + cpu).collect();
            assert_eq!(*values, expected);
            assert_eq!(table.get(key).unwrap(), expected);
        }
        table.clear(&[7]).unwrap();
        assert_eq!(table.get(&7).unwrap(), vec![0; cpus]);
        table.remove(&7).unwrap();
        table.remove_all(&keys).unwrap();
        assert!(table.rows().unwrap().is_empty());
    }

    #[test]
    fn values_that_are_no_multiple_of_eight_bytes_keep_apart() {
        // Like the programs' arrays: each CPU's value is padded.
        let map = PerCpuArray::<MapData, Odd>::create(4, 0).unwrap();
        let map = fixture::handle(map.map());
        assert_eq!(map.value_size(), 16 * aya::util::nr_cpus().unwrap());
        let table = PerCpuTable::<u32, Odd>(Table::from_map("ARRAY", map).unwrap());
        assert_eq!(table.get(&3).unwrap(), vec![[0; 3]; aya::util::nr_cpus().unwrap()]);
    }

    type Odd = [u32; 3];

    #[test]
    fn a_map_of_other_sizes_is_refused() {
        let map = || fixture::hash::<PolicyKey, PolicyValue>(10).map;
        assert!(Table::<u32, PolicyValue>::from_map("HASH", map()).is_err());
        assert!(Table::<PolicyKey, u32>::from_map("HASH", map()).is_err());
        let per_cpu = fixture::per_cpu::<u32, u64>(10).0.map;
        assert!(Table::<u32, [u64; 2]>::from_map("PER_CPU", per_cpu).is_err());
        assert!(map().lookup(&[0_u8; 4], &mut [0_u8; 8]).is_err(), "a short key");
        assert!(map().update_batch(&[0_u8; 24], &[0_u8; 8]).is_err(), "too few values");
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
            table.put_all(rows).unwrap();
            writes.push(begun.elapsed());
            let begun = std::time::Instant::now();
            table.remove_all(&keys).unwrap();
            removals.push(begun.elapsed());
        }
        for (verb, times) in [("write", &mut writes), ("remove", &mut removals)] {
            let (p50, p99) = (percentile(times, 50), percentile(times, 99));
            println!("{what}: {verb} {} rows: p50 {p50:?}, p99 {p99:?}", rows.len());
        }
    }

    /// Prints the costs that the documents quote: `cargo test -p kni-dataplane --release
    /// costs_of_rows -- --ignored --nocapture`.
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
