//! Tests that the first packet after attach passes: it waits neither for addresses nor for neighbours or programs.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, Stage,
    frames::PacketSocket,
    node::{NODE_V4, NODE_V6},
    patience, require,
    stage::address,
    traffic::{Servers, new_token, ping, syn_repeats, tcp_get, udp_ask},
};

use super::{FAMILIES, PORT};

const PODS: usize = 5;
/// The most that first packets may take longer than later ones of the same moment, of which the times show how busy the
/// machine is: what would delay all of them.
const DELAY: Duration = Duration::from_millis(500);

/// The first contact of each kind, each with a separate pod. UDP and ping send one packet, which must be the one that
/// arrives.
type Contact = fn(&Namespaces, std::net::IpAddr) -> Result<()>;

fn contacts() -> [(&'static str, Contact); 3] {
    [
        ("TCP", |from, to| Ok(tcp_get(from, to, PORT, patience()).map(drop)?)),
        ("UDP", |from, to| Ok(udp_ask(from, to, PORT, patience()).map(drop)?)),
        ("ping", |from, to| Ok(ping(from, to, &new_token(), patience())?)),
    ]
}

/// What would make a packet wait: repeated SYNs, and searches for neighbours and for their own address on the link of a
/// pod.
struct Waits<'a> {
    namespaces: [&'a Namespaces; 2],
    repeats: [u64; 2],
    link: PacketSocket,
}

impl<'a> Waits<'a> {
    fn watch(stage: &'a Stage, pod: &'a Pod) -> Result<Self> {
        let namespaces = [&*stage.node, &pod.inside];
        Ok(Self {
            namespaces,
            repeats: [syn_repeats(namespaces[0])?, syn_repeats(namespaces[1])?],
            link: PacketSocket::open(&pod.inside, "eth0")?,
        })
    }

    fn assert_none(&self) -> Result<()> {
        let repeats = [syn_repeats(self.namespaces[0])?, syn_repeats(self.namespaces[1])?];
        ensure!(repeats == self.repeats, "SYNs were repeated");
        // All frames of the contacts have been captured by now.
        let frames = Cell::new(0);
        let search = self.link.receive(Duration::from_millis(1), |frame| {
            frames.set(frames.get() + 1);
            searches(frame)
        })?;
        ensure!(search.is_none(), "a packet waits for a neighbour: {search:02x?}");
        ensure!(frames.get() > 0, "nothing was captured");
        Ok(())
    }
}

/// Whether it is a request of ARP, or a neighbour solicitation from an address.
fn searches(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x06]) => frame.get(20..22) == Some(&[0, 1]),
        Some([0x86, 0xdd]) => {
            let solicits = frame.get(20) == Some(&58) && frame.get(54) == Some(&135);
            // The kernel verifies link-local addresses, which no packet here uses.
            solicits && frame.get(22..38) != Some(&[0; 16])
        }
        _ => false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_packet_passes_at_once() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("first", Manifest::overlapping()).await?;
    let _node = Servers::start(&stage.node, "node", PORT)?;
    for (what, contact) in contacts() {
        for v4 in FAMILIES {
            let node = if v4 { NODE_V4 } else { NODE_V6 }.parse()?;
            let (mut first, mut later) = (Vec::new(), Vec::new());
            for number in 0..PODS {
                let name = format!("first-{}-{number}", what.to_lowercase());
                let pod = stage.pod(&name).await?;
                let waits = Waits::watch(&stage, &pod)?;
                let outward = || contact(&pod.inside, node).with_context(|| format!("{what} from {name} to the node"));
                // The pod's kernel replies, so that no server has to be started before.
                let inward = || {
                    ping(&stage.node, address(&pod, v4), &new_token(), patience())
                        .with_context(|| format!("ping from the node to {name}"))
                };
                // The very first packet of one half of the pods is sent to the node, that of the other half is sent by
                // it.
                for times in [&mut first, &mut later] {
                    times.push(timed(|| if number % 2 == 0 { outward() } else { inward() })?);
                }
                let _server = Servers::start(&pod.inside, "pod", PORT)?;
                for times in [&mut first, &mut later] {
                    times.push(timed(|| {
                        contact(&stage.node, address(&pod, v4))
                            .with_context(|| format!("{what} from the node to {name}"))
                    })?);
                }
                waits
                    .assert_none()
                    .with_context(|| format!("{what}, IPv4 {v4}, {name}"))?;
                stage.kubelet.kill_pod(pod).await?;
            }
            let middle = |times: &mut Vec<Duration>| {
                times.sort_unstable();
                times[times.len() / 2]
            };
            let (of_first, of_later) = (middle(&mut first), middle(&mut later));
            assert!(
                of_first < of_later * 3 + DELAY,
                "{what}, IPv4 {v4}: {first:?}, later {later:?}"
            );
        }
    }
    Ok(())
}

fn timed(contact: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    contact()?;
    Ok(start.elapsed())
}
