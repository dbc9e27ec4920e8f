//! Tests who reaches whom across nodes, over each fabric, and that policies follow pods of other nodes.
//!
//! Every run has one bed with both fabrics, through IPv6 and a port that is not the default. The beds with each of them
//! alone are long tests; the default tunnel is that of `enemies`, `services`, `policies` and `faults` in every run.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    cluster::{
        objects, patience,
        wire::{OVERLAY_PORT, Wire, ip_packet, tunnelled_at},
    },
    echo::udp_echo,
    require,
    traffic::{Servers, new_token, ping, tcp_get},
    wait,
};
use serde_json::json;

use super::{
    super::scene::{
        ANSWER, PORT, address, ask, assert_reached, assert_silent, identity, patch_metadata, wait_for_silence,
    },
    bed::{Bed, NODES, SILENCE, Setting, network_of, pairs},
    content::passes_unchanged,
    ports,
};

/// The port of servers of the nodes themselves.
const NODE_PORT: u16 = 7070;

/// A port of the tunnels other than the default.
const OTHER_PORT: u16 = 8472;
/// The IP protocol number of UDP.
const UDP: u8 = 17;
/// Datagrams between pods that leave in fragments.
const DATAGRAM: usize = 4_000;
/// The port of their server.
const ECHO: u16 = 7200;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: one of three beds, with tunnels only"]
async fn pods_reach_those_of_their_network_on_every_node() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let setting = Setting {
        green: true,
        ..Setting::default()
    };
    let bed = Bed::start_with("fabric-overlay4", &setting).await?;
    bed.connected().await?;
    bed.overlaps()?;
    bed.matrix().assert_expected();
    content_is_whole(&bed).await?;
    only_tunnels_are_on_the_wire(&bed, &tunnel(OVERLAY_PORT, true)).await?;
    ports::follow_the_flows(&bed, OVERLAY_PORT)?;
    nodes_and_pods_reach_each_other(&bed)?;
    policies_follow_pods_of_other_nodes(&bed).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: one of three beds, with tunnels through IPv6 only"]
async fn pods_reach_those_of_their_network_through_ipv6_and_another_port() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let port = OTHER_PORT.to_string();
    let bed = Bed::start(
        "fabric-overlay6",
        &["--underlay-family", "ipv6", "--overlay-port", &port],
        None,
    )
    .await?;
    bed.connected().await?;
    bed.matrix().assert_expected();
    content_is_whole(&bed).await?;
    only_tunnels_are_on_the_wire(&bed, &tunnel(OTHER_PORT, false)).await?;
    ports::follow_the_flows(&bed, OTHER_PORT)?;
    nodes_and_pods_reach_each_other(&bed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "long: one of three beds, with both fabrics and the default tunnel"]
async fn pods_reach_those_of_their_network_without_a_tunnel() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let bed = beside_tunnels("fabric-native", &[]).await?;
    everything_through_both(&bed, tunnel(OVERLAY_PORT, true)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_reach_those_of_their_network_over_each_fabric() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let port = OTHER_PORT.to_string();
    let args = ["--underlay-family", "ipv6", "--overlay-port", &port];
    let bed = beside_tunnels("fabric-both", &args).await?;
    everything_through_both(&bed, tunnel(OTHER_PORT, false)).await
}

/// The default network and a tenant are without a tunnel, beside tenants with its addresses in tunnels.
async fn beside_tunnels(name: &str, args: &[&str]) -> Result<Bed> {
    let native = || json!({ "fabric": "Native" });
    let setting = Setting {
        green: true,
        specs: vec![("default", native()), ("red", native())],
        ..Setting::with_args(args)
    };
    Bed::start_with(name, &setting).await
}

async fn everything_through_both(bed: &Bed, tunnel: Tunnel) -> Result<()> {
    bed.connected().await?;
    bed.overlaps()?;
    bed.matrix().assert_expected();
    content_is_whole(bed).await?;
    let native = Tunnel {
        without: &["plain", "red-team"],
        ..tunnel
    };
    only_tunnels_are_on_the_wire(bed, &native).await?;
    ports::follow_the_flows(bed, native.port)?;
    nodes_and_pods_reach_each_other(bed)?;
    policies_follow_pods_of_other_nodes(bed).await
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

/// What is expected between the nodes.
struct Tunnel {
    port: u16,
    v4: bool,
    /// The teams whose networks have none.
    without: &'static [&'static str],
}

