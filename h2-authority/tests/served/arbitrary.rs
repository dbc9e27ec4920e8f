//! Any valid headers in any valid encoding: the service gets exactly them, but for the authority.

use std::collections::BTreeMap;

use bytes::Bytes;
use h2_authority::{AuthorityAdapter, Rewriter};
use proptest::prelude::*;
use tokio::{io::AsyncReadExt, sync::mpsc};

use crate::{
    client::{Answer, Client, Seen, serve},
    encoder::{Encoder, Indexing, Style},
    wire::{END_STREAM, Framing, header_frames},
};

#[derive(Debug, Clone)]
struct Request {
    authority: String,
    path: String,
    /// Each with the way to write it.
    headers: Vec<(String, Vec<u8>, Style)>,
    pseudo_style: Style,
    resize: Option<usize>,
    framing: Framing,
}

fn style() -> impl Strategy<Value = Style> {
    let indexing = prop_oneof![
        4 => Just(Indexing::Incremental),
        1 => Just(Indexing::Without),
        1 => Just(Indexing::Never),
    ];
    (any::<(bool, bool, bool, bool)>(), prop::bool::weighted(0.8), indexing).prop_map(
        |((name_index, dynamic_first, huffman_name, huffman_value), repeat, indexing)| Style {
            repeat,
            name_index,
            dynamic_first,
            indexing,
            huffman_name,
            huffman_value,
        },
    )
}

fn header() -> impl Strategy<Value = (String, Vec<u8>)> {
    let name = prop_oneof![
        "x-[a-c]{1,2}",
        "x-[a-z0-9_.-]{0,30}",
        prop::sample::select(vec![
            "accept",
            "cookie",
            "user-agent",
            "via",
            "authorization",
            "content-type"
        ])
        .prop_map(ToOwned::to_owned),
    ];
    let value = prop_oneof![
        "[ab]{0,3}".prop_map(String::into_bytes),
        prop::collection::vec(prop_oneof![0x20..=0x7e_u8, 0x80..=0xff_u8], 0..120),
        (1..1500_usize).prop_map(|length| vec![b'v'; length]),
    ];
    (name, value)
}

fn framing() -> impl Strategy<Value = Framing> {
    (
        prop::option::of(any::<u8>()),
        any::<bool>(),
        prop::collection::vec(0..60_usize, 0..5),
    )
        .prop_map(|(padding, priority, pieces)| Framing {
            padding,
            priority,
            pieces,
        })
}

fn request(authority: impl Strategy<Value = String>) -> impl Strategy<Value = Request> {
    let headers = prop::collection::vec((header(), style()).prop_map(|((n, v), s)| (n, v, s)), 0..8);
    let resize = prop::option::weighted(0.1, 0..=4096_usize);
    (
        authority,
        "/[a-zA-Z.]{1,12}/[a-zA-Z]{1,12}",
        headers,
        style(),
        resize,
        framing(),
    )
        .prop_map(|(authority, path, headers, pseudo_style, resize, framing)| Request {
            authority,
            path,
            headers,
            pseudo_style,
            resize,
            framing,
        })
}

fn odd_authority() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("%2Ftmp%2Fkni.sock".to_owned()),
        Just("/tmp/kni.sock".to_owned()),
        Just("localhost".to_owned()),
        "[a-z/%:@\\[\\]?# é-]{1,40}",
        "(/[a-z]{1,30}){1,20}",
    ]
}

/// What the adapter's documentation promises, written anew: the value, or the value with host bytes only.
fn expected_authority(authority: &str) -> String {
    if authority.parse::<http::uri::Authority>().is_ok() {
        return authority.to_owned();
    }
    let bytes = authority.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' => char::from(byte),
        _ => '-',
    });
    bytes.collect()
}

fn expected(request: &Request) -> Seen {
    let mut headers = BTreeMap::<String, Vec<Vec<u8>>>::new();
    for (name, value, _) in &request.headers {
        headers.entry(name.clone()).or_default().push(value.clone());
    }
    Seen {
        method: "POST".to_owned(),
        authority: Some(expected_authority(&request.authority)),
        path: request.path.clone(),
        headers,
        body: Bytes::new(),
    }
}

