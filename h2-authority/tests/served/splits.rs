//! The output must not depend on where reads or frames are cut.

use bytes::BytesMut;
use h2_authority::Rewriter;

use crate::{
    client::{Answer, Client},
    encoder::{Encoder, GRPC_GO, Style},
    wire::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, Framing, HAS_PRIORITY, HEADERS, PING, PREFACE, PRIORITY, SETTINGS,
        WINDOW_UPDATE, frame, header_frames, take_frames,
    },
};

fn block(encoder: &mut Encoder, authority: &str, style: Style) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/kni.KNI/QueryNodeNetworks"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        encoder.field(name, value.as_bytes(), style, &mut block);
    }
    block
}

/// A connection with each kind of frame around header blocks of each kind.
pub(crate) fn stream() -> Vec<u8> {
    let mut encoder = Encoder::new();
    let plain = Style {
        huffman_value: false,
        ..GRPC_GO
    };
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0]));
    bytes.extend(frame(WINDOW_UPDATE, 0, 0, &[0, 1, 0, 0]));
    let framings = [
        Framing::default(),
        Framing {
            padding: Some(7),
            priority: true,
            pieces: vec![],
        },
        Framing {
            padding: Some(0),
            priority: false,
            pieces: vec![3, 0, 9],
        },
    ];
    let requests = [
        ("%2Ftmp%2Fkni.sock", GRPC_GO),
        ("/tmp/kni.sock", plain),
        ("localhost:1", plain),
    ];
    let mut stream = 1;
    for (authority, style) in requests.into_iter().chain(requests) {
        for framing in &framings {
            let block = block(&mut encoder, authority, style);
            bytes.extend(header_frames(stream, 0, &block, framing));
            bytes.extend(frame(PING, 0, 0, b"12345678"));
            bytes.extend(frame(DATA, END_STREAM, stream, b"\0\0\0\0\x02hi"));
            bytes.extend(frame(PRIORITY, 0, stream, &[0, 0, 0, 0, 1]));
            stream += 2;
        }
    }
    bytes
}

fn rewritten(pieces: &[&[u8]]) -> BytesMut {
    let mut rewriter = Rewriter::default();
    let mut out = BytesMut::new();
    for piece in pieces {
        rewriter.push(piece, &mut out).unwrap();
    }
    assert!(!rewriter.is_transparent());
    rewriter.finish(&mut out);
    out
}

#[test]
fn every_split_of_the_stream_gives_the_same() {
    let bytes = stream();
    let whole = rewritten(&[&bytes]);
    assert!(whole.windows(13).any(|part| part == b"-tmp-kni.sock"));
    for at in 0..=bytes.len() {
        let (head, tail) = bytes.split_at(at);
        assert_eq!(rewritten(&[head, tail]), whole, "split at {at}");
    }
    assert_eq!(rewritten(&bytes.chunks(1).collect::<Vec<_>>()), whole);
}

#[test]
fn every_cut_of_the_stream_ends_where_it_was_cut() {
    let bytes = stream();
    let whole = rewritten(&[&bytes]);
    for at in 0..=bytes.len() {
        let out = rewritten(&[&bytes[..at]]);
        let common = out.iter().zip(&whole).take_while(|(a, b)| a == b).count();
        // Up to the cut block all is equal, and the cut block is as the client sent it.
        assert!(bytes[..at].ends_with(&out[common..]), "cut at {at}");
    }
}

#[test]
fn frames_without_a_change_are_the_same_bytes() {
    let mut encoder = Encoder::new();
    let mut bytes = PREFACE.to_vec();
    for stream in [1, 3] {
        let block = block(&mut encoder, "localhost", GRPC_GO);
        let framing = Framing {
            padding: Some(9),
            priority: true,
            pieces: vec![2, 0, 1],
        };
        bytes.extend(header_frames(stream, END_STREAM, &block, &framing));
        // Unknown types are passed on too.
        bytes.extend(frame(0xfa, 0xff, stream, b"grease"));
    }
    assert_eq!(rewritten(&[&bytes]), bytes);
}

#[test]
fn rewritten_frames_keep_flags_and_priority() {
    let block = block(&mut Encoder::new(), "/x", GRPC_GO);
    let framing = Framing {
        padding: Some(9),
        priority: true,
        pieces: vec![4],
    };
    let bytes = [PREFACE, &header_frames(5, END_STREAM, &block, &framing)].concat();
    let out = rewritten(&[&bytes]);
    let frames = take_frames(&mut out[PREFACE.len()..].to_vec());
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0].stream, 5);
    assert_eq!(frames[0].kind, HEADERS);
    assert_eq!(frames[0].flags, END_STREAM | END_HEADERS | HAS_PRIORITY);
    assert_eq!(frames[0].payload[..5], [0, 0, 0, 0, 15]);
}

#[tokio::test]
async fn block_split_at_every_byte_is_served() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
    let style = Style {
        repeat: false,
        ..GRPC_GO
    };
    let mut stream = 1;
    let mut at = 0;
    loop {
        let block = block(&mut encoder, "%2Ftmp%2Fkni.sock", style);
        let bytes = header_frames(
            stream,
            END_STREAM,
            &block,
            &Framing {
                pieces: vec![at],
                ..Framing::default()
            },
        );
        assert!(
            at >= block.len()
                || bytes
                    .windows(5)
                    .any(|part| part[0] == CONTINUATION && part[1] == END_HEADERS)
        );
        client.send(&bytes).await;
        assert_eq!(client.answer().await, Answer::Done(stream), "split at {at}");
        assert_eq!(
            client.next_seen().await.authority.as_deref(),
            Some("-2Ftmp-2Fkni.sock"),
            "split at {at}"
        );
        if at > block.len() {
            return;
        }
        at += 1;
        stream += 2;
    }
}

#[tokio::test]
async fn one_byte_frames_and_one_byte_reads_are_served() {
    let mut client = Client::connect().await;
    let block = block(
        &mut Encoder::new(),
        "/tmp/kni.sock",
        Style {
            huffman_value: false,
            ..GRPC_GO
        },
    );
    // 60 frames of one byte, within the limit of 64, and the rest.
    let framing = Framing {
        pieces: vec![1; 60],
        ..Framing::default()
    };
    let bytes = header_frames(1, END_STREAM, &block, &framing);
    client.send_in_pieces(&bytes, &[1]).await;
    assert_eq!(client.answer().await, Answer::Done(1));
    assert_eq!(client.next_seen().await.authority.as_deref(), Some("-tmp-kni.sock"));
}
