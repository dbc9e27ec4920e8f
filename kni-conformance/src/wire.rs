//! Makes gRPC calls with `:authority` values that HTTP libraries refuse to send: one call per connection.

mod frame;
mod hpack;

use std::{io, path::Path, time::Duration};

use tokio::{io::AsyncWriteExt as _, net::UnixStream, time::timeout};

use self::frame::{Frame, Kind};
use crate::limits::scaled;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The only stream of a connection.
const STREAM: u32 = 1;
/// `SETTINGS_HEADER_TABLE_SIZE` = 0: the server's headers never refer to earlier ones.
const NO_HEADER_TABLE: [u8; 6] = [0, 1, 0, 0, 0, 0];
const PING_LENGTH: usize = 8;
/// gRPC's prefix of a message: compression and length.
const PREFIX: usize = 5;

/// The result of a call that the server has answered.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// The HTTP status.
    pub(crate) http: String,
    /// The gRPC status, and its message.
    pub(crate) status: String,
    /// The gRPC message of a failure.
    pub(crate) reason: String,
    /// The encoded response.
    pub(crate) message: Vec<u8>,
}

/// A connection on which one request was sent.
pub(crate) struct Call {
    stream: UnixStream,
}

impl Call {
    /// Connects and sends the request. Dropping the value closes the connection.
    pub(crate) async fn send(socket: &Path, method: &str, authority: &str, message: &[u8]) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket).await?;
        let path = format!("/kni.KNI/{method}");
        let headers = hpack::encode(&[
            (":method", "POST"),
            (":scheme", "http"),
            (":path", &path),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("user-agent", "kni-conformance"),
            ("te", "trailers"),
        ]);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        let body = [&[0][..], &length.to_be_bytes(), message].concat();
        let mut bytes = PREFACE.to_vec();
        for frame in [
            Frame::new(Kind::Settings, 0, 0, NO_HEADER_TABLE.to_vec()),
            Frame::new(Kind::Headers, frame::END_HEADERS, STREAM, headers),
            Frame::new(Kind::Data, frame::END_STREAM, STREAM, body),
        ] {
            bytes.extend(frame.encode()?);
        }
        stream.write_all(&bytes).await?;
        Ok(Self { stream })
    }

    /// Waits until the server has read the request: it acknowledges a ping that follows it.
    pub(crate) async fn wait_until_read(&mut self, limit: Duration) -> io::Result<()> {
        let ping = Frame::new(Kind::Ping, 0, 0, vec![0; PING_LENGTH]).encode()?;
        self.stream.write_all(&ping).await?;
        let acknowledged = async {
            loop {
                let frame = Frame::read(&mut self.stream).await?;
                if frame.kind == Kind::Ping && frame.flags & frame::ACK != 0 {
                    return Ok(());
                }
            }
        };
        timeout(scaled(limit), acknowledged).await?
    }

    /// Waits for the answer.
    pub(crate) async fn answer(mut self, limit: Duration) -> io::Result<Answer> {
        timeout(scaled(limit), self.read()).await?
    }

    async fn read(&mut self) -> io::Result<Answer> {
        let mut answer = Answer::default();
        let (mut block, mut body) = (Vec::new(), Vec::new());
        let mut ends_stream = false;
        loop {
            let frame = Frame::read(&mut self.stream).await?;
            let has = |flag: u8| frame.flags & flag != 0;
            match frame.kind {
                Kind::Settings if !has(frame::ACK) => self.write(Kind::Settings, Vec::new()).await?,
                Kind::Ping if !has(frame::ACK) => self.write(Kind::Ping, frame.payload).await?,
                Kind::Headers | Kind::Continuation if frame.stream == STREAM => {
                    ends_stream |= frame.kind == Kind::Headers && has(frame::END_STREAM);
                    block.extend_from_slice(frame.block()?);
                    if has(frame::END_HEADERS) {
                        answer.note(&hpack::decode(&block)?);
                        block.clear();
                    }
                }
                Kind::Data if frame.stream == STREAM => {
                    ends_stream = has(frame::END_STREAM);
                    body.extend_from_slice(frame.content()?);
                }
                Kind::Reset => {
                    return Err(io::Error::other(format!(
                        "the server resets the stream: {}",
                        frame.error()
                    )));
                }
                Kind::GoAway => return Err(io::Error::other(format!("the server closes: {}", frame.error()))),
                Kind::Settings | Kind::Ping | Kind::Headers | Kind::Continuation | Kind::Data | Kind::Other => {}
            }
            if ends_stream && block.is_empty() {
                answer.message = body.get(PREFIX..).unwrap_or_default().to_vec();
                return Ok(answer);
            }
        }
    }

    /// Acknowledges a frame.
    async fn write(&mut self, kind: Kind, payload: Vec<u8>) -> io::Result<()> {
        let bytes = Frame::new(kind, frame::ACK, 0, payload).encode()?;
        self.stream.write_all(&bytes).await
    }
}

impl Answer {
    fn note(&mut self, headers: &[(String, String)]) {
        for (name, value) in headers {
            match name.as_str() {
                ":status" => self.http.clone_from(value),
                "grpc-status" => self.status.clone_from(value),
                "grpc-message" => self.reason.clone_from(value),
                _ => {}
            }
        }
    }
}
