//! Encodes and reads the frames of HTTP/2 (RFC 9113, section 4.1).

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _};

pub(super) const ACK: u8 = 0x1;
pub(super) const END_STREAM: u8 = 0x1;
pub(super) const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Length of the fields that a priority adds.
const PRIORITY_LENGTH: usize = 5;

/// The types of frames that matter to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Headers,
    Reset,
    Settings,
    Ping,
    GoAway,
    Continuation,
    Other,
}

/// A frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) flags: u8,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    pub(super) fn new(kind: Kind, flags: u8, stream: u32, payload: Vec<u8>) -> Self {
        Self {
            kind,
            flags,
            stream,
            payload,
        }
    }

    /// The bytes of the frame.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let kind = match self.kind {
            Kind::Data => 0,
            Kind::Headers => 1,
            Kind::Reset => 3,
            Kind::Settings => 4,
            Kind::Ping => 6,
            Kind::GoAway => 7,
            Kind::Continuation => 9,
            Kind::Other => return Err(io::Error::other("a frame of an unknown type")),
        };
        let length = u32::try_from(self.payload.len()).map_err(io::Error::other)?;
        let [_, length @ ..] = length.to_be_bytes();
        let mut bytes = length.to_vec();
        bytes.extend([kind, self.flags]);
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend(&self.payload);
        Ok(bytes)
    }

    /// Reads the next frame.
    pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let [a, b, c, kind, flags, stream @ ..] = {
            let mut head = [0; 9];
            from.read_exact(&mut head).await?;
            head
        };
        let mut payload = vec![0; usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)];
        from.read_exact(&mut payload).await?;
        let kind = match kind {
            0 => Kind::Data,
            1 => Kind::Headers,
            3 => Kind::Reset,
            4 => Kind::Settings,
            6 => Kind::Ping,
            7 => Kind::GoAway,
            9 => Kind::Continuation,
            _ => Kind::Other,
        };
        Ok(Self {
            kind,
            flags,
            // The first bit is reserved.
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            payload,
        })
    }

    /// The payload of DATA without padding.
    pub(super) fn content(&self) -> io::Result<&[u8]> {
        let cut = || {
            if self.flags & PADDED == 0 {
                return Some(&*self.payload);
            }
            let (padding, rest) = self.payload.split_first()?;
            rest.get(..rest.len().checked_sub((*padding).into())?)
        };
        cut().ok_or_else(|| io::Error::other("a frame with more padding than content"))
    }

    /// The part of a header block in HEADERS or CONTINUATION.
    pub(super) fn block(&self) -> io::Result<&[u8]> {
        if self.kind == Kind::Continuation {
            return Ok(&self.payload);
        }
        let skipped = if self.flags & PRIORITY == 0 { 0 } else { PRIORITY_LENGTH };
        let block = self.content()?.get(skipped..);
        block.ok_or_else(|| io::Error::other("a frame without its priority"))
    }

    /// The error code of `RST_STREAM` or `GOAWAY`, which is its last field but debug data.
    pub(super) fn error(&self) -> String {
        let at = if self.kind == Kind::GoAway { 4 } else { 0 };
        let code = self.payload.get(at..).and_then(|rest| rest.first_chunk::<4>());
        match code.map(|bytes| u32::from_be_bytes(*bytes)) {
            Some(1) => "PROTOCOL_ERROR".to_owned(),
            Some(code) => format!("code {code}"),
            None => "without a code".to_owned(),
        }
    }
}
