//! Models the maps: keys find the offset of a value in the map's own memory.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};

/// Numbers of `enum bpf_map_type`.
const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PERCPU_HASH: u32 = 5;
const PERCPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const LRU_PERCPU_HASH: u32 = 10;
const LPM_TRIE: u32 = 11;

/// Flags of `bpf_map_update_elem`.
const BPF_NOEXIST: u64 = 1;
const BPF_EXIST: u64 = 2;

/// The errors that programs see.
const ENOENT: i64 = 2;
const E2BIG: i64 = 7;
const EEXIST: i64 = 17;
const EINVAL: i64 = 22;

/// A map. Per-CPU maps have the values of one CPU.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) name: String,
    kind: u32,
    pub(super) key_size: usize,
    pub(super) value_size: usize,
    max_entries: usize,
    /// All values, one behind the other at offsets that are multiples of 8.
    pub(super) memory: Vec<u8>,
    /// Position of each key's value; unused by arrays.
    positions: BTreeMap<Vec<u8>, usize>,
    /// Positions of removed values. They stay readable until they are used again, as in the kernel.
    free: Vec<usize>,
}

impl Map {
    pub(super) fn new(name: &str, declared: &aya_obj::Map) -> Self {
        let mut map = Self {
            name: name.to_owned(),
            kind: declared.map_type(),
            key_size: declared.key_size() as usize,
            value_size: declared.value_size() as usize,
            max_entries: declared.max_entries() as usize,
            memory: declared.data().to_vec(),
            positions: BTreeMap::new(),
            free: Vec::new(),
        };
        if map.is_array() && map.memory.is_empty() {
            map.memory = vec![0; map.max_entries * map.stride()];
        }
        map
    }

    fn is_array(&self) -> bool {
        matches!(self.kind, ARRAY | PERCPU_ARRAY)
    }

    /// Whether it has one value for all CPUs, which can be copied.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.kind, HASH | ARRAY | LRU_HASH | LPM_TRIE) && self.name.bytes().all(|byte| byte != b'.')
    }

    fn stride(&self) -> usize {
        self.value_size.next_multiple_of(8)
    }

    /// The offset of the key's value.
    pub(super) fn find(&self, key: &[u8]) -> Result<Option<usize>> {
        let position = match self.kind {
            ARRAY | PERCPU_ARRAY => Some(index(key)?).filter(|index| *index < self.max_entries),
            HASH | PERCPU_HASH | LRU_HASH | LRU_PERCPU_HASH => self.positions.get(key).copied(),
            LPM_TRIE => self.longest(key)?,
            kind => bail!("{}: no lookups in maps of type {kind}", self.name),
        };
        Ok(position.map(|position| position * self.stride()))
    }

    /// The value of the longest prefix of the key.
    fn longest(&self, key: &[u8]) -> Result<Option<usize>> {
        let (limit, data) = prefix(key)?;
        let mut best = None;
        for (key, position) in &self.positions {
            let (length, prefix) = prefix(key)?;
            let is_longer = best.is_none_or(|(longest, _)| length > longest);
            if length <= limit && is_longer && same_bits(prefix, data, length) {
                best = Some((length, *position));
            }
        }
        Ok(best.map(|(_, position)| position))
    }

    /// Writes a row; 0, or a negative error number.
    pub(super) fn update(&mut self, key: &[u8], value: &[u8], flags: u64) -> Result<i64> {
        if self.is_array() {
            return Ok(match self.find(key)? {
                None => -E2BIG,
                Some(_) if flags == BPF_NOEXIST => -EEXIST,
                Some(at) => self.write(at, value)?,
            });
        }
        let found = self.positions.get(key).copied();
        let position = match found {
            _ if flags > BPF_EXIST => return Ok(-EINVAL),
            Some(_) if flags == BPF_NOEXIST => return Ok(-EEXIST),
            None if flags == BPF_EXIST => return Ok(-ENOENT),
            Some(position) => position,
            None if self.positions.len() >= self.max_entries => return Ok(-E2BIG),
            None => self.free.pop().unwrap_or_else(|| {
                let position = self.memory.len() / self.stride();
                self.memory.resize(self.memory.len() + self.stride(), 0);
                position
            }),
        };
        self.positions.insert(key.to_vec(), position);
        self.write(position * self.stride(), value)
    }

    fn write(&mut self, at: usize, value: &[u8]) -> Result<i64> {
        ensure!(value.len() == self.value_size, "{}: {} bytes", self.name, value.len());
        let place = self.memory.get_mut(at..at + value.len()).context("a value's place")?;
        place.copy_from_slice(value);
        Ok(0)
    }

    /// Removes a row; 0, or a negative error number.
    pub(super) fn delete(&mut self, key: &[u8]) -> i64 {
        if self.is_array() {
            return -EINVAL;
        }
        match self.positions.remove(key) {
            Some(position) => {
                self.free.push(position);
                0
            }
            None => -ENOENT,
        }
    }
}

