//! Compares the blocks that the node leases from with the objects of the API server, and its leases with both.
//!
//! Objects disappear: by an etcd restore, with a network that is deleted and made again, or because the node counted as
//! gone. A lost block is claimed again before another address of it is leased. If another node has it by then, the
//! addresses of its pods are reported.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_claims::{Claim, ClaimError, Claims, NetworkRef};
use kni_ipam::blocks::{is_unit, object_name, parse_object_name, unit_of};
use kni_model::NetworkName;
use kube::ResourceExt as _;
use tokio::time::Instant;

use kni_cluster::Key;

use super::{
    Block, Memory, ObjectControllers,
    desired::{is_unit_of, prefixes},
    used::Used,
    within,
};

impl ObjectControllers {
    /// Whether a held block may have been lost: its network is gone or was made again, or the watch has shown its end.
    pub(super) fn lost_one(&self, memory: &mut Memory) -> bool {
        let held = self.cache.blocks().held();
        let replaced = held
            .keys()
            .any(|name| self.network_ref(name).as_ref() != memory.networks.get(name));
        let tables = self.cache.tables();
        let version = Some(tables.blocks.version());
        if memory.seen_version == version {
            return replaced;
        }
        memory.seen_version = version;
        let mut lost = false;
        for (network, block) in held
            .iter()
            .flat_map(|(name, blocks)| blocks.iter().map(move |block| (name, block)))
        {
            let name = object_name(network, block);
            let row = tables.blocks.get("", &name);
            if row.is_some_and(|row| row.metadata.deletion_timestamp.is_none()) {
                memory.seen.insert(name);
            } else {
                // A claim that the watch has not reported yet is no loss.
                lost |= memory.seen.remove(&name) || row.is_some();
            }
        }
        replaced || lost
    }

    /// Compares, and claims what is missing. Returns whether the held blocks have changed, also beside an error.
    pub(super) async fn check(&self, memory: &mut Memory) -> (bool, Result<(), ClaimError>) {
        let Some(claims) = memory.claims.clone() else {
            return (false, Ok(()));
        };
        let (own, mut failed) = match within(self.own_blocks(&claims)).await {
            Ok(Some(own)) => own,
            Ok(None) => return (false, Ok(())),
            Err(error) => return (false, Err(error)),
        };
        let valid = own.as_deref().map(|own| self.valid(&claims, own));
        let mut changed = false;
        if let Some(valid) = &valid {
            changed = self.unhold_lost(valid);
            self.leave_lost(memory, valid, own.as_deref().unwrap_or_default());
        }
        let mut conflicts = Vec::new();
        let objects = own.as_deref().unwrap_or_default();
        let is_left = |object: &AddressBlock| claims.is_of_earlier_node(object) && !self.is_of_gone_network(object);
        memory.unsettled_own = objects.iter().any(is_left);
        for (name, units) in by_network(self.missing_blocks(memory, valid.unwrap_or_default())) {
            let Some(network) = self.network_ref(&name) else {
                continue;
            };
            kni_tasks::progress();
            let (settled, done) = confirm_or_claim(&claims, &network, units, objects).await;
            if done.is_err() {
                failed = done;
            }
            for (unit, claim) in settled {
                match claim {
                    Claim::Ours => {
                        tracing::info!(network = %name, block = %unit, "the node has this address block");
                        self.hold(memory, network.clone(), unit);
                        changed = true;
                    }
                    // It is released, or taken over, first.
                    Claim::Taken(_) if has_block(objects, &name, &unit) => memory.unsettled_own = true,
                    Claim::Taken(by) => conflicts.extend(self.conflict(&name, &unit, &by)),
                }
            }
        }
        if failed.as_ref().err().is_none_or(ClaimError::is_refusal) {
            memory.lost = false;
            self.cache.blocks().set_conflicts(conflicts);
            let held = self.cache.blocks().held();
            memory.networks = held
                .keys()
                .filter_map(|name| Some((name.clone(), self.network_ref(name)?)))
                .collect();
            memory.checked = Some(Instant::now());
        }
        (changed, failed)
    }

