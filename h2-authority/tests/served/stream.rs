//! Tests the adapter as a stream: the output does not depend on the sizes of reads, and ends where the input ends.

use std::{io, io::IoSlice, time::Instant};

use h2_authority::AuthorityAdapter;
use tokio::io::{AsyncReadExt as _, AsyncWrite as _, AsyncWriteExt as _};

use crate::{
    client::{ESCAPED, RAW, block, fields},
    encoder::{Encoder, GRPC_GO, Style},
    wire::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, Framing, HAS_PRIORITY, HEADERS, PING, PREFACE, PRIORITY,
        WINDOW_UPDATE, frame, frames, greeting, header_frames,
    },
};

/// A connection with each kind of frame around header blocks of each kind.
pub(crate) fn connection() -> Vec<u8> {
    let mut encoder = Encoder::new();
    let plain = Style {
        huffman_value: false,
        ..GRPC_GO
    };
    let mut bytes = greeting();
    bytes.extend(frame(WINDOW_UPDATE, 0, 0, &[0, 1, 0, 0]));
    let framings = [
        (None, false, vec![]),
        (Some(7), true, vec![]),
        (Some(0), false, vec![3, 0, 9]),
    ];
    let requests = [(ESCAPED, GRPC_GO), (RAW, plain), ("localhost:1", plain)];
    let mut stream = 1;
    for (authority, style) in requests.into_iter().chain(requests) {
        for (padding, priority, pieces) in framings.clone() {
            let block = block(&mut encoder, &fields(authority), style);
            let framing = Framing {
                padding,
                priority,
                pieces,
            };
            bytes.extend(header_frames(stream, 0, &block, &framing));
            bytes.extend(frame(PING, 0, 0, b"12345678"));
            bytes.extend(frame(DATA, END_STREAM, stream, b"\0\0\0\0\x02hi"));
            bytes.extend(frame(PRIORITY, 0, stream, &[0, 0, 0, 0, 1]));
            bytes.extend(frame(0xfa, 0xff, stream, b"grease"));
            stream += 2;
        }
    }
    bytes
}

/// The output of the adapter for input that arrives in two pieces.
pub(crate) async fn rewritten(head: &[u8], tail: &[u8]) -> (Vec<u8>, io::Result<usize>) {
    let mut out = Vec::new();
    let result = AuthorityAdapter::new(head.chain(tail)).read_to_end(&mut out).await;
    (out, result)
}

#[tokio::test]
async fn every_split_of_the_stream_gives_the_same() {
    let bytes = connection();
    let (whole, _) = rewritten(&bytes, &[]).await;
    assert_eq!(whole.windows(9).filter(|part| part == b"localhost").count(), 18);
    for at in 0..=bytes.len() {
        let (head, tail) = bytes.split_at(at);
        assert_eq!(rewritten(head, tail).await.0, whole, "split at {at}");
    }
    let (mut client, server) = tokio::io::duplex(1);
    let mut adapter = AuthorityAdapter::new(server);
    let write = async {
        client.write_all(&bytes).await.unwrap();
        drop(client);
    };
    let mut read = Vec::new();
    let read_bytes = async {
        let mut byte = [0];
        while adapter.read(&mut byte).await.unwrap() == 1 {
            read.push(byte[0]);
        }
        assert_eq!(adapter.read(&mut byte).await.unwrap(), 0, "the end is permanent");
    };
    tokio::join!(write, read_bytes);
    assert_eq!(read, whole, "byte by byte");
}

