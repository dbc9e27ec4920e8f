//! Derives which node has which pods' addresses, and updates it by the blocks that changed. Pure.

mod parts;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_cluster::{Key, Tables};
use kni_dataplane::{NetworkFabric, Way};
use kni_fabric::{Desired, Path, Stack};
use kni_ipam::blocks::parse_object_name;
use kni_model::{Fabric, Network, NetworkId, NetworkName};

use self::parts::{Nodes, egress, names, tunnel};
use super::underlay::way;

/// A network of this node, and its number in the cluster.
type Numbered = (Network, Option<u32>);

/// A network of this node.
#[derive(Debug, Clone, PartialEq)]
struct Here {
    id: NetworkId,
    name: NetworkName,
    /// The UID of its object.
    uid: Option<String>,
    subnets: Vec<IpNet>,
    fabric: Fabric,
    default: bool,
    /// The number that its packets carry; without one none of them enters the tunnel.
    number: Option<u32>,
}

/// What everything is derived from, except for blocks and claims. Objects change more often than this: the figures of a
/// network, the heartbeat of the node, or the blocks that this node has.
#[derive(Debug, PartialEq)]
struct Inputs {
    /// The version of the nodes.
    nodes: u64,
    /// The UID of this node.
    uid: Option<String>,
    /// The networks of this node.
    networks: Vec<Here>,
}

/// What this node should know of others, and what that was derived from.
///
/// # Guarantees
/// - It is the same after [`Self::update`] as if it was derived anew.
/// - A change of blocks costs as much as these blocks, and a change of egress claims as much as all claims.
#[derive(Debug, Default)]
pub(super) struct Derived {
    inputs: Option<Inputs>,
    /// The versions of the blocks and of the egress claims.
    blocks: u64,
    claims: u64,
    /// `None`: this node has no address yet.
    nodes: Option<Nodes>,
    /// The networks that have blocks, by name.
    networks: BTreeMap<String, Here>,
    /// Whether the name of each of their blocks states its network and range, as the API server requires: then no two
    /// are the same, and a name shows which block is gone.
    is_named: bool,
    /// How often each way is used.
    uses: BTreeMap<Way, usize>,
    egress_ways: BTreeMap<Way, Path>,
    desired: Arc<Desired>,
}

/// What an update has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Updated {
    /// No input.
    Nothing,
    /// An input without effect.
    Inputs,
    /// The desired state.
    Desired,
}

impl Updated {
    fn of(differs: bool) -> Self {
        if differs { Self::Desired } else { Self::Inputs }
    }
}

impl Inputs {
    fn new(tables: &Tables, networks: impl IntoIterator<Item = Numbered>, node: &str) -> Self {
        let networks = networks.into_iter().map(|(Network { id, spec }, number)| {
            let object = tables.networks.get("", spec.name.as_str());
            Here {
                id,
                uid: object.and_then(|object| object.metadata.uid.clone()),
                name: spec.name,
                subnets: spec.subnets,
                fabric: spec.fabric,
                default: spec.default,
                number,
            }
        });
        Self {
            nodes: tables.node_endpoints.version(),
            uid: tables.own_node.get("", node).map(|row| row.uid.clone()),
            networks: networks.collect(),
        }
    }
}

impl Derived {
    /// The desired state as of the last update.
    pub(super) fn desired(&self) -> &Arc<Desired> {
        &self.desired
    }

    /// Updates the desired state of `node` with these networks.
    pub(super) fn update(
        &mut self,
        tables: &Tables,
        networks: impl IntoIterator<Item = Numbered>,
        node: &str,
    ) -> Updated {
        let inputs = Inputs::new(tables, networks, node);
        if self.inputs.as_ref() != Some(&inputs) {
            return self.renew(tables, inputs, node);
        }
        let (blocks, claims) = (tables.other_blocks.version(), tables.egress_claims.version());
        if (self.blocks, self.claims) == (blocks, claims) {
            return Updated::Nothing;
        }
        let mut differs = false;
        if self.claims != claims {
            self.claims = claims;
            differs |= self.update_egress(tables, node);
        }
        if self.blocks != blocks {
            match self.update_blocks(tables) {
                Some(changed) => differs |= changed,
                None => differs |= self.renew(tables, inputs, node) == Updated::Desired,
            }
            self.blocks = blocks;
        }
        Updated::of(differs)
    }

