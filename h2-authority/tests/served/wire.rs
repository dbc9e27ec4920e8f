//! Writes HTTP/2 frames byte by byte.

use std::iter::repeat_n;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 0x1;
pub(crate) const END_HEADERS: u8 = 0x4;
pub(crate) const PADDED: u8 = 0x8;
pub(crate) const HAS_PRIORITY: u8 = 0x20;

/// The reserved bit of a stream identifier, which receivers ignore (RFC 9113, section 4.1).
pub(crate) const RESERVED: u32 = 1 << 31;

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// The preface and empty settings, which every client sends first.
pub(crate) fn greeting() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// The division of a header block into frames.
#[derive(Debug, Clone, Default)]
pub(crate) struct Framing {
    pub(crate) padding: Option<u8>,
    pub(crate) priority: bool,
    /// Lengths of all pieces of the block except the last. If they add up to more than the block, the last
    /// piece is empty.
    pub(crate) pieces: Vec<usize>,
}

/// The frames of one header block.
pub(crate) fn header_frames(stream: u32, flags: u8, block: &[u8], framing: &Framing) -> Vec<u8> {
    let mut pieces = Vec::new();
    let mut rest = block;
    for length in &framing.pieces {
        let (piece, tail) = rest.split_at((*length).min(rest.len()));
        pieces.push(piece);
        rest = tail;
    }
    pieces.extend(rest.chunks(16_000));
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let mut payload: Vec<u8> = framing.padding.into_iter().collect();
    let mut first_flags = flags | framing.padding.map_or(0, |_| PADDED);
    if framing.priority {
        first_flags |= HAS_PRIORITY;
        // Depends on stream 0 with weight 16.
        payload.extend_from_slice(&[0, 0, 0, 0, 15]);
    }
    payload.extend_from_slice(pieces[0]);
    payload.extend(repeat_n(0, framing.padding.unwrap_or(0).into()));
    let end = |at: usize| if at + 1 == pieces.len() { END_HEADERS } else { 0 };
    let mut out = frame(HEADERS, first_flags | end(0), stream, &payload);
    for (at, piece) in pieces.iter().enumerate().skip(1) {
        out.extend(frame(CONTINUATION, end(at), stream, piece));
    }
    out
}

/// A frame that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// The complete frames at the front of `bytes`.
pub(crate) fn frames(mut bytes: &[u8]) -> Vec<Frame> {
    let mut frames = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<9>() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let Some((payload, tail)) = rest.split_at_checked(length) else {
            break;
        };
        frames.push(Frame {
            kind: head[3],
            flags: head[4],
            stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
            payload: payload.to_vec(),
        });
        bytes = tail;
    }
    frames
}
