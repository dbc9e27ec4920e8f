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
