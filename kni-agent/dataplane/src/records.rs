//! Keeps a copy of the agent's records in a pinned map, where it lives as long as the programs of the interfaces.
//!
//! A record is split into chunks under a row number. A change writes new rows, then the number of the change (row 0),
//! then removes the rows that it supersedes: after a kill at any time, the rows of the last complete change are those
//! with the highest number up to that one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Mutex,
};

use aya::{
    Pod,
    maps::{HashMap, MapData, MapError, MapInfo},
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{DataplaneError, lock, table::Table};

const NAME: &str = "RECORDS";
/// Memory is allocated per row (`BPF_F_NO_PREALLOC`).
const NO_PREALLOC: u32 = 1;
/// Chunks that fit per endpoint: an attached pod with a namespace of the agent has three or four.
const CHUNKS_PER_ENDPOINT: u32 = 16;
const LEAST_CHUNKS: u32 = 4096;
/// Bytes of a record in one chunk: with the header, the key and the kernel's own element, one kibibyte.
const DATA: usize = 936;

/// A record in the copy. Names of tables and keys have at most 65 535 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedRecord {
    /// Table.
    pub table: String,
    /// Key in the table.
    pub key: String,
    /// Content; `None` removes the record.
    pub record: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct ChunkKey {
    row: u32,
    chunk: u32,
}

/// The key of the number of the last complete change.
const LAST_CHANGE: ChunkKey = ChunkKey { row: 0, chunk: 0 };

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Chunk {
    /// Number of the change that wrote it.
    sequence: u64,
    /// Checksum of the whole row.
    sum: u64,
    /// Length of the whole row.
    length: u32,
    /// Chunks of the whole row.
    chunks: u32,
    data: [u8; DATA],
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            sequence: 0,
            sum: 0,
            length: 0,
            chunks: 0,
            data: [0; DATA],
        }
    }
}

// SAFETY: `repr(C)` without padding (two u32), any bytes are valid.
unsafe impl Pod for ChunkKey {}
// SAFETY: `repr(C)` without padding (8 + 8 + 4 + 4 + 936 bytes, a multiple of 8), any bytes are valid.
unsafe impl Pod for Chunk {}

/// The copy of the records.
pub struct RecordMap {
    table: Table<ChunkKey, Chunk>,
    index: Mutex<Index>,
}

/// Where the records are.
#[derive(Default)]
struct Index {
    places: BTreeMap<(String, String), Place>,
    last_row: u32,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    row: u32,
    chunks: u32,
}

/// The newest row of a record: its change, its place and its content.
type Newest = (u64, Place, Option<Vec<u8>>);

impl Place {
    fn keys(self) -> impl Iterator<Item = ChunkKey> {
        (0..self.chunks).map(move |chunk| ChunkKey { row: self.row, chunk })
    }
}

impl RecordMap {
    /// The pin of the map. Not among those of a layout: the records outlive a change of it.
    pub(super) fn pin(root: &Path) -> PathBuf {
        root.join("records")
    }

    /// Opens the map that an agent has pinned below `root`, if there is one.
    pub fn open_pinned(root: &Path) -> Result<Option<Self>, DataplaneError> {
        let path = Self::pin(root);
        if !path.exists() || !fits(&path) {
            return Ok(None);
        }
        Self::open_at(&path).map(Some)
    }

    /// Opens the pinned map, or makes and pins it.
    pub(super) fn open(root: &Path, max_endpoints: u32) -> Result<Self, DataplaneError> {
        let path = Self::pin(root);
        if path.exists() && !fits(&path) {
            tracing::warn!(path = %path.display(), "replacing a pinned map of records of another size");
            std::fs::remove_file(&path).map_err(DataplaneError::pin(&path, "removing a map of another size"))?;
        }
        if !path.exists() {
            let chunks = max_endpoints.saturating_mul(CHUNKS_PER_ENDPOINT).max(LEAST_CHUNKS);
            let map = HashMap::<MapData, ChunkKey, Chunk>::create(chunks, NO_PREALLOC);
            let map = map.map_err(DataplaneError::map(NAME, "creating"))?;
            map.pin(&path).map_err(pin_failed)?;
        }
        Self::open_at(&path)
    }

    fn open_at(path: &Path) -> Result<Self, DataplaneError> {
        let map = Self {
            table: Table::open(NAME, path)?,
            index: Mutex::default(),
        };
        // The index is complete from here on.
        map.read()?;
        Ok(map)
    }

