//! Decides which networks need a block of the node, which blocks are not needed, and which units may be claimed.

mod holding;

use std::{
    cell::LazyCell,
    collections::BTreeMap,
    hash::{Hash as _, Hasher as _},
    net::IpAddr,
    time::Duration,
};

use fnv::FnvHasher;
use ipnet::IpNet;
use kni_claims::NetworkRef;
use kni_crd::PodNetwork;
use kni_ipam::blocks::{Prefixes, Taken, is_unit, next_unit, unit_prefix};
use kni_model::{NetworkName, view::NetworkView};
use tokio::time::Instant;

use kni_cluster::{Addresses, Key, joining::networks_of, taken_blocks};

use self::holding::{Holding, Need, Supply, size_of};
use super::{Memory, ObjectControllers};

/// A block that was empty for this long is released.
pub(crate) const GRACE: Duration = Duration::from_secs(15);
/// No block is claimed for pods to come if less than one part in so many of the network is free.
const PLENTY: u128 = 2;
/// Blocks for pods to come are released if less than one part in so many of the network is free.
const SCARCE: u128 = 4;

/// A change to the blocks of one network.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Claim so many additional blocks of each family.
    Take { ipv4: usize, ipv6: usize },
    /// Release these blocks.
    GiveBack(Vec<IpNet>),
}

/// The units of a network that may be claimed.
pub(super) struct Units {
    subnets: Vec<IpNet>,
    prefixes: Prefixes,
    /// The others.
    pub(super) taken: Taken,
    /// Addresses that are excluded from the network.
    excluded: Taken,
    /// Whether the blocks of all nodes are known.
    covered: bool,
}

impl Units {
    /// The unit to try. The seed is the same in every network, so that the blocks of a node are similar where possible.
    pub(super) fn next(&self, node: &str, ipv4: bool, attempt: u32) -> Option<IpNet> {
        let mut hasher = FnvHasher::default();
        (node, attempt).hash(&mut hasher);
        next_unit(
            &self.subnets,
            &self.taken,
            ipv4,
            self.prefixes.of(ipv4),
            hasher.finish(),
        )
    }

    fn supply(&self, ipv4: bool) -> Supply {
        let (mut all, mut free) = (0_u128, 0_u128);
        for subnet in self.subnets.iter().filter(|subnet| subnet.addr().is_ipv4() == ipv4) {
            let size = size_of(subnet);
            all = all.saturating_add(size.saturating_sub(self.excluded.count_in(subnet)));
            free = free.saturating_add(size.saturating_sub(self.taken.count_in(subnet)));
        }
        if free >= all / PLENTY && self.covered {
            Supply::Plenty
        } else if free >= all / SCARCE {
            Supply::Moderate
        } else {
            Supply::Scarce
        }
    }
}

/// The network's `perNodePrefix`.
pub(super) fn prefixes(object: &PodNetwork) -> Prefixes {
    let asked = object.spec.per_node_prefix.unwrap_or_default();
    Prefixes {
        ipv4: asked.ipv4,
        ipv6: asked.ipv6,
    }
}

/// Whether a range is a unit of the network as its object states it, also where the network is refused.
pub(super) fn is_unit_of(object: &PodNetwork, range: &IpNet) -> bool {
    let subnets: Vec<IpNet> = object.spec.subnets.iter().filter_map(|net| net.parse().ok()).collect();
    is_unit(&subnets, prefixes(object), range)
}

impl ObjectControllers {
    /// The due changes.
    pub(super) fn steps(&self, memory: &mut Memory) -> Vec<(NetworkRef, Step)> {
        let waiting = self.cache.blocks().waiting();
        let views = (self.state.networks)();
        let needs = self.needs(&views, &waiting);
        let leases = (self.state.leases)();
        let resting = (self.state.resting)();
        let held = self.cache.blocks().held();
        memory
            .empty
            .retain(|(network, block), _| held.get(network).is_some_and(|blocks| blocks.contains(block)));
        let mut steps = Vec::new();
        for view in views {
            let spec = &view.network.spec;
            let name = &spec.name;
            let blocks = held.get(name);
            let has: Vec<IpNet> = blocks.into_iter().flatten().copied().collect();
            // Skip the network while its pools do not have the latest blocks yet.
            if spec.subnets.is_empty() || spec.blocks.as_ref() != Some(&has) {
                continue;
            }
            let Some(network) = self.network_ref(name) else {
                continue;
            };
            let need = needs.get(name).copied().unwrap_or_default();
            let of = |all: &BTreeMap<NetworkName, Vec<IpAddr>>| all.get(name).cloned().unwrap_or_default();
            let idle = idle(memory, name, &has, (&of(&leases), &of(&resting)), self.block_grace);
            if !memory.failed.is_due(name) {
                continue;
            }
            let prefixes = self.prefixes_of(name);
            let holding = |ipv4: bool| Holding::of(&view, &has, ipv4, prefixes);
            let units = LazyCell::new(|| self.units(memory, name));
            let supply = |ipv4: bool| units.as_ref().map_or(Supply::Plenty, |units| units.supply(ipv4));
            let short = |ipv4: bool| holding(ipv4).map_or(0, |holding| holding.short_of(need, || supply(ipv4)));
            let (ipv4, ipv6) = (short(true), short(false));
            if ipv4 > 0 || ipv6 > 0 {
                steps.push((network, Step::Take { ipv4, ipv6 }));
                continue;
            }
            let none_left = |ipv4: bool| {
                let is_empty = holding(ipv4).is_some_and(|holding| holding.free == 0);
                let units = || units.as_ref();
                need.in_use && is_empty && units().is_some_and(|units| units.next(&self.node, ipv4, 0).is_none())
            };
            self.cache
                .blocks()
                .set_exhausted(name, none_left(true) || none_left(false));
            let mut unneeded = Vec::new();
            for ipv4 in [true, false] {
                let idle = idle.iter().filter(|block| block.addr().is_ipv4() == ipv4);
                if let Some(holding) = holding(ipv4) {
                    unneeded.extend(holding.unneeded(&idle.copied().collect::<Vec<_>>(), need, || supply(ipv4)));
                }
            }
            if !unneeded.is_empty() {
                steps.push((network, Step::GiveBack(unneeded)));
            }
        }
        steps
    }

