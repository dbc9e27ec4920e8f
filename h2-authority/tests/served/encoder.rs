//! Implements an HPACK encoder that supports every valid encoding, with the choices of grpc-go as the default.

use std::collections::VecDeque;

/// The part of RFC 7541, Appendix A, that gRPC clients use.
const STATIC: [(usize, &str, &str); 13] = [
    (1, ":authority", ""),
    (2, ":method", "GET"),
    (3, ":method", "POST"),
    (4, ":path", "/"),
    (6, ":scheme", "http"),
    (7, ":scheme", "https"),
    (16, "accept-encoding", "gzip, deflate"),
    (19, "accept", ""),
    (23, "authorization", ""),
    (31, "content-type", ""),
    (32, "cookie", ""),
    (58, "user-agent", ""),
    (60, "via", ""),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Indexing {
    Incremental,
    Without,
    Never,
}

/// The encoding of one field.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a free choice of the format, independent of the others"
)]
pub(crate) struct Style {
    /// Write the index of an equal field if a table has one.
    pub(crate) repeat: bool,
    /// Write the index of an equal name if a table has one.
    pub(crate) name_index: bool,
    /// Look for names in the dynamic table first.
    pub(crate) dynamic_first: bool,
    pub(crate) indexing: Indexing,
    pub(crate) huffman_name: bool,
    pub(crate) huffman_value: bool,
}

/// The encoding of golang.org/x/net/http2/hpack, except for Huffman coding that makes a string longer.
pub(crate) const GRPC_GO: Style = Style {
    repeat: true,
    name_index: true,
    dynamic_first: false,
    indexing: Indexing::Incremental,
    huffman_name: true,
    huffman_value: true,
};

/// The state of a client for one connection.
pub(crate) struct Encoder {
    entries: VecDeque<(String, Vec<u8>)>,
    capacity: usize,
}

impl Encoder {
    pub(crate) fn new() -> Self {
        Self {
            entries: VecDeque::new(),
            capacity: 4096,
        }
    }

    /// Writes a dynamic table size update; only allowed at the front of a block.
    pub(crate) fn resize(&mut self, capacity: usize, out: &mut Vec<u8>) {
        put_integer(out, 0x20, 5, capacity);
        self.capacity = capacity;
        self.evict(0);
    }

    pub(crate) fn field(&mut self, name: &str, value: &[u8], style: Style, out: &mut Vec<u8>) {
        let equal = self.find(false, |n, v| n == name && v == value);
        if let (true, Some(index)) = (style.repeat, equal) {
            return put_integer(out, 0x80, 7, index);
        }
        let size = name.len() + value.len() + 32;
        // As in Go: an entry that exceeds the capacity is not added to the table.
        let never_fits = size > self.capacity && style.repeat && style.indexing == Indexing::Incremental;
        let indexing = if never_fits { Indexing::Without } else { style.indexing };
        let (first, prefix) = match indexing {
            Indexing::Incremental => (0x40, 6),
            Indexing::Without => (0x00, 4),
            Indexing::Never => (0x10, 4),
        };
        let known = self
            .find(style.dynamic_first, |n, _| n == name)
            .filter(|_| style.name_index);
        put_integer(out, first, prefix, known.unwrap_or(0));
        if known.is_none() {
            put_text(out, name.as_bytes(), style.huffman_name);
        }
        put_text(out, value, style.huffman_value);
        if indexing == Indexing::Incremental {
            self.evict(size);
            if size <= self.capacity {
                self.entries.push_front((name.to_owned(), value.to_vec()));
            }
        }
    }

    /// The current number of entries in the dynamic table.
    pub(crate) fn entries(&self) -> usize {
        self.entries.len()
    }

    fn find(&self, dynamic_first: bool, wanted: impl Fn(&str, &[u8]) -> bool) -> Option<usize> {
        let fixed = || {
            STATIC
                .iter()
                .find(|(_, name, value)| wanted(name, value.as_bytes()))
                .map(|(index, ..)| *index)
        };
        let dynamic = || {
            self.entries
                .iter()
                .position(|(name, value)| wanted(name, value))
                .map(|at| at + 62)
        };
        if dynamic_first {
            dynamic().or_else(fixed)
        } else {
            fixed().or_else(dynamic)
        }
    }

    fn evict(&mut self, room: usize) {
        let size = |entries: &VecDeque<(String, Vec<u8>)>| -> usize {
            entries.iter().map(|(name, value)| name.len() + value.len() + 32).sum()
        };
        while !self.entries.is_empty() && size(&self.entries) + room > self.capacity {
            self.entries.pop_back();
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &[u8], huffman: bool) {
    if !huffman {
        put_integer(out, 0, 7, text.len());
        return out.extend_from_slice(text);
    }
    let mut coded = Vec::new();
    httlib_huffman::encode(text, &mut coded).unwrap();
    put_integer(out, 0x80, 7, coded.len());
    out.extend_from_slice(&coded);
}

fn put_integer(out: &mut Vec<u8>, first: u8, prefix: u32, mut value: usize) {
    let mask = (1_usize << prefix) - 1;
    if value < mask {
        return out.push(first | u8::try_from(value).unwrap());
    }
    out.push(first | u8::try_from(mask).unwrap());
    value -= mask;
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap());
}
