//! Connections as grpc-go makes them: a literal authority first, its index from then on, and metadata that evicts.

use bytes::Bytes;

use crate::{
    client::{Answer, Client},
    encoder::{Encoder, GRPC_GO, Indexing, Style},
    wire::{DATA, END_STREAM, Framing, frame, header_frames},
};

const PROTOCOL_ERROR: u32 = 1;

const ESCAPED: &str = "%2Ftmp%2Fkni.sock";
const RAW: &str = "/tmp/kni.sock";

fn legal(authority: &str) -> String {
    authority.replace(['%', '/'], "-")
}

/// The fields grpc-go sends, in its order.
fn fields(authority: &str) -> Vec<(String, Vec<u8>)> {
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/kni.KNI/AttachInterface"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.60.1"),
        ("te", "trailers"),
    ]
    .map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()))
    .to_vec()
}

fn block(encoder: &mut Encoder, fields: &[(String, Vec<u8>)], style: Style) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        encoder.field(name, value, style, &mut block);
    }
    block
}

/// Sends a request, waits for its answer, and checks what the service saw of it.
async fn call(client: &mut Client, stream: u32, block: &[u8], authority: &str, body: &[u8]) {
    let mut bytes = header_frames(stream, 0, block, &Framing::default());
    let mut chunks = body.chunks(16_384).peekable();
    if body.is_empty() {
        bytes.extend(frame(DATA, END_STREAM, stream, &[]));
    }
    while let Some(chunk) = chunks.next() {
        bytes.extend(frame(DATA, u8::from(chunks.peek().is_none()), stream, chunk));
    }
    client.send(&bytes).await;
    assert_eq!(client.answer().await, Answer::Done(stream), "authority {authority}");
    let seen = client.next_seen().await;
    assert_eq!(seen.authority.as_deref(), Some(authority));
    assert_eq!(
        (seen.method.as_str(), seen.path.as_str()),
        ("POST", "/kni.KNI/AttachInterface")
    );
    assert_eq!(seen.headers["content-type"], [b"application/grpc"]);
    assert_eq!(seen.headers["te"], [b"trailers"]);
    assert_eq!(seen.body, Bytes::copy_from_slice(body));
}

#[tokio::test]
async fn h2_refuses_them_without_the_adapter() {
    for authority in [ESCAPED, RAW] {
        let mut client = Client::connect_bare().await;
        let block = block(&mut Encoder::new(), &fields(authority), GRPC_GO);
        client
            .send(&header_frames(1, END_STREAM, &block, &Framing::default()))
            .await;
        assert_eq!(client.answer().await, Answer::Reset(1, PROTOCOL_ERROR), "{authority}");
    }
}

#[tokio::test]
async fn each_authority_is_served_first_and_repeated() {
    for (authority, expected) in [
        (ESCAPED, "-2Ftmp-2Fkni.sock"),
        (RAW, "-tmp-kni.sock"),
        ("localhost", "localhost"),
    ] {
        let mut client = Client::connect().await;
        let mut encoder = Encoder::new();
        for stream in [1, 3, 5, 7] {
            let block = block(&mut encoder, &fields(authority), GRPC_GO);
            assert!(stream == 1 || block.len() == 7, "repeats are all indices");
            call(&mut client, stream, &block, expected, b"message").await;
        }
    }
}

#[tokio::test]
async fn each_way_to_write_the_authority_is_served() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
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
                call(&mut client, stream, &block, &legal(authority), b"").await;
                stream += 2;
            }
        }
    }
}

#[tokio::test]
async fn messages_of_every_size_are_served() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
    for (at, size) in [0, 1, 5, 100, 8191, 8192, 8193, 16_383, 16_384, 16_385, 40_000, 60_000]
        .iter()
        .enumerate()
    {
        let body: Vec<u8> = (0..*size).map(|at: usize| at.to_le_bytes()[0]).collect();
        let block = block(&mut encoder, &fields(ESCAPED), GRPC_GO);
        call(
            &mut client,
            u32::try_from(2 * at + 1).unwrap(),
            &block,
            &legal(ESCAPED),
            &body,
        )
        .await;
    }
}

