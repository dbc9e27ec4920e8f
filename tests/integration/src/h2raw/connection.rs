//! Unary gRPC calls over one connection.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use anyhow::Context as _;

use super::{
    frame::{
        ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS,
        WINDOW_UPDATE,
    },
    hpack::{Coding, Encoder, decode_block},
};
use crate::namespaces::Namespaces;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS_HEADER_TABLE_SIZE: u16 = 1;
const SETTINGS_INITIAL_WINDOW_SIZE: u16 = 4;
const LARGEST_WINDOW: u32 = 0x7fff_ffff;
/// The frame size every peer takes.
const FRAME_SIZE: usize = 16_384;

/// One request and the way it is put on the wire.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    /// `/package.Service/Method`.
    pub path: &'a str,
    /// The value of `:authority`, sent as it is.
    pub authority: &'a str,
    /// The encoded message.
    pub message: &'a [u8],
    /// How the header fields are written.
    pub coding: Coding,
    /// More header fields.
    pub metadata: &'a [(&'a str, &'a str)],
    /// Bytes of padding in HEADERS and DATA.
    pub padding: Option<u8>,
    /// Cut the header block into HEADERS and CONTINUATION frames of so many bytes.
    pub continuation: Option<usize>,
}

impl<'a> Call<'a> {
    /// As grpc-go sends it.
    pub fn new(path: &'a str, authority: &'a str, message: &'a [u8]) -> Self {
        let coding = Coding::GRPC_GO;
        Self {
            path,
            authority,
            message,
            coding,
            metadata: &[],
            padding: None,
            continuation: None,
        }
    }
}

