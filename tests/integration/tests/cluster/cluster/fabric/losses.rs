//! Counts what traffic between pods loses during a fault, beside a run of the same traffic without one.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_integration::{
    Pod,
    cluster::wire::{Wire, ip_packet, tunnelled},
    traffic::Stream,
};
use kube::{Api, api::ListParams};

use super::{
    super::scene::{PORT, address, assert_reached, identity},
    bed::{Bed, TEAMS},
};

/// Traffic of all teams between pairs of nodes, in both directions.
pub(super) struct Traffic(Vec<(String, Stream)>);

/// What a run of traffic has lost.
#[derive(Debug, Default)]
pub(super) struct Losses {
    requests: u64,
    pub(super) lost: u64,
    pub(super) broken: usize,
    pub(super) longest_silence: Duration,
    /// Answers by others than the pod that was asked.
    wrong: usize,
}

impl Traffic {
    /// TCP and UDP between the teams' pods of two nodes: IPv4 in one direction, IPv6 in the other.
    pub(super) fn start(bed: &Bed, pairs: &[[usize; 2]]) -> Result<Self> {
        let mut pods = Vec::new();
        for [one, other] in pairs {
            for team in TEAMS {
                pods.push([bed.pod(team, *one), bed.pod(team, *other)]);
            }
        }
        Self::between(&pods)
    }

    /// The same between pairs of pods.
    pub(super) fn between(pairs: &[[&Pod; 2]]) -> Result<Self> {
        let mut streams = Vec::new();
        for [one, other] in pairs {
            for (from, to, v4) in [(one, other, true), (other, one, false)] {
                let there = SocketAddr::new(address(to, v4), PORT);
                streams.push((identity(to), Stream::udp(&from.inside, there)?));
                streams.push((identity(to), Stream::tcp(&from.inside, there)?));
            }
        }
        Ok(Self(streams))
    }

    /// Ends the traffic and prints what it has lost.
    pub(super) fn stop(self, what: &str) -> Losses {
        let mut losses = Losses::default();
        for (server, stream) in self.0 {
            let report = stream.stop();
            losses.requests += report.sent;
            losses.lost += report.lost();
            losses.broken += usize::from(report.broken.is_some());
            losses.longest_silence = losses.longest_silence.max(report.longest_silence);
            losses.wrong += usize::from(report.identities.iter().any(|identity| *identity != server));
        }
        println!(
            "{what}: {} requests, {} lost, {} connections broken, longest silence {:.0?}",
            losses.requests, losses.lost, losses.broken, losses.longest_silence
        );
        losses
    }

    /// [`Self::stop`], where nothing may be lost.
    pub(super) fn stop_whole(self, what: &str) -> Result<()> {
        let losses = self.stop(what);
        ensure!(
            losses.requests > 0 && losses.lost == 0 && losses.broken == 0 && losses.wrong == 0,
            "{what}: {losses:?}"
        );
        Ok(())
    }
}

/// Runs the same traffic for a time, without a fault.
pub(super) async fn control(bed: &Bed, pairs: &[[usize; 2]], time: Duration) -> Result<()> {
    let traffic = Traffic::start(bed, pairs)?;
    tokio::time::sleep(time).await;
    traffic.stop_whole("control run without a fault")
}

/// Checks that each address of a running pod has one pod, on the node that owns its block, and that no two blocks of a
/// network overlap.
pub(super) async fn addresses_have_one_owner(bed: &Bed) -> Result<()> {
    let api: Api<AddressBlock> = Api::all(bed.cluster.client.clone());
    let mut blocks: BTreeMap<String, Vec<(IpNet, String)>> = BTreeMap::new();
    for object in api.list(&ListParams::default()).await? {
        let range: IpNet = object.spec.cidr.parse()?;
        let of_network = blocks.entry(object.spec.network).or_default();
        let overlaps = of_network
            .iter()
            .find(|(other, _)| other.contains(&range) || range.contains(other));
        ensure!(overlaps.is_none(), "{range} and {overlaps:?}");
        of_network.push((range, object.spec.node_name));
    }
    let mut owners: BTreeMap<(String, IpAddr), String> = BTreeMap::new();
    for member in &bed.cluster.nodes {
        for pod in member.kubelet.running() {
            let network = pod.namespace.strip_suffix("-team").unwrap_or("default").to_owned();
            for ip in pod.ips() {
                let of_network = blocks.get(&network).context("no blocks")?;
                let owner = of_network.iter().find(|(range, _)| range.contains(&ip));
                ensure!(
                    owner.is_some_and(|(_, node)| *node == member.name),
                    "{ip} of {} on {} is in {owner:?}",
                    identity(&pod),
                    member.name
                );
                let before = owners.insert((network.clone(), ip), identity(&pod));
                ensure!(before.is_none(), "{ip} is of {} and of {before:?}", identity(&pod));
            }
        }
    }
    println!("{} addresses have one owner each", owners.len());
    Ok(())
}

/// Checks on the wire that each address of a network is sent by one node only.
pub(super) async fn one_sender_each(bed: &Bed) -> Result<()> {
    let numbers = bed.cluster.numbers().await?;
    let mut senders: BTreeMap<(u32, IpAddr), IpAddr> = BTreeMap::new();
    for team in TEAMS {
        for (from, to) in [(1, 2), (2, 3), (3, 1)] {
            let wire = Wire::open(&bed.cluster)?;
            assert_reached(bed.pod(team, from), bed.pod(team, to));
            let frames = wire.frames()?;
            for (outer, _, _, payload) in frames.iter().filter_map(|frame| ip_packet(frame)) {
                let Some((number, inner)) = tunnelled(payload) else {
                    continue;
                };
                let (inner, ..) = ip_packet(inner).context("an IP packet in the tunnel")?;
                ensure!(numbers.contains_key(&number), "{number}");
                let before = senders.insert((number, inner), outer);
                ensure!(
                    before.is_none_or(|before| before == outer),
                    "{inner} of {number} is sent by {outer} and {before:?}"
                );
            }
        }
    }
    println!("{} addresses on the wire are sent by one node each", senders.len());
    Ok(())
}