#[tokio::test]
async fn trailers_pass() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
    let head = block(&mut encoder, &fields(RAW), GRPC_GO);
    let tail = block(&mut encoder, &[("x-checksum".to_owned(), b"77".to_vec())], GRPC_GO);
    let mut bytes = header_frames(1, 0, &head, &Framing::default());
    bytes.extend(frame(DATA, 0, 1, b"body"));
    bytes.extend(header_frames(1, END_STREAM, &tail, &Framing::default()));
    client.send(&bytes).await;
    assert_eq!(client.answer().await, Answer::Done(1));
    assert_eq!(client.next_seen().await.body, Bytes::from_static(b"body"));
}

#[tokio::test]
async fn headers_larger_than_a_frame_are_served() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
    for stream in [1, 3, 5] {
        let mut fields = fields(ESCAPED);
        fields.push(("x-large".to_owned(), vec![b'0' + stream; 60_000]));
        let block = block(
            &mut encoder,
            &fields,
            Style {
                huffman_value: false,
                ..GRPC_GO
            },
        );
        let bytes = header_frames(u32::from(stream), END_STREAM, &block, &Framing::default());
        client.send(&bytes).await;
        assert_eq!(client.answer().await, Answer::Done(stream.into()));
        let seen = client.next_seen().await;
        assert_eq!(seen.authority, Some(legal(ESCAPED)));
        assert_eq!(seen.headers["x-large"], [vec![b'0' + stream; 60_000]]);
    }
}

/// Five thousand requests with three authorities and metadata of changing size: the authorities are evicted and come
/// back, by index, by name index and as literals, and each index must mean the same on both ends.
#[tokio::test]
async fn thousands_of_requests_stay_in_step() {
    let mut client = Client::connect().await;
    let mut encoder = Encoder::new();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let (mut indexed, mut literal) = (0, 0);
    for number in 0..5000_u32 {
        let authority = [ESCAPED, RAW, "localhost"][usize::try_from(next(3)).unwrap()];
        let mut fields = fields(authority);
        let mut expected = Vec::new();
        for _ in 0..next(4) {
            let size = usize::try_from(if next(20) == 0 { next(5000) } else { next(300) }).unwrap();
            let name = format!("x-metadata-{}", next(6));
            let value = format!("{number}-{}", "v".repeat(size));
            expected.push((name.clone(), value.clone().into_bytes()));
            fields.push((name, value.into_bytes()));
        }
        let mut block = Vec::new();
        if next(50) == 0 {
            encoder.resize(usize::try_from(next(4097)).unwrap(), &mut block);
        }
        // Now and then not as grpc-go does, so that the names the rewriter remembers are asked for.
        let style = Style {
            repeat: next(5) != 0,
            dynamic_first: next(2) == 0,
            ..GRPC_GO
        };
        for (name, value) in &fields {
            let before = block.len();
            encoder.field(name, value, style, &mut block);
            if name == ":authority" {
                *(if block.len() - before <= 2 {
                    &mut indexed
                } else {
                    &mut literal
                }) += 1;
            }
        }
        let stream = 2 * number + 1;
        client
            .send(&header_frames(stream, END_STREAM, &block, &Framing::default()))
            .await;
        assert_eq!(client.answer().await, Answer::Done(stream), "request {number}");
        let seen = client.next_seen().await;
        assert_eq!(seen.authority, Some(legal(authority)), "request {number}");
        for (name, value) in &expected {
            assert!(seen.headers[name].contains(value), "request {number}: {name}");
        }
        let count: usize = seen.headers.values().map(Vec::len).sum();
        assert_eq!(count, expected.len() + 3, "request {number}");
    }
    assert!(
        indexed > 1000 && literal > 300,
        "both forms occur: {indexed} indexed, {literal} literal"
    );
    assert!(encoder.entries() > 0);
}