const fn tunnel(port: u16, v4: bool) -> Tunnel {
    Tunnel { port, v4, without: &[] }
}

/// Each packet between pods is in a tunnel, with the number of its network, and none has a pod's address; in networks
/// without a tunnel all have the pods' addresses.
async fn only_tunnels_are_on_the_wire(bed: &Bed, expected: &Tunnel) -> Result<()> {
    let known = bed.cluster.numbers().await?;
    let mut count = 0;
    for team in bed.teams {
        let number = known.iter().find(|(_, network)| *network == network_of(team));
        let number = number.map(|(number, _)| *number).context("a number")?;
        let exchange = Exchange {
            numbers: known.keys().copied().collect(),
            own: (!expected.without.contains(team)).then_some(number),
            team: of_team(bed, team),
            pods: bed.teams.iter().flat_map(|team| of_team(bed, team)).collect(),
        };
        for (from, to) in pairs() {
            // One exchange at a time: the sockets hold only so many frames.
            let (from, to) = (bed.pod(team, from), bed.pod(team, to));
            let wire = Wire::open(&bed.cluster)?;
            assert_reached(from, to);
            for v4 in [true, false] {
                let there = SocketAddr::new(address(to, v4), ECHO);
                udp_echo(&from.inside, there, &to.inside, ECHO, DATAGRAM)?;
                ping(&from.inside, there.ip(), &new_token(), ANSWER)?;
            }
            let frames = wire.frames()?;
            count += frames.len();
            let seen = exchange.ends(&frames, expected)?;
            for (from, to) in [(from, to), (to, from)] {
                for v4 in [true, false] {
                    let ends = (address(from, v4), address(to, v4));
                    ensure!(seen.contains(&ends), "{team}: {ends:?} is not among {seen:?}");
                }
            }
        }
        if exchange.own.is_none() {
            // The last packets of this network do not count for the next one.
            tokio::time::sleep(SILENCE).await;
        }
    }
    println!("{count} frames on the wire");
    Ok(())
}

/// The addresses of a team's pods.
fn of_team(bed: &Bed, team: &str) -> BTreeSet<IpAddr> {
    let pods = (1..=NODES).map(|node| bed.pod(team, node));
    pods.flat_map(|pod| [true, false].map(|v4| address(pod, v4))).collect()
}

/// What the pods of a team may send.
struct Exchange {
    /// The numbers of all networks.
    numbers: BTreeSet<u32>,
    /// That of the team's network, if it has a tunnel.
    own: Option<u32>,
    /// The addresses of its pods.
    team: BTreeSet<IpAddr>,
    /// Those of the pods of all teams.
    pods: BTreeSet<IpAddr>,
}

impl Exchange {
    /// The ends of the team's packets; none is on the wire in another way than expected.
    fn ends(&self, frames: &[Vec<u8>], expected: &Tunnel) -> Result<BTreeSet<(IpAddr, IpAddr)>> {
        let mut seen = BTreeSet::new();
        for (source, destination, protocol, payload) in frames.iter().filter_map(|frame| ip_packet(frame)) {
            // Packets to an address of another network are masqueraded, and leave as to any host.
            if self.pods.contains(&source) {
                ensure!(
                    self.own.is_none() && self.team.contains(&source) && self.team.contains(&destination),
                    "{source} to {destination} outside of a tunnel"
                );
                seen.insert((source, destination));
            } else if protocol == UDP
                && let Some((number, inner)) = tunnelled_at(expected.port, payload)
            {
                ensure!(source.is_ipv4() == expected.v4, "{source} to {destination}");
                let (from, to, ..) = ip_packet(inner).context("an IP packet in the tunnel")?;
                ensure!(self.numbers.contains(&number), "{from} to {to} in {number}");
                ensure!(self.pods.contains(&from) && self.pods.contains(&to), "{from} to {to}");
                if Some(number) == self.own {
                    ensure!(self.team.contains(&from) && self.team.contains(&to), "{from} to {to}");
                    seen.insert((from, to));
                }
            }
        }
        Ok(seen)
    }
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
                let red = tcp_get(&bed.pod("red-team", from).inside, there, NODE_PORT, SILENCE);
                ensure!(red.is_err(), "{red:?}");
            }
        }
    }
    Ok(())
}

/// A policy at the receiver finds pods of other nodes by their labels, also for connections that exist.
async fn policies_follow_pods_of_other_nodes(bed: &Bed) -> Result<()> {
    for team in bed.teams {
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
            wait::until(&what, patience(), async || {
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
