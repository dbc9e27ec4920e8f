//! Streams that no client should send: no panic, no unbounded memory, and the error is left to h2.

use bytes::BytesMut;
use h2_authority::{Error, Limits, Rewriter};
use proptest::prelude::*;

use crate::{
    client::{Answer, Client},
    encoder::{Encoder, GRPC_GO},
    wire::{CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PADDED, PREFACE, SETTINGS, frame},
};

const PROTOCOL_ERROR: u32 = 1;

fn rewrite(bytes: &[u8]) -> (BytesMut, Rewriter) {
    let mut rewriter = Rewriter::default();
    let mut out = BytesMut::new();
    rewriter.push(bytes, &mut out).unwrap();
    (out, rewriter)
}

fn odd_block() -> Vec<u8> {
    let mut block = Vec::new();
    Encoder::new().field(":authority", b"/x.sock", GRPC_GO, &mut block);
    block
}

#[test]
fn other_protocols_pass() {
    for bytes in [
        &b"GET / HTTP/1.1\r\nhost: /x\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nXX",
        b"\x16\x03\x01",
    ] {
        let bytes = [bytes, &frame(HEADERS, END_HEADERS, 1, &odd_block())].concat();
        let (out, rewriter) = rewrite(&bytes);
        assert_eq!(out, bytes);
        assert!(rewriter.is_transparent());
    }
}

#[test]
fn after_an_error_of_the_client_all_bytes_pass() {
    let odd = odd_block();
    let broken = [
        // HPACK: index 0, a bad Huffman string, an integer without end, a table beyond 4096, a cut string.
        frame(HEADERS, END_HEADERS, 1, &[0x80]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x81, 0x00]),
        frame(HEADERS, END_HEADERS, 1, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f]),
        frame(HEADERS, END_HEADERS, 1, &[0x41, 0x09, b'/']),
        // An odd authority before the error must not be half rewritten.
        frame(HEADERS, END_HEADERS, 1, &[&odd[..], &[0x80]].concat()),
        // Framing: padding beyond the payload, and frames out of order.
        frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0x82]),
        frame(HEADERS, END_HEADERS | PADDED, 1, &[]),
        frame(CONTINUATION, END_HEADERS, 1, &odd),
        [frame(HEADERS, 0, 1, &odd), frame(DATA, END_STREAM, 1, b"x")].concat(),
        [frame(HEADERS, 0, 1, &odd), frame(CONTINUATION, END_HEADERS, 3, &[])].concat(),
        [frame(HEADERS, 0, 1, &odd), frame(HEADERS, END_HEADERS, 1, &[])].concat(),
    ];
    for (at, broken) in broken.iter().enumerate() {
        let bytes = [
            PREFACE,
            &frame(SETTINGS, 0, 0, &[]),
            broken,
            &frame(HEADERS, END_HEADERS, 3, &odd),
        ]
        .concat();
        let (out, rewriter) = rewrite(&bytes);
        assert_eq!(out, bytes, "case {at}");
        assert!(rewriter.is_transparent(), "case {at}");
    }
}

#[tokio::test]
async fn h2_reports_the_errors() {
    for broken in [
        frame(HEADERS, END_HEADERS, 1, &[0x80]),
        frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xe2, 0x1f]),
        [frame(HEADERS, 0, 1, &odd_block()), frame(DATA, END_STREAM, 1, b"x")].concat(),
    ] {
        let mut client = Client::connect().await;
        client.send(&broken).await;
        // h2 0.4 reports HPACK errors with this code too.
        assert_eq!(client.answer().await, Answer::Goaway(PROTOCOL_ERROR));
    }
}

#[test]
fn large_blocks_are_refused_before_they_are_held() {
    let limits = Limits {
        block_size: 1000,
        ..Limits::default()
    };
    let before = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    let large = frame(HEADERS, END_HEADERS, 7, &[0; 1001]);
    let mut rewriter = Rewriter::new(limits);
    let mut out = BytesMut::new();
    let error = Error::BlockTooLarge { stream: 7, limit: 1000 };
    assert_eq!(rewriter.push(&[&before, &large[..9]].concat(), &mut out), Err(error));
    assert_eq!(out, before);
    assert_eq!(rewriter.push(b"more", &mut out), Err(error));
    rewriter.finish(&mut out);
    assert_eq!(out, before);
    assert_eq!(error.to_string(), "header block of stream 7 is larger than 1000 bytes");

    let pieces = [
        frame(HEADERS, 0, 7, &[0; 600]),
        frame(CONTINUATION, END_HEADERS, 7, &[0; 401]),
    ]
    .concat();
    let mut rewriter = Rewriter::new(limits);
    assert_eq!(rewriter.push(&[&before[..], &pieces].concat(), &mut out), Err(error));
}

#[test]
fn floods_of_continuations_are_refused() {
    let flood = |count| {
        let mut bytes = [PREFACE, &frame(HEADERS, 0, 1, &odd_block())].concat();
        for _ in 0..count {
            bytes.extend(frame(CONTINUATION, 0, 1, &[]));
        }
        let mut out = BytesMut::new();
        Rewriter::default().push(&bytes, &mut out)
    };
    assert_eq!(flood(64), Ok(()));
    assert_eq!(flood(65), Err(Error::TooManyContinuations { stream: 1, limit: 64 }));
}

