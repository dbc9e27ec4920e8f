use std::{net::Shutdown, os::unix::net::UnixStream, time::Duration};

use anyhow::Result;
use kni_integration::h2raw::{Call, Coding, Connection, Failure, Reply, decode_block};
use kni_proto::kni::kni_server::KniServer;

use super::fake::Fake;

const ATTACH: &str = "/kni.KNI/AttachInterface";

/// A connection to a plain tonic server, which ends with the runtime.
fn connect() -> Result<(tokio::runtime::Runtime, Connection)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let (client, server) = UnixStream::pair()?;
    client.set_read_timeout(Some(Duration::from_secs(5)))?;
    server.set_nonblocking(true)?;
    let server = runtime.block_on(async { tokio::net::UnixStream::from_std(server) })?;
    let incoming = tokio_stream::once(Ok::<_, std::io::Error>(server));
    let service = KniServer::new(Fake::default()).max_decoding_message_size(64 << 20);
    runtime.spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming),
    );
    Ok((runtime, Connection::start(client)?))
}

/// A request as protobuf by hand: name (1), id (2) and one entry of extradata (9), all strings.
fn request(name: &str, id: &str, value: &str) -> Vec<u8> {
    let entry = [field(1, "key"), field(2, value)].concat();
    let entry = [vec![9 << 3 | 2], length(entry.len()), entry].concat();
    [field(1, name), field(2, id), entry].concat()
}

fn field(number: u8, text: &str) -> Vec<u8> {
    [vec![number << 3 | 2], length(text.len()), text.as_bytes().to_vec()].concat()
}

fn length(mut value: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
    bytes
}

fn assert_echoed(reply: &Reply, name: &str, value: &str) {
    assert_eq!(
        (reply.http_status.as_str(), reply.grpc_status),
        ("200", Some(0)),
        "{}",
        reply.grpc_message
    );
    let holds = |text: &str| {
        text.is_empty()
            || reply
                .message
                .windows(text.len())
                .any(|window| window == text.as_bytes())
    };
    assert!(holds(name) && holds(value), "the answer is not to this question");
}

#[test]
fn every_way_to_write_a_request_is_served() -> Result<()> {
    let (_runtime, mut connection) = connect()?;
    let codings =
        [(true, true), (true, false), (false, true), (false, false)].map(|(huffman, index)| Coding { huffman, index });
    for (coding, padding, continuation) in codings
        .iter()
        .flat_map(|c| [None, Some(0), Some(255)].map(|p| (c, p)))
        .flat_map(|(c, p)| [None, Some(1), Some(7)].map(|cut| (*c, p, cut)))
    {
        let message = request("pod", "0123", "value");
        let call = Call {
            coding,
            padding,
            continuation,
            ..Call::new(ATTACH, "localhost", &message)
        };
        let reply = connection
            .call(&call)
            .map_err(|e| anyhow::anyhow!("{coding:?} {padding:?} {continuation:?}: {e}"))?;
        assert_echoed(&reply, "pod", "value");
    }
    Ok(())
}

#[test]
fn messages_of_every_size_pass_the_windows() -> Result<()> {
    let (_runtime, mut connection) = connect()?;
    for size in [0, 1, 100, 16_379, 16_384, 65_535, 65_536, 200_000, 3_000_000] {
        let value = "v".repeat(size);
        let message = request("pod", "id", &value);
        for padding in [None, Some(9)] {
            let call = Call {
                padding,
                ..Call::new(ATTACH, "localhost", &message)
            };
            let reply = connection.call(&call)?;
            assert_echoed(&reply, "pod", &value[..size.min(50)]);
            assert!(reply.message.len() >= size, "{} of {size}", reply.message.len());
        }
    }
    Ok(())
}

#[test]
fn thousands_of_calls_keep_the_tables_in_step() -> Result<()> {
    let (_runtime, mut connection) = connect()?;
    for number in 0..3000 {
        let (name, trace) = (format!("pod-{number}"), format!("trace-{}", number % 200));
        let message = request(&name, "id", "value");
        // 200 different values do not fit the dynamic table: entries are evicted and come again.
        let metadata = [("x-trace", trace.as_str())];
        let call = Call {
            metadata: &metadata,
            ..Call::new(ATTACH, "localhost", &message)
        };
        assert_echoed(&connection.call(&call)?, &name, "value");
    }
    Ok(())
}

#[test]
fn a_status_and_its_message_come_back() -> Result<()> {
    let (_runtime, mut connection) = connect()?;
    let reply = connection.call(&Call::new("/kni.KNI/CreateNetwork", "localhost", &[]))?;
    assert_eq!(
        (reply.grpc_status, reply.grpc_message.as_str()),
        (Some(8), "network%20blue")
    );
    assert!(reply.message.is_empty());
    let reply = connection.call(&Call::new("/kni.KNI/NoSuchMethod", "localhost", &[]))?;
    assert_eq!(reply.grpc_status, Some(12));
    Ok(())
}

/// Why the agent needs an adapter; and the proof that this client really sends what it is told to.
#[test]
fn a_plain_server_refuses_a_path_as_authority() -> Result<()> {
    const PROTOCOL_ERROR: u32 = 1;
    for authority in ["%2Ftmp%2Fkni.sock", "/tmp/kni.sock"] {
        let (_runtime, mut connection) = connect()?;
        let refused = connection.call(&Call::new(ATTACH, authority, &[]));
        assert!(
            matches!(
                refused,
                Err(Failure::Reset(PROTOCOL_ERROR) | Failure::GoAway(PROTOCOL_ERROR))
            ),
            "{refused:?}"
        );
    }
    let (_runtime, mut connection) = connect()?;
    connection.stream().shutdown(Shutdown::Write)?;
    assert!(connection.call(&Call::new(ATTACH, "localhost", &[])).is_err());
    Ok(())
}

#[test]
fn blocks_of_the_standard_are_decoded() {
    // RFC 7541, C.6.1: Huffman-coded response, of which the static and literal fields are kept.
    let block = [0x48, 0x82, 0x64, 0x02, 0x58, 0x85, 0xae, 0xc3, 0x77, 0x1a, 0x4b];
    let fields = decode_block(&block).expect("a block of the standard");
    assert_eq!(
        fields,
        [
            (":status".into(), "302".into()),
            ("cache-control".into(), "private".into())
        ]
    );
    assert_eq!(decode_block(&[0x40]), None);
    assert_eq!(decode_block(&[0x00, 0x85]), None);
}
