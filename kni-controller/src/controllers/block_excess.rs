//! Finds nodes that hold more empty address blocks of a network than their pods can need. Pure but for its memory.
//!
//! Such blocks are reported and not released: a node that does not reach the API server may lease from them at any
//! moment.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use ipnet::IpNet;
use kni_cluster::{Key, Networks, Tables, joining::networks_of};
use kni_crd::PodFacts;
use kni_ipam::blocks::parse_object_name;
use kni_model::NetworkName;
use tokio::time::Instant;

use super::{
    gone_nodes::GRACE,
    member_names::{beginning_with, prefix},
    overview::exists,
};

/// The blocks are compared at most once in this time.
const INTERVAL: Duration = Duration::from_secs(3);

/// The most blocks that one pod accounts for in a network: it has an interface in each.
const MOST_OF_POD: usize = 4;
/// Agents hold a free address for pods to come for so many that they use,
const SHARE: u128 = 3;
/// and at most as many as a block has, or as these.
const MOST_SPARE: u128 = 4;

/// A network, a node, and whether the family is IPv4.
type Holder = (String, String, bool);

/// The nodes of a network, and whether a node has blocks of an earlier node of its name: its agent, once it runs, takes
/// them over and releases the empty ones.
pub(super) type Nodes = BTreeMap<String, bool>;

/// Since when nodes hold too many blocks.
#[derive(Debug, Default)]
pub(super) struct BlockExcess {
    since: BTreeMap<Holder, Instant>,
    compared: Option<Instant>,
    found: BTreeMap<String, Nodes>,
}

impl BlockExcess {
    /// The nodes that have held too many blocks of networks for longer than an agent takes to release them.
    pub(super) fn update(&mut self, tables: &Tables, networks: &Networks, now: Instant) -> &BTreeMap<String, Nodes> {
        let age = self.compared.map(|compared| now.saturating_duration_since(compared));
        if age.is_some_and(|age| age < INTERVAL) {
            return &self.found;
        }
        self.compared = Some(now);
        // A block whose pods are not read yet has pods.
        let is_known = tables.blocks.is_synced() && tables.members.is_synced();
        let excessive = if is_known {
            excessive(tables, networks)
        } else {
            BTreeSet::new()
        };
        self.since.retain(|holder, _| excessive.contains(holder));
        for holder in excessive {
            self.since.entry(holder).or_insert(now);
        }
        self.found.clear();
        for ((network, node, _), since) in &self.since {
            if now.saturating_duration_since(*since) >= GRACE {
                let nodes = self.found.entry(network.clone()).or_default();
                nodes.insert(node.clone(), was_registered_again(tables, network, node));
            }
        }
        &self.found
    }
}

fn excessive(tables: &Tables, networks: &Networks) -> BTreeSet<Holder> {
    let mut held: BTreeMap<Holder, Vec<IpNet>> = BTreeMap::new();
    for (key, block) in tables.blocks.rows() {
        let spec = &block.spec;
        // The others are removed.
        if let Some((_, range)) = parse_object_name(&key.name)
            && exists(tables, &spec.network, &spec.network_uid)
        {
            let holder = (spec.network.clone(), spec.node_name.clone(), range.addr().is_ipv4());
            held.entry(holder).or_default().push(range);
        }
    }
    let mut joining = Joining::default();
    held.retain(|(network, node, _), blocks| {
        // A node may have one whatever its pods.
        if blocks.len() < 2 || networks.refused.contains_key(network) {
            return false;
        }
        blocks.sort();
        let used = Used::of(tables, network, node, blocks);
        let empty = blocks.len().saturating_sub(used.blocks);
        // Only where it makes a difference.
        empty > used.permitted(blocks, 0) && empty > used.permitted(blocks, joining.of(tables, networks, network, node))
    });
    held.into_keys().collect()
}

