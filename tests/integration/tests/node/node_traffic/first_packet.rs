//! Tests that the first packet after attach passes: it waits neither for addresses nor for neighbours or programs.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Namespaces, Stage,
    node::{NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::{Servers, new_token, ping, tcp_get, udp_ask},
};

use super::{FAMILIES, PORT};

const PODS: usize = 5;
/// A probe starts a thread and enters a namespace; the packets themselves take microseconds. The retries of ARP, of TCP
/// and of duplicate address detection, which must not occur, take a second.
const PROMPT: Duration = Duration::from_millis(50);
const EVER: Duration = Duration::from_millis(500);

/// The first contact of each kind, each with a separate pod.
type Contact = fn(&Namespaces, std::net::IpAddr) -> Result<()>;

fn contacts() -> [(&'static str, Contact); 3] {
    [
        ("TCP", |from, to| Ok(tcp_get(from, to, PORT, EVER).map(drop)?)),
        ("UDP", |from, to| Ok(udp_ask(from, to, PORT, EVER).map(drop)?)),
        ("ping", |from, to| Ok(ping(from, to, &new_token(), EVER)?)),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_packet_passes_at_once() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("first", Manifest::overlapping()).await?;
    let _node = Servers::start(&stage.node, "node", PORT)?;
    for (what, contact) in contacts() {
        for v4 in FAMILIES {
            let node = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
            let mut took = Vec::new();
            for number in 0..PODS {
                let name = format!("first-{}-{number}", what.to_lowercase());
                let pod = stage.pod(&name).await?;
                let start = Instant::now();
                // The very first packet of one half of the pods is sent to the node, that of the other half is sent by
                // it.
                if number % 2 == 0 {
                    contact(&pod.inside, node).with_context(|| format!("{what} from {name} to the node"))?;
                } else {
                    // The pod's kernel replies, so that no server has to be started before.
                    ping(&stage.node, address(&pod, v4), &new_token(), EVER)
                        .with_context(|| format!("ping from the node to {name}"))?;
                }
                took.push(start.elapsed());
                let _server = Servers::start(&pod.inside, "pod", PORT)?;
                let start = Instant::now();
                contact(&stage.node, address(&pod, v4)).with_context(|| format!("{what} from the node to {name}"))?;
                took.push(start.elapsed());
                stage.kubelet.kill_pod(pod).await?;
            }
            took.sort_unstable();
            let (middle, last) = (took[took.len() / 2], took[took.len() - 1]);
            assert!(middle < PROMPT && last < EVER, "{what}, IPv4 {v4}: {took:?}");
        }
    }
    Ok(())
}
