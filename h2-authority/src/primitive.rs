//! Reads and writes the two primitive types of HPACK (RFC 7541, section 5): integers and strings.

use crate::huffman::{self, BadHuffman};

/// Octets of one integer, as h2 limits them: enough for 2^28, and too few to overflow.
const MAX_INTEGER_OCTETS: u32 = 5;

/// Why a header block cannot be read. h2 reports each to the client as a connection error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HpackError {
    /// The block ends inside a representation.
    #[error("the header block ends inside a field")]
    Truncated,
    /// An integer is longer than any that fits.
    #[error("an integer has more than {MAX_INTEGER_OCTETS} octets")]
    IntegerTooLong,
    /// An index of zero, or beyond both tables.
    #[error("no table entry has index {0}")]
    BadIndex(usize),
    /// A dynamic table size update beyond the limit, or after the first field of a block.
    #[error("dynamic table size update to {0} is too large or too late in the block")]
    BadSizeUpdate(usize),
    /// A string is not properly Huffman-coded.
    #[error(transparent)]
    Huffman(#[from] BadHuffman),
}

/// Reads one header block from front to back.
pub(crate) struct Reader<'a> {
    length: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(block: &'a [u8]) -> Self {
        Self {
            length: block.len(),
            rest: block,
        }
    }

    /// Octets read so far.
    pub(crate) fn position(&self) -> usize {
        self.length - self.rest.len()
    }

    /// The next octet, without reading it.
    pub(crate) fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    /// Reads an integer whose first part is the low `prefix` bits (1 to 7) of the next octet.
    pub(crate) fn integer(&mut self, prefix: u32) -> Result<usize, HpackError> {
        let mask = (1_usize << prefix) - 1;
        let mut value = usize::from(self.octet()?) & mask;
        if value < mask {
            return Ok(value);
        }
        for place in 0..MAX_INTEGER_OCTETS - 1 {
            let octet = self.octet()?;
            value += usize::from(octet & 0x7f) << (7 * place);
            if octet & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(HpackError::IntegerTooLong)
    }

    /// Reads a string, without decoding it.
    pub(crate) fn text(&mut self) -> Result<Text<'a>, HpackError> {
        let huffman = self.peek().ok_or(HpackError::Truncated)? & 0x80 != 0;
        let length = self.integer(7)?;
        let (octets, rest) = self.rest.split_at_checked(length).ok_or(HpackError::Truncated)?;
        self.rest = rest;
        Ok(Text { huffman, octets })
    }

    fn octet(&mut self) -> Result<u8, HpackError> {
        let (octet, rest) = self.rest.split_first().ok_or(HpackError::Truncated)?;
        self.rest = rest;
        Ok(*octet)
    }
}

/// A string as it stands in the block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text<'a> {
    huffman: bool,
    octets: &'a [u8],
}

impl Text<'_> {
    /// Hands each decoded octet to `sink`.
    pub(crate) fn for_each(&self, mut sink: impl FnMut(u8)) -> Result<(), HpackError> {
        if self.huffman {
            huffman::decode(self.octets, sink)?;
        } else {
            self.octets.iter().for_each(|octet| sink(*octet));
        }
        Ok(())
    }

    /// The number of decoded octets.
    pub(crate) fn decoded_len(&self) -> Result<usize, HpackError> {
        if !self.huffman {
            return Ok(self.octets.len());
        }
        let mut length = 0;
        self.for_each(|_| length += 1)?;
        Ok(length)
    }

    /// The decoded octets.
    pub(crate) fn decode(&self) -> Result<Vec<u8>, HpackError> {
        let mut decoded = Vec::with_capacity(self.octets.len() * 8 / 5);
        self.for_each(|octet| decoded.push(octet))?;
        Ok(decoded)
    }
}

/// Appends `text` as a string that is not Huffman-coded.
pub(crate) fn put_plain_text(out: &mut Vec<u8>, text: &[u8]) {
    let mut length = text.len();
    if length < 0x7f {
        out.push(low_octet(length));
    } else {
        out.push(0x7f);
        length -= 0x7f;
        while length >= 0x80 {
            out.push(low_octet(length) | 0x80);
            length >>= 7;
        }
        out.push(low_octet(length));
    }
    out.extend_from_slice(text);
}

fn low_octet(value: usize) -> u8 {
    value.to_le_bytes().first().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn integers_of_the_rfc() {
        assert_eq!(Reader::new(&[0b1110_1010]).integer(5), Ok(10));
        assert_eq!(
            Reader::new(&[0b0001_1111, 0b1001_1010, 0b0000_1010]).integer(5),
            Ok(1337)
        );
        assert_eq!(Reader::new(&[0x7f, 0]).integer(7), Ok(127));
    }

    #[test]
    fn long_and_cut_integers_are_refused() {
        assert_eq!(
            Reader::new(&[0x7f, 0x80, 0x80, 0x80, 0x80, 0]).integer(7),
            Err(HpackError::IntegerTooLong)
        );
        assert_eq!(
            Reader::new(&[0x7f, 0xff, 0xff, 0xff, 0x7f]).integer(7),
            Ok(127 + (1 << 28) - 1)
        );
        assert_eq!(Reader::new(&[0x7f, 0x80]).integer(7), Err(HpackError::Truncated));
        assert_eq!(Reader::new(&[]).integer(7), Err(HpackError::Truncated));
    }

    #[test]
    fn strings_do_not_reach_past_the_block() {
        assert_eq!(Reader::new(b"\x03ab").text().err(), Some(HpackError::Truncated));
        assert_eq!(Reader::new(b"").text().err(), Some(HpackError::Truncated));
        assert_eq!(Reader::new(b"\x03abcd").text().unwrap().decode().unwrap(), b"abc");
        assert_eq!(
            Reader::new(&[0x82, 0x64, 0x02]).text().unwrap().decode().unwrap(),
            b"302"
        );
        assert_eq!(Reader::new(&[0x82, 0x64, 0x02]).text().unwrap().decoded_len(), Ok(3));
    }

    proptest! {
        #[test]
        fn written_strings_read_back(text in prop::collection::vec(any::<u8>(), 0..40_000)) {
            let mut block = Vec::new();
            put_plain_text(&mut block, &text);
            let mut reader = Reader::new(&block);
            prop_assert_eq!(reader.text().unwrap().decode().unwrap(), text);
            prop_assert_eq!(reader.position(), block.len());
        }
    }
}
