//! Tests connections with the encoding of grpc-go, and with all other valid encodings of their header blocks.

use bytes::Bytes;

use crate::{
    client::{Answer, ESCAPED, RAW, block, exchange, exchange_bare, fields, legal},
    encoder::{Encoder, GRPC_GO, Indexing, Style},
    wire::{CONTINUATION, DATA, END_HEADERS, END_STREAM, Framing, HEADERS, PADDED, RESERVED, frame, header_frames},
};

const PROTOCOL_ERROR: u32 = 1;

/// The answers to `count` successful requests.
pub(crate) fn all_done(count: usize) -> Vec<Answer> {
    let streams = (1..).step_by(2).take(count);
    streams.map(Answer::Done).collect()
}

#[tokio::test]
async fn h2_refuses_socket_paths_without_the_adapter() {
    for authority in [ESCAPED, RAW, ""] {
        let block = block(&mut Encoder::new(), &fields(authority), GRPC_GO);
        let bytes = header_frames(1, END_STREAM, &block, &Framing::default());
        assert_eq!(
            exchange_bare([&bytes[..]]).await,
            (vec![Answer::Reset(1, PROTOCOL_ERROR)], vec![])
        );
    }
}

#[tokio::test]
async fn each_authority_is_served_first_and_repeated() {
    for authority in [
        ESCAPED,
        RAW,
        "",
        "localhost",
        "[::1]:443",
        "user@host",
        "a:1:2",
        "9 9",
        "é",
    ] {
        let mut encoder = Encoder::new();
        let mut bytes = Vec::new();
        for stream in [1, 3, 5, 7] {
            let block = block(&mut encoder, &fields(authority), GRPC_GO);
            assert!(stream == 1 || block.len() == 7, "repeated fields are all indexed");
            bytes.extend(header_frames(stream, 0, &block, &Framing::default()));
            bytes.extend(frame(DATA, END_STREAM, stream, b"message"));
        }
        let (answers, seen) = exchange([&bytes[..]]).await;
        assert_eq!(answers, all_done(4), "{authority}");
        for request in seen {
            assert_eq!(request.authority, Some(legal(authority)), "{authority}");
            assert_eq!(
                (request.method.as_str(), request.body),
                ("POST", Bytes::from("message"))
            );
            assert_eq!(request.path, "/kni.KNI/AttachInterface");
            assert_eq!(request.headers["content-type"], [b"application/grpc"]);
            assert_eq!(request.headers.len(), 3);
        }
    }
}

#[tokio::test]
async fn each_way_to_write_the_authority_is_served() {
    let mut encoder = Encoder::new();
    let mut bytes = Vec::new();
    let mut stream = 1;
    for indexing in [Indexing::Without, Indexing::Never, Indexing::Incremental] {
        for bits in 0..32 {
            let style = Style {
                repeat: bits & 1 != 0,
                name_index: bits & 2 != 0,
                indexing,
                huffman_name: bits & 4 != 0,
                huffman_value: bits & 8 != 0,
                dynamic_first: bits & 16 != 0,
            };
            for authority in [ESCAPED, RAW] {
                let block = block(&mut encoder, &fields(authority), style);
                bytes.extend(header_frames(stream, END_STREAM, &block, &Framing::default()));
                stream += 2;
            }
        }
    }
    let (answers, seen) = exchange([&bytes[..]]).await;
    assert_eq!((answers, seen.len()), (all_done(192), 192));
    assert!(
        seen.iter()
            .all(|request| request.authority.as_deref() == Some("localhost"))
    );
}

#[tokio::test]
async fn a_block_split_at_every_byte_is_served() {
    let mut encoder = Encoder::new();
    let style = Style {
        repeat: false,
        ..GRPC_GO
    };
    let (mut bytes, mut stream) = (Vec::new(), 1);
    for at in 0..100 {
        let block = block(&mut encoder, &fields(ESCAPED), style);
        let framing = Framing {
            pieces: vec![at],
            ..Framing::default()
        };
        bytes.extend(header_frames(stream, END_STREAM, &block, &framing));
        stream += 2;
        assert!(block.len() < 100);
    }
    // Only frames of one byte.
    let block = block(&mut encoder, &fields(RAW), style);
    let framing = Framing {
        pieces: vec![1; block.len()],
        ..Framing::default()
    };
    bytes.extend(header_frames(stream, END_STREAM, &block, &framing));
    let (answers, seen) = exchange(bytes.chunks(1)).await;
    assert_eq!((answers, seen.len()), (all_done(101), 101));
    assert!(
        seen.iter()
            .all(|request| request.authority.as_deref() == Some("localhost"))
    );
}