fn index(key: &[u8]) -> Result<usize> {
    let bytes: [u8; 4] = key.try_into().context("the index of an array")?;
    Ok(u32::from_ne_bytes(bytes) as usize)
}

/// The length in bits and the data of a trie's key (`struct bpf_lpm_trie_key`).
fn prefix(key: &[u8]) -> Result<(usize, &[u8])> {
    let (length, data) = key.split_first_chunk::<4>().context("the key of a trie")?;
    let length = u32::from_ne_bytes(*length) as usize;
    ensure!(length <= 8 * data.len(), "a prefix of {length} bits");
    Ok((length, data))
}

fn same_bits(a: &[u8], b: &[u8], length: usize) -> bool {
    let (bytes, bits) = (length / 8, length % 8);
    let last = |of: &[u8]| of.get(bytes).copied().unwrap_or(0) & !(0xff_u8 >> bits);
    a.get(..bytes) == b.get(..bytes) && (bits == 0 || last(a) == last(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(kind: u32, key_size: usize) -> Map {
        Map {
            name: "TEST".into(),
            kind,
            key_size,
            value_size: 4,
            max_entries: 2,
            memory: Vec::new(),
            positions: BTreeMap::new(),
            free: Vec::new(),
        }
    }

    #[test]
    fn a_hash_finds_what_was_written_and_is_bounded() {
        let mut map = map(HASH, 1);
        assert_eq!(map.update(&[1], &[1; 4], BPF_EXIST).unwrap(), -ENOENT);
        assert_eq!(map.update(&[1], &[1; 4], BPF_NOEXIST).unwrap(), 0);
        assert_eq!(map.update(&[1], &[2; 4], BPF_NOEXIST).unwrap(), -EEXIST);
        assert_eq!(map.update(&[2], &[2; 4], 0).unwrap(), 0);
        assert_eq!(map.update(&[3], &[3; 4], 0).unwrap(), -E2BIG);
        let second = map.find(&[2]).unwrap().unwrap();
        assert_eq!(map.memory[second..second + 4], [2; 4]);
        assert_eq!((map.delete(&[1]), map.delete(&[1])), (0, -ENOENT));
        assert_eq!(map.update(&[3], &[3; 4], 0).unwrap(), 0);
        assert_eq!((map.find(&[1]).unwrap(), map.find(&[3]).unwrap()), (None, Some(0)));
    }

    #[test]
    fn a_trie_finds_the_longest_prefix() {
        let mut map = map(LPM_TRIE, 6);
        let key = |bits: u8, data: [u8; 2]| [bits, 0, 0, 0, data[0], data[1]];
        assert_eq!(map.update(&key(0, [0, 0]), &[0; 4], 0).unwrap(), 0);
        assert_eq!(map.update(&key(12, [10, 0x10]), &[1; 4], 0).unwrap(), 0);
        let found = |data| map.find(&key(16, data)).unwrap();
        assert_eq!((found([10, 0x1f]), found([10, 0x20])), (Some(8), Some(0)));
    }
}
