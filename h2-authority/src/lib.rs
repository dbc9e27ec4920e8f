//! Serves HTTP/2 clients whose `:authority` is a socket path: this crate alone knows how to make that header legal.
//!
//! A grpc-go client that dials a bare unix path sends `:authority: %2Frun%2Fx.sock` (or `/run/x.sock` before
//! grpc-go began to escape it). Neither is an authority by RFC 3986, so the `h2` crate, and hyper and tonic on top of
//! it, refuse each request with `PROTOCOL_ERROR` before any service sees it. No server option turns that off.
//!
//! [`AuthorityAdapter`] goes around the accepted stream. It reads the client's frames and, in header blocks only,
//! replaces an `:authority` value that `http::uri::Authority` would refuse by a legal one **of the same decoded
//! length**. HPACK charges a table entry by its decoded length, so the dynamic tables of the client and of the server
//! keep evicting the same entries, and a later request that names the entry by index gets the legal value without
//! this crate changing a byte. Everything else passes unchanged, in both directions.
//!
//! ```
//! use bytes::BytesMut;
//! use h2_authority::Rewriter;
//!
//! let mut wire = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
//! // HEADERS on stream 1 with END_HEADERS and END_STREAM, then `:authority` (static name 1) as a literal.
//! wire.extend_from_slice(&[0, 0, 9, 1, 5, 0, 0, 0, 1]);
//! wire.extend_from_slice(b"\x41\x07/x.sock");
//!
//! let mut out = BytesMut::new();
//! Rewriter::default().push(&wire, &mut out)?;
//! assert!(out.ends_with(b"\x41\x07-x.sock"));
//! # Ok::<(), h2_authority::Error>(())
//! ```
//!
//! # What is not changed
//!
//! - An empty `:authority` stays, and h2 refuses it: no legal value has length 0.
//! - A stream that is not HTTP/2, or breaks its framing or HPACK, is passed on as it came, so that h2 itself names the
//!   error to the client. From the first such byte on the adapter does nothing.
//!
//! # Cost
//!
//! A request whose fields are all indexed, as grpc-go sends from its second call on, costs about 80 ns. A literal
//! Huffman-coded authority costs about 250 ns (x86-64, `opt-level = 1`; `cargo test -p h2-authority cost --
//! --nocapture` measures it). Memory is bounded by [`Limits`] and does not depend on the size of messages.

#![forbid(unsafe_code)]

mod adapter;
mod authority;
mod block;
mod error;
mod frame;
mod hpack;
mod huffman;
mod primitive;
mod rewrite;
mod table;

pub use adapter::AuthorityAdapter;
pub use error::Error;
pub use rewrite::{Limits, Rewriter};
