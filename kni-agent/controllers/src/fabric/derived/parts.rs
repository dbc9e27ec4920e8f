//! Derives the parts that blocks do not change: the nodes, the egress addresses, the tunnel. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_api::{AddressBlock, egress_address_claim::Holder};
use kni_cluster::{
    Tables,
    egress::{is_held_by, unit_of_node},
};
use kni_dataplane::{Answering, EgressShares, Way};
use kni_fabric::{Path, Tunnel};
use kni_model::{
    Fabric,
    network::{OVERHEAD_V4, OVERHEAD_V6},
};

use super::Here;
use crate::fabric::underlay::{Underlay, way};

/// Another node.
#[derive(Debug)]
pub(super) struct Other {
    uid: String,
    pub(super) underlay: Underlay,
}

/// This node, and the others by name.
#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) own: Underlay,
    pub(super) others: BTreeMap<String, Other>,
}

impl Nodes {
    /// `None` while this node has no address.
    pub(super) fn of(tables: &Tables, node: &str) -> Option<Self> {
        let own = tables.node_endpoints.get("", node).map(|object| Underlay::of(object));
        let own = own.filter(|own| !own.addresses.is_empty())?;
        let others = others(tables, node, &own);
        Some(Self { own, others })
    }

    /// The way to a block of another node; none if that node is not known, or the block is no part of the network.
    pub(super) fn way_of(&self, here: &Here, range: &IpNet, block: &AddressBlock) -> Option<(Way, Path)> {
        let spec = &block.spec;
        let is_inside = here.subnets.iter().any(|subnet| subnet.contains(range));
        let other = self.others.get(&spec.node_name).filter(|_| is_inside)?;
        let other = (other.uid == spec.node_uid).then_some(other)?;
        way(&self.own, &other.underlay, here.fabric, range)
    }
}

/// The other nodes. An address that two of them have, or that is this node's, is used for none: it cannot say whose
/// packets it sends.
fn others(tables: &Tables, node: &str, own: &Underlay) -> BTreeMap<String, Other> {
    let rows = tables.node_endpoints.rows().iter();
    let others = rows.filter(|(key, object)| key.name == object.spec.node_name && key.name != node);
    let mut others: BTreeMap<String, Other> = others
        .map(|(key, object)| {
            let other = Other {
                uid: object.spec.node_uid.clone(),
                underlay: Underlay::of(object),
            };
            (key.name.clone(), other)
        })
        .collect();
    let mut seen: BTreeSet<IpAddr> = own.addresses.iter().copied().collect();
    let all = others
        .values()
        .flat_map(|other| other.underlay.addresses.iter().copied());
    let twice: BTreeSet<IpAddr> = all.filter(|address| !seen.insert(*address)).collect();
    for other in others.values_mut() {
        other.underlay.addresses.retain(|address| !twice.contains(address));
    }
    others
}

/// The names of all nodes by their addresses.
pub(super) fn names(node: &str, nodes: &Nodes) -> BTreeMap<IpAddr, String> {
    let others = nodes
        .others
        .iter()
        .map(|(name, other)| (name.as_str(), &other.underlay));
    let all = others.chain([(node, &nodes.own)]);
    all.flat_map(|(name, underlay)| {
        underlay
            .addresses
            .iter()
            .map(move |address| (*address, name.to_owned()))
    })
    .collect()
}