    /// The number of the last complete change and the records after it; `None` if there was none. Removes the rest of
    /// an interrupted change.
    pub fn read(&self) -> Result<Option<(u64, Vec<CopiedRecord>)>, DataplaneError> {
        let mut index = lock(&self.index);
        let mut rows: BTreeMap<u32, BTreeMap<u32, Chunk>> = BTreeMap::new();
        let mut last = 0;
        for (key, chunk) in self.table.rows()? {
            if key == LAST_CHANGE {
                last = chunk.sequence;
            } else {
                rows.entry(key.row).or_default().insert(key.chunk, chunk);
            }
        }
        let mut newest: BTreeMap<(String, String), Newest> = BTreeMap::new();
        let mut useless = Vec::new();
        for (row, chunks) in rows {
            index.last_row = index.last_row.max(row);
            let keys = chunks.keys().map(|chunk| ChunkKey { row, chunk: *chunk });
            let whole = assemble(&chunks).filter(|(sequence, _)| *sequence <= last);
            let Some((sequence, record)) = whole else {
                useless.extend(keys);
                continue;
            };
            let place = Place {
                row,
                chunks: u32::try_from(chunks.len()).unwrap_or(u32::MAX),
            };
            let id = (record.table, record.key);
            match newest.get(&id) {
                Some((known, _, _)) if *known > sequence => useless.extend(keys),
                _ => {
                    let before = newest.insert(id, (sequence, place, record.record));
                    useless.extend(before.into_iter().flat_map(|(_, place, _)| place.keys()));
                }
            }
        }
        index.places.clear();
        let mut records = Vec::new();
        for (id, (_, place, record)) in newest {
            if record.is_none() {
                useless.extend(place.keys());
                continue;
            }
            let (table, key) = id.clone();
            records.push(CopiedRecord { table, key, record });
            index.places.insert(id, place);
        }
        self.table.remove_all(&useless)?;
        Ok((last > 0).then_some((last, records)))
    }

    /// Applies a change as a whole or not at all, also if the process is killed meanwhile. A few microseconds.
    pub fn write(&self, sequence: u64, edits: &[CopiedRecord]) -> Result<(), DataplaneError> {
        let mut index = lock(&self.index);
        // Of several edits of one record, the last one counts.
        let edits: BTreeMap<(String, String), &CopiedRecord> = edits
            .iter()
            .map(|edit| ((edit.table.clone(), edit.key.clone()), edit))
            .collect();
        let mut chunks = Vec::new();
        let mut written = Vec::new();
        for (id, edit) in edits {
            if edit.record.is_none() && !index.places.contains_key(&id) {
                continue;
            }
            index.last_row = index.last_row.checked_add(1).unwrap_or(1);
            let row = split(index.last_row, sequence, edit);
            let place = Place {
                row: index.last_row,
                chunks: u32::try_from(row.len()).unwrap_or(u32::MAX),
            };
            chunks.extend(row);
            written.push((id, place, edit.record.is_some()));
        }
        let last = Chunk {
            sequence,
            ..Chunk::default()
        };
        let put = self.table.put_all(&chunks);
        if let Err(error) = put.and_then(|()| self.table.put(&LAST_CHANGE, &last)) {
            let keys: Vec<ChunkKey> = chunks.iter().map(|(key, _)| *key).collect();
            self.table.remove_all(&keys)?;
            return Err(error);
        }
        let mut superseded = Vec::new();
        for (id, place, present) in written {
            let before = if present {
                index.places.insert(id, place)
            } else {
                index.places.remove(&id)
            };
            superseded.extend(before.into_iter().flat_map(Place::keys));
            if !present {
                // After the row that it removes.
                superseded.extend(place.keys());
            }
        }
        self.table.remove_all(&superseded)
    }

    /// Makes the copy contain exactly these records.
    pub fn replace(&self, sequence: u64, records: &[CopiedRecord]) -> Result<(), DataplaneError> {
        let key = |record: &CopiedRecord| (record.table.clone(), record.key.clone());
        let known: BTreeMap<(String, String), CopiedRecord> = match self.read()? {
            Some((_, known)) => known.into_iter().map(|record| (key(&record), record)).collect(),
            None => BTreeMap::new(),
        };
        let desired: BTreeMap<(String, String), &CopiedRecord> =
            records.iter().map(|record| (key(record), record)).collect();
        let gone = known.iter().filter(|(id, _)| !desired.contains_key(*id));
        let gone = gone.map(|(_, record)| CopiedRecord {
            record: None,
            ..record.clone()
        });
        let changed = desired.iter().filter(|(id, record)| known.get(*id) != Some(**record));
        let edits: Vec<CopiedRecord> = gone.chain(changed.map(|(_, record)| (*record).clone())).collect();
        self.write(sequence, &edits)
    }
}

fn fits(path: &Path) -> bool {
    MapInfo::from_pin(path).is_ok_and(|info| {
        usize::try_from(info.key_size()) == Ok(size_of::<ChunkKey>())
            && usize::try_from(info.value_size()) == Ok(size_of::<Chunk>())
    })
}

fn pin_failed(error: aya::pin::PinError) -> DataplaneError {
    DataplaneError::map(NAME, "pinning")(MapError::PinError { name: None, error })
}

/// FNV-1a, 64 bit.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Lengths of table and key, table, key, whether there is a record, the record.
fn encode(record: &CopiedRecord) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in [&record.table, &record.key] {
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend(text.bytes().take(length.into()));
    }
    bytes.push(u8::from(record.record.is_some()));
    bytes.extend(record.record.iter().flatten());
    bytes
}

