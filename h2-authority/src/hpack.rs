//! Decodes header blocks (RFC 7541) and encodes their fields as literals without indexing.
//!
//! No published decoder fits: `httlib-hpack` 0.1.3 and `fluke-hpack` 0.3.1 panic on truncated input, and `loona-hpack`
//! 0.4.3 builds a new Huffman table for each string, which takes 20 µs even for an empty one.

use std::collections::VecDeque;

use bytes::Bytes;
use httlib_huffman::DecoderSpeed;
use http::uri::Authority;

/// Replaces an authority that h2 refuses.
const LEGAL_AUTHORITY: &[u8] = b"localhost";

const AUTHORITY: &[u8] = b":authority";
/// The index of [`AUTHORITY`] in the static table.
const AUTHORITY_INDEX: usize = 1;

/// Entries of the static table. The dynamic table continues its indexes.
const STATIC_LEN: usize = 61;

/// The lengths of the names in the static table (appendix A), from index 1. They suffice: literals refer to a static
/// name by its index, and the server resolves it.
#[rustfmt::skip]
const STATIC_NAME_LENGTHS: [u8; STATIC_LEN] = [
    10, 7, 7, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7, 7, 14, 15, 15, 13, 6, 27, 3, 5, 13, 13, 19, 16, 16, 14, 16, 13, 12, 6,
    4, 4, 6, 7, 4, 4, 8, 17, 13, 8, 19, 13, 4, 8, 12, 18, 19, 5, 7, 7, 11, 6, 10, 25, 17, 10, 4, 3, 16,
];

/// The initial `SETTINGS_HEADER_TABLE_SIZE`, which h2 servers keep.
const TABLE_SIZE: usize = 4096;
/// The size of a table entry without its name and value (section 4.1).
const ENTRY_OVERHEAD: usize = 32;

/// Why a header block cannot be passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockError {
    /// It is not valid HPACK.
    Invalid,
    /// Its fields exceed the limit.
    TooLarge,
}

/// The dynamic table of the client's encoder, newest entry first.
#[derive(Debug)]
pub(crate) struct Decoder {
    entries: VecDeque<Field>,
    size: usize,
    capacity: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            size: 0,
            capacity: TABLE_SIZE,
        }
    }
}

impl Decoder {
    /// Returns the fields of `block` as literals of at most `limit` bytes, with an authority that h2 accepts.
    ///
    /// After an error the table no longer matches the one of the client.
    pub(crate) fn transcode(&mut self, block: &[u8], limit: usize) -> Result<Vec<u8>, BlockError> {
        let mut reader = Reader(block);
        let mut out = Vec::with_capacity(block.len());
        // The high bits of the first octet distinguish the representations (section 6).
        while let Some(first) = reader.0.first() {
            match first.leading_zeros() {
                0 => self.indexed(reader.integer(7)?, &mut out)?,
                1 => {
                    let field = self.literal(&mut reader, 6)?;
                    field.put(&mut out);
                    self.insert(field);
                }
                // Size updates are only valid before the first field.
                2 if out.is_empty() => self.resize(reader.integer(5)?)?,
                2 => return Err(BlockError::Invalid),
                _ => self.literal(&mut reader, 4)?.put(&mut out),
            }
            if out.len() > limit {
                return Err(BlockError::TooLarge);
            }
        }
        Ok(out)
    }

    fn indexed(&self, index: usize, out: &mut Vec<u8>) -> Result<(), BlockError> {
        match index {
            0 => return Err(BlockError::Invalid),
            // Its value in the static table is empty, which is not an authority.
            AUTHORITY_INDEX => Field::new(Name::Static(index), Vec::new())?.put(out),
            2..=STATIC_LEN => put_integer(out, 0x80, 7, index),
            _ => self.entry(index)?.put(out),
        }
        Ok(())
    }

    fn literal(&self, reader: &mut Reader<'_>, prefix: u32) -> Result<Field, BlockError> {
        let name = match reader.integer(prefix)? {
            0 => Name::Literal(reader.string()?.into()),
            index @ 1..=STATIC_LEN => Name::Static(index),
            index => self.entry(index)?.name.clone(),
        };
        Field::new(name, reader.string()?)
    }

    fn entry(&self, index: usize) -> Result<&Field, BlockError> {
        let at = index.checked_sub(STATIC_LEN + 1);
        at.and_then(|at| self.entries.get(at)).ok_or(BlockError::Invalid)
    }