    /// Derives everything anew.
    fn renew(&mut self, tables: &Tables, inputs: Inputs, node: &str) -> Updated {
        let before = std::mem::replace(self, Self::of(tables, inputs, node));
        let differs = before.desired != self.desired;
        if !differs {
            self.desired = before.desired;
        }
        Updated::of(differs)
    }

    fn of(tables: &Tables, inputs: Inputs, node: &str) -> Self {
        let mut derived = Self {
            blocks: tables.other_blocks.version(),
            claims: tables.egress_claims.version(),
            nodes: Nodes::of(tables, node),
            is_named: true,
            ..Self::default()
        };
        derived.add_egress(tables, (node, inputs.uid.as_deref()), &inputs.networks);
        if let Some(nodes) = &derived.nodes {
            let desired = Arc::make_mut(&mut derived.desired);
            desired.names = Arc::new(names(node, nodes));
            let mut native: Vec<IpNet> = Vec::new();
            for here in &inputs.networks {
                let number = here.number.filter(|_| here.fabric == Fabric::Overlay);
                if here.fabric == Fabric::None || (here.fabric == Fabric::Overlay && number.is_none()) {
                    continue;
                }
                if here.fabric == Fabric::Native {
                    let overlaps = |net: &IpNet| native.iter().any(|other| other.contains(net) || net.contains(other));
                    if here.subnets.iter().any(overlaps) {
                        // Without a tunnel an address is that of one network only. All nodes choose the same one.
                        continue;
                    }
                    native.extend(&here.subnets);
                }
                derived.networks.insert(here.name.to_string(), here.clone());
            }
        }
        let networks: Vec<Here> = derived.networks.values().cloned().collect();
        for here in &networks {
            derived.add_network(tables, here);
        }
        derived.inputs = Some(inputs);
        derived
    }

    /// Adds a network with its blocks.
    fn add_network(&mut self, tables: &Tables, here: &Here) {
        let Some(nodes) = &self.nodes else { return };
        let mut network = NetworkFabric {
            number: here.number.filter(|_| here.fabric == Fabric::Overlay),
            exposed: here.fabric == Fabric::Native,
            ..NetworkFabric::default()
        };
        let mut used: Vec<(Way, Path)> = Vec::new();
        let objects = tables.other_blocks.of_network(here.name.as_str());
        let mut blocks: BTreeMap<IpNet, &AddressBlock> = BTreeMap::new();
        for (key, object) in objects {
            self.is_named &= is_named(key, object);
            if here.uid.as_deref() == Some(object.spec.network_uid.as_str())
                && let Ok(range) = object.spec.cidr.parse()
            {
                blocks.insert(range, object);
            }
        }
        for (range, object) in blocks {
            if let Some((way, path)) = nodes.way_of(here, &range, object) {
                network.blocks.insert(range, way);
                used.push((way, path));
            }
        }
        let desired = Arc::make_mut(&mut self.desired);
        if here.default {
            // The nodes' own addresses, in the network whose pods they exchange packets with.
            network.own = nodes.own.addresses.iter().copied().collect::<BTreeSet<IpAddr>>();
            for other in nodes.others.values() {
                for address in &other.underlay.addresses {
                    let way = way(&nodes.own, &other.underlay, here.fabric, &IpNet::from(*address));
                    network.nodes.extend(way.map(|(way, _)| (*address, way)));
                    used.extend(way);
                }
            }
            desired.stack = Some(Stack {
                network: here.id,
                ipv4: nodes.own.ipv4(),
                ipv6: nodes.own.ipv6(),
            });
        }
        desired.networks.insert(here.id, network);
        for (way, path) in used {
            acquire(&mut self.uses, desired, way, path);
        }
    }

    /// Sets what concerns egress addresses, where nothing of it is set.
    fn add_egress(&mut self, tables: &Tables, (node, uid): (&str, Option<&str>), networks: &[Here]) {
        let nodes = self.nodes.as_ref();
        let mut ways = BTreeMap::new();
        let desired = Arc::make_mut(&mut self.desired);
        desired.egress = egress(tables, (node, uid), nodes, &mut ways);
        desired.tunnel = nodes.and_then(|nodes| tunnel(networks, &nodes.own, !ways.is_empty()));
        for (way, path) in &ways {
            acquire(&mut self.uses, desired, *way, *path);
        }
        self.egress_ways = ways;
    }

