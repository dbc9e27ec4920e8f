//! Tests who reaches whom across nodes, over each fabric, and that policies follow pods of other nodes.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    cluster::{
        PATIENCE, objects,
        wire::{Wire, ip_packet, tunnelled},
    },
    require,
    traffic::{Servers, tcp_get},
    wait,
};
use serde_json::json;

use super::{
    super::scene::{
        ANSWER, PORT, address, ask, assert_reached, assert_silent, identity, patch_metadata, wait_for_silence,
    },
    bed::{Bed, NODES, TEAMS},
    content::passes_unchanged,
    enemies::numbers as numbers_of,
};

/// The port of servers of the nodes themselves.
const NODE_PORT: u16 = 7070;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_reach_those_of_their_network_on_every_node() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-overlay4", &[], None).await?;
    bed.connected().await?;
    ensure!(bed.overlaps(), "red and blue are meant to have the same addresses");
    bed.matrix().assert_expected();
    content_is_whole(&bed).await?;
    only_tunnels_are_on_the_wire(&bed, true).await?;
    nodes_and_pods_reach_each_other(&bed)?;
    policies_follow_pods_of_other_nodes(&bed).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_reach_those_of_their_network_through_ipv6() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-overlay6", &["--underlay-family", "ipv6"], None).await?;
    bed.connected().await?;
    bed.matrix().assert_expected();
    content_is_whole(&bed).await?;
    only_tunnels_are_on_the_wire(&bed, false).await?;
    nodes_and_pods_reach_each_other(&bed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_reach_those_of_their_network_without_a_tunnel() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = Bed::start("fabric-native", &[], Some("Native")).await?;
    bed.connected().await?;
    bed.matrix().assert_expected();
    content_is_whole(&bed).await?;
    nodes_and_pods_reach_each_other(&bed)?;
    // Pods have their own addresses on the wire.
    let wire = Wire::open(&bed.cluster)?;
    assert_reached(bed.pod("plain", 1), bed.pod("plain", 2));
    let pods: BTreeSet<IpAddr> = [1, 2].map(|node| address(bed.pod("plain", node), true)).into();
    let frames = wire.frames()?;
    let plain = frames.iter().filter_map(|frame| ip_packet(frame));
    let seen: BTreeSet<IpAddr> = plain
        .map(|(source, ..)| source)
        .filter(|ip| pods.contains(ip))
        .collect();
    ensure!(seen == pods, "{seen:?}");
    policies_follow_pods_of_other_nodes(&bed).await
}

/// Each failure shows what the nodes dropped, and where sockets of pods stopped.
async fn content_is_whole(bed: &Bed) -> Result<()> {
    let Err(failed) = passes_unchanged(bed) else {
        return Ok(());
    };
    let mut shown = vec![bed.drops().await?];
    for member in &bed.cluster.nodes {
        for arguments in [&["-s", "link"][..], &["-s", "-s", "neighbour"]] {
            shown.push(member.node.run("ip", arguments)?);
        }
    }
    for pod in &bed.pods {
        shown.push(format!("{}: {}", identity(pod), pod.inside.run("ss", &["-tani"])?));
    }
    Err(failed.context(format!("{}\n{}", shown.join("\n"), bed.state())))
}

