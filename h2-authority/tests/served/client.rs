//! Runs a real h2 server with or without the adapter, and records its results for given bytes.

use std::{cell::Cell, collections::BTreeMap, future::poll_fn};

use bytes::Bytes;
use h2_authority::AuthorityAdapter;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream},
    sync::mpsc,
    task::yield_now,
};

use crate::{
    encoder::{Encoder, Style},
    wire::{GOAWAY, HEADERS, RST_STREAM, frames, greeting},
};

/// More turns of all tasks than the server needs to react to its input.
const IDLE_TURNS: usize = 200;

pub(crate) const ESCAPED: &str = "%2Ftmp%2Fkni.sock";
pub(crate) const RAW: &str = "/tmp/kni.sock";

/// A request as the service behind h2 receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) authority: Option<String>,
    pub(crate) path: String,
    /// The values of each name, in the order of their arrival.
    pub(crate) headers: BTreeMap<String, Vec<Vec<u8>>>,
    pub(crate) body: Bytes,
    pub(crate) trailers: usize,
}

/// A message of the server about one stream, or about the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done(u32),
    Reset(u32, u32),
    Goaway(u32),
    Closed,
}

/// Reports each request with its whole body, and answers 200 without a body.
pub(crate) async fn serve<IO>(io: IO, seen: mpsc::UnboundedSender<Seen>) -> Result<(), h2::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let mut connection = h2::server::handshake(io).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        tokio::spawn(answer(request, respond, seen.clone()));
    }
    Ok(())
}

async fn answer(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    seen: mpsc::UnboundedSender<Seen>,
) {
    let (parts, mut body) = request.into_parts();
    let mut bytes = Vec::new();
    while let Some(Ok(chunk)) = body.data().await {
        bytes.extend_from_slice(&chunk);
        if body.flow_control().release_capacity(chunk.len()).is_err() {
            return;
        }
    }
    let trailers = poll_fn(|cx| body.poll_trailers(cx)).await;
    let Ok(trailers) = trailers else { return };
    let mut headers = BTreeMap::<String, Vec<Vec<u8>>>::new();
    for (name, value) in &parts.headers {
        let values = headers.entry(name.to_string()).or_default();
        values.push(value.as_bytes().to_vec());
    }
    let request = Seen {
        method: parts.method.to_string(),
        authority: parts.uri.authority().map(ToString::to_string),
        path: parts.uri.path().to_owned(),
        headers,
        body: bytes.into(),
        trailers: trailers.map_or(0, |trailers| trailers.len()),
    };
    // A client that has disconnected needs no answer.
    if seen.send(request).is_ok() && respond.send_response(http::Response::new(()), true).is_err() {}
}

/// Sends the greeting and `pieces` to a server behind the adapter, and returns its answers and the requests that
/// reached the service once both sides are idle. Must run in a runtime with one thread.
pub(crate) async fn exchange<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Answer>, Vec<Seen>) {
    let (io, server) = tokio::io::duplex(64 * 1024);
    let (sender, seen) = mpsc::unbounded_channel();
    tokio::spawn(serve(AuthorityAdapter::new(server), sender));
    run(io, seen, pieces).await
}

/// [`exchange`] without the adapter.
pub(crate) async fn exchange_bare<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Answer>, Vec<Seen>) {
    let (io, server) = tokio::io::duplex(64 * 1024);
    let (sender, seen) = mpsc::unbounded_channel();
    tokio::spawn(serve(server, sender));
    run(io, seen, pieces).await
}

async fn run<'a>(
    io: DuplexStream,
    mut seen: mpsc::UnboundedReceiver<Seen>,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Answer>, Vec<Seen>) {
    let (mut reader, mut writer) = tokio::io::split(io);
    let written = Cell::new(false);
    let write = async {
        let mut open = writer.write_all(&greeting()).await.is_ok();
        for piece in pieces {
            // A server that refuses the connection may have closed it.
            open = open && writer.write_all(piece).await.is_ok();
            // The server reads each piece separately.
            yield_now().await;
        }
        written.set(true);
    };
    let idle = async || {
        let mut turns = 0;
        while turns < IDLE_TURNS {
            yield_now().await;
            turns += usize::from(written.get());
        }
    };
    let mut received = Vec::new();
    let mut closed = false;
    let read = async {
        while !closed {
            tokio::select! {
                read = reader.read_buf(&mut received) => closed = read.unwrap_or(0) == 0,
                () = idle() => return,
            }
        }
    };
    tokio::join!(write, read);
    let mut answers = Vec::new();
    for frame in frames(&received) {
        let code = |at: usize| u32::from_be_bytes(frame.payload[at..at + 4].try_into().unwrap());
        match frame.kind {
            HEADERS => answers.push(Answer::Done(frame.stream)),
            RST_STREAM => answers.push(Answer::Reset(frame.stream, code(0))),
            GOAWAY => answers.push(Answer::Goaway(code(4))),
            _ => {}
        }
    }
    answers.extend(closed.then_some(Answer::Closed));
    let mut requests = Vec::new();
    while let Ok(request) = seen.try_recv() {
        requests.push(request);
    }
    (answers, requests)
}

/// The fields that grpc-go sends, in its order.
pub(crate) fn fields(authority: &str) -> Vec<(String, Vec<u8>)> {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/kni.KNI/AttachInterface"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.60.1"),
        ("te", "trailers"),
    ]
    .map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()))
    .to_vec()
}

/// The header block of these fields.
pub(crate) fn block(encoder: &mut Encoder, fields: &[(String, Vec<u8>)], style: Style) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        encoder.field(name, value, style, &mut block);
    }
    block
}

/// The authority that the service must receive.
pub(crate) fn legal(authority: &str) -> String {
    let is_legal = authority.parse::<http::uri::Authority>().is_ok();
    if is_legal { authority } else { "localhost" }.to_owned()
}
