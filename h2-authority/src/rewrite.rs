//! Follows the client's byte stream frame by frame, and decides what is passed on, held back or rewritten.

use bytes::BytesMut;

use crate::{
    Error,
    block::HeaderBlock,
    frame::{FrameHeader, HEADER_LEN, PREFACE, kind},
    hpack,
    table::Table,
};

/// Bounds on what a client can make the server hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The `SETTINGS_HEADER_TABLE_SIZE` that the server announces, in bytes. h2, hyper and tonic announce none, which
    /// means 4096. A wrong value makes the two HPACK tables differ.
    pub header_table_size: usize,
    /// Bytes of the payloads, padding included, of one HEADERS frame and its CONTINUATION frames.
    pub block_size: usize,
    /// CONTINUATION frames after one HEADERS frame.
    pub continuations: usize,
}

impl Default for Limits {
    /// 4096 bytes of table, 256 KiB of header block, 64 CONTINUATION frames.
    fn default() -> Self {
        Self {
            header_table_size: 4096,
            block_size: 256 * 1024,
            continuations: 64,
        }
    }
}

/// Where in the stream the next byte belongs.
#[derive(Debug, Clone, Copy)]
enum State {
    /// In the connection preface, of which this many bytes came.
    Preface(usize),
    /// In a frame header.
    Header,
    /// In a payload that is passed on as it comes, with this many bytes to go.
    Payload(usize),
    /// In the payload of a held frame, with this many bytes to go.
    HeldPayload(usize),
    /// Behind an error that h2 will report: everything is passed on.
    Transparent,
    /// Behind an error of this crate.
    Failed(Error),
}

/// The rewriting without any I/O: client bytes in, bytes for the server out.
///
/// How the input is cut into pieces does not change the output. What is held back between calls is at most one header
/// block and one frame header; the output is at most twice the input.
#[derive(Debug)]
pub struct Rewriter {
    state: State,
    limits: Limits,
    /// The first bytes of a frame header, while the rest is missing.
    partial: Vec<u8>,
    block: HeaderBlock,
    table: Table,
}

impl Default for Rewriter {
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

impl Rewriter {
    /// A rewriter for a connection of which no byte was read.
    pub fn new(limits: Limits) -> Self {
        Self {
            state: State::Preface(0),
            limits,
            partial: Vec::with_capacity(HEADER_LEN),
            block: HeaderBlock::default(),
            table: Table::new(limits.header_table_size),
        }
    }

    /// Takes the next bytes from the client and appends to `out` what the server is to get.
    ///
    /// After an error, which every later call repeats, `out` holds all that came before the refused header block; the
    /// connection must be closed.
    pub fn push(&mut self, mut input: &[u8], out: &mut BytesMut) -> Result<(), Error> {
        while !input.is_empty() {
            input = self.step(input, out)?;
        }
        Ok(())
    }

    /// Appends to `out` what is held back. To be called at the end of the client's stream, so that the server sees a
    /// stream that is cut where the client cut it.
    pub fn finish(&mut self, out: &mut BytesMut) {
        self.block.put_original(out);
        self.block.clear();
        out.extend_from_slice(&self.partial);
        self.partial.clear();
        if !matches!(self.state, State::Failed(_)) {
            self.state = State::Transparent;
        }
    }

    /// Whether the rewriter passes everything on from here: the client does not speak HTTP/2, made an error that h2
    /// will report, or ended its stream.
    pub fn is_transparent(&self) -> bool {
        matches!(self.state, State::Transparent)
    }

    /// Handles at least one byte of `input`, which is not empty, and returns the rest.
    fn step<'a>(&mut self, input: &'a [u8], out: &mut BytesMut) -> Result<&'a [u8], Error> {
        match self.state {
            State::Preface(seen) => Ok(self.preface(seen, input, out)),
            State::Header => self.header(input, out),
            State::Payload(left) => {
                let (now, rest) = input.split_at(left.min(input.len()));
                out.extend_from_slice(now);
                self.state = State::payload(left - now.len());
                Ok(rest)
            }
            State::HeldPayload(left) => {
                let (now, rest) = input.split_at(left.min(input.len()));
                self.block.extend(now);
                self.held_payload(left - now.len(), out);
                Ok(rest)
            }
            State::Transparent => {
                out.extend_from_slice(input);
                Ok(&[])
            }
            State::Failed(error) => Err(error),
        }
    }

    fn preface<'a>(&mut self, seen: usize, input: &'a [u8], out: &mut BytesMut) -> &'a [u8] {
        let expected = PREFACE.get(seen..).unwrap_or_default();
        let (now, rest) = input.split_at(expected.len().min(input.len()));
        out.extend_from_slice(now);
        self.state = if !expected.starts_with(now) {
            State::Transparent
        } else if now.len() == expected.len() {
            State::Header
        } else {
            State::Preface(seen + now.len())
        };
        rest
    }

    fn header<'a>(&mut self, input: &'a [u8], out: &mut BytesMut) -> Result<&'a [u8], Error> {
        let missing = HEADER_LEN - self.partial.len();
        let (now, rest) = input.split_at(missing.min(input.len()));
        self.partial.extend_from_slice(now);
        let Some(raw) = self.partial.first_chunk::<HEADER_LEN>().copied() else {
            return Ok(rest);
        };
        let header = FrameHeader::parse(raw);
        let joins = if self.block.is_open() {
            self.block.continues_with(&header)
        } else {
            header.kind == kind::HEADERS
        };
        if joins {
            self.check(&header)?;
            self.partial.clear();
            self.block.begin_frame(header, raw);
            self.held_payload(header.length, out);
        } else if self.block.is_open() || header.kind == kind::CONTINUATION {
            // A frame that must not come here. From now on nobody can tell what the server makes of the stream.
            self.finish(out);
        } else {
            self.partial.clear();
            out.extend_from_slice(&raw);
            self.state = State::payload(header.length);
        }
        Ok(rest)
    }

    /// Refuses a frame that would make the block exceed a limit, before any of its payload is held.
    fn check(&mut self, header: &FrameHeader) -> Result<(), Error> {
        let stream = header.stream();
        let Limits {
            block_size,
            continuations,
            ..
        } = self.limits;
        let error = if self.block.size_with(header) > block_size {
            Error::BlockTooLarge {
                stream,
                limit: block_size,
            }
        } else if self.block.is_open() && self.block.continuations() >= continuations {
            Error::TooManyContinuations {
                stream,
                limit: continuations,
            }
        } else {
            return Ok(());
        };
        self.state = State::Failed(error);
        self.block.clear();
        self.partial.clear();
        Err(error)
    }

    /// Goes on after bytes of a held payload, or ends the frame if none are `left`.
    fn held_payload(&mut self, left: usize, out: &mut BytesMut) {
        if left > 0 {
            self.state = State::HeldPayload(left);
            return;
        }
        match self.block.end_frame() {
            Ok(false) => self.state = State::Header,
            Ok(true) => self.end_block(out),
            // Padding that does not fit: h2 ends the connection over it.
            Err(_) => self.finish(out),
        }
    }

    fn end_block(&mut self, out: &mut BytesMut) {
        match hpack::rewrite(&self.block.content(), &mut self.table) {
            Ok(Some(content)) => self.block.put_with(&content, out),
            Ok(None) => self.block.put_original(out),
            // h2 will find the same error and tell the client; the tables are lost either way.
            Err(_) => return self.finish(out),
        }
        self.block.clear();
        self.state = State::Header;
    }
}

impl State {
    fn payload(left: usize) -> Self {
        if left == 0 { Self::Header } else { Self::Payload(left) }
    }
}
