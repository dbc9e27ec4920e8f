//! Runs the client of h2 behind a proxy that inserts socket paths into its requests and reshapes its header frames.

use std::{
    io,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use h2::client::SendRequest;
use httlib_huffman::encode;
use kni_integration::Stage;
use prost::bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    time::{sleep, timeout},
};

use super::authorities;

const TIMEOUT: Duration = Duration::from_secs(10);
/// Usually long enough for the agent to read the first piece separately.
const PAUSE: Duration = Duration::from_micros(300);

const PREFACE_LEN: usize = 24;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;

/// How the proxy encodes the client's frames.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shape {
    /// For each header block in turn: bytes of padding, and the size of the pieces for CONTINUATION frames.
    pub(crate) blocks: Vec<(Option<u8>, Option<usize>)>,
    /// The positions at which to pause.
    pub(crate) cut: Cut,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Cut {
    #[default]
    Nowhere,
    At(usize),
    Everywhere,
}

/// A connection to the agent.
pub(crate) struct Connection {
    client: SendRequest<Bytes>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Bytes written to the agent.
    written: AtomicUsize,
    /// Number of header blocks with an inserted socket path.
    replaced: AtomicUsize,
}

/// The name that the client of h2 accepts instead of a socket path. Its Huffman code has the same length.
fn substitute(authority: &str) -> String {
    authority.replace(['/', '%'], "-")
}

fn huffman(text: &str) -> Vec<u8> {
    let mut coded = Vec::new();
    encode(text.as_bytes(), &mut coded).expect("every byte has a code");
    coded
}

impl Connection {
    pub(crate) async fn open(stage: &Stage, socket: &str, shape: Shape) -> Result<Self> {
        let agent = stage.node.enter(|| UnixStream::connect(socket))??;
        agent.set_nonblocking(true)?;
        let (from_agent, to_agent) = tokio::net::UnixStream::from_std(agent)?.into_split();
        let (near, far) = tokio::io::duplex(1 << 20);
        let (from_client, to_client) = tokio::io::split(far);
        let counts = Arc::new(Counts::default());
        let proxy = Proxy {
            to: to_agent,
            shape,
            counts: Arc::clone(&counts),
            blocks: 0,
        };
        let names = authorities(socket).map(|name| (huffman(&substitute(&name)), huffman(&name)));
        tokio::spawn(proxy.run(from_client, names));
        tokio::spawn(copy(from_agent, to_client));
        let (client, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 24)
            .handshake(near)
            .await?;
        tokio::spawn(connection);
        Ok(Self { client, counts })
    }

    /// Bytes written to the agent so far.
    pub(crate) fn written(&self) -> usize {
        self.counts.written.load(Ordering::SeqCst)
    }

    /// A unary call; returns the message of the response.
    pub(crate) async fn call(&self, path: &str, authority: &str, message: &[u8]) -> Result<Vec<u8>> {
        self.call_with(path, authority, message, None).await
    }

