//! Tests that no connection is reset where a node takes or has an egress address and does not know the nodes that share
//! it, or has no uplink for a moment: its stack has none of their connections.

use anyhow::{Context as _, Result, ensure};
use kni_api::NodeEndpoint;
use kni_integration::{
    cluster::{Fault, Member, Rule, patience},
    frames::{Ip, Link, PacketSocket, Payload, TcpFlags},
    wait,
};
use kube::{Api, api::DeleteParams};
use nix::sys::signal::Signal;

use super::{super::egress_owners::mac, ADDRESSES, OUTSIDE, Scene, assess, dropped, ip};

/// The position of the node behind a proxy.
pub(super) const PROXIED: usize = 2;
/// A port of the host outside that no pod has a connection with.
const FOREIGN_PORT: u16 = 9;
/// Segments of a family for another node while the owner has no route.
const SEGMENTS: u64 = 100;

/// Moves the addresses from `owner` to a node that is not confirmed, under traffic of all nodes, and from there to one
/// that has just started.
pub(super) async fn the_owner_knows_the_other_nodes_late(scene: &mut Scene, owner: usize) -> Result<()> {
    let next = (0..PROXIED).find(|node| *node != owner).context("another node")?;
    owner_has_no_default_route(scene, owner).await?;
    owner_is_not_confirmed(scene, next).await?;
    owner_has_not_read_all(scene).await
}

/// The uplink is the interface of the default route. Its addresses stay when the route goes.
async fn owner_has_no_default_route(scene: &Scene, owner: usize) -> Result<()> {
    let streams = scene.traffic(&[0, 1, 2])?;
    let member = &scene.cluster.nodes[owner];
    let mut routes = Vec::new();
    for family in ["-4", "-6"] {
        let shown = member.node.run("ip", &[family, "route", "show", "default"])?;
        let route = shown.lines().next().context("no default route")?.trim().to_owned();
        change_route(member, family, "del", &route)?;
        routes.push((family, route));
    }
    let lost = "the node has no uplink";
    ensure!(
        member.agent.wait_for_log(lost, patience()),
        "not noticed: {}",
        member.agent.log()
    );
    others_get_their_segments(scene, owner).await?;
    for (family, route) in routes {
        change_route(member, family, "add", &route)?;
    }
    scene.all_leave(&[0, 1, 2]).await?;
    assess("owner without a route", streams);
    Ok(())
}

/// Sends segments to ports of the other nodes' units. Those nodes count what comes and belongs to no connection; the
/// stack of the owner would reset it.
async fn others_get_their_segments(scene: &Scene, owner: usize) -> Result<()> {
    let link = Link::new([2, 0, 0, 0, 0, 0x78], mac(&scene.cluster, owner)?);
    let socket = PacketSocket::open(scene.cluster.fabric.inside(), "fabric0")?;
    for (position, member) in scene.cluster.nodes.iter().enumerate() {
        if position == owner {
            continue;
        }
        let before = dropped(member, "from_overlay", "no_flow").await?;
        for family in [0, 1] {
            let unit = scene.units(family).await?.get(&member.name).copied();
            let port = u16::from(unit.context("no unit")?) * 1024 + 1;
            let packet = Ip::new(ip(OUTSIDE[family]), ip(ADDRESSES[family]));
            let frame = link.frame(&packet.packet(&Payload::tcp(FOREIGN_PORT, port, TcpFlags::ACK)));
            for _ in 0..SEGMENTS {
                socket.send(&frame)?;
            }
        }
        let sent = 2 * SEGMENTS;
        wait::until("the other node gets its segments", patience(), async || {
            let more = dropped(member, "from_overlay", "no_flow").await? - before;
            ensure!(more >= sent, "{}: {more} of {sent}", member.name);
            Ok(true)
        })
        .await?;
    }
    Ok(())
}

fn change_route(member: &Member, family: &str, verb: &str, route: &str) -> Result<()> {
    let arguments = [family, "route", verb].into_iter().chain(route.split_whitespace());
    member.node.run("ip", &arguments.collect::<Vec<_>>()).map(drop)
}

/// A node that is not confirmed knows no way to another one, and none of them a way to it.
async fn owner_is_not_confirmed(scene: &mut Scene, node: usize) -> Result<()> {
    let streams = scene.traffic(&[0, 1, 2])?;
    scene.cluster.controllers[0].signal(Signal::SIGTERM)?;
    let endpoints: Api<NodeEndpoint> = Api::all(scene.cluster.client.clone());
    let name = scene.cluster.nodes[node].name.clone();
    let before = endpoints.get(&name).await?.metadata.uid;
    endpoints.delete(&name, &DeleteParams::default()).await?;
    wait::until("the node reports itself again, unconfirmed", patience(), async || {
        let endpoint = endpoints.get_opt(&name).await?;
        Ok(endpoint.is_some_and(|endpoint| endpoint.metadata.uid != before && endpoint.status.is_none()))
    })
    .await?;
    scene.assign(node).await?;
    wait::until("the node has the addresses", patience(), async || {
        Ok(scene.owner().await? == node)
    })
    .await?;
    scene.cluster.start_controller().await?;
    scene.all_leave(&[0, 1, 2]).await?;
    assess("owner not confirmed", streams);
    Ok(())
}

/// An agent that has just started knows the claims before it knows which nodes share the addresses.
async fn owner_has_not_read_all(scene: &mut Scene) -> Result<()> {
    let member = &mut scene.cluster.nodes[PROXIED];
    member.agent.kill9()?;
    let proxy = member.proxy.as_ref().context("no proxy")?;
    proxy.faults.set(vec![Rule::any("/addressblocks", Fault::Answer(503))]);
    member.agent.restart()?;
    scene.assign(PROXIED).await?;
    for family in [0, 1] {
        wait::until("the node waits for what it does not know", patience(), async || {
            let status = scene.claim(family).await?.status.context("no status")?;
            let conditions = status.conditions;
            ensure!(
                conditions.iter().any(|one| one.reason == "AddressNotForwarded"),
                "{conditions:?}"
            );
            Ok(true)
        })
        .await?;
    }
    let member = &scene.cluster.nodes[PROXIED];
    let shown = member.node.run("ip", &["address", "show", "dev", "uplink0"])?;
    for address in ADDRESSES {
        ensure!(!shown.contains(&format!(" {address}/")), "{shown}");
    }
    member.proxy.as_ref().context("no proxy")?.faults.clear();
    wait::until("the node has the addresses", patience(), async || {
        Ok(scene.owner().await? == PROXIED)
    })
    .await?;
    scene.all_leave(&[0, 1, 2]).await
}
