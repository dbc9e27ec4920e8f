//! Derives from the cluster's objects which node has which pods' addresses, and has that applied.
//!
//! A node is known by the addresses of its `NodeEndpoint` that kni-controller has confirmed, and has the addresses of its
//! `AddressBlock`s. Both are written by that node alone, with its token.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use ipnet::IpNet;
use kni_api::{NodeEndpoint, egress_address_claim::Holder};
use kni_cluster::{
    Tables,
    egress::{is_held_by, unit_of_node},
};
use kni_dataplane::{Answering, EgressShares, NetworkFabric, Way};
use kni_fabric::{Desired, Path, Stack, Tunnel};
use kni_model::{
    Fabric, Network,
    network::{OVERHEAD_V4, OVERHEAD_V6},
};

use super::{ObjectControllers, retry::Retry};

/// Changes that arrive within this time are applied together.
const GATHER: Duration = Duration::from_millis(10);

/// The addresses of a node in the underlay, the preferred family first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Underlay {
    addresses: Vec<IpAddr>,
    port: u16,
    mtu: u32,
    stamp: u64,
}

/// A network of this node, and the number that its packets carry; without one none of them enters the tunnel.
type Here<'a> = (&'a Network, Option<u32>);

/// Other nodes by name, each with its UID.
type Others<'a> = BTreeMap<&'a str, (&'a str, Underlay)>;

impl Underlay {
    fn of(endpoint: &NodeEndpoint) -> Self {
        let mut stamp = DefaultHasher::new();
        (&endpoint.spec.node_uid, endpoint.spec.epoch).hash(&mut stamp);
        Self {
            addresses: endpoint
                .confirmed()
                .filter_map(|address| address.parse().ok())
                .collect(),
            port: endpoint.spec.port,
            mtu: endpoint.spec.mtu,
            stamp: stamp.finish(),
        }
    }

    fn ipv4(&self) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        })
    }

    fn ipv6(&self) -> Option<Ipv6Addr> {
        self.addresses.iter().find_map(|address| match address {
            IpAddr::V6(v6) => Some(*v6),
            IpAddr::V4(_) => None,
        })
    }

    fn of_family(&self, v4: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == v4)
    }

    /// Both ends must choose the same family, as each accepts packets from one address of the other only: IPv6 where both
    /// have it and one of them prefers it, otherwise IPv4.
    fn common(&self, other: &Self) -> Option<(IpAddr, IpAddr)> {
        let both = |v4| Some((self.of_family(v4)?, other.of_family(v4)?));
        let prefers = |underlay: &Self| underlay.addresses.first().is_some_and(IpAddr::is_ipv6);
        let (v4, v6) = (both(true), both(false));
        if prefers(self) || prefers(other) {
            v6.or(v4)
        } else {
            v4.or(v6)
        }
    }
}

