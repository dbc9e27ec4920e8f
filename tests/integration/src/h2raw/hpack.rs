//! HPACK (RFC 7541): an encoder that can be told how to write a field, and a decoder of answers.

use std::collections::VecDeque;

use httlib_huffman::{DecoderSpeed, decode, encode};

/// The names of the static table, from index 1. A name with several values stands at each of them.
const STATIC: [&str; 61] = [
    ":authority",
    ":method",
    ":method",
    ":path",
    ":path",
    ":scheme",
    ":scheme",
    ":status",
    ":status",
    ":status",
    ":status",
    ":status",
    ":status",
    ":status",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "accept",
    "access-control-allow-origin",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-range",
    "content-type",
    "cookie",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "link",
    "location",
    "max-forwards",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "refresh",
    "retry-after",
    "server",
    "set-cookie",
    "strict-transport-security",
    "transfer-encoding",
    "user-agent",
    "vary",
    "via",
    "www-authenticate",
];
/// The values of the static table that occur here: method, path, scheme and status.
const STATIC_VALUES: [(usize, &str); 13] = [
    (2, "GET"),
    (3, "POST"),
    (4, "/"),
    (5, "/index.html"),
    (6, "http"),
    (7, "https"),
    (8, "200"),
    (9, "204"),
    (10, "206"),
    (11, "304"),
    (12, "400"),
    (13, "404"),
    (14, "500"),
];
const TABLE_SIZE: usize = 4096;

/// How fields are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coding {
    /// Huffman-code the strings.
    pub huffman: bool,
    /// Put each field into the dynamic table, and send its index from then on, as grpc-go does. Otherwise every field
    /// is a literal every time.
    pub index: bool,
}

impl Coding {
    /// What grpc-go does.
    pub const GRPC_GO: Self = Self {
        huffman: true,
        index: true,
    };
}

#[derive(Debug, Default)]
pub(super) struct Encoder {
    /// Newest first, as the indexes count.
    dynamic: VecDeque<(String, String)>,
    size: usize,
}

impl Encoder {
    pub(super) fn block(&mut self, fields: &[(&str, &str)], coding: Coding) -> Vec<u8> {
        let mut block = Vec::new();
        for field in fields {
            self.field(*field, coding, &mut block);
        }
        block
    }

    fn field(&mut self, (name, value): (&str, &str), coding: Coding, block: &mut Vec<u8>) {
        let known = self
            .dynamic
            .iter()
            .position(|(n, v)| n == name && v == value)
            .map(|at| at + STATIC.len() + 1);
        let fixed = STATIC_VALUES
            .iter()
            .find(|(at, v)| STATIC[at - 1] == name && v == &value)
            .map(|(at, _)| *at);
        if let Some(index) = fixed.or(known) {
            return integer(block, 0x80, 7, index);
        }
        let name_index = STATIC.iter().position(|n| n == &name).map_or(0, |at| at + 1);
        if coding.index {
            integer(block, 0x40, 6, name_index);
        } else {
            integer(block, 0x00, 4, name_index);
        }
        if name_index == 0 {
            string(block, name, coding.huffman);
        }
        string(block, value, coding.huffman);
        if coding.index {
            self.insert(name, value);
        }
    }

    fn insert(&mut self, name: &str, value: &str) {
        self.dynamic.push_front((name.to_owned(), value.to_owned()));
        self.size += cost(name, value);
        while self.size > TABLE_SIZE {
            let Some((name, value)) = self.dynamic.pop_back() else {
                break;
            };
            self.size -= cost(&name, &value);
        }
    }
}

fn cost(name: &str, value: &str) -> usize {
    name.len() + value.len() + 32
}

fn integer(block: &mut Vec<u8>, first: u8, prefix: u32, value: usize) {
    let most = (1 << prefix) - 1;
    let byte = |value: usize| u8::try_from(value).expect("masked to a byte");
    if value < most {
        return block.push(first | byte(value));
    }
    block.push(first | byte(most));
    let mut left = value - most;
    while left >= 0x80 {
        block.push(byte(left & 0x7f) | 0x80);
        left >>= 7;
    }
    block.push(byte(left));
}

fn string(block: &mut Vec<u8>, text: &str, huffman: bool) {
    if huffman {
        let mut coded = Vec::new();
        encode(text.as_bytes(), &mut coded).expect("every byte has a code");
        integer(block, 0x80, 7, coded.len());
        block.extend_from_slice(&coded);
    } else {
        integer(block, 0x00, 7, text.len());
        block.extend_from_slice(text.as_bytes());
    }
}

/// Decodes a header block of a peer that was told to keep no dynamic table; `None` when it is not HPACK. Static fields
/// that occur in no answer have an empty value.
pub fn decode_block(mut block: &[u8]) -> Option<Vec<(String, String)>> {
    let mut fields = Vec::new();
    while let Some(first) = block.first().copied() {
        if first & 0x80 != 0 {
            let index = take_integer(&mut block, 7)?;
            let value = STATIC_VALUES
                .iter()
                .find(|(at, _)| *at == index)
                .map_or("", |(_, value)| value);
            fields.push(((*STATIC.get(index.checked_sub(1)?)?).to_owned(), value.to_owned()));
        } else if first & 0xe0 == 0x20 {
            take_integer(&mut block, 5)?;
        } else {
            let name = match take_integer(&mut block, if first & 0x40 != 0 { 6 } else { 4 })? {
                0 => take_string(&mut block)?,
                index => (*STATIC.get(index - 1)?).to_owned(),
            };
            fields.push((name, take_string(&mut block)?));
        }
    }
    Some(fields)
}

fn take_integer(block: &mut &[u8], prefix: u32) -> Option<usize> {
    let most = (1 << prefix) - 1;
    let (first, mut rest) = block.split_first()?;
    let mut value = usize::from(*first) & most;
    if value == most {
        for shift in (0..28).step_by(7) {
            let (byte, behind) = rest.split_first()?;
            rest = behind;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *block = rest;
    Some(value)
}

fn take_string(block: &mut &[u8]) -> Option<String> {
    let huffman = block.first()? & 0x80 != 0;
    let length = take_integer(block, 7)?;
    let (bytes, rest) = block.split_at_checked(length)?;
    *block = rest;
    let mut text = Vec::new();
    if huffman {
        decode(bytes, &mut text, DecoderSpeed::FourBits).ok()?;
    } else {
        text.extend_from_slice(bytes);
    }
    String::from_utf8(text).ok()
}
