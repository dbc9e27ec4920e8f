//! Wraps the accepted stream: reads give the rewritten bytes, writes pass.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::rewrite::Rewriter;

/// Bytes requested from the stream at once.
const READ_SIZE: usize = 8 * 1024;

/// The server's end of a stream whose reads contain only authorities that h2 accepts.
///
/// Writes, flushes and shutdown pass to the wrapped stream. See the crate documentation for the limits.
#[derive(Debug)]
pub struct AuthorityAdapter<IO> {
    io: IO,
    rewriter: Rewriter,
    /// Rewritten and not yet read.
    ready: BytesMut,
}

impl<IO> AuthorityAdapter<IO> {
    /// Wraps an accepted stream of which no byte was read.
    pub fn new(io: IO) -> Self {
        Self {
            io,
            rewriter: Rewriter::default(),
            ready: BytesMut::new(),
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for AuthorityAdapter<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let mut ended = false;
        loop {
            if this.ready.is_empty()
                && let Some(bytes) = this.rewriter.next()?
            {
                this.ready = bytes;
            }
            let count = this.ready.len().min(buf.remaining());
            buf.put_slice(&this.ready.split_to(count));
            if count > 0 || ended || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let mut chunk = [0; READ_SIZE];
            let mut input = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut input))?;
            this.rewriter.push(input.filled());
            ended = input.filled().is_empty();
            if ended {
                this.rewriter.finish();
            }
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