fn decode(bytes: &[u8]) -> Option<CopiedRecord> {
    let text = |bytes: &[u8]| {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (text, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        Some((String::from_utf8(text.to_vec()).ok()?, rest.to_vec()))
    };
    let (table, rest) = text(bytes)?;
    let (key, rest) = text(&rest)?;
    let (present, record) = rest.split_first()?;
    Some(CopiedRecord {
        table,
        key,
        record: (*present == 1).then(|| record.to_vec()),
    })
}

fn split(row: u32, sequence: u64, record: &CopiedRecord) -> Vec<(ChunkKey, Chunk)> {
    let bytes = encode(record);
    let header = Chunk {
        sequence,
        sum: checksum(&bytes),
        length: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        chunks: u32::try_from(bytes.len().div_ceil(DATA)).unwrap_or(u32::MAX),
        ..Chunk::default()
    };
    let chunk = |(chunk, part): (u32, &[u8])| {
        let mut made = header;
        for (to, from) in made.data.iter_mut().zip(part) {
            *to = *from;
        }
        (ChunkKey { row, chunk }, made)
    };
    (0..).zip(bytes.chunks(DATA)).map(chunk).collect()
}

/// The change and the record of a row, if it is whole.
fn assemble(chunks: &BTreeMap<u32, Chunk>) -> Option<(u64, CopiedRecord)> {
    let first = chunks.get(&0)?;
    let same = |chunk: &Chunk| (chunk.sequence, chunk.sum, chunk.length) == (first.sequence, first.sum, first.length);
    if u32::try_from(chunks.len()).ok()? != first.chunks || !chunks.values().all(same) {
        return None;
    }
    let mut bytes: Vec<u8> = chunks.values().flat_map(|chunk| chunk.data).collect();
    bytes.truncate(usize::try_from(first.length).ok()?);
    (checksum(&bytes) == first.sum).then_some(())?;
    Some((first.sequence, decode(&bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::fixture;

    fn map() -> RecordMap {
        RecordMap {
            table: fixture::hash(1024),
            index: Mutex::default(),
        }
    }

    /// Another process with the same map.
    fn record(key: &str, record: Option<&[u8]>) -> CopiedRecord {
        CopiedRecord {
            table: "sandboxes".to_owned(),
            key: key.to_owned(),
            record: record.map(<[u8]>::to_vec),
        }
    }

    #[test]
    fn records_are_replaced_and_removed_and_leave_no_chunks() {
        let map = map();
        assert_eq!(map.read().unwrap(), None);
        let long = vec![7_u8; 5000];
        map.write(1, &[record("a", Some(b"one")), record("b", Some(&long))])
            .unwrap();
        let expected = vec![record("a", Some(b"one")), record("b", Some(&long))];
        assert_eq!(map.read().unwrap(), Some((1, expected)));
        map.write(2, &[record("b", Some(b"two")), record("a", None), record("z", None)])
            .unwrap();
        assert_eq!(map.read().unwrap(), Some((2, vec![record("b", Some(b"two"))])));
        assert_eq!(
            map.table.rows().unwrap().len(),
            2,
            "one row and the number of the change"
        );
        map.replace(3, &[record("c", Some(b"three"))]).unwrap();
        assert_eq!(map.read().unwrap(), Some((3, vec![record("c", Some(b"three"))])));
        map.replace(4, &[]).unwrap();
        assert_eq!(map.table.rows().unwrap().len(), 1);
    }

    #[test]
    fn an_interrupted_change_is_as_if_it_had_not_begun() {
        let map = map();
        map.write(1, &[record("a", Some(b"one")), record("b", Some(b"one"))])
            .unwrap();
        // Killed before the number of the change was written.
        map.table.put_all(&split(90, 2, &record("a", Some(b"two")))).unwrap();
        map.table.put_all(&split(91, 2, &record("b", None))).unwrap();
        let one = vec![record("a", Some(b"one")), record("b", Some(b"one"))];
        assert_eq!(map.read().unwrap(), Some((1, one)));
        assert_eq!(map.table.rows().unwrap().len(), 3);
        // Killed after it, before the old rows were removed.
        map.table.put_all(&split(90, 2, &record("a", Some(b"two")))).unwrap();
        map.table.put_all(&split(91, 2, &record("b", None))).unwrap();
        let last = Chunk {
            sequence: 2,
            ..Chunk::default()
        };
        map.table.put(&LAST_CHANGE, &last).unwrap();
        assert_eq!(map.read().unwrap(), Some((2, vec![record("a", Some(b"two"))])));
        assert_eq!(map.table.rows().unwrap().len(), 2);
        // A damaged chunk.
        let (key, mut chunk) = split(95, 2, &record("c", Some(b"three"))).remove(0);
        chunk.data[2] ^= 1;
        map.table.put(&key, &chunk).unwrap();
        assert_eq!(map.read().unwrap().unwrap().1.len(), 1);
    }
}
