//! Tests that pods do not send to the port of tunnels while the node has no tunnel.

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction::FromPod, Verdict, overlay::Overlay};
use kni_dataplane::{EgressRow, EgressSource, FabricRows, NetworkRoutes, RouteEgress, TunnelEnds};
use kni_integration::{
    frames::{Ip, Payload},
    require,
};
use kni_model::{EndpointId, NetworkId};
use nix::net::if_::if_nametoindex;

use super::scene::{A, BLUE, LOCAL, NODE, Scene, VXLAN_PORT, inside, own_underlay, publish, tunnel_ends, underlay};

/// The way of what leaves the network of [`A`].
fn set_egress(scene: &Scene<'_>, egress: RouteEgress) -> Result<()> {
    let routes = NetworkRoutes {
        subnets: vec!["10.0.0.0/16".parse()?, "fd00::/48".parse()?],
        service_subnets: Vec::new(),
        egress,
    };
    Ok(scene.dataplane().set_routes(NetworkId::try_from(BLUE)?, &routes)?)
}

/// The network of [`A`] leaves the node with the node's addresses.
fn masquerade(scene: &Scene<'_>) -> Result<()> {
    let dataplane = scene.dataplane();
    dataplane.set_uplink(Some(if_nametoindex("uplink0")?))?;
    set_egress(scene, RouteEgress::Masquerade { host_access: false })?;
    let TunnelEnds { ipv4, ipv6, .. } = tunnel_ends();
    let source = EgressSource {
        ipv4,
        ipv6,
        first: 61_000,
        last: u16::MAX,
        shared_v4: false,
        shared_v6: false,
    };
    Ok(dataplane.set_masquerade(EndpointId(A), &EgressRow::From(source))?)
}

/// A packet of [`A`] that is a forged one of the tunnel once it has left the node.
fn forged(family: usize) -> Vec<u8> {
    let content = [&[8, 0, 0, 0, 0, 0x10, 1, 0][..], &[0; 40]].concat();
    let node = underlay(NODE, family == 0);
    Ip::new(LOCAL[family], node).packet(&Payload::udp(5555, VXLAN_PORT, &content))
}

#[test]
fn the_port_of_tunnels_is_closed_to_pods_without_a_tunnel() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-guard", |scene| {
        scene.without_tunnel()?;
        masquerade(scene)?;
        for family in [0, 1] {
            scene.send_unexplained(A, &forged(family))?;
            let left = scene.tunnelled(underlay(NODE, family == 0))?;
            ensure!(
                left.from == own_underlay(family == 0),
                "{left:?}: without the port, it leaves"
            );
        }
        ensure!(scene.flows() == 2, "{} rows of flows", scene.flows());
        scene.dataplane().guard_tunnel_port(VXLAN_PORT)?;
        ensure!(scene.flows() == 0, "flows to the port remain");
        let without = FabricRows::default();
        let with = FabricRows {
            tunnel: Some(tunnel_ends()),
            ..FabricRows::default()
        };
        for rows in [None, Some(&without), Some(&with), Some(&without)] {
            if let Some(rows) = rows {
                scene.dataplane().set_fabric(rows)?;
            }
            for family in [0, 1] {
                scene
                    .dropped("to the port", FromPod, Verdict::OverlayPort, || {
                        scene.send(A, &forged(family))
                    })
                    .with_context(|| format!("{rows:?}"))?;
            }
        }
        let left = Overlay {
            port: VXLAN_PORT.to_be_bytes(),
            ..Overlay::default()
        };
        let row = scene.overlay()?;
        ensure!(row == left, "{row:?}");
        scene.quiet()
    })
}

/// The node's stack would forward such a packet. Behind it, `to_uplink` is a second border.
#[test]
fn the_port_of_tunnels_is_closed_to_pods_that_the_stack_forwards() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("port-stack", |scene| {
        scene.without_tunnel()?;
        let dataplane = scene.dataplane();
        publish(dataplane, A, BLUE, LOCAL, true)?;
        set_egress(scene, RouteEgress::Stack)?;
        let given_to_stack = || -> Result<u64> {
            let forwarded = dataplane.forwarded(EndpointId(A))?.into_iter();
            let counts = forwarded.filter(|(from, verdict, _)| (*from, *verdict) == (FromPod, Verdict::PassedToStack));
            Ok(counts.map(|(_, _, count)| count.packets).sum())
        };
        for family in [0, 1] {
            scene.send_unexplained(A, &forged(family))?;
        }
        let before = given_to_stack()?;
        ensure!(before == 2, "{before} packets: without the port, the stack gets them");
        dataplane.guard_tunnel_port(VXLAN_PORT)?;
        for family in [0, 1] {
            scene.dropped("to the port", FromPod, Verdict::OverlayPort, || {
                scene.send_unexplained(A, &forged(family))
            })?;
        }
        let after = given_to_stack()?;
        ensure!(after == before, "{} packets passed the border", after - before);
        Ok(())
    })
}
