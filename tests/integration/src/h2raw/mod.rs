//! An HTTP/2 client written frame by frame, which sends what a grpc-go client sends and no Rust client would.

mod connection;
mod frame;
mod hpack;

pub use connection::{Call, Connection, Failure, Reply};
pub use hpack::{Coding, decode_block};