#[tokio::test]
async fn every_cut_of_the_stream_ends_where_it_was_cut() {
    let bytes = connection();
    let (whole, _) = rewritten(&bytes, &[]).await;
    for at in 0..=bytes.len() {
        let (out, result) = rewritten(&bytes[..at], &[]).await;
        assert_eq!(result.unwrap(), out.len());
        // Everything is equal up to the cut block or frame. A cut frame is as the client sent it; an open block has no
        // end.
        let common = out.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        let cut = frames(&bytes[PREFACE.len().min(at)..at]).pop();
        let open = cut.filter(|frame| [HEADERS, CONTINUATION].contains(&frame.kind) && frame.flags & END_HEADERS == 0);
        let last = frames(&out[PREFACE.len().min(at)..]).pop();
        match open {
            Some(open) => assert_eq!(
                last.map(|last| (last.kind, last.stream, last.flags)),
                Some((HEADERS, open.stream, 0))
            ),
            None => assert!(bytes[..at].ends_with(&out[common..]), "cut at {at}"),
        }
    }
}

#[tokio::test]
async fn only_header_blocks_change() {
    let bytes = connection();
    let (out, _) = rewritten(&bytes, &[]).await;
    let other = |bytes: &[u8]| {
        let mut frames = frames(&bytes[PREFACE.len()..]);
        frames.retain(|frame| frame.kind != HEADERS && frame.kind != CONTINUATION);
        frames
    };
    assert_eq!(other(&bytes), other(&out));
    let headers: Vec<_> = frames(&out[PREFACE.len()..])
        .into_iter()
        .filter(|frame| frame.kind == HEADERS)
        .collect();
    assert_eq!(headers.len(), 18);
    for (at, frame) in headers.iter().enumerate() {
        let priority = if at % 3 == 1 { HAS_PRIORITY } else { 0 };
        assert_eq!(frame.flags, END_HEADERS | priority, "block {at}");
        assert!(priority == 0 || frame.payload.starts_with(&[0, 0, 0, 0, 15]));
    }
}

#[tokio::test]
async fn other_protocols_pass() {
    let block = block(&mut Encoder::new(), &fields(RAW), GRPC_GO);
    let headers = header_frames(1, END_STREAM, &block, &Framing::default());
    for start in [
        &b"GET / HTTP/1.1\r\nhost: /x\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nXX",
        b"\x16\x03\x01",
    ] {
        let bytes = [start, &headers].concat();
        assert_eq!(rewritten(&bytes, &[]).await.0, bytes);
    }
}

#[tokio::test]
async fn writes_pass_unchanged() {
    let (mut client, server) = tokio::io::duplex(1024);
    let vectored = server.is_write_vectored();
    let mut adapter = AuthorityAdapter::new(server);
    assert_eq!(adapter.is_write_vectored(), vectored);
    let illegal = [PREFACE, &frame(HEADERS, END_HEADERS, 1, b"\x41\x02/x")].concat();
    adapter.write_all(&illegal).await.unwrap();
    let parts = [IoSlice::new(b"ab"), IoSlice::new(b"cd")];
    let count = adapter.write_vectored(&parts).await.unwrap();
    assert!(count == 4 || !vectored);
    adapter.flush().await.unwrap();
    adapter.shutdown().await.unwrap();
    let mut read = Vec::new();
    client.read_to_end(&mut read).await.unwrap();
    assert_eq!(read, [&illegal[..], &b"abcd"[..count]].concat());
}

#[tokio::test]
async fn cost() {
    const ROUNDS: u32 = 20_000;
    for (what, repeat) in [("all fields indexed", true), ("all values Huffman-coded", false)] {
        let mut encoder = Encoder::new();
        let mut bytes = greeting();
        for at in 0..ROUNDS {
            let style = Style { repeat, ..GRPC_GO };
            let block = block(&mut encoder, &fields(ESCAPED), style);
            bytes.extend(header_frames(2 * at + 1, END_STREAM, &block, &Framing::default()));
        }
        let start = Instant::now();
        let (out, _) = rewritten(&bytes, &[]).await;
        println!("{what}: {} ns per request", (start.elapsed() / ROUNDS).as_nanos());
        assert_eq!(frames(&out[PREFACE.len()..]).len(), ROUNDS as usize + 1);
    }
}