/// The answer of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    /// `:status`.
    pub http_status: String,
    /// `grpc-status`.
    pub grpc_status: Option<u32>,
    /// `grpc-message`, percent-encoded as it came.
    pub grpc_message: String,
    /// The encoded message, without its five bytes of framing; empty when there is none.
    pub message: Vec<u8>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// The server reset the stream, with this HTTP/2 error code (1 is `PROTOCOL_ERROR`).
    Reset(u32),
    /// The server ended the connection, with this HTTP/2 error code.
    GoAway(u32),
    /// The connection broke or timed out, or what came is not HTTP/2.
    Io(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reset(code) => write!(f, "stream reset, error code {code}"),
            Self::GoAway(code) => write!(f, "connection ended, error code {code}"),
            Self::Io(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Failure {}

/// A connection; calls go one after another.
#[derive(Debug)]
pub struct Connection<S = UnixStream> {
    stream: S,
    encoder: Encoder,
    next_stream: u32,
    /// What the server lets us send: on the connection, and on each new stream.
    window: i64,
    stream_window: i64,
}

impl Connection {
    /// Connects to a unix socket as seen inside `ns`. Reads give up after `timeout`.
    pub fn open(ns: &Namespaces, socket: &str, timeout: Duration) -> anyhow::Result<Self> {
        let stream = ns.enter(|| UnixStream::connect(socket))?;
        let stream = stream.with_context(|| format!("{socket} in {}", ns.name()))?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self::start(stream)?)
    }
}

impl<S: Read + Write> Connection<S> {
    /// Sends the preface and settings: the server is to keep no dynamic table and needs not wait for us.
    pub fn start(mut stream: S) -> io::Result<Self> {
        stream.write_all(PREFACE)?;
        let mut settings = setting(SETTINGS_HEADER_TABLE_SIZE, 0);
        settings.extend(setting(SETTINGS_INITIAL_WINDOW_SIZE, LARGEST_WINDOW));
        Frame::new(SETTINGS, 0, 0, settings).write(&mut stream)?;
        let grant = (LARGEST_WINDOW - 65_535).to_be_bytes().to_vec();
        Frame::new(WINDOW_UPDATE, 0, 0, grant).write(&mut stream)?;
        Ok(Self {
            stream,
            encoder: Encoder::default(),
            next_stream: 1,
            window: 65_535,
            stream_window: 65_535,
        })
    }

    /// The stream, for whoever wants to send something else.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Makes a call and waits for its end.
    pub fn call(&mut self, call: &Call<'_>) -> Result<Reply, Failure> {
        let id = self.begin(call)?;
        let mut exchange = Exchange {
            id,
            window: self.stream_window,
            ..Exchange::default()
        };
        self.send_message(call, &mut exchange)?;
        while !exchange.ended {
            self.receive(&mut exchange)?;
        }
        exchange.reply()
    }

    /// Sends the header block only, and leaves the request open; its stream.
    pub fn begin(&mut self, call: &Call<'_>) -> io::Result<u32> {
        let id = self.next_stream;
        self.next_stream += 2;
        let mut fields = vec![
            (":method", "POST"),
            (":scheme", "http"),
            (":path", call.path),
            (":authority", call.authority),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-go/1.58.3"),
            ("te", "trailers"),
        ];
        fields.extend_from_slice(call.metadata);
        let block = self.encoder.block(&fields, call.coding);
        let parts: Vec<_> = block.chunks(call.continuation.unwrap_or(FRAME_SIZE - 256)).collect();
        for (index, part) in parts.iter().enumerate() {
            let kind = if index == 0 { HEADERS } else { CONTINUATION };
            let flags = if index + 1 == parts.len() { END_HEADERS } else { 0 };
            let frame = Frame::new(kind, flags, id, part.to_vec());
            // CONTINUATION has no padding.
            let padding = call.padding.filter(|_| kind == HEADERS);
            padding
                .map_or(frame.clone(), |padding| frame.padded(padding))
                .write(&mut self.stream)?;
        }
        Ok(id)
    }

    fn send_message(&mut self, call: &Call<'_>, exchange: &mut Exchange) -> Result<(), Failure> {
        let length = u32::try_from(call.message.len())
            .map_err(io::Error::other)?
            .to_be_bytes();
        let body = [&[0][..], &length, call.message].concat();
        let mut left = &body[..];
        // Padding counts against the windows.
        let overhead = call.padding.map_or(0, |padding| usize::from(padding) + 1);
        while !left.is_empty() && !exchange.ended {
            let room = usize::try_from(self.window.min(exchange.window)).unwrap_or(0);
            let size = room.min(FRAME_SIZE).saturating_sub(overhead).min(left.len());
            if size == 0 {
                self.receive(exchange)?;
                continue;
            }
            let (part, rest) = left.split_at(size);
            left = rest;
            let frame = Frame::new(
                DATA,
                if rest.is_empty() { END_STREAM } else { 0 },
                exchange.id,
                part.to_vec(),
            );
            call.padding
                .map_or(frame.clone(), |padding| frame.padded(padding))
                .write(&mut self.stream)?;
            let used = i64::try_from(size + overhead).map_err(io::Error::other)?;
            self.window -= used;
            exchange.window -= used;
        }
        Ok(())
    }

    fn receive(&mut self, exchange: &mut Exchange) -> Result<(), Failure> {
        let frame = Frame::read(&mut self.stream)?;
        let bad = || io::Error::other("a frame is shorter than its kind");
        match frame.kind {
            SETTINGS if !frame.has(ACK) => self.settings(&frame, exchange)?,
            PING if !frame.has(ACK) => Frame::new(PING, ACK, 0, frame.payload.clone()).write(&mut self.stream)?,
            WINDOW_UPDATE => {
                let more = i64::from(frame.number(0).ok_or_else(bad)?);
                if frame.stream == 0 {
                    self.window += more;
                } else if frame.stream == exchange.id {
                    exchange.window += more;
                }
            }
            GOAWAY => return Err(Failure::GoAway(frame.number(4).ok_or_else(bad)?)),
            RST_STREAM if frame.stream == exchange.id => {
                return exchange.reset(frame.number(0).ok_or_else(bad)?);
            }
            DATA | HEADERS | CONTINUATION if frame.stream == exchange.id => exchange.take(&frame)?,
            _ => {}
        }
        if frame.kind == DATA && !frame.payload.is_empty() {
            let used = u32::try_from(frame.payload.len())
                .map_err(io::Error::other)?
                .to_be_bytes()
                .to_vec();
            Frame::new(WINDOW_UPDATE, 0, 0, used).write(&mut self.stream)?;
        }
        Ok(())
    }

    fn settings(&mut self, frame: &Frame, exchange: &mut Exchange) -> io::Result<()> {
        for setting in frame.payload.chunks_exact(6) {
            let (id, value) = setting.split_at(2);
            if id == SETTINGS_INITIAL_WINDOW_SIZE.to_be_bytes() {
                let value = i64::from(u32::from_be_bytes(value.try_into().map_err(io::Error::other)?));
                exchange.window += value - self.stream_window;
                self.stream_window = value;
            }
        }
        Frame::new(SETTINGS, ACK, 0, Vec::new()).write(&mut self.stream)
    }
}

fn setting(id: u16, value: u32) -> Vec<u8> {
    [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()
}

/// What has come of one stream.
#[derive(Debug, Default)]
struct Exchange {
    id: u32,
    window: i64,
    block: Vec<u8>,
    /// The header block that is coming in ends the stream.
    last_block: bool,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
    ended: bool,
}

impl Exchange {
    fn take(&mut self, frame: &Frame) -> io::Result<()> {
        let content = frame
            .content()
            .ok_or_else(|| io::Error::other("more padding than frame"))?;
        if frame.kind == DATA {
            self.body.extend_from_slice(content);
            self.ended |= frame.has(END_STREAM);
            return Ok(());
        }
        self.block.extend_from_slice(content);
        self.last_block |= frame.kind == HEADERS && frame.has(END_STREAM);
        if frame.has(END_HEADERS) {
            let fields = decode_block(&self.block).ok_or_else(|| io::Error::other("not HPACK"))?;
            self.fields.extend(fields);
            self.block.clear();
            self.ended |= self.last_block;
        }
        Ok(())
    }

    /// A server that has answered may reset the stream with `NO_ERROR` to stop the rest of the request.
    fn reset(&mut self, code: u32) -> Result<(), Failure> {
        if code == 0 && self.ended {
            Ok(())
        } else {
            Err(Failure::Reset(code))
        }
    }

    fn reply(self) -> Result<Reply, Failure> {
        let field = |name: &str| {
            self.fields
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, value)| value.clone())
        };
        let message = match self.body.as_slice() {
            [] => Vec::new(),
            [0, a, b, c, d, message @ ..]
                if message.len() as u64 == u64::from(u32::from_be_bytes([*a, *b, *c, *d])) =>
            {
                message.to_vec()
            }
            _ => {
                return Err(Failure::Io(io::Error::other(
                    "the answer is not one uncompressed message",
                )));
            }
        };
        Ok(Reply {
            http_status: field(":status").unwrap_or_default(),
            grpc_status: field("grpc-status").and_then(|status| status.parse().ok()),
            grpc_message: field("grpc-message").unwrap_or_default(),
            message,
        })
    }
}
