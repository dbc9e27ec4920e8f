//! Random streams: any valid requests in any valid encoding are served, and any other bytes end without a panic.

use std::collections::BTreeMap;

use bytes::Bytes;
use h2_authority::AuthorityAdapter;
use proptest::prelude::*;
use tokio::sync::mpsc;

use crate::{
    client::{ESCAPED, RAW, Seen, exchange, legal, serve},
    encoder::{Encoder, Indexing, Style},
    requests::all_done,
    stream::{connection, rewritten},
    wire::{CONTINUATION, DATA, END_HEADERS, END_STREAM, Framing, HEADERS, PREFACE, frame, header_frames},
};

#[derive(Debug, Clone)]
struct Request {
    authority: String,
    path: String,
    /// The headers, each with its encoding style.
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
    let known = ["accept", "cookie", "user-agent", "via", "authorization", "content-type"];
    let name = prop_oneof![
        "x-[a-c]{1,2}",
        "x-[a-z0-9_.-]{0,30}",
        prop::sample::select(known.map(ToOwned::to_owned).to_vec()),
    ];
    let value = prop_oneof![
        "[ab]{0,3}".prop_map(String::into_bytes),
        prop::collection::vec(prop_oneof![0x20..=0x7e_u8, 0x80..=0xff_u8], 0..120),
        (1..1500_usize).prop_map(|length| vec![b'v'; length]),
    ];
    (name, value)
}

fn framing() -> impl Strategy<Value = Framing> {
    let pieces = prop::collection::vec(0..60_usize, 0..5);
    (prop::option::of(any::<u8>()), any::<bool>(), pieces).prop_map(|(padding, priority, pieces)| Framing {
        padding,
        priority,
        pieces,
    })
}

fn request(authority: impl Strategy<Value = String>) -> impl Strategy<Value = Request> {
    let path = "/[a-zA-Z.]{1,12}/[a-zA-Z]{1,12}";
    let headers = prop::collection::vec((header(), style()).prop_map(|((n, v), s)| (n, v, s)), 0..8);
    let resize = prop::option::weighted(0.1, 0..=4096_usize);
    (authority, path, headers, style(), resize, framing()).prop_map(
        |(authority, path, headers, pseudo_style, resize, framing)| Request {
            authority,
            path,
            headers,
            pseudo_style,
            resize,
            framing,
        },
    )
}

fn any_authority() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![ESCAPED.to_owned(), RAW.to_owned(), "localhost".to_owned()]),
        "[a-z/%:@\\[\\]?# é-]{0,40}",
        "(/[a-z]{1,30}){1,20}",
    ]
}

fn expected(request: &Request, body: Bytes) -> Seen {
    let mut headers = BTreeMap::<String, Vec<Vec<u8>>>::new();
    for (name, value, _) in &request.headers {
        headers.entry(name.clone()).or_default().push(value.clone());
    }
    Seen {
        method: "POST".to_owned(),
        authority: Some(legal(&request.authority)),
        path: request.path.clone(),
        headers,
        body,
        trailers: 0,
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

/// Frames of any content, mostly of the types that matter.
fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let kind = prop_oneof![2 => Just(HEADERS), 1 => Just(CONTINUATION), 1 => Just(DATA), 1 => any::<u8>()];
    let flags = prop_oneof![Just(END_HEADERS), any::<u8>()];
    let octets = vec![0x41, 0x01, 0x82, 0xbe, 0x7e, 0x20, 0x05, b'/', b'a'];
    let content = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(prop::sample::select(octets), 0..60),
    ];
    (kind, flags, 0..4_u32, content).prop_map(|(kind, flags, stream, payload)| frame(kind, flags, stream, &payload))
}

fn block_on<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(test)
}

/// Checks that the stream ends, whole and split, with the same bytes and the same result.
fn check(bytes: &[u8], at: prop::sample::Index) -> Result<(), TestCaseError> {
    block_on(async {
        let (out, result) = rewritten(bytes, &[]).await;
        // 65 KiB for each block of at least ten bytes.
        prop_assert!(out.len() <= bytes.len() * 6600);
        let (head, tail) = bytes.split_at(at.index(bytes.len() + 1));
        let (split_out, split_result) = rewritten(head, tail).await;
        prop_assert_eq!(out, split_out);
        prop_assert_eq!(result.is_ok(), split_result.is_ok());
        Ok(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_requests_are_served(
        requests in prop::collection::vec(request(any_authority()), 1..25),
        read in 1..400_usize,
    ) {
        let mut encoder = Encoder::new();
        let streams = (1..).step_by(2).zip(&requests);
        let bytes: Vec<u8> = streams.flat_map(|(stream, request)| encode(&mut encoder, stream, request)).collect();
        let (answers, seen) = block_on(exchange(bytes.chunks(read)));
        prop_assert_eq!(answers, all_done(requests.len()));
        let expected: Vec<_> = requests.iter().map(|request| expected(request, Bytes::new())).collect();
        prop_assert_eq!(seen, expected);
    }

    /// The client of h2 as an encoder that shares no code with this crate.
    #[test]
    fn requests_of_another_client_pass(
        requests in prop::collection::vec(request("[a-z]{1,20}(:[0-9]{1,4})?"), 1..12),
        size in 0..200_000_usize,
    ) {
        block_on(async {
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
                prop_assert_eq!(seen.recv().await.unwrap(), expected(request, content));
            }
            Ok(())
        })?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..600), at: prop::sample::Index) {
        check(&bytes, at)?;
        check(&[PREFACE, &bytes].concat(), at)?;
    }

    #[test]
    fn any_frames_end(frames in prop::collection::vec(any_frame(), 0..12), at: prop::sample::Index) {
        check(&[PREFACE.to_vec(), frames.concat()].concat(), at)?;
    }

    #[test]
    fn any_damage_to_a_valid_stream_ends(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        at: prop::sample::Index,
    ) {
        let mut bytes = connection();
        for (place, value) in changes {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        check(&bytes, at)?;
    }
}
