//! The adapter as a stream: ends, errors and the untouched write side.

use std::io::{ErrorKind, IoSlice};

use h2_authority::{AuthorityAdapter, Error, Limits};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::{
    client::{Answer, Client},
    wire::{CONTINUATION, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame},
};

#[tokio::test]
async fn small_reads_get_all_bytes_and_then_the_end() {
    let (mut client, server) = tokio::io::duplex(1024);
    let mut adapter = AuthorityAdapter::new(server);
    let bytes = [
        PREFACE,
        &frame(SETTINGS, 0, 0, &[]),
        &frame(HEADERS, END_HEADERS, 1, b"\x41\x02/x"),
    ]
    .concat();
    client.write_all(&bytes).await.unwrap();
    drop(client);
    let mut read = Vec::new();
    let mut byte = [0];
    while adapter.read(&mut byte).await.unwrap() == 1 {
        read.push(byte[0]);
    }
    let expected = [&bytes[..bytes.len() - 2], b"-x"].concat();
    assert_eq!(read, expected);
    assert_eq!(adapter.read(&mut byte).await.unwrap(), 0, "the end stays the end");
}

#[tokio::test]
async fn held_bytes_come_out_at_the_end() {
    let (mut client, server) = tokio::io::duplex(1024);
    let mut adapter = AuthorityAdapter::new(server);
    let bytes = [PREFACE, &frame(HEADERS, 0, 1, b"\x41\x02/x"), &[0, 0]].concat();
    client.write_all(&bytes).await.unwrap();
    drop(client);
    let mut read = Vec::new();
    adapter.read_to_end(&mut read).await.unwrap();
    assert_eq!(read, bytes);
}

#[tokio::test]
async fn limit_is_invalid_data_behind_what_came_before() {
    let (mut client, server) = tokio::io::duplex(1024);
    let limits = Limits {
        continuations: 1,
        ..Limits::default()
    };
    let mut adapter = AuthorityAdapter::with_limits(server, limits);
    let before = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    let flood = [
        frame(HEADERS, 0, 9, &[]),
        frame(CONTINUATION, 0, 9, &[]),
        frame(CONTINUATION, 0, 9, &[]),
    ]
    .concat();
    client.write_all(&[&before[..], &flood].concat()).await.unwrap();
    let mut read = vec![0; before.len()];
    adapter.read_exact(&mut read).await.unwrap();
    assert_eq!(read, before);
    for _ in 0..2 {
        let error = adapter.read(&mut read).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        assert_eq!(inner, Some(&Error::TooManyContinuations { stream: 9, limit: 1 }));
    }
}

#[tokio::test]
async fn limit_ends_the_connection() {
    let mut client = Client::connect().await;
    // A block of 272 KiB.
    client.send(&frame(HEADERS, 0, 1, &[0x82; 16_384])).await;
    for _ in 0..16 {
        // The server hangs up at the last of them.
        if client
            .io
            .write_all(&frame(CONTINUATION, 0, 1, &[0x82; 16_384]))
            .await
            .is_err()
        {}
    }
    while client.answer().await != Answer::Closed {}
    let error = client.server.await.unwrap().unwrap_err();
    assert_eq!(
        error.get_io().map(std::io::Error::kind),
        Some(ErrorKind::InvalidData),
        "{error}"
    );
}

#[tokio::test]
async fn writes_pass_untouched() {
    let (mut client, server) = tokio::io::duplex(1024);
    let mut adapter = AuthorityAdapter::new(server);
    assert_eq!(adapter.is_write_vectored(), adapter.get_ref().is_write_vectored());
    let illegal = [PREFACE, &frame(HEADERS, END_HEADERS, 1, b"\x41\x02/x")].concat();
    adapter.write_all(&illegal).await.unwrap();
    let count = adapter
        .write_vectored(&[IoSlice::new(b"ab"), IoSlice::new(b"cd")])
        .await
        .unwrap();
    assert!(count == 4 || !adapter.is_write_vectored());
    adapter.flush().await.unwrap();
    adapter.shutdown().await.unwrap();
    let mut read = Vec::new();
    client.read_to_end(&mut read).await.unwrap();
    assert_eq!(read, [&illegal[..], &b"abcd"[..count]].concat());
    drop(adapter.into_inner());
}
