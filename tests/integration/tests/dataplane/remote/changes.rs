//! Tests changes of what a node knows of others that have no room.

use std::{collections::BTreeMap, net::Ipv4Addr};

use anyhow::{Result, ensure};
use kni_common::{Direction::FromPod, Verdict};
use kni_dataplane::{DataplaneError, FabricRows, Hop, NetworkFabric, Way};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};
use kni_model::NetworkId;
use nix::net::if_::if_nametoindex;

use super::scene::{A, BLUE, MTU, NODE, OWN, REMOTE, THEIRS, families, inside, out, segment, tunnel_ends, underlay};

/// The blue network's remote pods at [`NODE`], if `led`, and more ways.
fn rows(led: bool, more: u32) -> Result<FabricRows> {
    let hop = Hop {
        ifindex: if_nametoindex("overlay0")?,
        mtu: MTU,
        stamp: 1,
    };
    let way = |underlay| Way {
        underlay,
        overlay: true,
    };
    let node = way(underlay(NODE, true));
    let more = (0..more).map(|number| way(Ipv4Addr::from(0x0a80_0000 + number).into()));
    let blocks = ["10.0.1.0/24", "fd00:0:0:1::/64"].map(|net| net.parse().map(|net| (net, node)));
    let blocks: BTreeMap<_, _> = blocks.into_iter().collect::<Result<_, _>>()?;
    let network = NetworkFabric {
        number: Some(4097),
        blocks: if led { blocks } else { BTreeMap::new() },
        ..NetworkFabric::default()
    };
    Ok(FabricRows {
        tunnel: Some(tunnel_ends()),
        ways: more.chain([node]).map(|way| (way, hop)).collect(),
        networks: [(NetworkId::try_from(BLUE)?, network)].into(),
        egress: BTreeMap::new(),
    })
}

#[test]
fn a_change_without_room_withdraws_what_it_can() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("no-room", |scene| {
        let dataplane = scene.dataplane();
        dataplane.set_fabric(&rows(true, 0)?)?;
        for ends in families() {
            scene.send(A, &out(ends, &segment(TcpFlags::SYN)))?;
            scene.tunnelled(underlay(NODE, true))?;
        }
        let refused = dataplane.set_fabric(&rows(false, 9000)?);
        ensure!(
            matches!(refused, Err(DataplaneError::TooManyNodes { .. })),
            "{refused:?}"
        );
        for ends in families() {
            // Of its flow; and a new one.
            for (flags, reason) in [
                (TcpFlags::ACK, Verdict::DestinationNotReady),
                (TcpFlags::SYN, Verdict::NoDestination),
            ] {
                let port = if flags == TcpFlags::SYN { OWN + 1 } else { OWN };
                let packet = out(ends, &Payload::tcp(port, THEIRS, flags));
                scene.dropped("a former pod", FromPod, reason, || scene.send(A, &packet))?;
            }
        }
        // Its own place is free again once the others are gone.
        dataplane.set_fabric(&rows(true, 0)?)?;
        let there = dataplane.other_node(NetworkId::try_from(BLUE)?, REMOTE[0])?;
        ensure!(there.is_some_and(|node| node.mtu == MTU), "{there:?}");
        scene.quiet()
    })
}