#[test]
fn data_is_not_held() {
    let mut rewriter = Rewriter::default();
    let mut out = BytesMut::new();
    rewriter.push(PREFACE, &mut out).unwrap();
    // The longest frame there is; h2 will refuse it, but not because this crate buffered it.
    rewriter
        .push(&[0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1], &mut out)
        .unwrap();
    let mut sent = out.len();
    for _ in 0..100 {
        rewriter.push(&[7; 1000], &mut out).unwrap();
        sent += 1000;
        assert_eq!(out.len(), sent);
    }
}

#[test]
fn cost() {
    let mut encoder = Encoder::new();
    let mut request = |authority: &str| {
        let mut block = Vec::new();
        for (name, value) in [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/kni.KNI/AttachInterface"),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-go/1.60.1"),
            ("te", "trailers"),
        ] {
            encoder.field(name, value.as_bytes(), GRPC_GO, &mut block);
        }
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &block)
    };
    let first = request("%2Ftmp%2Fkni.sock");
    let repeat = request("%2Ftmp%2Fkni.sock");
    let mut coded = Vec::new();
    httlib_huffman::encode(b"%2Ftmp%2Fkni.sock", &mut coded).unwrap();
    let mut literal = vec![0x01, 0x80 | u8::try_from(coded.len()).unwrap()];
    literal.extend(coded);
    let literal = frame(HEADERS, END_HEADERS | END_STREAM, 1, &literal);

    let mut rewriter = Rewriter::default();
    let mut out = BytesMut::new();
    rewriter.push(&[PREFACE, &first].concat(), &mut out).unwrap();
    for (what, frame) in [("all fields indexed", &repeat), ("literal authority", &literal)] {
        const ROUNDS: u32 = 200_000;
        let mut bytes = 0;
        let start = std::time::Instant::now();
        for _ in 0..ROUNDS {
            out.clear();
            rewriter.push(frame, &mut out).unwrap();
            bytes += out.len();
        }
        println!("{what}: {} ns per request", (start.elapsed() / ROUNDS).as_nanos());
        assert!(bytes >= frame.len() * 200_000, "no request is lost");
    }
    assert!(!rewriter.is_transparent());
}

/// Frames of any content, of the types that matter more often than not.
fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![
        Just(HEADERS),
        Just(HEADERS),
        Just(CONTINUATION),
        Just(DATA),
        any::<u8>()
    ];
    let flags = prop_oneof![Just(END_HEADERS), any::<u8>()];
    let content = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(
            prop::sample::select(vec![0x41, 0x01, 0x82, 0xbe, 0x7e, 0x20, 0x05, b'/', b'a']),
            0..60
        ),
    ];
    (kind, flags, 0..4_u32, content).prop_map(|(kind, flags, stream, payload)| frame(kind, flags, stream, &payload))
}

/// Pushes `bytes` in pieces, and checks what holds for every stream.
fn check(bytes: &[u8], lengths: &[usize]) -> Result<(), TestCaseError> {
    let limits = Limits {
        block_size: 400,
        continuations: 3,
        ..Limits::default()
    };
    let mut rewriter = Rewriter::new(limits);
    let mut out = BytesMut::new();
    let mut rest = bytes;
    let mut lengths = lengths.iter().cycle();
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(
            lengths
                .next()
                .map_or(rest.len(), |length| (*length).clamp(1, rest.len())),
        );
        rest = tail;
        if let Err(error) = rewriter.push(piece, &mut out) {
            prop_assert_eq!(rewriter.push(b"x", &mut out), Err(error));
            break;
        }
    }
    rewriter.finish(&mut out);
    prop_assert!(
        out.len() <= 2 * bytes.len(),
        "{} bytes became {}",
        bytes.len(),
        out.len()
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..600), lengths in prop::collection::vec(1..50_usize, 1..9)) {
        check(&bytes, &lengths)?;
        check(&[PREFACE, &bytes].concat(), &lengths)?;
    }

    #[test]
    fn any_frames(frames in prop::collection::vec(any_frame(), 0..12), lengths in prop::collection::vec(1..80_usize, 1..9)) {
        check(&[PREFACE.to_vec(), frames.concat()].concat(), &lengths)?;
    }

    #[test]
    fn any_damage_to_a_valid_stream(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        lengths in prop::collection::vec(1..200_usize, 1..9),
    ) {
        let mut bytes = crate::splits::stream();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check(&bytes, &lengths)?;
    }

    #[test]
    fn any_frames_split_anywhere_give_the_same(frames in prop::collection::vec(any_frame(), 0..12), at in any::<prop::sample::Index>()) {
        let bytes = [PREFACE.to_vec(), frames.concat()].concat();
        let run = |pieces: &[&[u8]]| {
            let mut rewriter = Rewriter::default();
            let mut out = BytesMut::new();
            let result = pieces.iter().try_for_each(|piece| rewriter.push(piece, &mut out));
            rewriter.finish(&mut out);
            (out, result)
        };
        let (head, tail) = bytes.split_at(at.index(bytes.len()));
        prop_assert_eq!(run(&[head, tail]), run(&[&bytes]));
    }
}
