//! Decides which networks need a block of the node, which blocks are not needed, and which units may be claimed.

use std::{
    collections::BTreeSet,
    hash::{Hash as _, Hasher as _},
    net::IpAddr,
    time::Duration,
};

use fnv::FnvHasher;
use ipnet::IpNet;
use kni_claims::NetworkRef;
use kni_crd::PodNetwork;
use kni_ipam::blocks::{Prefixes, Taken, is_unit, next_unit, unit_prefix};
use kni_model::{
    NetworkName,
    view::{AddressUse, NetworkView},
};
use tokio::time::Instant;

use kni_cluster::joining::networks_of;

use super::{Memory, ObjectControllers};

/// A block that was empty for this long is released.
const GRACE: Duration = Duration::from_secs(15);
/// The next block is claimed when less than one quarter of the addresses is free.
const SPARE: u128 = 4;

/// A change to the blocks of one network.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Claim an additional block of these families.
    Take { ipv4: bool, ipv6: bool },
    /// Release these blocks.
    GiveBack(Vec<IpNet>),
}

/// The units of a network that may be claimed.
pub(super) struct Units {
    subnets: Vec<IpNet>,
    prefixes: Prefixes,
    /// The others.
    pub(super) taken: Taken,
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
        let demanded = self.cache.blocks().take_demanded();
        let views = (self.state.networks)();
        let needed = self.needed(&views, &demanded);
        let leases = (self.state.leases)();
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
            let step = if needed.contains(name) && !memory.failed.contains_key(name) {
                take(&view, demanded.contains(name))
            } else {
                None
            };
            if step.is_none() && !memory.failed.contains_key(name) {
                self.cache.blocks().set_exhausted(name, false);
            }
            let leases = leases.get(name).map(Vec::as_slice).unwrap_or_default();
            let step = step.or_else(|| {
                let idle = idle(memory, name, &has, leases, GRACE);
                let unneeded = unneeded(&view, &has, leases, &idle, needed.contains(name));
                (!unneeded.is_empty()).then_some(Step::GiveBack(unneeded))
            });
            steps.extend(step.map(|step| (network, step)));
        }
        steps
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

    /// Networks that have pods on this node, or that pods are about to join.
    fn needed(&self, views: &[NetworkView], demanded: &BTreeSet<NetworkName>) -> BTreeSet<NetworkName> {
        let mut needed = demanded.clone();
        for view in views {
            if view.attachments > 0 || view.network.spec.default {
                needed.insert(view.network.spec.name.clone());
            }
        }
        let tables = self.cache.tables();
        let networks = self.networks(&tables);
        for (key, pod) in tables.pods.rows() {
            if pod.node == self.node && !pod.host_network && !pod.finished {
                needed.extend(networks_of(&tables, &networks, &key.namespace, pod));
            }
        }
        needed
    }

    /// The units of a network that no node is known to have, and in which no pod of another node is known to be.
    pub(super) fn units(&self, memory: &Memory, name: &NetworkName) -> Option<Units> {
        let tables = self.cache.tables();
        let object = tables.networks.get("", name.as_str())?;
        let networks = self.networks(&tables);
        let spec = networks.spec(name)?;
        let prefixes = prefixes(object);
        let mut taken = Taken::default();
        let listed = object.status.iter().flat_map(|status| &status.blocks);
        for block in listed.filter_map(|block| block.cidr.parse().ok()) {
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
        let elsewhere = tables.members.rows().values();
        let elsewhere = elsewhere.filter(|row| row.spec.network == name.as_str() && row.spec.node_name != self.node);
        for address in elsewhere
            .flat_map(|row| &row.spec.members)
            .flat_map(|member| &member.addresses)
        {
            if let Ok(ip) = address.parse::<IpAddr>() {
                taken.insert(&ip.into());
            }
        }
        // A block is still useful if only a part of it is excluded.
        for exclude in &spec.exclude_subnets {
            let asked = prefixes.of(exclude.addr().is_ipv4());
            let subnet = spec.subnets.iter().find(|subnet| subnet.contains(exclude));
            if subnet.is_some_and(|subnet| exclude.prefix_len() <= unit_prefix(subnet, asked)) {
                taken.insert(exclude);
            }
        }
        Some(Units {
            subnets: spec.subnets.clone(),
            prefixes,
            taken,
        })
    }
}

/// Whether a network that is in use needs an additional block.
fn take(view: &NetworkView, demanded: bool) -> Option<Step> {
    let short = |usage: &AddressUse, has: bool| {
        has && (usage.free == 0 || (!demanded && usage.free < usage.total / SPARE) || usage.total == 0)
    };
    let has = |ipv4: bool| view.network.spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
    let ipv4 = short(&view.ipv4, has(true));
    let ipv6 = short(&view.ipv6, has(false));
    (ipv4 || ipv6).then_some(Step::Take { ipv4, ipv6 })
}

/// The blocks without a lease for at least `grace`, in order.
fn idle(memory: &mut Memory, name: &NetworkName, has: &[IpNet], leases: &[IpAddr], grace: Duration) -> Vec<IpNet> {
    let mut idle = Vec::new();
    for block in has {
        let key = (name.clone(), *block);
        if leases.iter().any(|ip| block.contains(ip)) {
            memory.empty.remove(&key);
        } else if memory.empty.entry(key).or_insert_with(Instant::now).elapsed() >= grace {
            idle.push(*block);
        }
    }
    idle
}

/// The idle blocks that the node does not need: of a network in use all but one of a family, and only as many as leave
/// the spare addresses that would otherwise be claimed again.
fn unneeded(view: &NetworkView, has: &[IpNet], leases: &[IpAddr], idle: &[IpNet], needed: bool) -> Vec<IpNet> {
    let mut unneeded = Vec::new();
    for (ipv4, usage) in [(true, &view.ipv4), (false, &view.ipv6)] {
        let of_family = |net: &&IpNet| net.addr().is_ipv4() == ipv4;
        let empty = has
            .iter()
            .filter(of_family)
            .filter(|block| !leases.iter().any(|ip| block.contains(ip)));
        let spare = usize::from(needed);
        let most = empty.count().saturating_sub(spare);
        let (mut free, mut total) = (usage.free, usage.total);
        for block in idle.iter().filter(of_family).rev().take(most) {
            let size = 1_u128 << u32::from(block.max_prefix_len() - block.prefix_len()).min(127);
            let (left, of) = (free.saturating_sub(size), total.saturating_sub(size));
            if needed && left < of / SPARE {
                break;
            }
            (free, total) = (left, of);
            unneeded.push(*block);
        }
    }
    unneeded
}
