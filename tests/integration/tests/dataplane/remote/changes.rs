//! Tests changes of what a node knows of others that cannot be carried out as a whole.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use kni_common::{Direction::FromPod, Verdict};
use kni_dataplane::{DataplaneError, FabricRows, Hop, NetworkFabric, Way};
use kni_fabric::{Desired, Fabric, Path, Tunnel};
use kni_integration::{
    frames::{Payload, TcpFlags},
    require,
};
use kni_model::NetworkId;
use nix::net::if_::if_nametoindex;

use super::scene::{
    A, BLUE, Ends, MTU, NODE, OTHER, OWN, REMOTE, THEIRS, families, inside, out, segment, tunnel_ends, underlay,
};

/// The blue network's remote pods at [`NODE`], if `led`, and more ways.
fn rows(led: bool, more: u32) -> Result<FabricRows> {
    let hop = Hop {
        ifindex: Some(if_nametoindex("overlay0")?),
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

/// The blue network's pods in these blocks, each at a node, as the agent applies it.
fn desired(blocks: &[(&str, u32)]) -> Result<Desired> {
    let way = |number| Way {
        underlay: underlay(number, true),
        overlay: true,
    };
    let ends = tunnel_ends();
    let blocks = blocks.iter().map(|(net, number)| Ok((net.parse()?, way(*number))));
    let network = NetworkFabric {
        number: Some(4097),
        blocks: blocks.collect::<Result<_>>()?,
        ..NetworkFabric::default()
    };
    Ok(Desired {
        tunnel: Some(Tunnel {
            ipv4: ends.ipv4,
            ipv6: ends.ipv6,
            port: ends.port,
            mtu: MTU,
            host_network: None,
        }),
        ways: [NODE, OTHER]
            .map(|number| (way(number), Path { mtu: MTU, stamp: 1 }))
            .into(),
        networks: [(NetworkId::try_from(BLUE)?, network)].into(),
        ..Desired::default()
    })
}

#[test]
fn a_tunnel_device_that_cannot_be_made_keeps_no_withdrawn_row() -> Result<()> {
    require!(root, netns, bpf, ip);
    inside("no-device", |scene| {
        let dataplane = scene.dataplane();
        dataplane.set_fabric(&rows(true, 0)?)?;
        let [v4, v6] = families();
        for (family, ends) in [v4, v6].into_iter().enumerate() {
            scene.send(A, &out(ends, &segment(TcpFlags::SYN)))?;
            scene
                .tunnelled(underlay(NODE, true))
                .with_context(|| format!("family {family}"))?;
        }
        // Another device has the port.
        let fabric = Fabric::new(Arc::clone(dataplane))?;
        let apply = |desired: &Desired| tokio::runtime::Handle::current().block_on(fabric.apply(desired));
        let refused = apply(&desired(&[("10.0.1.0/24", NODE), ("10.0.7.0/24", OTHER)])?);
        let refused = refused.err().context("the port is taken")?.to_string();
        ensure!(refused.contains("that of device overlay0"), "{refused}");
        ensure!(fabric.problem().is_some(), "the error is reported");

        let withdrawn = |ends: Ends| -> Result<()> {
            for (flags, reason) in [
                (TcpFlags::ACK, Verdict::DestinationNotReady),
                (TcpFlags::SYN, Verdict::NoDestination),
            ] {
                let port = if flags == TcpFlags::SYN { OWN + 1 } else { OWN };
                let packet = out(ends, &Payload::tcp(port, THEIRS, flags));
                scene.dropped("a former pod", FromPod, reason, || scene.send(A, &packet))?;
            }
            Ok(())
        };
        withdrawn(v6)?;
        // What is still desired stays as it was, and nothing is added without a device.
        scene.send(A, &out(v4, &segment(TcpFlags::ACK)))?;
        scene.tunnelled(underlay(NODE, true))?;
        let added = dataplane.other_node(NetworkId::try_from(BLUE)?, "10.0.7.9".parse()?)?;
        ensure!(added.is_none(), "{added:?}");
        apply(&desired(&[])?).err().context("the port is still taken")?;
        withdrawn(v4)?;
        scene.quiet()
    })
}