    fn insert(&mut self, field: Field) {
        self.evict(self.capacity.saturating_sub(field.size));
        if field.size <= self.capacity {
            self.size += field.size;
            self.entries.push_front(field);
        }
    }

    fn resize(&mut self, capacity: usize) -> Result<(), BlockError> {
        if capacity > TABLE_SIZE {
            return Err(BlockError::Invalid);
        }
        self.capacity = capacity;
        self.evict(capacity);
        Ok(())
    }

    /// Removes the oldest entries until the rest is at most `size` bytes.
    fn evict(&mut self, size: usize) {
        while self.size > size
            && let Some(field) = self.entries.pop_back()
        {
            self.size -= field.size;
        }
    }
}

#[derive(Debug, Clone)]
enum Name {
    /// An index of the static table.
    Static(usize),
    Literal(Bytes),
}

#[derive(Debug)]
struct Field {
    name: Name,
    /// A value that h2 accepts, if this is an authority.
    value: Vec<u8>,
    /// The size of the field, with the value of the client, as a table entry.
    size: usize,
}

impl Field {
    fn new(name: Name, mut value: Vec<u8>) -> Result<Self, BlockError> {
        let (length, is_authority) = match &name {
            Name::Static(index) => {
                let length = STATIC_NAME_LENGTHS.get(index - 1).ok_or(BlockError::Invalid)?;
                (usize::from(*length), *index == AUTHORITY_INDEX)
            }
            Name::Literal(name) => (name.len(), name == AUTHORITY),
        };
        let size = length + value.len() + ENTRY_OVERHEAD;
        if is_authority && Authority::try_from(value.as_slice()).is_err() {
            value = LEGAL_AUTHORITY.to_vec();
        }
        Ok(Self { name, value, size })
    }

    /// Writes a literal without indexing (section 6.2.2).
    fn put(&self, out: &mut Vec<u8>) {
        match &self.name {
            Name::Static(index) => put_integer(out, 0, 4, *index),
            Name::Literal(name) => {
                out.push(0);
                put_string(out, name);
            }
        }
        put_string(out, &self.value);
    }
}

/// Writes a string without Huffman coding.
fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    put_integer(out, 0, 7, text.len());
    out.extend_from_slice(text);
}

/// Writes an integer behind the high bits of `first` (section 5.1).
fn put_integer(out: &mut Vec<u8>, first: u8, prefix: u32, value: usize) {
    let low_byte = |value: usize| value.to_le_bytes().first().copied().unwrap_or_default();
    let most = (1 << prefix) - 1;
    if value < most {
        return out.push(first | low_byte(value));
    }
    out.push(first | low_byte(most));
    let mut rest = value - most;
    while rest >= 0x80 {
        out.push(low_byte(rest) | 0x80);
        rest >>= 7;
    }
    out.push(low_byte(rest));
}

/// The bytes of a block that are not decoded yet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Result<u8, BlockError> {
        let (byte, rest) = self.0.split_first().ok_or(BlockError::Invalid)?;
        self.0 = rest;
        Ok(*byte)
    }

    /// Reads an integer of up to five octets, as h2 does.
    fn integer(&mut self, prefix: u32) -> Result<usize, BlockError> {
        let most = (1 << prefix) - 1;
        let mut value = usize::from(self.byte()?) & most;
        if value < most {
            return Ok(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(BlockError::Invalid)
    }

    fn string(&mut self) -> Result<Vec<u8>, BlockError> {
        let is_coded = self.0.first().is_some_and(|first| first & 0x80 != 0);
        let length = self.integer(7)?;
        let (text, rest) = self.0.split_at_checked(length).ok_or(BlockError::Invalid)?;
        self.0 = rest;
        if !is_coded {
            return Ok(text.to_vec());
        }
        let (mut decoded, mut encoded) = (Vec::new(), Vec::new());
        httlib_huffman::decode(text, &mut decoded, DecoderSpeed::FiveBits).map_err(|_invalid| BlockError::Invalid)?;
        // The crate accepts wrong padding, which the only valid code of the decoded text shows.
        httlib_huffman::encode(&decoded, &mut encoded).map_err(|_invalid| BlockError::Invalid)?;
        if encoded == text {
            Ok(decoded)
        } else {
            Err(BlockError::Invalid)
        }
    }
}