    /// The objects of the node. It takes over those of an earlier node of its name: the ranges are free at no time, and
    /// pods keep their addresses. The result of that is beside the objects.
    async fn own_blocks(
        &self,
        claims: &Claims,
    ) -> Result<(Option<Vec<AddressBlock>>, Result<(), ClaimError>), ClaimError> {
        let Some(own) = claims.own().await? else {
            return Ok((None, Ok(())));
        };
        let (mut own, gone): (Vec<_>, Vec<_>) = own.into_iter().partition(|object| !self.is_of_gone_network(object));
        let count = own.iter().filter(|object| claims.is_of_earlier_node(object)).count();
        if count > 0 {
            tracing::info!(count, "the node was registered again; taking over its address blocks");
        }
        let adopted;
        (own, adopted) = claims.adopt_all(own).await;
        own.extend(gone);
        Ok((Some(own), adopted))
    }

    /// Has objects released that are not the node's any more, once no pod needs them.
    fn leave_lost(&self, memory: &mut Memory, valid: &BTreeSet<Block>, own: &[AddressBlock]) {
        let lost = own
            .iter()
            .filter(|object| is_deleted(object) || self.is_of_gone_network(object));
        let lost = lost.filter_map(block_of).filter(|block| !valid.contains(block));
        memory.leaving.extend(lost);
        memory.retain_leaving(own, &Used::of(self));
    }

    /// The blocks whose objects belong to this node and to the present networks.
    fn valid(&self, claims: &Claims, own: &[AddressBlock]) -> BTreeSet<Block> {
        let valid = own.iter().filter_map(|object| {
            let (name, range) = block_of(object)?;
            let network = self.network_ref(&name)?;
            (claims.is_valid(object, &network) && self.is_unit(&name, &range)).then_some((name, range))
        });
        valid.collect()
    }

    /// Whether the network of a block is known to be gone, to be another one of that name, or to have other units.
    /// While its object is not understood or not valid, the node may lease from the block.
    fn is_of_gone_network(&self, object: &AddressBlock) -> bool {
        let Some((name, range)) = block_of(object) else {
            return false;
        };
        let tables = self.cache.tables();
        if tables.networks.refused().contains_key(&Key::new("", name.as_str())) {
            return false;
        }
        let Some(network) = tables.networks.get("", name.as_str()) else {
            return true;
        };
        network.metadata.uid.as_deref() != Some(object.spec.network_uid.as_str()) || !is_unit_of(network, &range)
    }

    /// Stops leasing from held blocks that are not the node's any more. Returns whether there were any.
    fn unhold_lost(&self, valid: &BTreeSet<Block>) -> bool {
        let held = self.cache.blocks().held();
        let held = held
            .iter()
            .flat_map(|(name, blocks)| blocks.iter().map(move |block| (name.clone(), *block)));
        let lost: Vec<Block> = held.filter(|block| !valid.contains(block)).collect();
        for (network, block) in &lost {
            tracing::warn!(%network, %block, "the node has lost an address block");
            self.cache.blocks().unhold(network, block);
        }
        !lost.is_empty()
    }

    /// Blocks that the node should have and does not hold: with an object, or with leases.
    fn missing_blocks(&self, memory: &Memory, valid: BTreeSet<Block>) -> BTreeSet<Block> {
        let mut missing = valid;
        for (name, leases) in (self.state.leases)() {
            let units: Vec<IpNet> = leases.iter().filter_map(|ip| self.unit_of(&name, *ip)).collect();
            missing.extend(units.into_iter().map(|unit| (name.clone(), unit)));
        }
        let held = self.cache.blocks().held();
        missing.retain(|block| {
            let is_held = held.get(&block.0).is_some_and(|blocks| blocks.contains(&block.1));
            !is_held && !memory.leaving.contains(block) && self.is_unit(&block.0, &block.1)
        });
        missing
    }

    fn unit_of(&self, name: &NetworkName, address: IpAddr) -> Option<IpNet> {
        let tables = self.cache.tables();
        let object = tables.networks.get("", name.as_str())?;
        let networks = self.networks(&tables);
        let spec = networks.spec(name).filter(|spec| spec.blocks.is_some())?;
        unit_of(&spec.subnets, prefixes(object), address)
    }

