//! Serves HTTP/2 clients that send a socket path as `:authority`.
//!
//! A grpc-go client that dials a bare unix path sends `:authority: %2Frun%2Fx.sock`, or `/run/x.sock` in older
//! versions. Neither is an authority by RFC 3986, so the `h2` crate, and hyper and tonic above it, reset each request
//! with `PROTOCOL_ERROR` before any service sees it. h2 has no option for this.
//!
//! [`AuthorityAdapter`] wraps the accepted stream. It decodes each header block of the client, replaces an
//! `:authority` that h2 would refuse by `localhost`, the name that grpc-go sends for `unix:` targets, and passes the
//! fields on as HPACK literals without indexing. The dynamic table of the server therefore stays empty, and only the
//! adapter follows the one of the client. All other frames, and all bytes from the server, pass unchanged.
//!
//! A stream that is not HTTP/2 passes unchanged. From the first error in the framing or in HPACK on, the adapter passes
//! all bytes unchanged too, so that h2 reports the error to the client.
//!
//! # Limits
//!
//! The adapter holds one frame of at most 16 KiB and one header block of at most 64 KiB, both as received and as
//! passed on; hyper accepts 16 KiB of header fields. A larger block ends the connection with
//! [`InvalidData`](std::io::ErrorKind::InvalidData). The server must not announce a `SETTINGS_HEADER_TABLE_SIZE` above
//! the default of 4096 bytes; h2, hyper and tonic announce none.
//!
//! # Cost
//!
//! 0.6 µs for a request whose fields are all indexed, as grpc-go sends them from its second call on, and 3 µs for one
//! whose strings are all Huffman-coded (x86-64, `opt-level = 1`; `cargo test -p h2-authority cost -- --nocapture`).

#![forbid(unsafe_code)]

mod adapter;
mod hpack;
mod rewrite;

pub use adapter::AuthorityAdapter;
