//! Tests the paths and counters of exchanged packets.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Pod, Stage,
    echo::{pattern, tcp_echo, udp_echo},
    frames::{PacketSocket, checksum},
    require,
    stage::address,
    traffic::{Matrix, Probe, Servers, udp_ask},
};

use super::{Ends, MANY, PORT, networks, passed, patience};

/// Sent and received packets of a pod in the operators' view.
async fn counted(stage: &Stage, pod: &Pod) -> Result<[u64; 2]> {
    let interface = stage.interface(pod, "eth0").await?;
    ensure!(interface.healthy, "{:?}", interface.problems);
    let packets = |counter: Option<kni_proto::runtime::Counter>| counter.unwrap_or_default().packets;
    Ok([packets(interface.from_pod), packets(interface.to_pod)])
}

#[tokio::test(flavor = "multi_thread")]
async fn datagrams_pass_the_stack_by_and_are_counted_as_ever() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-udp", networks()).await?;
    let (client, server) = (stage.pod("client").await?, stage.pod("server").await?);
    for v4 in [true, false] {
        let ends = Ends::between(&client, &server, v4)?;
        // Policies are evaluated for the first two packets, which open and confirm the flow.
        ends.exchange(b"first")?;
        let before = [counted(&stage, &client).await?, counted(&stage, &server).await?];
        let watchers = [passed(&stage, &client).await?, passed(&stage, &server).await?];
        for number in 0..MANY {
            ends.exchange(&pattern(usize::try_from(number)? * 7 % 1400 + 1))?;
        }
        let after = [counted(&stage, &client).await?, counted(&stage, &server).await?];
        for (before, after) in before.iter().zip(after) {
            for (before, after) in before.iter().zip(after) {
                // Neighbour discovery may add one or two.
                ensure!((MANY..MANY + 4).contains(&(after - before)), "{before} {after}");
            }
        }
        for watcher in watchers {
            ensure!(watcher.seen()? < 4, "{} packets took the slow way", watcher.seen()?);
        }
    }
    Ok(())
}

/// The result of the checksum of a UDP packet, which is 0 if it is correct.
fn wrong_checksum(frame: &[u8]) -> Option<u16> {
    let (addresses, header) = match frame.get(12..14)? {
        [0x08, 0x00] => (frame.get(26..34)?, 34),
        [0x86, 0xdd] => (frame.get(22..54)?, 54),
        _ => return None,
    };
    let udp = frame.get(header..)?;
    let length = u16::from_be_bytes([udp[4], udp[5]]);
    let (pseudo, udp) = ([0, 17, udp[4], udp[5]], udp.get(..length.into())?);
    Some(checksum(&[addresses, &pseudo, udp]))
}

/// After the redirect it is unknown that a checksum is still to be computed.
#[tokio::test(flavor = "multi_thread")]
async fn checksums_are_finished_before_the_frame_leaves_the_pod() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-sums", networks()).await?;
    let (client, server) = (stage.pod("client").await?, stage.pod("server").await?);
    for v4 in [true, false] {
        let ends = Ends::between(&client, &server, v4)?;
        ends.exchange(b"first")?;
        let watcher = passed(&stage, &client).await?;
        let arriving = PacketSocket::open(&server.inside, "eth0")?;
        let token = b"a datagram of odd length";
        let is_it = |frame: &[u8]| frame.windows(token.len()).any(|bytes| bytes == token);
        // A packet that makes the flow a stream takes the slow way: at most two, in different windows of time.
        let mut slow = 0;
        for _ in 0..3 {
            let before = watcher.seen()?;
            ends.exchange(token)?;
            let frame = arriving.receive(patience(), is_it)?.context("it does not arrive")?;
            assert_eq!(wrong_checksum(&frame), Some(0), "{frame:02x?}");
            slow += u32::from(watcher.seen()? != before);
        }
        assert!(slow < 3, "all took the slow way");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn all_else_takes_the_slow_way() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = Stage::start("xdp-else", networks()).await?;
    let (client, server) = (stage.pod("client").await?, stage.pod("server").await?);
    for v4 in [true, false] {
        let to = SocketAddr::new(address(&server, v4), 4000);
        let watcher = passed(&stage, &client).await?;
        tcp_echo(&client.inside, to, &server.inside, 4000, 1 << 20)?;
        let tcp = watcher.seen()?;
        ensure!(tcp > 5, "only {tcp} TCP segments passed");
        // Longer than the MTU: fragments.
        udp_echo(&client.inside, to, &server.inside, 4000, 20_000)?;
        udp_echo(&client.inside, to, &server.inside, 4000, 65_000)?;
        ensure!(watcher.seen()? > tcp + 20, "fragments do not pass");
    }
    Ok(())
}