#[tokio::test]
async fn the_reserved_bit_of_a_stream_is_ignored() {
    let block = block(&mut Encoder::new(), &fields(RAW), GRPC_GO);
    let (head, tail) = block.split_at(block.len() / 2);
    for (first, second) in [(0, RESERVED), (RESERVED, 0), (RESERVED, RESERVED)] {
        let mut bytes = frame(HEADERS, END_STREAM, 1 | first, head);
        bytes.extend(frame(CONTINUATION, END_HEADERS, 1 | second, tail));
        let (answers, seen) = exchange([bytes.as_slice()]).await;
        assert_eq!((answers, seen.len()), (all_done(1), 1));
        assert_eq!(seen[0].authority.as_deref(), Some("localhost"));
    }
}

#[tokio::test]
async fn bodies_of_every_size_and_trailers_pass() {
    let sizes = [
        0,
        1,
        5,
        100,
        8191,
        8192,
        8193,
        16_383,
        16_384,
        16_385,
        40_000,
        60_000_usize,
    ];
    for size in sizes {
        let mut encoder = Encoder::new();
        let body: Vec<u8> = (0..size).map(|at| at.to_le_bytes()[0]).collect();
        let head = block(&mut encoder, &fields(RAW), GRPC_GO);
        let tail = block(&mut encoder, &[("x-checksum".to_owned(), b"77".to_vec())], GRPC_GO);
        let mut bytes = header_frames(1, 0, &head, &Framing::default());
        for chunk in body.chunks(16_384) {
            bytes.extend(frame(DATA, 0, 1, chunk));
        }
        bytes.extend(frame(DATA, PADDED, 1, &[3, 0, 0, 0]));
        bytes.extend(header_frames(1, END_STREAM, &tail, &Framing::default()));
        let (answers, seen) = exchange([&bytes[..]]).await;
        assert_eq!(answers, all_done(1), "{size} bytes");
        assert_eq!((&seen[0].body[..], seen[0].trailers), (&body[..], 1), "{size} bytes");
    }
}

#[tokio::test]
async fn headers_larger_than_a_frame_are_served() {
    let plain = Style {
        huffman_value: false,
        ..GRPC_GO
    };
    let mut encoder = Encoder::new();
    let (mut bytes, mut expected) = (Vec::new(), Vec::new());
    for (stream, size) in [(1_u8, 60_000), (3, 16_100), (5, 16_384), (7, 32_768)] {
        let value = vec![b'0' + stream; size];
        let mut fields = fields(ESCAPED);
        fields.push(("x-large".to_owned(), value.clone()));
        let block = block(&mut encoder, &fields, plain);
        bytes.extend(header_frames(stream.into(), END_STREAM, &block, &Framing::default()));
        expected.push(value);
    }
    let (answers, seen) = exchange([&bytes[..]]).await;
    assert_eq!((answers, seen.len()), (all_done(4), 4));
    for (request, value) in seen.iter().zip(expected) {
        assert_eq!(request.authority.as_deref(), Some("localhost"));
        assert_eq!(request.headers["x-large"], [value]);
    }
}

/// Three authorities and metadata of changing size: the authorities are evicted and return, by index, by name index
/// and as literals, and the table of the adapter must match the one of the client at each request.
#[tokio::test]
async fn thousands_of_requests_on_one_connection_are_served() {
    const REQUESTS: u32 = 5000;
    let mut encoder = Encoder::new();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random % below).unwrap()
    };
    let (mut bytes, mut expected) = (Vec::new(), Vec::new());
    for number in 0..REQUESTS {
        let authority = [ESCAPED, RAW, "example.org"][next(3)];
        let mut fields = fields(authority);
        for _ in 0..next(4) {
            let size = if next(20) == 0 { next(5000) } else { next(300) };
            let value = format!("{number}-{}", "v".repeat(size));
            fields.push((format!("x-metadata-{}", next(6)), value.into_bytes()));
        }
        let mut head = Vec::new();
        if next(50) == 0 {
            encoder.resize(next(4097), &mut head);
        }
        // Sometimes different from grpc-go, so that names are used by their dynamic index.
        let style = Style {
            repeat: next(5) != 0,
            dynamic_first: next(2) == 0,
            ..GRPC_GO
        };
        head.extend(block(&mut encoder, &fields, style));
        bytes.extend(header_frames(2 * number + 1, END_STREAM, &head, &Framing::default()));
        expected.push((legal(authority), fields.split_off(4)));
    }
    let (answers, seen) = exchange(bytes.chunks(5000)).await;
    assert_eq!(answers.len(), expected.len());
    assert_eq!(seen.len(), expected.len());
    for (number, (request, (authority, fields))) in seen.iter().zip(expected).enumerate() {
        assert_eq!(request.authority, Some(authority), "request {number}");
        let count: usize = request.headers.values().map(Vec::len).sum();
        assert_eq!(count, fields.len(), "request {number}");
        assert!(
            fields.iter().all(|(name, value)| request.headers[name].contains(value)),
            "request {number}"
        );
    }
    assert!(encoder.entries() > 0);
}
