//! Tests streams that no client should send: h2 reports the error, memory is bounded, and nothing panics.

use std::io::ErrorKind;

use h2_authority::AuthorityAdapter;
use tokio::io::AsyncReadExt as _;

use crate::{
    client::{Answer, ESCAPED, RAW, block, exchange, exchange_bare, fields},
    encoder::{Encoder, GRPC_GO},
    stream::rewritten,
    wire::{CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PADDED, frame, greeting},
};

const LIMIT: usize = 64 * 1024;

/// A request with a socket path as authority.
fn request(stream: u32) -> Vec<u8> {
    let block = block(&mut Encoder::new(), &fields(RAW), GRPC_GO);
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &block)
}

fn invalid() -> Vec<Vec<u8>> {
    let path = block(&mut Encoder::new(), &fields(ESCAPED), GRPC_GO);
    let long = frame(DATA, 0, 1, &vec![0; 16_385]);
    vec![
        // HPACK: index 0, an unknown index, invalid Huffman codes and padding, an integer without end, a table over
        // 4096 bytes, a resize after a field, a cut string, and an error behind a socket path.
        frame(HEADERS, END_HEADERS, 1, &[0x80]),
        frame(HEADERS, END_HEADERS, 1, &[0xbe]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x81, 0x00]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x82, 0x1f, 0x00]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x84, 0xff, 0xff, 0xff, 0xff]),
        frame(HEADERS, END_HEADERS, 1, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f]),
        frame(HEADERS, END_HEADERS, 1, &[0x83, 0x20]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x09, b'/']),
        frame(HEADERS, END_HEADERS, 1, &[&path[..], &[0x80]].concat()),
        // Framing: padding longer than the payload, frames out of order, a frame over the maximum.
        frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0x82]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[]),
        frame(CONTINUATION, END_HEADERS, 1, &path),
        [frame(HEADERS, 0, 1, &path), frame(DATA, END_STREAM, 1, b"x")].concat(),
        [frame(HEADERS, 0, 1, &path), frame(CONTINUATION, END_HEADERS, 3, &[])].concat(),
        [frame(HEADERS, 0, 1, &path), frame(HEADERS, END_HEADERS, 1, &[])].concat(),
        [frame(HEADERS, 0, 1, &path), long.clone()].concat(),
        long,
    ]
}

#[tokio::test]
async fn errors_are_those_of_h2_without_the_adapter() {
    for (at, invalid) in invalid().iter().enumerate() {
        let bytes = [&invalid[..], &request(3)].concat();
        let (expected, _) = exchange_bare([&bytes[..]]).await;
        assert!(matches!(expected[..], [Answer::Goaway(1..), ..]), "{expected:?}");
        let (answers, seen) = exchange([&bytes[..]]).await;
        assert_eq!((answers, seen), (expected, vec![]), "case {at}");
    }
}

/// An entry with each name of the static table, and with each size around the capacity of the table: its index is valid
/// exactly if h2 still has the entry.
#[tokio::test]
async fn evictions_are_those_of_h2_without_the_adapter() {
    const CAPACITY: u8 = 100;
    let mut evicted = 0;
    for index in 1..=61 {
        // Names have 3 to 27 bytes, and the table adds 32 to each entry.
        for length in CAPACITY - 32 - 28..=CAPACITY - 32 - 2 {
            let head = [0x3f, CAPACITY - 31, 0x40 | index, length];
            let block = [&head[..], &vec![b'v'; length.into()], &[0xbe]].concat();
            let bytes = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block);
            let (expected, _) = exchange_bare([&bytes[..]]).await;
            let is_evicted = matches!(expected[..], [Answer::Goaway(_), ..]);
            evicted += u32::from(is_evicted);
            let (answers, _) = exchange([&bytes[..]]).await;
            assert_eq!(answers, expected, "name {index}, value of {length} bytes");
            // A block with an error passes unchanged. h2 refuses `:status` for its value, evicted or not.
            let (out, _) = rewritten(&greeting(), &bytes).await;
            let is_status = (8..=14).contains(&index);
            assert!(
                is_status || out.ends_with(&block) == is_evicted,
                "name {index}, value of {length} bytes"
            );
        }
    }
    assert!((61..61 * 26).contains(&evicted), "{evicted}");
}

/// A frame that is not a header block is forwarded as soon as it is complete, and one over the maximum at once.
#[tokio::test]
async fn data_is_not_held() {
    let mut head = [&greeting()[..], &[0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1]].concat();
    head.extend(vec![7; 100_000]);
    assert_eq!(rewritten(&head, &request(1)).await.0, [head, request(1)].concat());
}

async fn assert_refused(blocks: &[u8], stream: u32) {
    let before = [greeting(), request(1)].concat();
    let (before_out, _) = rewritten(&before, &[]).await;
    let bytes = [&before[..], blocks, &request(99)].concat();
    let mut adapter = AuthorityAdapter::new(&bytes[..]);
    let mut out = Vec::new();
    for _ in 0..2 {
        let error = adapter.read_to_end(&mut out).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        let expected = format!("header block of stream {stream} exceeds {LIMIT} bytes");
        assert_eq!(error.to_string(), expected);
        assert_eq!(out, before_out, "what preceded the block is passed on");
    }
}

#[tokio::test]
async fn large_blocks_are_refused() {
    let piece = frame(CONTINUATION, 0, 7, &vec![0x82; 16_384]);
    let large = [frame(HEADERS, 0, 7, &vec![0x82; 16_384]), piece.repeat(3)].concat();
    assert_refused(&large, 7).await;
    let empty = [
        frame(HEADERS, 0, 7, &[]),
        frame(CONTINUATION, 0, 7, &[]).repeat(LIMIT / 9),
    ]
    .concat();
    assert_refused(&empty, 7).await;
    // An entry of 4000 bytes, and its index 17 times: 68 kB of fields in 4 kB.
    let entry = [&[0x40, 1, b'x', 0x7f, 0xa1, 0x1e][..], &[b'v'; 4000], &[0xbe; 16]].concat();
    assert_refused(&frame(HEADERS, END_HEADERS, 7, &entry), 7).await;
    let allowed = &entry[..entry.len() - 1];
    let bytes = [greeting(), frame(HEADERS, END_HEADERS, 7, allowed)].concat();
    let (out, result) = rewritten(&bytes, &[]).await;
    assert!(
        result.is_ok() && out.len() > 64_000 && out.len() < LIMIT + 100,
        "{}",
        out.len()
    );
}

#[tokio::test]
async fn the_limit_ends_the_connection() {
    let piece = frame(CONTINUATION, 0, 1, &vec![0x82; 16_384]);
    let bytes = [frame(HEADERS, 0, 1, &vec![0x82; 16_384]), piece.repeat(16)].concat();
    assert_eq!(exchange([&bytes[..]]).await, (vec![Answer::Closed], vec![]));
}