    /// [`Self::call`] with `x-trace` metadata.
    pub(crate) async fn call_with(
        &self,
        path: &str,
        authority: &str,
        message: &[u8],
        trace: Option<&str>,
    ) -> Result<Vec<u8>> {
        let name = substitute(authority);
        let mut request = http::Request::post(format!("http://{name}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(trace) = trace {
            request = request.header("x-trace", trace);
        }
        let response = timeout(TIMEOUT, self.exchange(request.body(())?, message));
        let response = response.await.context("no response")??;
        let replaced = self.counts.replaced.load(Ordering::SeqCst);
        ensure!(replaced > 0 || name == authority, "the proxy put no path in");
        Ok(response)
    }

    async fn exchange(&self, request: http::Request<()>, message: &[u8]) -> Result<Vec<u8>> {
        let mut client = self.client.clone().ready().await?;
        let (response, mut body) = client.send_request(request, false)?;
        let length = u32::try_from(message.len())?.to_be_bytes();
        body.send_data([&[0][..], &length, message].concat().into(), true)?;
        let (head, mut body) = response.await?.into_parts();
        ensure!(head.status == 200, "HTTP status {}", head.status);
        let mut received = Vec::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk?;
            body.flow_control().release_capacity(chunk.len())?;
            received.extend_from_slice(&chunk);
        }
        let status = body.trailers().await?.unwrap_or(head.headers);
        let code = status.get("grpc-status").context("no grpc-status")?;
        ensure!(code == "0", "{status:?}");
        Ok(received.split_off(5))
    }
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<u64> {
    tokio::io::copy(&mut from, &mut to).await
}

struct Proxy<W> {
    to: W,
    shape: Shape,
    counts: Arc<Counts>,
    blocks: usize,
}

impl<W: AsyncWrite + Unpin> Proxy<W> {
    /// Forwards frames until one side closes, with each of `names` replaced in header blocks.
    async fn run(mut self, mut from: impl AsyncRead + Unpin, names: [(Vec<u8>, Vec<u8>); 3]) -> io::Result<()> {
        let mut preface = [0; PREFACE_LEN];
        from.read_exact(&mut preface).await?;
        self.write(&preface).await?;
        loop {
            let mut head = [0; 9];
            from.read_exact(&mut head).await?;
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut payload = vec![0; length];
            from.read_exact(&mut payload).await?;
            let bytes = if head[3] == HEADERS {
                let replaced = names
                    .iter()
                    .any(|(from, to)| from != to && replace(&mut payload, from, to));
                self.counts.replaced.fetch_add(replaced.into(), Ordering::SeqCst);
                self.header_frames(head, &payload)
            } else {
                [&head[..], &payload].concat()
            };
            self.write(&bytes).await?;
        }
    }

    /// The frames of a header block, in the next shape.
    fn header_frames(&mut self, head: [u8; 9], block: &[u8]) -> Vec<u8> {
        assert_eq!(
            head[4] & !0x1,
            END_HEADERS,
            "a whole block without padding and priority"
        );
        let shapes = &self.shape.blocks;
        let (padding, size) = shapes
            .get(self.blocks % shapes.len().max(1))
            .copied()
            .unwrap_or_default();
        self.blocks += 1;
        let pieces: Vec<_> = block.chunks(size.unwrap_or(block.len())).collect();
        let mut out = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            let (kind, flags) = if at == 0 {
                (HEADERS, head[4] & !END_HEADERS)
            } else {
                (CONTINUATION, 0)
            };
            let end = if at + 1 == pieces.len() { END_HEADERS } else { 0 };
            let padding = padding.filter(|_| at == 0);
            let mut payload: Vec<u8> = padding.into_iter().chain(piece.iter().copied()).collect();
            payload.resize(payload.len() + usize::from(padding.unwrap_or(0)), 0);
            let length = u32::try_from(payload.len()).expect("a small frame").to_be_bytes();
            out.extend_from_slice(&length[1..]);
            out.extend([kind, flags | end | padding.map_or(0, |_| PADDED)]);
            out.extend_from_slice(&head[5..]);
            out.extend(payload);
        }
        out
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.counts.written.fetch_add(bytes.len(), Ordering::SeqCst);
        let first = match self.shape.cut {
            Cut::Nowhere => bytes.len(),
            Cut::At(at) => at.saturating_sub(written).min(bytes.len()),
            Cut::Everywhere => {
                for byte in bytes {
                    self.to.write_all(&[*byte]).await?;
                    sleep(PAUSE).await;
                }
                return Ok(());
            }
        };
        let (head, tail) = bytes.split_at(first);
        self.to.write_all(head).await?;
        if !tail.is_empty() && first > 0 {
            sleep(PAUSE).await;
        }
        self.to.write_all(tail).await
    }
}

/// Replaces the first occurrence of `from` by `to`, which has the same length; returns whether there was one.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) -> bool {
    let found = bytes.windows(from.len()).position(|window| window == from);
    if let Some(at) = found {
        bytes[at..at + from.len()].copy_from_slice(to);
    }
    found.is_some()
}
