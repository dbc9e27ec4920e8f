//! The layout of HTTP/2 frames (RFC 9113, sections 4.1, 6.2 and 6.10), as far as header blocks need it.

use std::ops::Range;

use bytes::{BufMut, BytesMut};

/// What a client sends before its first frame.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes of a frame header.
pub(crate) const HEADER_LEN: usize = 9;

/// The payload every server accepts: the initial `SETTINGS_MAX_FRAME_SIZE`, and the least a server may set.
pub(crate) const MAX_PAYLOAD: usize = 16_384;

const PRIORITY_LEN: usize = 5;

/// Frame types that carry a header block from a client.
pub(crate) mod kind {
    pub(crate) const HEADERS: u8 = 0x1;
    pub(crate) const CONTINUATION: u8 = 0x9;
}

/// Flags that change the layout of a HEADERS frame or end its block.
pub(crate) mod flag {
    pub(crate) const END_HEADERS: u8 = 0x4;
    pub(crate) const PADDED: u8 = 0x8;
    pub(crate) const PRIORITY: u8 = 0x20;
}

/// The nine bytes before each payload. Numbers are big-endian on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct FrameHeader {
    /// Bytes of the payload, below 2^24.
    pub(crate) length: usize,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    /// The stream with its reserved bit, which is passed on and otherwise ignored.
    raw_stream: u32,
}

impl FrameHeader {
    pub(crate) fn parse(raw: [u8; HEADER_LEN]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = raw;
        let length = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
        Self {
            length,
            kind,
            flags,
            raw_stream: u32::from_be_bytes([s0, s1, s2, s3]),
        }
    }

    pub(crate) fn stream(&self) -> u32 {
        self.raw_stream & 0x7fff_ffff
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    fn put(&self, out: &mut BytesMut) {
        out.put_uint(self.length as u64, 3);
        out.put_u8(self.kind);
        out.put_u8(self.flags);
        out.put_u32(self.raw_stream);
    }
}

/// Where the parts of a HEADERS or CONTINUATION payload are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The priority fields; empty if the frame has none.
    pub(crate) priority: Range<usize>,
    /// The piece of the header block.
    pub(crate) fragment: Range<usize>,
}

impl Layout {
    /// `None` if the payload is too short for its flags or its padding.
    pub(crate) fn of(header: &FrameHeader, payload: &[u8]) -> Option<Self> {
        // On CONTINUATION these flags mean nothing.
        let has = |flag| header.kind == kind::HEADERS && header.has(flag);
        let (padding, start) = if has(flag::PADDED) {
            (usize::from(*payload.first()?), 1)
        } else {
            (0, 0)
        };
        let priority = start..if has(flag::PRIORITY) {
            start + PRIORITY_LEN
        } else {
            start
        };
        let end = payload.len().checked_sub(padding).filter(|end| *end >= priority.end)?;
        Some(Self {
            fragment: priority.end..end,
            priority,
        })
    }
}

