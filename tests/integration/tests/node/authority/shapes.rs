//! Every way to write the header and the message.

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Stage,
    agent::KUBELET_SOCKET,
    h2raw::{Call, Coding},
    require,
};

use super::{ATTACH, attach, authorities, doors, filled, open, sandbox, served};

#[tokio::test(flavor = "multi_thread")]
async fn attach_is_served_for_each_authority_on_each_socket() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("doors", Manifest::overlapping()).await?;
    for (number, (socket, authority)) in doors().into_iter().enumerate() {
        let sandbox = sandbox(&stage, &format!("door-{number}")).await?;
        let message = attach(&sandbox);
        let call = Call::new(ATTACH, &authority, &message);
        let reply = open(&stage, socket)?.call(&call);
        let addresses = reply.map_err(anyhow::Error::from).and_then(|reply| served(&reply));
        let addresses = addresses.with_context(|| format!("{authority} on {socket}"))?;
        // Not only said: done.
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
    let codings =
        [(true, true), (true, false), (false, true), (false, false)].map(|(huffman, index)| Coding { huffman, index });
    let mut answers = Vec::new();
    for authority in authorities(KUBELET_SOCKET) {
        for coding in codings {
            // One connection for all shapes, so that each finds the table that the ones before left.
            let mut connection = open(&stage, KUBELET_SOCKET)?;
            for padding in [None, Some(0), Some(1), Some(255)] {
                for continuation in [None, Some(1), Some(5), Some(13), Some(60)] {
                    // Where nothing is rewritten, h2 alone sets the limit, of five CONTINUATION frames. Otherwise it is
                    // 64; in pieces of a byte that is enough for a block of indexes only.
                    let least = match (authority.as_str(), coding.index) {
                        ("localhost", _) => 60,
                        (_, true) => 1,
                        (_, false) => 5,
                    };
                    if continuation.is_some_and(|size| size < least) {
                        continue;
                    }
                    let call = Call {
                        coding,
                        padding,
                        continuation,
                        ..Call::new(ATTACH, &authority, &message)
                    };
                    let what = || format!("{authority} {coding:?} {padding:?} {continuation:?}");
                    let reply = connection.call(&call).with_context(what)?;
                    answers.push(served(&reply).with_context(what)?);
                }
            }
        }
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "one sandbox, several answers");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_every_size_are_served() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("sizes", Manifest::overlapping()).await?;
    let base = sandbox(&stage, "sizes").await?;
    let mut connections = Vec::new();
    for authority in authorities(KUBELET_SOCKET) {
        connections.push((open(&stage, KUBELET_SOCKET)?, authority));
    }
    // Around every border: of one frame, of several, of the windows, of a mebibyte.
    let borders = [1024, 16_384, 32_768, 65_535, 131_072, 1 << 20];
    let sizes = borders.iter().flat_map(|border| (border - 20..=border + 20).step_by(5));
    for size in sizes.chain([700, 250_000, 500_000, 900_000]) {
        let message = filled(attach(&base), size);
        for (connection, authority) in &mut connections {
            let reply = connection.call(&Call::new(ATTACH, authority, &message));
            let reply = reply.with_context(|| format!("{authority}, {} bytes", message.len()))?;
            served(&reply).with_context(|| format!("{authority}, {} bytes", message.len()))?;
        }
    }
    Ok(())
}
