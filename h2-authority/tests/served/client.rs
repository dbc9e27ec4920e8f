//! A raw client and a real h2 server, joined by a pipe with the adapter on the server's end.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use h2_authority::AuthorityAdapter;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream},
    sync::mpsc,
    task::JoinHandle,
};

use crate::wire::{
    END_STREAM, Frame, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame, take_frames,
};

/// A request as the service behind h2 sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) authority: Option<String>,
    pub(crate) path: String,
    /// The values of each name, in the order they came.
    pub(crate) headers: BTreeMap<String, Vec<Vec<u8>>>,
    pub(crate) body: Bytes,
}

/// Reports each request, with its whole body, and answers 200 without a body.
pub(crate) async fn serve<IO>(io: IO, seen: mpsc::UnboundedSender<Seen>) -> Result<(), h2::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let mut connection = h2::server::handshake(io).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        let seen = seen.clone();
        tokio::spawn(async move {
            let (parts, mut body) = request.into_parts();
            let mut bytes = Vec::new();
            while let Some(chunk) = body.data().await {
                let Ok(chunk) = chunk else { return };
                bytes.extend_from_slice(&chunk);
                if body.flow_control().release_capacity(chunk.len()).is_err() {
                    return;
                }
            }
            let mut headers = BTreeMap::<String, Vec<Vec<u8>>>::new();
            for (name, value) in &parts.headers {
                headers
                    .entry(name.to_string())
                    .or_default()
                    .push(value.as_bytes().to_vec());
            }
            let request = Seen {
                method: parts.method.to_string(),
                authority: parts.uri.authority().map(ToString::to_string),
                path: parts.uri.path().to_owned(),
                headers,
                body: bytes.into(),
            };
            // A test that has seen enough hangs up.
            if seen.send(request).is_ok() && respond.send_response(http::Response::new(()), true).is_err() {
                // The client has hung up.
            }
        });
    }
    Ok(())
}

/// What the server said about one stream, or about the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done(u32),
    Reset(u32, u32),
    Goaway(u32),
    Closed,
}

/// A client that sends bytes as they are and understands just enough of the answers.
pub(crate) struct Client {
    pub(crate) io: DuplexStream,
    pub(crate) seen: mpsc::UnboundedReceiver<Seen>,
    pub(crate) server: JoinHandle<Result<(), h2::Error>>,
    input: Vec<u8>,
    answers: std::collections::VecDeque<Answer>,
}

impl Client {
    /// Connects, and greets with the preface and empty settings.
    pub(crate) async fn connect() -> Self {
        Self::over(|io, seen| tokio::spawn(serve(AuthorityAdapter::new(io), seen))).await
    }

    /// The same without the adapter.
    pub(crate) async fn connect_bare() -> Self {
        Self::over(|io, seen| tokio::spawn(serve(io, seen))).await
    }

    async fn over(
        start: impl FnOnce(DuplexStream, mpsc::UnboundedSender<Seen>) -> JoinHandle<Result<(), h2::Error>>,
    ) -> Self {
        let (io, server_io) = tokio::io::duplex(64 * 1024);
        let (sender, seen) = mpsc::unbounded_channel();
        let server = start(server_io, sender);
        let mut client = Self {
            io,
            seen,
            server,
            input: Vec::new(),
            answers: std::collections::VecDeque::new(),
        };
        client.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await;
        client
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.io.write_all(bytes).await.unwrap();
    }

    /// Sends in pieces of the given lengths, in turn, each of which the server can read before the next comes.
    pub(crate) async fn send_in_pieces(&mut self, mut bytes: &[u8], lengths: &[usize]) {
        let mut lengths = lengths.iter().cycle();
        while !bytes.is_empty() {
            let length = lengths
                .next()
                .map_or(bytes.len(), |length| (*length).clamp(1, bytes.len()));
            let (piece, rest) = bytes.split_at(length);
            self.send(piece).await;
            tokio::task::yield_now().await;
            bytes = rest;
        }
    }

    /// The next request the service saw.
    pub(crate) async fn next_seen(&mut self) -> Seen {
        tokio::time::timeout(Duration::from_secs(20), self.seen.recv())
            .await
            .unwrap()
            .unwrap()
    }

    /// The next thing the server says.
    pub(crate) async fn answer(&mut self) -> Answer {
        loop {
            if let Some(answer) = self.answers.pop_front() {
                return answer;
            }
            let mut chunk = [0; 4096];
            let read = tokio::time::timeout(Duration::from_secs(20), self.io.read(&mut chunk))
                .await
                .unwrap();
            let count = read.unwrap_or(0);
            if count == 0 {
                return Answer::Closed;
            }
            self.input.extend_from_slice(&chunk[..count]);
            for frame in take_frames(&mut self.input) {
                self.react(&frame).await;
            }
        }
    }

    async fn react(&mut self, received: &Frame) {
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        match received.kind {
            SETTINGS if received.flags & 1 == 0 => {
                // A server that refuses the connection may have hung up; its last words are still to be read.
                if self.io.write_all(&frame(SETTINGS, 1, 0, &[])).await.is_err() {}
            }
            SETTINGS | WINDOW_UPDATE => {}
            HEADERS => {
                assert_eq!(received.flags & END_STREAM, END_STREAM);
                self.answers.push_back(Answer::Done(received.stream));
            }
            RST_STREAM => self
                .answers
                .push_back(Answer::Reset(received.stream, number(&received.payload))),
            GOAWAY => self.answers.push_back(Answer::Goaway(number(&received.payload[4..8]))),
            kind => panic!("unexpected frame of type {kind}"),
        }
    }
}
