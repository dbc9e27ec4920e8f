//! Tests that interfaces have the MTU of their network, and that senders of larger packets get an error.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use kni_integration::{
    Manifest, Namespaces, Node, Stage,
    echo::{tcp_echo, udp_echo},
    node::{FABRIC_V4, FABRIC_V6},
    require,
    stage::{address, forwarding},
    traffic::{assert_path_limit, is_too_big, whole_datagrams},
};

use super::{FAMILIES, PORT};

fn manifests(mtu: u32) -> Vec<Manifest> {
    let network = Manifest::default_network("default", &["10.244.0.0/16", "fd00:244::/64"]);
    vec![network.spec(&format!("mtu: {mtu}"))]
}

fn headers(v4: bool) -> usize {
    if v4 { 20 + 8 } else { 40 + 8 }
}

async fn stage(name: &str, mtu: u32) -> Result<Stage> {
    let node = Node::new(name)?;
    forwarding(&node)?;
    Stage::on(node, manifests(mtu)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn jumbo_frames_pass_between_pods_and_shrink_beyond() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = stage("jumbo", 9000).await?;
    let pods = [stage.pod("jumbo-1").await?, stage.pod("jumbo-2").await?];
    assert_mtu(&stage, &pods[0], 9000).await?;
    for v4 in FAMILIES {
        let peer = SocketAddr::new(address(&pods[1], v4), PORT);
        assert_limit(&pods[0].inside, peer, 9000 - headers(v4))?;
        udp_echo(&pods[0].inside, peer, &pods[1].inside, PORT, 9000 - headers(v4))?;
        tcp_echo(&pods[0].inside, peer, &pods[1].inside, PORT, 1 << 20)?;
        // Behind the node's uplink the MTU is 1500.
        let fabric = SocketAddr::new(if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse()?, PORT);
        assert_path_limit(&pods[0].inside, fabric, 4000)?;
        tcp_echo(&pods[0].inside, fabric, stage.node.fabric(), PORT, 1 << 20)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_with_a_small_mtu_tells_the_outside() -> Result<()> {
    require!(root, netns, bpf, ip);
    let stage = stage("small", 1300).await?;
    let pods = [stage.pod("small-1").await?, stage.pod("small-2").await?];
    assert_mtu(&stage, &pods[0], 1300).await?;
    for v4 in FAMILIES {
        let [first, second] = [0, 1].map(|at| SocketAddr::new(address(&pods[at], v4), PORT));
        assert_limit(&pods[0].inside, second, 1300 - headers(v4))?;
        assert_limit(&stage.node, first, 1300 - headers(v4))?;
        udp_echo(&pods[0].inside, second, &pods[1].inside, PORT, 20_000)?;
        assert_path_limit(stage.node.fabric(), first, 1400)?;
        tcp_echo(stage.node.fabric(), first, &pods[0].inside, PORT, 1 << 20)?;
        tcp_echo(&stage.node, first, &pods[0].inside, PORT, 1 << 20)?;
    }
    Ok(())
}

async fn assert_mtu(stage: &Stage, pod: &kni_integration::Pod, mtu: u32) -> Result<()> {
    let interface = stage.interface(pod, "eth0").await?;
    assert_eq!(interface.mtu, mtu);
    for (ns, name) in [(&pod.inside, "eth0"), (&*stage.node, interface.host_ifname.as_str())] {
        let file = format!("/sys/class/net/{name}/mtu");
        // The node's sysfs shows only the node; the pod's interface is queried with ip.
        let shown = ns.run("ip", &["-j", "link", "show", "dev", name]).context(file)?;
        let shown: serde_json::Value = serde_json::from_str(&shown)?;
        assert_eq!(shown[0]["mtu"], mtu, "{name}");
    }
    Ok(())
}

/// Checks the largest datagram that is sent whole, and one with an additional byte.
fn assert_limit(from: &Namespaces, to: SocketAddr, most: usize) -> Result<()> {
    let socket = whole_datagrams(from, to)?;
    let sent = socket.send(&vec![0; most]);
    assert!(sent.is_ok(), "{most} bytes from {} to {to}: {sent:?}", from.name());
    let socket = whole_datagrams(from, to)?;
    let sent = socket.send(&vec![0; most + 1]);
    assert!(
        is_too_big(&sent),
        "{} bytes from {} to {to}: {sent:?}",
        most + 1,
        from.name()
    );
    Ok(())
}
