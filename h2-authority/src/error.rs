//! The errors that end a connection, and how they look to code that only knows `io::Error`.

use std::io;

/// A header block that is too expensive to hold. The connection cannot go on: the HPACK state behind it is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The payloads of a HEADERS frame and its CONTINUATION frames, padding included, exceed the limit.
    #[error("header block of stream {stream} is larger than {limit} bytes")]
    BlockTooLarge {
        /// The HTTP/2 stream the block belongs to.
        stream: u32,
        /// The limit in bytes.
        limit: usize,
    },
    /// More CONTINUATION frames than the limit follow one HEADERS frame.
    #[error("header block of stream {stream} has more than {limit} CONTINUATION frames")]
    TooManyContinuations {
        /// The HTTP/2 stream the block belongs to.
        stream: u32,
        /// The limit in frames.
        limit: usize,
    },
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}
