//! Frames of RFC 9113, in and out.

use std::io::{self, Read, Write};

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_STREAM: u8 = 0x1;
pub(super) const ACK: u8 = 0x1;
pub(super) const END_HEADERS: u8 = 0x4;
pub(super) const PADDED: u8 = 0x8;
pub(super) const PRIORITY: u8 = 0x20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) fn new(kind: u8, flags: u8, stream: u32, payload: Vec<u8>) -> Self {
        Self {
            kind,
            flags,
            stream,
            payload,
        }
    }

    /// With `padding` bytes of padding and the length of it in front.
    pub(super) fn padded(mut self, padding: u8) -> Self {
        self.flags |= PADDED;
        self.payload.insert(0, padding);
        self.payload.resize(self.payload.len() + usize::from(padding), 0);
        self
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let length = u32::try_from(self.payload.len())
            .map_err(io::Error::other)?
            .to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], self.kind, self.flags];
        bytes.extend_from_slice(&self.stream.to_be_bytes());
        bytes.extend_from_slice(&self.payload);
        to.write_all(&bytes)
    }

    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 9];
        from.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        let mut payload = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        from.read_exact(&mut payload)?;
        Ok(Self {
            kind: head[3],
            flags: head[4],
            stream,
            payload,
        })
    }

    /// The payload of DATA or HEADERS without padding and priority.
    pub(super) fn content(&self) -> Option<&[u8]> {
        let mut rest = &self.payload[..];
        if self.has(PADDED) {
            let (padding, behind) = rest.split_first()?;
            rest = behind.get(..behind.len().checked_sub(usize::from(*padding))?)?;
        }
        if self.kind == HEADERS && self.has(PRIORITY) {
            rest.get(5..)
        } else {
            Some(rest)
        }
    }

    pub(super) fn number(&self, at: usize) -> Option<u32> {
        Some(u32::from_be_bytes(self.payload.get(at..at + 4)?.try_into().ok()?))
    }
}