/// Whether a node has blocks of an earlier node of its name.
fn was_registered_again(tables: &Tables, network: &str, node: &str) -> bool {
    let mut blocks = tables.blocks.rows().values().map(|block| &block.spec);
    let present = tables.nodes.get("", node);
    present.is_some_and(|present| {
        blocks.any(|block| block.network == network && block.node_name == node && block.node_uid != present.uid)
    })
}

/// What the pods of a node use of its blocks of one network and family.
#[derive(Debug, Default)]
struct Used {
    addresses: usize,
    blocks: usize,
}

impl Used {
    /// By the reports of the node about pods that the cluster has there. The blocks are in order.
    fn of(tables: &Tables, network: &str, node: &str, blocks: &[IpNet]) -> Self {
        let mut used = Self::default();
        let mut with_pods: BTreeSet<IpNet> = BTreeSet::new();
        let mut of_pod: BTreeMap<&str, BTreeSet<IpNet>> = BTreeMap::new();
        let reports = beginning_with(&tables.members, &prefix(network, node));
        let reports = reports.filter_map(|key| Some(&tables.members.rows().get(&key)?.spec));
        let reports = reports.filter(|report| report.node_name == node);
        for member in reports.flat_map(|report| &report.members) {
            let pod = tables.pods.get(&member.namespace, &member.pod_name);
            if !pod.is_some_and(|pod| pod.uid == member.pod_uid && pod.node == node) {
                continue;
            }
            for address in member.addresses.iter().filter_map(|text| text.parse::<IpAddr>().ok()) {
                let behind = blocks.partition_point(|block| block.addr() <= address);
                let block = behind.checked_sub(1).and_then(|at| blocks.get(at));
                let Some(block) = block.filter(|block| block.contains(&address)) else {
                    continue;
                };
                used.addresses += 1;
                let of_pod = of_pod.entry(&member.pod_uid).or_default();
                if of_pod.len() < MOST_OF_POD {
                    of_pod.insert(*block);
                    with_pods.insert(*block);
                }
            }
        }
        used.blocks = with_pods.len();
        used
    }

    /// How many empty blocks an agent retains if its pods have so many interfaces in the network, or will have.
    fn permitted(&self, blocks: &[IpNet], interfaces: usize) -> usize {
        let sizes = blocks.iter().map(|block| {
            let bits = u32::from(block.max_prefix_len().saturating_sub(block.prefix_len()));
            1_u128.checked_shl(bits).unwrap_or(u128::MAX)
        });
        let size = sizes.min().unwrap_or(1);
        let number = |count: usize| u128::try_from(count).unwrap_or(u128::MAX);
        let spare = (number(self.addresses) / SHARE).clamp(1, size.max(MOST_SPARE));
        let coming = number(interfaces.saturating_sub(self.addresses));
        let free = coming.saturating_add(spare);
        usize::try_from(free.div_ceil(size)).unwrap_or(usize::MAX)
    }
}

/// The networks that the pods of nodes join, as far as they were asked for.
#[derive(Debug, Default)]
struct Joining(BTreeMap<String, BTreeMap<NetworkName, usize>>);

impl Joining {
    /// How many interfaces in a network the pods of a node have, or will have.
    fn of(&mut self, tables: &Tables, networks: &Networks, network: &str, node: &str) -> usize {
        let of_node = self.0.entry(node.to_owned()).or_insert_with(|| {
            let mut counts = BTreeMap::new();
            let pods = tables.pods.rows().iter().filter(|(_, pod)| is_joining(pod, node));
            for (Key { namespace, .. }, pod) in pods {
                for name in networks_of(tables, networks, namespace, pod) {
                    *counts.entry(name).or_default() += 1;
                }
            }
            counts
        });
        let name = network.parse::<NetworkName>();
        name.ok()
            .and_then(|name| of_node.get(&name).copied())
            .unwrap_or_default()
    }
}

fn is_joining(pod: &PodFacts, node: &str) -> bool {
    pod.node == node && !pod.host_network && !pod.finished
}
