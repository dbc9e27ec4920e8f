//! Tests requests of all shapes and sizes, cut at any byte, and thousands of them on one connection.

use anyhow::{Context as _, Result};
use kni_integration::{Manifest, Stage, agent::KUBELET_SOCKET, require};
use kni_proto::kni::{QueryPodNetworkRequest, QueryPodNetworkResponse};
use prost::Message as _;

use super::{
    ATTACH, QUERY, attach, attached, authorities,
    client::{Connection, Cut, Shape},
    endpoints, filled, sandbox,
};

const REQUESTS: usize = 3000;

#[tokio::test(flavor = "multi_thread")]
async fn attach_is_served_for_each_authority_on_each_socket() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("endpoints", Manifest::overlapping()).await?;
    for (number, (socket, authority)) in endpoints().into_iter().enumerate() {
        let sandbox = sandbox(&stage, &format!("endpoint-{number}")).await?;
        let connection = Connection::open(&stage, socket, Shape::default()).await?;
        let response = connection.call(ATTACH, &authority, &attach(&sandbox)).await;
        let addresses = response.and_then(|message| attached(&message));
        let addresses = addresses.with_context(|| format!("{authority} on {socket}"))?;
        // The agent has really attached the interface.
        assert_eq!(stage.kubelet.query(&sandbox.id).await?.ipconfigs["eth0"].ip, addresses);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn padding_and_continuation_are_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("shapes", Manifest::overlapping()).await?;
    let sandbox = sandbox(&stage, "shapes").await?;
    let message = attach(&sandbox);
    let paddings = [None, Some(0), Some(1), Some(255)].into_iter();
    let pieces = [None, Some(1), Some(5), Some(13), Some(60)];
    let blocks: Vec<_> = paddings
        .flat_map(|padding| pieces.map(|size| (padding, size)))
        .collect();
    let mut responses = Vec::new();
    for authority in authorities(KUBELET_SOCKET) {
        // The first block of a connection is a literal, all others consist of indexes: each shape is first once.
        for first in 0..blocks.len() {
            let mut shape = Shape::default();
            shape.blocks.clone_from(&blocks);
            shape.blocks.rotate_left(first);
            let connection = Connection::open(&stage, KUBELET_SOCKET, shape).await?;
            for number in 0..if first == 0 { blocks.len() } else { 2 } {
                let what = || format!("{authority} {:?}", blocks[(first + number) % blocks.len()]);
                let response = connection.call(ATTACH, &authority, &message).await.with_context(what)?;
                responses.push(attached(&response).with_context(what)?);
            }
        }
    }
    responses.dedup();
    assert_eq!(responses.len(), 1, "one sandbox, several responses");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_every_size_are_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("sizes", Manifest::overlapping()).await?;
    let base = sandbox(&stage, "sizes").await?;
    let mut connections = Vec::new();
    for authority in authorities(KUBELET_SOCKET) {
        let connection = Connection::open(&stage, KUBELET_SOCKET, Shape::default()).await?;
        connections.push((connection, authority));
    }
    // Around the sizes of one frame, of several, of the windows, of a mebibyte.
    let borders = [1024, 16_384, 32_768, 65_535, 131_072, 1 << 20];
    let sizes = borders.iter().flat_map(|border| (border - 20..=border + 20).step_by(5));
    for size in sizes.chain([700, 250_000, 500_000, 900_000]) {
        let message = filled(attach(&base), size);
        for (connection, authority) in &connections {
            let what = || format!("{authority}, {} bytes", message.len());
            let response = connection.call(ATTACH, authority, &message).await.with_context(what)?;
            attached(&response).with_context(what)?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_cut_at_any_byte_is_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("cut", Manifest::overlapping()).await?;
    let sandbox = sandbox(&stage, "cut").await?;
    let mut request = sandbox.attach_request();
    // The client compresses its headers: the label makes up for their bytes, so that as many are cut.
    request.labels.insert("example.com/padding".to_owned(), "x".repeat(64));
    let message = request.encode_to_vec();
    for authority in authorities(KUBELET_SOCKET) {
        let (mut at, mut length) = (1, usize::MAX);
        while at < length {
            let cut = Cut::At(at);
            let connection = Connection::open(
                &stage,
                KUBELET_SOCKET,
                Shape {
                    cut,
                    ..Shape::default()
                },
            )
            .await?;
            let what = || format!("{authority} cut at {at}");
            let response = connection.call(ATTACH, &authority, &message).await.with_context(what)?;
            attached(&response).with_context(what)?;
            // The first round determines the number of bytes of the request and the following frames.
            length = length.min(connection.written());
            at += 1;
        }
        assert!(at > 500, "only {at} bytes were cut");
        let cut = Cut::Everywhere;
        let connection = Connection::open(
            &stage,
            KUBELET_SOCKET,
            Shape {
                cut,
                ..Shape::default()
            },
        )
        .await?;
        let response = connection.call(ATTACH, &authority, &message).await;
        attached(&response.with_context(|| format!("{authority} byte by byte"))?)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_requests_on_one_connection_are_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("thousands", Manifest::overlapping()).await?;
    let sandbox = sandbox(&stage, "thousands").await?;
    let message = attach(&sandbox);
    let mut query = QueryPodNetworkRequest::default();
    query.id.clone_from(&sandbox.id);
    let query = query.encode_to_vec();
    let authorities = authorities(KUBELET_SOCKET);
    let connection = Connection::open(&stage, KUBELET_SOCKET, Shape::default()).await?;
    let addresses = attached(&connection.call(ATTACH, &authorities[0], &message).await?)?;
    for number in 0..REQUESTS {
        // Long runs of one authority, so that it is sent as an index, and changes between them. The trace is new or
        // repeated, and all traces together exceed the table: entries are evicted and return.
        let authority = &authorities[number / 7 % authorities.len()];
        let trace = format!("{:>0width$}", number % 97, width = 40 + number % 50);
        let trace = (number % 3 != 0).then_some(trace.as_str());
        let what = || format!("request {number} to {authority}");
        let got = if number % 10 == 0 {
            let response = connection.call_with(ATTACH, authority, &message, trace).await;
            attached(&response.with_context(what)?)?
        } else {
            let response = connection.call_with(QUERY, authority, &query, trace).await;
            let mut response = QueryPodNetworkResponse::decode(&*response.with_context(what)?)?;
            response.ipconfigs.remove("eth0").unwrap_or_default().ip
        };
        assert_eq!(got, addresses, "{}", what());
    }
    Ok(())
}