/// The egress addresses that several nodes share and this one has a part in: it answers for them, or its pods leave
/// with them. Without `nodes` no way to another one is known.
pub(super) fn egress(
    tables: &Tables,
    (node, uid): (&str, Option<&str>),
    nodes: Option<&Nodes>,
    ways: &mut BTreeMap<Way, Path>,
) -> BTreeMap<IpAddr, EgressShares> {
    let this = &Holder {
        node_name: node.to_owned(),
        node_uid: uid.unwrap_or_default().to_owned(),
        epoch: 0,
    };
    let mut egress = BTreeMap::new();
    for claim in tables.egress_claims.rows().values() {
        let Ok(address) = claim.spec.address.parse::<IpAddr>() else {
            continue;
        };
        let mut way_to = |name: &str, uid: &str| {
            let nodes = nodes?;
            let other = nodes.others.get(name).filter(|other| other.uid == uid)?;
            let (way, path) = way(&nodes.own, &other.underlay, Fabric::Overlay, &IpNet::from(address))?;
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
                .map(|share| (share.unit, way_to(&share.node_name, &share.node_uid)))
                .collect(),
        };
        egress.insert(address, shares);
    }
    egress
}

/// The tunnel exists while a network of the cluster, or an egress address, needs it.
pub(super) fn tunnel(networks: &[Here], own: &Underlay, is_needed: bool) -> Option<Tunnel> {
    let mut overlays = networks.iter().filter(|network| network.fabric == Fabric::Overlay);
    let default = overlays
        .clone()
        .find(|network| network.default && network.number.is_some());
    if !is_needed && overlays.next().is_none() {
        return None;
    }
    let overhead = if own.ipv4().is_some() { OVERHEAD_V4 } else { OVERHEAD_V6 };
    Some(Tunnel {
        ipv4: own.ipv4(),
        ipv6: own.ipv6(),
        port: own.port,
        mtu: own.mtu.saturating_sub(overhead),
        host_network: default.map(|network| network.id),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::Key;
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(kind: &str, name: &str, spec: &Value, status: &Value) -> Arc<K> {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec, "status": status,
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn endpoint(tables: &mut Tables, node: &str, addresses: &[&str]) {
        let spec = json!({
            "nodeName": node, "nodeUID": format!("{node}-1"), "addresses": addresses, "port": 4789, "mtu": 1500, "epoch": 1,
        });
        let row = object("NodeEndpoint", node, &spec, &json!({ "addresses": addresses }));
        tables.node_endpoints.put(Key::new("", node), Some(row));
    }

    #[test]
    fn the_holder_of_an_address_keeps_the_units_of_nodes_without_a_way() {
        let mut tables = Tables::default();
        let share = |unit: u8, node: &str| json!({ "unit": unit, "nodeName": node, "nodeUid": format!("{node}-1") });
        let spec = json!({
            // To go to another node, after this one has removed it.
            "address": "198.51.100.1", "nodeName": "n2", "nodeUid": "n2-1",
            "shares": [share(1, "n1"), share(2, "n2"), share(3, "n3")],
        });
        let holder = json!({ "nodeName": "n1", "nodeUid": "n1-1", "epoch": 1 });
        let row = object(
            "EgressAddressClaim",
            "198.51.100.1",
            &spec,
            &json!({ "holder": holder }),
        );
        tables.egress_claims.put(Key::new("", "198.51.100.1"), Some(row));
        endpoint(&mut tables, "n2", &["192.0.2.2"]);
        let units = |tables: &Tables, uid: Option<&str>| {
            let nodes = Nodes::of(tables, "n1");
            let shares = egress(tables, ("n1", uid), nodes.as_ref(), &mut BTreeMap::new());
            let shares = shares.into_values().next()?;
            assert_eq!((shares.answering, shares.unit), (Answering::Here, Some(1)));
            let units = shares.others.into_iter();
            Some(units.map(|(unit, way)| (unit, way.is_some())).collect::<Vec<_>>())
        };
        assert_eq!(
            units(&tables, Some("n1-1")),
            Some(vec![(2, false), (3, false)]),
            "this node is not confirmed"
        );
        endpoint(&mut tables, "n1", &["192.0.2.1"]);
        assert_eq!(
            units(&tables, Some("n1-1")),
            Some(vec![(2, true), (3, false)]),
            "n3 is not confirmed"
        );
        assert_eq!(units(&tables, Some("n1-2")), None, "another node of the name");
    }
}