fn encode(encoder: &mut Encoder, stream: u32, request: &Request) -> Vec<u8> {
    let mut block = Vec::new();
    if let Some(capacity) = request.resize {
        encoder.resize(capacity, &mut block);
    }
    let pseudo = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", &request.authority),
        (":path", &request.path),
    ];
    for (name, value) in pseudo {
        encoder.field(name, value.as_bytes(), request.pseudo_style, &mut block);
    }
    for (name, value, style) in &request.headers {
        encoder.field(name, value, *style, &mut block);
    }
    header_frames(stream, END_STREAM, &block, &request.framing)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_requests_are_served(
        requests in prop::collection::vec(request(odd_authority()), 1..25),
        reads in prop::collection::vec(1..400_usize, 1..8),
    ) {
        runtime().block_on(async {
            let mut client = Client::connect().await;
            let mut encoder = Encoder::new();
            for (at, request) in requests.iter().enumerate() {
                let stream = u32::try_from(2 * at + 1).unwrap();
                let bytes = encode(&mut encoder, stream, request);
                client.send_in_pieces(&bytes, &reads).await;
                prop_assert_eq!(client.answer().await, Answer::Done(stream));
                prop_assert_eq!(client.next_seen().await, expected(request));
            }
            Ok(())
        })?;
    }

    /// h2's own client, an encoder that shares nothing with this crate: its requests arrive unchanged.
    #[test]
    fn requests_of_another_client_pass(
        requests in prop::collection::vec(request("[a-z]{1,20}(:[0-9]{1,4})?"), 1..12),
        size in 0..200_000_usize,
    ) {
        runtime().block_on(async {
            let (client_io, server_io) = tokio::io::duplex(4096);
            let (sender, mut seen) = mpsc::unbounded_channel();
            tokio::spawn(serve(AuthorityAdapter::new(server_io), sender));
            let (mut client, connection) = h2::client::handshake(client_io).await.unwrap();
            tokio::spawn(connection);
            for request in &requests {
                let uri = format!("http://{}{}", request.authority, request.path);
                let mut builder = http::Request::builder().method("POST").uri(uri);
                for (name, value, _) in &request.headers {
                    builder = builder.header(name, value.as_slice());
                }
                client = client.ready().await.unwrap();
                let (response, mut body) = client.send_request(builder.body(()).unwrap(), false).unwrap();
                let content = Bytes::from(vec![b'm'; size]);
                body.send_data(content.clone(), true).unwrap();
                prop_assert_eq!(response.await.unwrap().status(), 200);
                let seen = seen.recv().await.unwrap();
                prop_assert_eq!(seen, Seen { body: content, ..expected(request) });
            }
            Ok(())
        })?;
    }
}

/// What h2's own client writes comes out of the rewriter as the same bytes.
#[tokio::test]
async fn bytes_of_another_client_pass() {
    let (client_io, mut server_io) = tokio::io::duplex(1 << 20);
    let (mut client, connection) = h2::client::handshake(client_io).await.unwrap();
    let connection = tokio::spawn(connection);
    for number in 0..100 {
        let request = http::Request::builder()
            .uri(format!("http://localhost:{}/kni.KNI/QueryPodNetwork", number % 7))
            .header("x-number", number)
            .header("x-large", "v".repeat(number * 10));
        let (_, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(Bytes::from(vec![0; number]), true).unwrap();
    }
    // The client has no settings of a server yet; what it has written by now is enough.
    let mut bytes = Vec::new();
    while let Ok(read) =
        tokio::time::timeout(std::time::Duration::from_millis(200), server_io.read_buf(&mut bytes)).await
    {
        assert!(read.unwrap() > 0);
    }
    connection.abort();
    assert!(bytes.len() > 10_000, "{} bytes", bytes.len());
    let mut out = bytes::BytesMut::new();
    let mut rewriter = Rewriter::default();
    rewriter.push(&bytes, &mut out).unwrap();
    assert!(!rewriter.is_transparent());
    rewriter.finish(&mut out);
    assert_eq!(out, bytes);
}
