//! The rewriter as a stream, so that an h2 server takes it for the accepted socket.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{Error, Limits, Rewriter};

/// Bytes asked of the stream at once.
const READ_SIZE: usize = 8 * 1024;

/// Above this, a buffer that a large header block left behind is given back.
const KEPT_CAPACITY: usize = 64 * 1024;

/// A server's end of a stream, which reads as if its client had sent legal authorities only.
///
/// Reads give the client's bytes after a [`Rewriter`]; a header block over the [`Limits`] ends them with
/// [`io::ErrorKind::InvalidData`] around an [`Error`], behind all bytes that came before the block. Writes, flushes
/// and shutdown go to the stream as they are.
#[derive(Debug)]
pub struct AuthorityAdapter<IO> {
    io: IO,
    rewriter: Rewriter,
    input: Box<[u8]>,
    /// Rewritten and not yet read.
    ready: BytesMut,
    failed: Option<Error>,
}

impl<IO> AuthorityAdapter<IO> {
    /// Wraps a just accepted stream, of which no byte was read, with the default limits.
    pub fn new(io: IO) -> Self {
        Self::with_limits(io, Limits::default())
    }

    /// Wraps a just accepted stream, of which no byte was read.
    pub fn with_limits(io: IO, limits: Limits) -> Self {
        Self {
            io,
            rewriter: Rewriter::new(limits),
            input: vec![0; READ_SIZE].into_boxed_slice(),
            ready: BytesMut::new(),
            failed: None,
        }
    }

    /// The stream inside, for example to ask for the peer's credentials.
    pub fn get_ref(&self) -> &IO {
        &self.io
    }

    /// Gives the stream back. Bytes that were read from it and not yet from the adapter are lost.
    pub fn into_inner(self) -> IO {
        self.io
    }

    /// Moves what is ready to the reader; returns whether there was any.
    fn take_ready(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let count = self.ready.len().min(buf.remaining());
        buf.put_slice(self.ready.get(..count).unwrap_or_default());
        self.ready.advance(count);
        if self.ready.is_empty() && self.ready.capacity() > KEPT_CAPACITY {
            self.ready = BytesMut::new();
        }
        count > 0
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for AuthorityAdapter<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if buf.remaining() == 0 || this.take_ready(buf) {
                return Poll::Ready(Ok(()));
            }
            if let Some(error) = this.failed {
                return Poll::Ready(Err(error.into()));
            }
            let mut input = ReadBuf::new(&mut this.input);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut input))?;
            if input.filled().is_empty() {
                this.rewriter.finish(&mut this.ready);
                this.take_ready(buf);
                return Poll::Ready(Ok(()));
            }
            this.failed = this.rewriter.push(input.filled(), &mut this.ready).err();
        }
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for AuthorityAdapter<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

#[cfg(feature = "tonic")]
impl<IO: tonic::transport::server::Connected> tonic::transport::server::Connected for AuthorityAdapter<IO> {
    type ConnectInfo = IO::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.io.connect_info()
    }
}
