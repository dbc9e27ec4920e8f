//! Tests that the node has no access to an isolated network, even with manual routes.

use std::time::Duration;

use anyhow::Result;
use kni_integration::{
    frames::{Ip, Link, PacketSocket, Payload},
    node::{FABRIC_V4, FABRIC_V6, NODE_V4, NODE_V6},
    require,
    stage::address,
    traffic::{Matrix, Probe, new_token},
};

use super::{PORT, Scene};

#[tokio::test(flavor = "multi_thread")]
async fn a_route_by_hand_gives_the_node_no_access() -> Result<()> {
    require!(root, netns, bpf, ip);
    let scene = Scene::set("by-hand").await?;
    let (stage, pod) = (&scene.stage, scene.pod("blue-1"));
    let interface = stage.interface(pod, "eth0").await?;
    for v4 in [true, false] {
        let to = address(pod, v4);
        let routes = stage.node.run("ip", &["route", "get", &to.to_string()])?;
        assert!(routes.contains("uplink0"), "the node has a route to {to}: {routes}");
        // Also with a permanent neighbour entry, as for the agent's own pods.
        stage.node.ip(&[
            &format!("route add {to} dev {}", interface.host_ifname),
            &format!(
                "neighbour replace {to} lladdr {} dev {} nud permanent",
                interface.mac, interface.host_ifname
            ),
        ])?;
        stage
            .node
            .fabric()
            .ip(&[&format!("route add {to} via {}", if v4 { NODE_V4 } else { NODE_V6 })])?;
    }

    assert_eq!(stage.drops(pod, "to_pod", "host_not_allowed").await?, 0);
    let servers: Vec<_> = scene.servers.iter().collect();
    let mut probes = Vec::new();
    for v4 in [true, false] {
        for from in [&*stage.node, stage.node.fabric()] {
            let (to, expected) = (address(pod, v4), None);
            probes.push(Probe { from, to, expected });
        }
    }
    let matrix = Matrix::run(&probes, &servers, PORT, Duration::from_millis(500));
    matrix.assert_expected();
    // TCP, UDP and ping of both families from the node and from outside.
    let dropped = stage.drops(pod, "to_pod", "host_not_allowed").await?;
    assert!(dropped >= 12, "only {dropped} packets came as far as the program");

    // A frame sent directly at the node's end, bypassing the routing table.
    let socket = PacketSocket::open(&stage.node, &interface.host_ifname)?;
    let listener = PacketSocket::open(&pod.inside, "eth0")?;
    let [pod_mac, host_mac] = stage.macs(pod, "eth0").await?;
    for (v4, from) in [
        (true, FABRIC_V4),
        (true, "10.10.0.12"),
        (false, FABRIC_V6),
        (false, "fd10::12"),
    ] {
        let token = new_token();
        let packet = Ip::new(from.parse()?, address(pod, v4)).packet(&Payload::udp(53, PORT, token.as_bytes()));
        let before = stage.drops(pod, "to_pod", "host_not_allowed").await?;
        // The kernel returns an error to the sender of a dropped frame.
        let sent = socket.send(&Link::new(host_mac, pod_mac).frame(&packet));
        assert_eq!(sent.err().and_then(|e| e.raw_os_error()), Some(libc::ENOBUFS));
        stage
            .wait_for_drops(pod, "to_pod", "host_not_allowed", before + 1)
            .await?;
        let arrived = listener.receive(Duration::from_millis(20), |frame| {
            frame.windows(token.len()).any(|window| window == token.as_bytes())
        })?;
        assert_eq!(arrived, None, "a frame from {from} reached the pod");
    }
    Ok(())
}
