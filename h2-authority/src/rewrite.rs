//! Splits the byte stream of the client into frames (RFC 9113) and rewrites its header blocks.

use std::io;

use bytes::{Buf as _, BufMut as _, BytesMut};

use crate::hpack::{BlockError, Decoder};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER_LEN: usize = 9;
const PRIORITY_LEN: usize = 5;

/// The initial `SETTINGS_MAX_FRAME_SIZE`, which h2 servers keep.
const MAX_PAYLOAD: usize = 16_384;

/// Bytes of one header block: of its frames as received, and of its fields as passed on.
pub(crate) const BLOCK_LIMIT: usize = 64 * 1024;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;

const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

#[derive(Debug, Clone, Copy)]
enum Phase {
    Preface,
    Frames,
    /// After an error of the client or the end of its stream: all bytes pass unchanged.
    Passthrough,
    /// After a header block over the limit, of this stream.
    Failed(u32),
}

/// The rewriting without any I/O: [`Self::push`] takes bytes of the client, [`Self::next`] returns bytes for the
/// server.
#[derive(Debug)]
pub(crate) struct Rewriter {
    phase: Phase,
    /// Received and not yet passed on: less than one frame after [`Self::next`] returned `None`.
    input: BytesMut,
    block: Option<Block>,
    decoder: Decoder,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self {
            phase: Phase::Preface,
            input: BytesMut::new(),
            block: None,
            decoder: Decoder::default(),
        }
    }
}

impl Rewriter {
    /// Takes the next bytes of the client.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Releases an incomplete frame or header block at the end of the client's stream.
    pub(crate) fn finish(&mut self) {
        if let Some(block) = self.block.take() {
            let mut held = block.frames(&block.fragment, false);
            held.unsplit(self.input.split());
            self.input = held;
        }
        if !matches!(self.phase, Phase::Failed(_)) {
            self.phase = Phase::Passthrough;
        }
    }