    fn is_unit(&self, name: &NetworkName, block: &IpNet) -> bool {
        let tables = self.cache.tables();
        let networks = self.networks(&tables);
        let object = tables.networks.get("", name.as_str());
        let spec = networks.spec(name).filter(|spec| spec.blocks.is_some());
        let known = object.zip(spec);
        known.is_some_and(|(object, spec)| is_unit(&spec.subnets, prefixes(object), block))
    }

    /// The addresses of this node's pods in a block of another node.
    fn conflict(&self, name: &NetworkName, unit: &IpNet, by: &str) -> Option<String> {
        let sandboxes = (self.state.sandboxes)();
        let attachments = sandboxes
            .iter()
            .flat_map(|sandbox| sandbox.attachments.iter().map(move |attachment| (sandbox, attachment)));
        let owners: Vec<String> = attachments
            .filter(|(_, attachment)| attachment.network == *name)
            .flat_map(|(sandbox, attachment)| {
                let inside = attachment.addresses().filter(|ip| unit.contains(ip));
                inside.map(|ip| format!("{ip} of pod {}/{}", sandbox.pod.namespace, sandbox.pod.name))
            })
            .collect();
        if owners.is_empty() {
            return None;
        }
        let object = object_name(name, unit);
        let text = format!(
            "network {name}: {} in AddressBlock {object}, which {by} has",
            owners.join(", ")
        );
        tracing::error!(network = %name, block = %unit, "{text}");
        Some(text)
    }
}

impl Memory {
    /// A block that leaves, and whose object was removed by another process, is claimed again if a pod has an address
    /// of it.
    fn retain_leaving(&mut self, own: &[AddressBlock], used: &Used) {
        let present: BTreeSet<Block> = own.iter().filter_map(block_of).collect();
        self.leaving
            .retain(|block| present.contains(block) || !used.is_leased(&block.0, &block.1));
    }
}

/// Whether one of the objects has this range of this network.
fn has_block(objects: &[AddressBlock], name: &NetworkName, unit: &IpNet) -> bool {
    let mut blocks = objects.iter().filter_map(block_of);
    blocks.any(|(network, range)| network == *name && range == *unit)
}

/// Whether it is being deleted: with its finalizer it stays until the node releases it, also one that an earlier
/// process of the agent has begun to release.
const fn is_deleted(object: &AddressBlock) -> bool {
    object.metadata.deletion_timestamp.is_some()
}

/// Claims units of a network. An agent that starts has the objects of most of them, and creates none again.
async fn confirm_or_claim(
    claims: &Claims,
    network: &NetworkRef,
    units: Vec<IpNet>,
    own: &[AddressBlock],
) -> (Vec<(IpNet, Claim)>, Result<(), ClaimError>) {
    let object_of = |unit: &IpNet| {
        let mut valid = own.iter().filter(|object| claims.is_valid(object, network));
        valid.find(|object| block_of(object).is_some_and(|(_, range)| range == *unit))
    };
    let there: Vec<&AddressBlock> = units.iter().filter_map(object_of).collect();
    let (mut settled, mut done) = (Vec::new(), Ok(()));
    if !there.is_empty() {
        match within(claims.confirm_objects(network, &there)).await {
            Ok(confirmed) => settled.extend(confirmed.into_iter().flatten()),
            Err(error) => done = Err(error),
        }
    }
    for unit in units.iter().filter(|unit| object_of(unit).is_none()) {
        match within(claims.claim(network, unit)).await {
            Ok(claim) => settled.extend(claim.map(|claim| (*unit, claim))),
            Err(error) => done = Err(error),
        }
    }
    (settled, done)
}

fn by_network(blocks: BTreeSet<Block>) -> BTreeMap<NetworkName, Vec<IpNet>> {
    let mut by_network: BTreeMap<NetworkName, Vec<IpNet>> = BTreeMap::new();
    for (name, unit) in blocks {
        by_network.entry(name).or_default().push(unit);
    }
    by_network
}

fn block_of(object: &AddressBlock) -> Option<Block> {
    parse_object_name(&object.name_any())
}
