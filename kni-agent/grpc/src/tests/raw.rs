//! Clients that dial a bare path and send it as `:authority`, byte by byte as grpc-go does without Huffman coding.

use kni_proto::kni::{AttachInterfaceRequest, AttachInterfaceResponse};
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

use super::{Served, kni::attach, soon};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![a, b, c, kind, flags, 0, 0, 0, stream];
    bytes.extend_from_slice(payload);
    bytes
}

/// A literal field that enters the dynamic table; `name` is an index of the static table or a text.
fn field(block: &mut Vec<u8>, name: Result<u8, &str>, value: &str) {
    match name {
        Ok(index) => block.push(0x40 | index),
        Err(text) => {
            block.extend_from_slice(&[0x40, u8::try_from(text.len()).unwrap()]);
            block.extend_from_slice(text.as_bytes());
        }
    }
    block.push(u8::try_from(value.len()).unwrap());
    block.extend_from_slice(value.as_bytes());
}

fn headers(authority: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    field(&mut block, Ok(4), "/kni.KNI/AttachInterface");
    field(&mut block, Ok(1), authority);
    field(&mut block, Ok(31), "application/grpc");
    field(&mut block, Err("te"), "trailers");
    block
}

/// The same fields by their indexes in the dynamic table, newest first.
const REPEATED: [u8; 6] = [0x83, 0x86, 0x80 + 65, 0x80 + 64, 0x80 + 63, 0x80 + 62];

fn message(request: &AttachInterfaceRequest) -> Vec<u8> {
    let encoded = request.encode_to_vec();
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(encoded.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(&encoded);
    bytes
}

/// Reads frames until the stream ends; returns its data.
async fn answer(client: &mut UnixStream, stream: u8) -> Vec<u8> {
    let mut data = Vec::new();
    loop {
        let mut head = [0; 9];
        client.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        client.read_exact(&mut payload).await.unwrap();
        let (kind, flags) = (head[3], head[4]);
        match kind {
            SETTINGS if flags == 0 => client.write_all(&frame(SETTINGS, 1, 0, &[])).await.unwrap(),
            RST_STREAM | GOAWAY => panic!("refused: frame {kind}, {payload:?}"),
            DATA if head[8] == stream => data.extend_from_slice(&payload),
            HEADERS if head[8] == stream && flags & END_STREAM != 0 => return data,
            _ => {}
        }
    }
}

async fn served_with(authority: &str) {
    let served = Served::start().await;
    let mut client = UnixStream::connect(served.path("two")).await.unwrap();
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    client.write_all(&frame(SETTINGS, 0, 0, &[])).await.unwrap();
    for (stream, block) in [(1, headers(authority)), (3, REPEATED.to_vec())] {
        let id = format!("raw{stream}");
        client
            .write_all(&frame(HEADERS, END_HEADERS, stream, &block))
            .await
            .unwrap();
        client
            .write_all(&frame(DATA, END_STREAM, stream, &message(&attach(&id))))
            .await
            .unwrap();
        let data = soon(answer(&mut client, stream)).await;
        let response = AttachInterfaceResponse::decode(&data[5..]).unwrap();
        assert_eq!(response.ipconfigs["eth0"].ip, ["10.1.0.2", "fd00::2"], "{authority}");
        assert!(served.backend.knows(&id));
    }
    drop(client);
    served.stop().await;
}

#[tokio::test]
async fn authorities_that_are_paths_are_served() {
    for authority in ["%2Ftmp%2Fkni.sock", "/tmp/kni.sock", "localhost"] {
        served_with(authority).await;
    }
}