    /// Returns the next bytes for the server, of at most one frame or header block, or `None` until more bytes come.
    ///
    /// An error is permanent; the bytes before the refused header block were returned before.
    pub(crate) fn next(&mut self) -> io::Result<Option<BytesMut>> {
        loop {
            match self.phase {
                Phase::Preface if self.input.starts_with(PREFACE) => {
                    self.phase = Phase::Frames;
                    return Ok(Some(self.input.split_to(PREFACE.len())));
                }
                Phase::Preface if PREFACE.starts_with(&self.input) => return Ok(None),
                Phase::Preface => self.phase = Phase::Passthrough,
                Phase::Frames => {
                    let Some(frame) = self.frame() else { return Ok(None) };
                    if let Some(bytes) = self.handle(frame) {
                        return Ok(Some(bytes));
                    }
                }
                Phase::Passthrough if self.input.is_empty() => return Ok(None),
                Phase::Passthrough => return Ok(Some(self.input.split())),
                Phase::Failed(stream) => {
                    let message = format!("header block of stream {stream} exceeds {BLOCK_LIMIT} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
    }

    /// The next frame, once it is complete. One that h2 refuses by its length alone is complete with its header.
    fn frame(&self) -> Option<Frame> {
        let frame = Frame::parse(*self.input.first_chunk()?);
        let complete = self.input.len() >= FRAME_HEADER_LEN + frame.length;
        (complete || frame.length > MAX_PAYLOAD).then_some(frame)
    }

    /// Handles the frame at the front of the input; returns the bytes that it makes available, if any.
    fn handle(&mut self, frame: Frame) -> Option<BytesMut> {
        let end = FRAME_HEADER_LEN + frame.length;
        let payload = self.input.get(FRAME_HEADER_LEN..end).unwrap_or_default();
        let joined = match (frame.kind, self.block.as_mut()) {
            _ if frame.length > MAX_PAYLOAD => false,
            (HEADERS, None) => {
                self.block = Block::open(frame, payload);
                self.block.is_some()
            }
            (CONTINUATION, Some(block)) if block.frame.stream_id() == frame.stream_id() => {
                block.fragment.extend_from_slice(payload);
                true
            }
            (CONTINUATION, None) | (_, Some(_)) => false,
            (_, None) => return Some(self.input.split_to(end)),
        };
        if !joined {
            // h2 ends the connection with an error at this frame.
            self.finish();
            return None;
        }
        self.input.advance(end);
        self.close_block(frame, end)
    }

    /// Accounts for a frame of the open block, and rewrites the block when the frame is its last one.
    fn close_block(&mut self, frame: Frame, size: usize) -> Option<BytesMut> {
        let mut block = self.block.take()?;
        block.received += size;
        if block.received > BLOCK_LIMIT {
            self.phase = Phase::Failed(frame.stream_id());
            return None;
        }
        if frame.flags & END_HEADERS == 0 {
            self.block = Some(block);
            return None;
        }
        match self.decoder.transcode(&block.fragment, BLOCK_LIMIT) {
            Ok(literals) => Some(block.frames(&literals, true)),
            Err(BlockError::TooLarge) => {
                self.phase = Phase::Failed(frame.stream_id());
                None
            }
            Err(BlockError::Invalid) => {
                // h2 finds the same error.
                self.phase = Phase::Passthrough;
                Some(block.frames(&block.fragment, true))
            }
        }
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy)]
struct Frame {
    length: usize,
    kind: u8,
    flags: u8,
    /// The stream with its reserved bit.
    stream: u32,
}

impl Frame {
    fn parse(raw: [u8; FRAME_HEADER_LEN]) -> Self {
        let [l0, l1, l2, kind, flags, s0, s1, s2, s3] = raw;
        Self {
            length: usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2),
            kind,
            flags,
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
        }
    }

    fn stream_id(self) -> u32 {
        self.stream & 0x7fff_ffff
    }
}

/// A header block whose last frame is still missing.
#[derive(Debug)]
struct Block {
    /// Its HEADERS frame.
    frame: Frame,
    priority: Vec<u8>,
    /// The HPACK bytes.
    fragment: Vec<u8>,
    /// Bytes of the frames so far.
    received: usize,
}

impl Block {
    /// `None` if the payload is too short for the padding and priority that its flags announce.
    fn open(frame: Frame, mut payload: &[u8]) -> Option<Self> {
        if frame.flags & PADDED != 0 {
            let (padding, rest) = payload.split_first()?;
            payload = rest.get(..rest.len().checked_sub(usize::from(*padding))?)?;
        }
        let priority_len = if frame.flags & PRIORITY == 0 { 0 } else { PRIORITY_LEN };
        let (priority, fragment) = payload.split_at_checked(priority_len)?;
        Some(Self {
            frame,
            priority: priority.to_vec(),
            fragment: fragment.to_vec(),
            received: 0,
        })
    }

    /// A HEADERS frame, and CONTINUATION frames if needed, that carry `content` in place of the block's own.
    fn frames(&self, content: &[u8], complete: bool) -> BytesMut {
        let mut out = BytesMut::new();
        let mut kind = HEADERS;
        let mut flags = self.frame.flags & !(PADDED | END_HEADERS);
        let mut head = self.priority.as_slice();
        let mut rest = content;
        loop {
            let (piece, tail) = rest.split_at(rest.len().min(MAX_PAYLOAD - head.len()));
            if complete && tail.is_empty() {
                flags |= END_HEADERS;
            }
            out.put_uint((head.len() + piece.len()) as u64, 3);
            out.put_u8(kind);
            out.put_u8(flags);
            out.put_u32(self.frame.stream);
            out.put_slice(head);
            out.put_slice(piece);
            if tail.is_empty() {
                return out;
            }
            (kind, flags, head, rest) = (CONTINUATION, 0, &[], tail);
        }
    }
}