    /// Whether the desired state differs.
    fn update_egress(&mut self, tables: &Tables, node: &str) -> bool {
        let Some(inputs) = &self.inputs else { return false };
        let nodes = self.nodes.as_ref();
        let mut ways = BTreeMap::new();
        let addresses = egress(tables, (node, inputs.uid.as_deref()), nodes, &mut ways);
        if addresses == self.desired.egress && ways == self.egress_ways {
            return false;
        }
        let desired = Arc::make_mut(&mut self.desired);
        desired.egress = addresses;
        desired.tunnel = nodes.and_then(|nodes| tunnel(&inputs.networks, &nodes.own, !ways.is_empty()));
        for (way, path) in &ways {
            acquire(&mut self.uses, desired, *way, *path);
        }
        for way in std::mem::replace(&mut self.egress_ways, ways).into_keys() {
            release(&mut self.uses, desired, way);
        }
        true
    }

    /// Whether the desired state differs; `None` if it has to be derived anew.
    fn update_blocks(&mut self, tables: &Tables) -> Option<bool> {
        if !self.is_named {
            return None;
        }
        let keys: BTreeSet<&Key> = tables.other_blocks.changed_since(self.blocks)?.collect();
        // All are read before the first one is set: a state that is derived anew is compared with the present one.
        let mut blocks = Vec::with_capacity(keys.len());
        for key in keys {
            let (name, range) = parse_object_name(&key.name)?;
            let object = tables.other_blocks.rows().get(key);
            if object.is_some_and(|object| object.spec.network != name.as_str() || !is_named(key, object)) {
                return None;
            }
            blocks.push((name, range, object));
        }
        let mut differs = false;
        for (name, range, object) in blocks {
            differs |= self.set_block(name.as_str(), range, object.map(AsRef::as_ref));
        }
        Some(differs)
    }

    /// Sets or removes a block. Whether the desired state differs.
    fn set_block(&mut self, network: &str, range: IpNet, object: Option<&AddressBlock>) -> bool {
        let (Some(here), Some(nodes)) = (self.networks.get(network), &self.nodes) else {
            return false;
        };
        let object = object.filter(|object| here.uid.as_deref() == Some(object.spec.network_uid.as_str()));
        let now = object.and_then(|object| nodes.way_of(here, &range, object));
        let known = self.desired.networks.get(&here.id);
        let former = known.and_then(|known| known.blocks.get(&range)).copied();
        if former == now.map(|(way, _)| way) {
            return false;
        }
        let desired = Arc::make_mut(&mut self.desired);
        if let Some(known) = desired.networks.get_mut(&here.id) {
            match now {
                Some((way, _)) => known.blocks.insert(range, way),
                None => known.blocks.remove(&range),
            };
        }
        if let Some((way, path)) = now {
            acquire(&mut self.uses, desired, way, path);
        }
        if let Some(former) = former {
            release(&mut self.uses, desired, former);
        }
        true
    }
}

/// Whether the name of a block states its network and range, and no other name could.
fn is_named(key: &Key, object: &AddressBlock) -> bool {
    let spec = &object.spec;
    let Ok(range) = spec.cidr.parse::<IpNet>() else {
        return false;
    };
    let after = |text: &'static str| {
        let rest = key.name.strip_prefix(spec.network.as_str())?;
        rest.strip_prefix(text)
    };
    let shown = after(if range.addr().is_ipv4() { ".v4-" } else { ".v6-" });
    let separated = spec.cidr.bytes().map(|byte| match byte {
        b'.' | b':' | b'/' => b'-',
        other => other,
    });
    shown.is_some_and(|shown| shown.bytes().eq(separated)) && range == range.trunc() && range.to_string() == spec.cidr
}

fn acquire(uses: &mut BTreeMap<Way, usize>, desired: &mut Desired, way: Way, path: Path) {
    *uses.entry(way).or_default() += 1;
    desired.ways.insert(way, path);
}

fn release(uses: &mut BTreeMap<Way, usize>, desired: &mut Desired, way: Way) {
    let Some(count) = uses.get_mut(&way) else { return };
    *count = count.saturating_sub(1);
    if *count == 0 {
        uses.remove(&way);
        desired.ways.remove(&way);
    }
}