/// Between networks, to pods without XDP, to the node and from it.
#[tokio::test(flavor = "multi_thread")]
async fn networks_stay_apart_and_everybody_else_is_reached() -> Result<()> {
    require!(root, netns, bpf, ip);
    let patience = Duration::from_millis(800);
    let stage = Stage::start("xdp-apart", networks()).await?;
    let mut pods = Vec::new();
    for network in ["blue", "red"] {
        for (number, ips) in [(1, "10.10.0.11,fd10::11"), (2, "10.10.0.12,fd10::12")] {
            pods.push(stage.pod_in(network, &format!("{network}-{number}"), ips).await?);
        }
    }
    pods.push(stage.pod("default").await?);
    pods.push(stage.pod_with("plain-1", &[("kni.dev/network", "plain")]).await?);
    pods.push(stage.pod_with("plain-2", &[("kni.dev/network", "plain")]).await?);
    let mut servers = vec![Servers::start(&stage.node, "node", PORT)?];
    for pod in &pods {
        servers.push(Servers::start(&pod.inside, &pod.name, PORT)?);
    }
    let pod = |name: &str| pods.iter().find(|pod| pod.name == name).expect("a pod of the test");
    let mut probes = Vec::new();
    let mut ask = |from, to: &str, expected| -> Result<()> {
        let to = to.parse()?;
        probes.push(Probe { from, to, expected });
        Ok(())
    };
    for (a, b) in [("10.10.0.11", "10.10.0.12"), ("fd10::11", "fd10::12")] {
        for network in ["blue", "red"] {
            let [one, two] = [1, 2].map(|number| pod(&format!("{network}-{number}")));
            ask(&one.inside, b, Some(&two.name))?;
            ask(&two.inside, a, Some(&one.name))?;
        }
        ask(&pod("default").inside, a, None)?;
        ask(&pod("plain-1").inside, a, None)?;
        ask(&stage.node, a, None)?;
    }
    for v4 in [true, false] {
        let to = address(pod("plain-2"), v4).to_string();
        ask(&pod("plain-1").inside, &to, Some("plain-2"))?;
        ask(&pod("blue-1").inside, &to, None)?;
        let to = address(pod("default"), v4).to_string();
        ask(&stage.node, &to, Some("default"))?;
        ask(&pod("blue-1").inside, &to, None)?;
        let node = if v4 {
            kni_integration::node::NODE_V4
        } else {
            kni_integration::node::NODE_V6
        };
        ask(&pod("default").inside, node, Some("node"))?;
        ask(&pod("red-1").inside, node, None)?;
    }
    let all: Vec<_> = servers.iter().collect();
    // Again with flows that exist.
    for _ in 0..2 {
        Matrix::run(&probes, &all, PORT, patience).assert_expected();
    }
    let to = address(pod("blue-2"), true);
    let answer = udp_ask(&pod("blue-1").inside, to, PORT, super::patience());
    ensure!(
        answer.is_ok_and(|answer| answer.identity == "blue-2"),
        "the wrong one answers"
    );
    Ok(())
}
