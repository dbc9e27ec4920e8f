//! Encodes and decodes header blocks without a dynamic table (RFC 7541).

use std::io;

use httlib_huffman::{DecoderSpeed, decode as huffman};

/// First bit of an index into the static table.
const INDEXED: u8 = 0x80;
/// Literal with incremental indexing.
const INCREMENTAL: u8 = 0x40;
/// Change of the size of the dynamic table.
const SIZE: u8 = 0x20;
const HUFFMAN: u8 = 0x80;

/// A header block of literals without Huffman code.
pub(super) fn encode(headers: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in headers {
        block.push(0);
        for text in [name, value] {
            encode_length(text.len(), &mut block);
            block.extend(text.as_bytes());
        }
    }
    block
}

/// An integer with a prefix of 7 bits.
fn encode_length(length: usize, block: &mut Vec<u8>) {
    let low = |value: usize| u8::try_from(value & 0x7f).unwrap_or_default();
    if length < 0x7f {
        block.push(low(length));
        return;
    }
    block.push(0x7f);
    let mut rest = length - 0x7f;
    while rest > 0x7f {
        block.push(low(rest) | 0x80);
        rest >>= 7;
    }
    block.push(low(rest));
}

/// The headers of a block. Those with a name of the static table other than `:status` have an empty name.
pub(super) fn decode(block: &[u8]) -> io::Result<Vec<(String, String)>> {
    let mut reader = Reader { rest: block };
    let mut headers = Vec::new();
    while let Some(first) = reader.rest.first().copied() {
        if first & INDEXED != 0 {
            if let Some(status) = static_status(reader.integer(7)?) {
                headers.push((":status".to_owned(), status.to_owned()));
            }
            continue;
        }
        if first & INCREMENTAL == 0 && first & SIZE != 0 {
            reader.integer(5)?;
            continue;
        }
        let index = reader.integer(if first & INCREMENTAL == 0 { 4 } else { 6 })?;
        let name = match index {
            0 => reader.text()?,
            index if static_status(index).is_some() => ":status".to_owned(),
            _ => String::new(),
        };
        headers.push((name, reader.text()?));
    }
    Ok(headers)
}

/// The value of a `:status` of the static table.
fn static_status(index: usize) -> Option<&'static str> {
    let values = ["200", "204", "206", "304", "400", "404", "500"];
    values.get(index.checked_sub(8)?).copied()
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn byte(&mut self) -> io::Result<u8> {
        let (first, rest) = self.rest.split_first().ok_or_else(cut)?;
        self.rest = rest;
        Ok(*first)
    }

    /// An integer whose prefix has `bits` bits.
    fn integer(&mut self, bits: u32) -> io::Result<usize> {
        let most = (1_usize << bits) - 1;
        let mut value = usize::from(self.byte()?) & most;
        if value < most {
            return Ok(value);
        }
        for shift in (0..28).step_by(7) {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(io::Error::other("an integer in the headers is too large"))
    }

    fn text(&mut self) -> io::Result<String> {
        let is_coded = self.rest.first().is_some_and(|first| first & HUFFMAN != 0);
        let length = self.integer(7)?;
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or_else(cut)?;
        self.rest = rest;
        let mut text = bytes.to_vec();
        if is_coded {
            text.clear();
            huffman(bytes, &mut text, DecoderSpeed::FourBits)
                .map_err(|error| io::Error::other(format!("the headers are not Huffman code: {error:?}")))?;
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

fn cut() -> io::Error {
    io::Error::other("the headers are incomplete")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded() {
        let long = "x".repeat(300);
        let headers = [(":authority", "%2Ftmp%2Fkni.sock"), ("long", &*long), ("", "")];
        let decoded = decode(&encode(&headers)).unwrap();
        let expected = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(decoded, expected);
    }

    #[test]
    fn answers_of_servers_are_decoded() {
        // A change of the size, an index, a Huffman coded literal, and a literal with the name of the static table.
        let mut block = vec![0x20, 0x88, 0x00, 0x88];
        block.extend([0x9a, 0xca, 0xc8, 0xb2, 0x12, 0x34, 0xda, 0x8f]);
        block.extend([0x01, b'0', 0x08, 0x03, b'4', b'1', b'5']);
        let expected = [(":status", "200"), ("grpc-status", "0"), (":status", "415")];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(decode(&block).unwrap(), expected);
    }

    #[test]
    fn incomplete_blocks_are_refused() {
        let block = encode(&[("grpc-status", "0")]);
        for length in 1..block.len() {
            assert!(decode(&block[..length]).is_err(), "{length}");
        }
        assert!(decode(&[0x7f; 8]).is_err());
    }
}