/// Each packet between the nodes' addresses is in a tunnel, with the number of its network; none has a pod's address.
async fn only_tunnels_are_on_the_wire(bed: &Bed, v4: bool) -> Result<()> {
    let mut frames = Vec::new();
    for team in TEAMS {
        for (from, to) in [(1, 2), (2, 3), (3, 1)] {
            // One exchange at a time: the sockets hold only so many frames.
            let wire = Wire::open(&bed.cluster)?;
            assert_reached(bed.pod(team, from), bed.pod(team, to));
            frames.extend(wire.frames()?);
        }
    }
    let pods: BTreeSet<IpAddr> = bed
        .pods
        .iter()
        .flat_map(|pod| [true, false].map(|v4| address(pod, v4)))
        .collect();
    let mut numbers = BTreeSet::new();
    for (source, destination, protocol, payload) in frames.iter().filter_map(|frame| ip_packet(frame)) {
        // Packets to an address of another network are masqueraded, and leave as to any host.
        ensure!(!pods.contains(&source), "{source} to {destination} outside of a tunnel");
        if protocol == 17
            && let Some((number, inner)) = tunnelled(payload)
        {
            ensure!(source.is_ipv4() == v4, "{source} to {destination}");
            let (from, to, ..) = ip_packet(inner).context("an IP packet in the tunnel")?;
            ensure!(pods.contains(&from) && pods.contains(&to), "{from} to {to}");
            numbers.insert(number);
        }
    }
    let expected: BTreeSet<u32> = numbers_of(bed).await?.into();
    ensure!(numbers == expected, "{numbers:?} instead of {expected:?}");
    println!("{} frames on the wire", frames.len());
    Ok(())
}

/// Each sees the other's own address.
fn nodes_and_pods_reach_each_other(bed: &Bed) -> Result<()> {
    let nodes = &bed.cluster.nodes;
    let servers = nodes
        .iter()
        .map(|member| Servers::start(&member.node, &member.name, NODE_PORT));
    let _servers = servers.collect::<Result<Vec<_>>>()?;
    for from in 1..=NODES {
        for to in (1..=NODES).filter(|to| *to != from) {
            for v4 in [true, false] {
                let family = usize::from(!v4);
                let (pod, member) = (bed.pod("plain", to), &nodes[from - 1]);
                let own: IpAddr = member.node.addresses()[family].parse()?;
                let answer = tcp_get(&member.node, address(pod, v4), PORT, ANSWER);
                let answer =
                    answer.with_context(|| format!("{} asks {}{}", member.name, identity(pod), bed.state()))?;
                ensure!(
                    answer.identity == identity(pod) && answer.client.ip() == own,
                    "{answer:?}"
                );

                let (pod, member) = (bed.pod("plain", from), &nodes[to - 1]);
                let there: IpAddr = member.node.addresses()[family].parse()?;
                let answer = tcp_get(&pod.inside, there, NODE_PORT, ANSWER);
                let answer =
                    answer.with_context(|| format!("{} asks {}{}", identity(pod), member.name, bed.state()))?;
                ensure!(
                    answer.identity == member.name && answer.client.ip() == address(pod, v4),
                    "{answer:?}"
                );
                // Other networks have no access to nodes.
                let red = tcp_get(&bed.pod("red-team", from).inside, there, NODE_PORT, super::bed::SILENCE);
                ensure!(red.is_err(), "{red:?}");
            }
        }
    }
    Ok(())
}

/// A policy at the receiver finds pods of other nodes by their labels, also for connections that exist.
async fn policies_follow_pods_of_other_nodes(bed: &Bed) -> Result<()> {
    for team in TEAMS {
        let (server, friend, stranger) = (bed.pod(team, 1), bed.pod(team, 2), bed.pod(team, 3));
        patch_metadata(&bed.cluster, friend, &json!({ "labels": { "friend": "yes" } })).await?;
        let spec = json!({
            "podSelector": {},
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "friend": "yes" } } }] }],
        });
        let policy = objects::policy(team, "friends", &spec);
        bed.cluster.apply(std::slice::from_ref(&policy)).await?;
        wait_for_silence(stranger, server).await?;
        let reached = async |from, to| {
            let what = format!("{} reaches {}", identity(from), identity(to));
            wait::until(&what, PATIENCE, async || {
                Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
            })
            .await
        };
        reached(friend, server).await?;
        assert_silent(stranger, server);
        patch_metadata(&bed.cluster, friend, &json!({ "labels": { "friend": null } })).await?;
        wait_for_silence(friend, server).await?;
        bed.cluster.delete(&policy).await?;
        reached(stranger, server).await?;
    }
    Ok(())
}