/// Writes `block` as a HEADERS frame and as many CONTINUATION frames as it takes.
///
/// `first` gives the stream and the flags, of which `END_HEADERS` is moved to the last frame and `PADDED` is dropped;
/// `priority` must be its priority fields.
pub(crate) fn put_block(out: &mut BytesMut, first: FrameHeader, priority: &[u8], block: &[u8]) {
    let (mut piece, mut rest) = block.split_at(block.len().min(MAX_PAYLOAD - priority.len()));
    let mut header = first;
    header.flags &= !(flag::PADDED | flag::END_HEADERS);
    header.length = priority.len() + piece.len();
    let mut priority = priority;
    loop {
        if rest.is_empty() {
            header.flags |= flag::END_HEADERS;
        }
        header.put(out);
        out.extend_from_slice(priority);
        out.extend_from_slice(piece);
        if rest.is_empty() {
            return;
        }
        (piece, rest) = rest.split_at(rest.len().min(MAX_PAYLOAD));
        priority = &[];
        header = FrameHeader {
            length: piece.len(),
            kind: kind::CONTINUATION,
            flags: 0,
            ..first
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(flags: u8) -> FrameHeader {
        FrameHeader {
            length: 0,
            kind: kind::HEADERS,
            flags,
            raw_stream: 3,
        }
    }

    #[test]
    fn header_is_read_and_written_alike() {
        let raw = [0x01, 0x02, 0x03, 0x09, 0xa5, 0x80, 0x00, 0x01, 0x07];
        let header = FrameHeader::parse(raw);
        assert_eq!(
            (header.length, header.kind, header.flags, header.stream()),
            (0x01_0203, 9, 0xa5, 0x107)
        );
        let mut out = BytesMut::new();
        header.put(&mut out);
        assert_eq!(out.as_ref(), raw);
    }

    #[test]
    fn layout_follows_the_flags() {
        let layout = |flags, payload: &[u8]| Layout::of(&headers(flags), payload).map(|l| (l.priority, l.fragment));
        assert_eq!(layout(0, &[9; 4]), Some((0..0, 0..4)));
        assert_eq!(layout(flag::PADDED, &[2, 7, 7, 0, 0]), Some((1..1, 1..3)));
        assert_eq!(layout(flag::PRIORITY, &[0; 7]), Some((0..5, 5..7)));
        assert_eq!(
            layout(flag::PADDED | flag::PRIORITY, &[1, 0, 0, 0, 0, 0, 8, 0]),
            Some((1..6, 6..7))
        );
        assert_eq!(layout(flag::PADDED, &[3, 0, 0, 0]), Some((1..1, 1..1)), "all padding");
        assert_eq!(
            layout(flag::PADDED, &[4, 0, 0, 0]),
            None,
            "padding covers its own length"
        );
        assert_eq!(layout(flag::PADDED, &[]), None);
        assert_eq!(layout(flag::PRIORITY, &[0; 4]), None);
    }

    #[test]
    fn continuation_has_neither_padding_nor_priority() {
        let header = FrameHeader {
            kind: kind::CONTINUATION,
            ..headers(flag::PADDED | flag::PRIORITY)
        };
        assert_eq!(Layout::of(&header, &[200, 1]).map(|l| l.fragment), Some(0..2));
    }

    #[test]
    fn long_blocks_are_split_at_the_frame_size() {
        const END_STREAM: u8 = 0x1;
        let block: Vec<u8> = (0..MAX_PAYLOAD * 2).map(|at| at.to_le_bytes()[0]).collect();
        let first = headers(flag::PADDED | flag::PRIORITY | flag::END_HEADERS | END_STREAM);
        let mut out = BytesMut::new();
        put_block(&mut out, first, b"prior", &block);

        let mut rest = &out[..];
        let mut frames = Vec::new();
        let mut content = Vec::new();
        while let Some((raw, tail)) = rest.split_first_chunk() {
            let header = FrameHeader::parse(*raw);
            assert_eq!(header.stream(), 3);
            content.extend_from_slice(&tail[..header.length]);
            frames.push((header.kind, header.flags, header.length));
            rest = &tail[header.length..];
        }
        assert_eq!(content, [b"prior", &block[..]].concat());
        assert_eq!(
            frames,
            [
                (kind::HEADERS, flag::PRIORITY | END_STREAM, MAX_PAYLOAD),
                (kind::CONTINUATION, 0, MAX_PAYLOAD),
                (kind::CONTINUATION, flag::END_HEADERS, 5),
            ]
        );
    }

    #[test]
    fn block_of_exactly_one_frame_is_not_split() {
        let mut out = BytesMut::new();
        put_block(&mut out, headers(flag::END_HEADERS), &[], &[0; MAX_PAYLOAD]);
        assert_eq!(out.len(), HEADER_LEN + MAX_PAYLOAD);
        assert_eq!(FrameHeader::parse(*out.first_chunk().unwrap()).flags, flag::END_HEADERS);
    }
}