impl ObjectControllers {
    /// Applies changes of nodes and their blocks for as long as the agent runs, and repeats what fails.
    pub(super) async fn reconcile_fabric(self) {
        let mut changes = self.cache.changes();
        let mut attached = self.state.changes.clone();
        let mut seen = None;
        let mut applied = None;
        let mut retry = Retry::default();
        loop {
            let versions = {
                let tables = self.cache.tables();
                let versions = [
                    tables.node_endpoints.version(),
                    tables.other_blocks.version(),
                    tables.networks.version(),
                    tables.numbers.version(),
                    tables.egress_claims.version(),
                    tables.own_node.version(),
                ];
                (versions, *attached.borrow_and_update())
            };
            if seen != Some(versions) || retry.is_over() {
                seen = Some(versions);
                if let Some(desired) = self.desired_fabric()
                    && (applied.as_ref() != Some(&desired) || retry.is_over())
                {
                    let done = (self.state.apply_fabric)(desired.clone()).await;
                    retry.ended(done);
                    applied = done.then_some(desired);
                    self.node_changed.notify_one();
                }
            }
            let next = async {
                tokio::select! {
                    sent = changes.changed() => sent.is_ok(),
                    sent = attached.changed() => sent.is_ok(),
                    () = retry.wait() => true,
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// `None` until the nodes and their blocks are known: what an earlier agent made stays.
    fn desired_fabric(&self) -> Option<Desired> {
        let views = (self.state.networks)();
        let tables = self.cache.tables();
        let known = tables.node_endpoints.is_synced() && tables.other_blocks.is_synced() && tables.networks.is_synced();
        known.then(|| {
            let here: Vec<Here<'_>> = views.iter().map(|view| (&view.network, view.number)).collect();
            desired(&tables, &here, &self.node)
        })
    }
}

/// This node, as the holder of egress addresses.
fn this_node(tables: &Tables, node: &str) -> Holder {
    let row = tables.own_node.get("", node);
    Holder {
        node_name: node.to_owned(),
        node_uid: row.map(|row| row.uid.clone()).unwrap_or_default(),
        epoch: 0,
    }
}

/// What this node should know of others.
fn desired(tables: &Tables, networks: &[Here<'_>], node: &str) -> Desired {
    let own = tables.node_endpoints.get("", node).map(|object| Underlay::of(object));
    let Some(own) = own.filter(|own| !own.addresses.is_empty()) else {
        return Desired::default();
    };
    let others = others(tables, node, &own);
    let blocks = blocks(tables);
    let mut desired = Desired {
        names: names((node, &own), &others),
        ..Desired::default()
    };
    desired.egress = egress(tables, &this_node(tables, node), (&own, &others), &mut desired.ways);
    desired.tunnel = tunnel(networks, &own, !desired.ways.is_empty());
    let mut native: Vec<IpNet> = Vec::new();
    for (here, number) in networks {
        let spec = &here.spec;
        let number = number.filter(|_| spec.fabric == Fabric::Overlay);
        if spec.fabric == Fabric::None || (spec.fabric == Fabric::Overlay && number.is_none()) {
            continue;
        }
        let exposed = spec.fabric == Fabric::Native;
        if exposed {
            let overlaps = |net: &IpNet| native.iter().any(|other| other.contains(net) || net.contains(other));
            if spec.subnets.iter().any(overlaps) {
                // Without a tunnel an address is that of one network only. All nodes choose the same one.
                continue;
            }
            native.extend(&spec.subnets);
        }
        let mut network = NetworkFabric {
            number,
            exposed,
            ..NetworkFabric::default()
        };
        for (block, (name, uid)) in blocks.get(spec.name.as_str()).into_iter().flatten() {
            let is_inside = spec.subnets.iter().any(|subnet| subnet.contains(block));
            let Some((of_uid, other)) = others.get(name).filter(|_| is_inside) else {
                continue;
            };
            if of_uid == uid
                && let Some((way, path)) = way(&own, other, spec.fabric, block)
            {
                desired.ways.insert(way, path);
                network.blocks.insert(*block, way);
            }
        }
        if spec.default {
            add_nodes(&mut network, &mut desired.ways, spec.fabric, (&own, &others));
            desired.stack = Some(Stack {
                network: here.id,
                ipv4: own.ipv4(),
                ipv6: own.ipv6(),
            });
        }
        desired.networks.insert(here.id, network);
    }
    desired
}

/// The other nodes, each with its UID. An address that two of them have, or that is this node's, is used for none: it cannot
/// say whose packets it sends.
fn others<'a>(tables: &'a Tables, node: &str, own: &Underlay) -> Others<'a> {
    let rows = tables.node_endpoints.rows().iter();
    let others = rows.filter(|(key, object)| key.name == object.spec.node_name && key.name != node);
    let mut others: Others<'_> = others
        .map(|(key, object)| (key.name.as_str(), (object.spec.node_uid.as_str(), Underlay::of(object))))
        .collect();
    let mut seen: BTreeSet<IpAddr> = own.addresses.iter().copied().collect();
    let all = others.values().flat_map(|(_, other)| other.addresses.iter().copied());
    let twice: BTreeSet<IpAddr> = all.filter(|address| !seen.insert(*address)).collect();
    for (_, other) in others.values_mut() {
        other.addresses.retain(|address| !twice.contains(address));
    }
    others
}

/// The names of all nodes by their addresses.
fn names((node, own): (&str, &Underlay), others: &Others<'_>) -> BTreeMap<IpAddr, String> {
    let others = others.iter().map(|(name, (_, other))| (*name, other));
    let all = others.chain([(node, own)]);
    all.flat_map(|(name, underlay)| {
        underlay
            .addresses
            .iter()
            .map(move |address| (*address, name.to_owned()))
    })
    .collect()
}

/// The blocks of joined networks, by network; each with its node and that node's UID.
fn blocks(tables: &Tables) -> BTreeMap<&str, BTreeMap<IpNet, (&str, &str)>> {
    let mut blocks: BTreeMap<&str, BTreeMap<IpNet, (&str, &str)>> = BTreeMap::new();
    for object in tables.other_blocks.rows().values() {
        let spec = &object.spec;
        let network = tables.networks.get("", &spec.network);
        let is_it = network.is_some_and(|network| network.metadata.uid.as_ref() == Some(&spec.network_uid));
        if let Some(block) = spec.cidr.parse::<IpNet>().ok().filter(|_| is_it) {
            let of_network = blocks.entry(&spec.network).or_default();
            of_network.insert(block, (&spec.node_name, &spec.node_uid));
        }
    }
    blocks
}

/// The egress addresses that several nodes share and this one has a part in: it answers for them, or its pods leave with
/// them.
fn egress(
    tables: &Tables,
    this: &Holder,
    (own, others): (&Underlay, &Others<'_>),
    ways: &mut BTreeMap<Way, Path>,
) -> BTreeMap<IpAddr, EgressShares> {
    let mut egress = BTreeMap::new();
    for claim in tables.egress_claims.rows().values() {
        let Ok(address) = claim.spec.address.parse::<IpAddr>() else {
            continue;
        };
        let mut way_to = |name: &str, uid: &str| {
            let (_, other) = others.get(name).filter(|(of, _)| *of == uid)?;
            let (way, path) = way(own, other, Fabric::Overlay, &IpNet::from(address))?;
            ways.insert(way, path);
            Some(way)
        };
        let unit = unit_of_node(claim, this);
        let holder = claim.status.as_ref().and_then(|status| status.holder.as_ref());
        // Also after the claim names another node: as long as the uplink has the address, the node's stack must get no
        // packet of others' connections, which it would answer with a reset.
        let is_held = is_held_by(claim, this);
        let answering = match holder {
            Some(_) if is_held => Some(Answering::Here),
            Some(holder) if unit.is_some() => way_to(&holder.node_name, &holder.node_uid).map(Answering::There),
            Some(_) | None => None,
        };
        let Some(answering) = answering else { continue };
        let shares = claim
            .spec
            .shares
            .iter()
            .filter(|share| is_held && Some(share.unit) != unit);
        let shares = EgressShares {
            answering,
            unit,
            others: shares
                .filter_map(|share| Some((share.unit, way_to(&share.node_name, &share.node_uid)?)))
                .collect(),
        };
        egress.insert(address, shares);
    }
    egress
}

/// The tunnel exists while a network of the cluster, or an egress address, needs it.
fn tunnel(networks: &[Here<'_>], own: &Underlay, is_needed: bool) -> Option<Tunnel> {
    let mut overlays = networks
        .iter()
        .filter(|(network, _)| network.spec.fabric == Fabric::Overlay);
    let default = overlays
        .clone()
        .find(|(network, number)| network.spec.default && number.is_some());
    if !is_needed && overlays.next().is_none() {
        return None;
    }
    let overhead = if own.ipv4().is_some() { OVERHEAD_V4 } else { OVERHEAD_V6 };
    Some(Tunnel {
        ipv4: own.ipv4(),
        ipv6: own.ipv6(),
        port: own.port,
        mtu: own.mtu.saturating_sub(overhead),
        host_network: default.map(|(network, _)| network.id),
    })
}

/// The way to a node's block; none where the two nodes have no family, or no port, in common.
fn way(own: &Underlay, other: &Underlay, fabric: Fabric, block: &IpNet) -> Option<(Way, Path)> {
    let mtu = own.mtu.min(other.mtu);
    let (underlay, overhead) = match fabric {
        Fabric::Overlay if own.port != other.port => return None,
        Fabric::Overlay => {
            let (_, underlay) = own.common(other)?;
            (underlay, if underlay.is_ipv4() { OVERHEAD_V4 } else { OVERHEAD_V6 })
        }
        Fabric::Native => (other.of_family(block.addr().is_ipv4())?, 0),
        Fabric::None => return None,
    };
    let way = Way {
        underlay,
        overlay: fabric == Fabric::Overlay,
    };
    let path = Path {
        mtu: mtu.saturating_sub(overhead),
        stamp: other.stamp,
    };
    Some((way, path))
}

/// The nodes' own addresses, in the network whose pods they exchange packets with.
fn add_nodes(
    network: &mut NetworkFabric,
    ways: &mut BTreeMap<Way, Path>,
    fabric: Fabric,
    (own, others): (&Underlay, &Others<'_>),
) {
    network.own = own.addresses.iter().copied().collect::<BTreeSet<_>>();
    for (_, other) in others.values() {
        for address in &other.addresses {
            if let Some((way, path)) = way(own, other, fabric, &IpNet::from(*address)) {
                ways.insert(way, path);
                network.nodes.insert(*address, way);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::Key;
    use kni_crd::{FromObject as _, PodNetwork};
    use kni_model::{NetworkId, NetworkSpec};
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(kind: &str, name: &str, spec: &Value, status: &Value) -> Arc<K> {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": kind, "metadata": { "name": name, "uid": format!("{name}-uid") },
            "spec": spec, "status": status,
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn endpoint(tables: &mut Tables, node: &str, addresses: &[&str], mtu: u32) {
        let spec = json!({
            "nodeName": node, "nodeUID": format!("{node}-1"), "addresses": addresses, "port": 4789, "mtu": mtu, "epoch": 1,
        });
        let row = object("NodeEndpoint", node, &spec, &json!({ "addresses": addresses }));
        tables.node_endpoints.put(Key::new("", node), Some(row));
    }

    fn block(tables: &mut Tables, network: &str, cidr: &str, node: &str) {
        let spec = json!({
            "network": network, "networkUID": format!("{network}-uid"), "cidr": cidr, "nodeName": node,
            "nodeUID": format!("{node}-1"),
        });
        let name = format!("{network}.{cidr}.{node}");
        let row = object("AddressBlock", &name, &spec, &json!({}));
        tables.other_blocks.put(Key::new("", &name), Some(row));
    }

    /// Two nodes beside this one, and a block of each in both networks.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        for name in ["default", "red"] {
            let row = object("PodNetwork", name, &json!({ "subnets": ["10.0.0.0/16"] }), &json!({}));
            tables.networks.put(Key::new("", name), Some(row));
            block(&mut tables, name, "10.0.1.0/26", "n2");
            block(&mut tables, name, "10.0.2.0/26", "n3");
        }
        endpoint(&mut tables, "n1", &["192.0.2.1", "2001:db8::1"], 1500);
        endpoint(&mut tables, "n2", &["192.0.2.2", "2001:db8::2"], 9000);
        endpoint(&mut tables, "n3", &["2001:db8::3", "192.0.2.3"], 1400);
        tables
    }

    fn network(name: &str, fabric: Fabric) -> Network {
        let default = name == "default";
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name },
            "spec": { "subnets": ["10.0.0.0/16"], "default": default },
        });
        let object: PodNetwork = serde_json::from_value(object).unwrap();
        let id: NetworkId = if default { 1 } else { 2 }.try_into().unwrap();
        let spec = NetworkSpec {
            fabric,
            ..NetworkSpec::from_object(&object).unwrap()
        };
        Network { id, spec }
    }

    /// What this node should know with these networks.
    fn of_networks(tables: &Tables, networks: &[(Network, Option<u32>)]) -> Desired {
        let here: Vec<Here<'_>> = networks.iter().map(|(network, number)| (network, *number)).collect();
        desired(tables, &here, "n1")
    }

    fn of(tables: &Tables, fabric: Fabric) -> Desired {
        let red = (network("red", Fabric::Overlay), Some(5001));
        of_networks(tables, &[(network("default", fabric), Some(5000)), red])
    }

    /// The blocks of a network with the addresses of their nodes.
    fn shown(desired: &Desired, network: u32) -> Vec<String> {
        let network = desired.networks.get(&network.try_into().unwrap());
        let blocks = network.into_iter().flat_map(|network| &network.blocks);
        blocks
            .map(|(block, way)| {
                format!(
                    "{block} {} {}",
                    way.underlay,
                    if way.overlay { "tunnel" } else { "direct" }
                )
            })
            .collect()
    }

    #[test]
    fn each_block_leads_to_its_node_by_a_family_that_both_choose() {
        let desired = of(&tables(), Fabric::Overlay);
        // The third node prefers IPv6.
        let expected = ["10.0.1.0/26 192.0.2.2 tunnel", "10.0.2.0/26 2001:db8::3 tunnel"];
        assert_eq!(shown(&desired, 1), expected);
        assert_eq!(shown(&desired, 2), expected);
        let mtus: Vec<u32> = desired.ways.values().map(|path| path.mtu).collect();
        assert_eq!(mtus, [1450, 1330], "of the smaller MTU, less the outer headers");
        let default = &desired.networks[&1.try_into().unwrap()];
        assert_eq!((default.nodes.len(), default.own.len()), (4, 2));
        let red = &desired.networks[&2.try_into().unwrap()];
        assert!(red.nodes.is_empty() && red.own.is_empty(), "no access to nodes");
        let names: BTreeSet<&str> = desired.names.values().map(String::as_str).collect();
        assert_eq!((desired.names.len(), names), (6, ["n1", "n2", "n3"].into()));
        assert_eq!(desired.tunnel.unwrap().mtu, 1450);
        assert_eq!(desired.tunnel.unwrap().host_network, Some(1.try_into().unwrap()));
    }

    #[test]
    fn networks_without_a_tunnel_have_ways_of_their_own_family() {
        let desired = of(&tables(), Fabric::Native);
        assert_eq!(
            shown(&desired, 1),
            ["10.0.1.0/26 192.0.2.2 direct", "10.0.2.0/26 192.0.2.3 direct"]
        );
        assert!(desired.networks[&1.try_into().unwrap()].exposed);
        assert_eq!(desired.tunnel.unwrap().host_network, None);
        // Both would have the same addresses outside of the nodes: the first one has them.
        let both = ["default", "red"].map(|name| (network(name, Fabric::Native), None));
        let desired = of_networks(&tables(), &both);
        assert_eq!(desired.networks.len(), 1);
        assert_eq!(desired.tunnel, None);
    }

    #[test]
    fn what_is_not_known_for_certain_is_left_out() {
        let closed = [
            (network("default", Fabric::Overlay), None),
            (network("red", Fabric::None), Some(7)),
        ];
        assert!(of_networks(&tables(), &closed).networks.is_empty());
        let with = |change: &dyn Fn(&mut Tables)| {
            let mut tables = tables();
            change(&mut tables);
            shown(&of(&tables, Fabric::Overlay), 2)
        };
        let third = ["10.0.2.0/26 2001:db8::3 tunnel"];
        assert_eq!(
            with(&|tables| endpoint(tables, "n2", &[], 1500)),
            third,
            "no address is confirmed"
        );
        assert_eq!(
            with(&|tables| endpoint(tables, "n2", &["192.0.2.1"], 1500)),
            third,
            "this node's own"
        );
        assert_eq!(
            with(&|tables| endpoint(tables, "n2", &["2001:db8::3"], 1500)),
            ["10.0.2.0/26 192.0.2.3 tunnel"],
            "two nodes have one address"
        );
        assert_eq!(with(&|tables| tables.node_endpoints.remove(&Key::new("", "n2"))), third);
        assert_eq!(
            with(&|tables| tables.node_endpoints.remove(&Key::new("", "n1"))),
            [""; 0],
            "no own end"
        );
        let foreign = |tables: &mut Tables| block(tables, "red", "172.16.0.0/26", "n2");
        assert_eq!(with(&foreign).len(), 2, "outside of the subnets");
        let later = |tables: &mut Tables| {
            let row = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "later" },
                "spec": { "subnets": ["10.0.0.0/16"] },
            });
            let row = Arc::new(serde_json::from_value(row).unwrap());
            tables.networks.put(Key::new("", "red"), Some(row));
        };
        assert_eq!(with(&later), [""; 0], "blocks of an earlier network of the name");
    }
}