    fn prefixes_of(&self, name: &NetworkName) -> Prefixes {
        let tables = self.cache.tables();
        tables
            .networks
            .get("", name.as_str())
            .map(|object| prefixes(object))
            .unwrap_or_default()
    }

    /// A network of the cluster, by name and uid.
    pub(super) fn network_ref(&self, name: &NetworkName) -> Option<NetworkRef> {
        let tables = self.cache.tables();
        let object = tables.networks.get("", name.as_str())?;
        let uid = object.metadata.uid.clone()?;
        Some(NetworkRef {
            name: name.clone(),
            uid,
        })
    }

    /// What the pods of the node, and those that are assigned to it, need of each network.
    fn needs(&self, views: &[NetworkView], waiting: &Addresses) -> BTreeMap<NetworkName, Need> {
        let mut needs: BTreeMap<NetworkName, Need> = BTreeMap::new();
        let in_use = views
            .iter()
            .filter(|view| view.attachments > 0 || view.network.spec.default);
        for view in in_use {
            needs.entry(view.network.spec.name.clone()).or_default().in_use = true;
        }
        let memberships = (self.state.memberships)();
        {
            let tables = self.cache.tables();
            let mut made: BTreeMap<Key, Vec<NetworkName>> = BTreeMap::new();
            for (pod, network) in memberships {
                if tables.pod_of(&self.node, &pod).is_some() {
                    let of_pod = made.entry(Key::new(&pod.namespace, &pod.name));
                    of_pod.or_default().push(network);
                }
            }
            let networks = self.networks(&tables);
            let own = tables.pods.rows().iter().filter(|(_, pod)| pod.node == self.node);
            for (key, pod) in own.filter(|(_, pod)| !pod.host_network && !pod.finished && !pod.deleting) {
                let mut made = made.remove(key).unwrap_or_default();
                for name in networks_of(&tables, &networks, &key.namespace, pod) {
                    let made = made
                        .iter()
                        .position(|network| *network == name)
                        .map(|at| made.remove(at));
                    let need = needs.entry(name).or_default();
                    need.in_use = true;
                    need.coming = need.coming.saturating_add(u128::from(made.is_none()));
                }
            }
        }
        // These may be of the pods above.
        for (name, count) in waiting {
            let need = needs.entry(name.clone()).or_default();
            need.in_use = true;
            need.coming = need.coming.max(u128::from(*count));
        }
        needs
    }

    /// The units of a network that no node is known to have, and in which no pod of another node is known to be.
    pub(super) fn units(&self, memory: &Memory, name: &NetworkName) -> Option<Units> {
        let tables = self.cache.tables();
        let object = tables.networks.get("", name.as_str())?;
        let networks = self.networks(&tables);
        let spec = networks.spec(name)?;
        let prefixes = prefixes(object);
        let mut excluded = Taken::default();
        // A block is still useful if only a part of it is excluded.
        for exclude in &spec.exclude_subnets {
            let asked = prefixes.of(exclude.addr().is_ipv4());
            let subnet = spec.subnets.iter().find(|subnet| subnet.contains(exclude));
            if subnet.is_some_and(|subnet| exclude.prefix_len() <= unit_prefix(subnet, asked)) {
                excluded.insert(exclude);
            }
        }
        let mut taken = excluded.clone();
        for block in taken_blocks(&tables, name) {
            taken.insert(&block);
        }
        let held = self.cache.blocks().held();
        let ours = held.get(name).into_iter().flatten();
        let others = memory
            .leaving
            .iter()
            .chain(memory.foreign.keys())
            .filter(|(network, _)| network == name);
        ours.chain(others.map(|(_, block)| block))
            .for_each(|block| taken.insert(block));
        // After a restore of the API server's data, pods may be where no block is.
        let elsewhere = tables.members.of_network(name.as_str()).map(|(_, row)| row);
        let elsewhere = elsewhere.filter(|row| row.spec.node_name != self.node);
        for address in elsewhere
            .flat_map(|row| &row.spec.members)
            .flat_map(|member| &member.addresses)
        {
            if let Ok(ip) = address.parse::<IpAddr>() {
                taken.insert(&ip.into());
            }
        }
        Some(Units {
            subnets: spec.subnets.clone(),
            prefixes,
            taken,
            excluded,
            covered: tables.other_blocks.covers(name),
        })
    }
}

/// The blocks without a lease for at least `grace`, in order. While an address of a block rests, the block is not idle.
fn idle(
    memory: &mut Memory,
    name: &NetworkName,
    has: &[IpNet],
    (leases, resting): (&[IpAddr], &[IpAddr]),
    grace: Duration,
) -> Vec<IpNet> {
    let mut idle = Vec::new();
    for block in has {
        let key = (name.clone(), *block);
        let contains = |addresses: &[IpAddr]| addresses.iter().any(|ip| block.contains(ip));
        if contains(leases) {
            memory.empty.remove(&key);
        } else if memory.empty.entry(key).or_insert_with(Instant::now).elapsed() >= grace && !contains(resting) {
            idle.push(*block);
        }
    }
    idle
}

#[cfg(test)]
mod tests;
