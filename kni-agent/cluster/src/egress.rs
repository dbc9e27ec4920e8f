//! Derives from the objects of the cluster who may use which egress addresses, and which node owns each. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use kni_api::{
    EgressAddressClaim,
    egress_address_claim::{Holder, UNITS, name_of},
};
use kni_crd::{EgressAddressPool, FromObject};
use kni_model::{
    NetworkName,
    egress::{EgressPool, EgressRefusal, EgressUser, EgressWay},
    policy::{Policy, PolicyKind, PolicyRef},
};
use kni_policy::{EgressFacts, EgressPools, EgressRight, egress_rights};
use kube::ResourceExt as _;

use super::{networks::Networks, tables::Tables};

/// Users and the addresses that they request.
pub type EgressRequests = BTreeSet<(EgressUser, IpAddr)>;

/// The pools of the cluster, and why others do not count, by name.
pub fn egress_pools(tables: &Tables) -> EgressPools {
    let read = |object: &Arc<EgressAddressPool>| EgressPool::from_object(object.as_ref());
    let rows = tables.egress_pools.rows().values();
    let (valid, invalid): (Vec<_>, Vec<_>) = rows
        .map(|object| (object.name_any(), read(object)))
        .partition(|(_, pool)| pool.is_ok());
    let mut pools = EgressPools::new(valid.into_iter().filter_map(|(_, pool)| pool.ok()).collect());
    let invalid = invalid
        .into_iter()
        .filter_map(|(name, pool)| Some((name, pool.err()?.to_string())));
    pools.refused.extend(invalid);
    pools
}

/// The addresses that policies and networks request.
pub fn egress_requests<'a>(policies: impl Iterator<Item = &'a Policy>, networks: &Networks) -> EgressRequests {
    let of_policies = policies.flat_map(|policy| {
        let addresses = policy.external.iter().flat_map(|rules| &rules.egress_addresses);
        addresses.map(|address| (EgressUser::Policy(policy.reference.clone()), *address))
    });
    let of_networks = networks.desired.networks.iter().flat_map(|(spec, _)| {
        let addresses = spec.egress_addresses.iter();
        addresses.map(|address| (EgressUser::Network(spec.name.clone()), *address))
    });
    of_policies.chain(of_networks).collect()
}

/// The rights of the users by the objects of the cluster, whichever node owns an address.
pub fn cluster_egress_rights(
    tables: &Tables,
    networks: &Networks,
    requests: &EgressRequests,
) -> BTreeMap<(EgressUser, IpAddr), EgressRight> {
    if requests.is_empty() {
        // Pools and namespaces need not be read.
        return BTreeMap::new();
    }
    let namespaces = tables.namespaces.rows().iter();
    let facts = EgressFacts {
        pools: &egress_pools(tables),
        namespaces: &namespaces
            .map(|(key, labels)| (key.name.clone(), labels.clone()))
            .collect(),
        reserved: &|address| reserved(tables, networks, address),
        holder: &|address| claim_of(tables, address).and_then(user_of),
    };
    egress_rights(requests, &facts)
}

/// The rights on one node: those by the objects, where the node owns the address, or has a share of it.
pub fn node_egress_rights(
    tables: &Tables,
    networks: &Networks,
    requests: &EgressRequests,
    node: &Holder,
) -> BTreeMap<(EgressUser, IpAddr), Result<EgressWay, EgressRefusal>> {
    let rights = cluster_egress_rights(tables, networks, requests).into_iter();
    let on_node = rights.map(|((user, address), right)| {
        let right = right.and_then(|_pool| ownership(claim_of(tables, address), &user, node));
        ((user, address), right)
    });
    on_node.collect()
}

/// The addresses that the node answers for, for pods of any node: it is assigned and confirmed, and the claim's user
/// has the right to the address.
pub fn answered_addresses(
    tables: &Tables,
    rights: &BTreeMap<(EgressUser, IpAddr), EgressRight>,
    node: &Holder,
) -> BTreeSet<IpAddr> {
    let granted = rights.iter().filter(|(_, right)| right.is_ok());
    let answered = granted.filter(|((user, address), _)| {
        claim_of(tables, *address).is_some_and(|claim| {
            !claim.spec.shares.is_empty()
                && user_of(claim).is_some_and(|of_claim| of_claim.shares_with(user))
                && answers(claim, node)
        })
    });
    answered.map(|((_, address), _)| *address).collect()
}

/// Whether a node is assigned, confirmed, and not to release the address.
fn answers(claim: &EgressAddressClaim, node: &Holder) -> bool {
    is_assigned_to(claim, node) && claim.metadata.deletion_timestamp.is_none() && is_held_by(claim, node)
}

/// Whether the node may have the address on its uplink: until it has removed it, whichever node is to be next.
pub fn is_held_by(claim: &EgressAddressClaim, node: &Holder) -> bool {
    let holder = claim.status.as_ref().and_then(|status| status.holder.as_ref());
    holder.is_some_and(|holder| is_same_node(holder, node))
}

/// What keeps the holder from the address, by its own report.
fn cannot_answer(claim: &EgressAddressClaim) -> Option<&str> {
    let status = claim.status.as_ref()?;
    let holder = status.holder.as_ref()?;
    let mut reports = status.conditions.iter().filter(|condition| condition.type_ == "Ready");
    let report = reports.find(|report| {
        matches!(
            report.reason.as_str(),
            "AddressConflict" | "AddressReserved" | "AddressNotAdded"
        )
    })?;
    (holder.node_name == claim.spec.node_name).then_some(report.message.as_str())
}

/// The unit of the ports of an address that a node has.
pub fn unit_of_node(claim: &EgressAddressClaim, node: &Holder) -> Option<u8> {
    let shares = claim.spec.shares.iter();
    let mut own = shares.filter(|share| {
        !node.node_uid.is_empty() && share.node_name == node.node_name && share.node_uid == node.node_uid
    });
    own.next().map(|share| share.unit)
}

/// Whether, and how, pods of the node may leave with the address of a claim for a user.
fn ownership(claim: Option<&EgressAddressClaim>, user: &EgressUser, node: &Holder) -> Result<EgressWay, EgressRefusal> {
    let Some(claim) = claim else {
        return Err(EgressRefusal::Unassigned);
    };
    match user_of(claim) {
        Some(other) if !other.shares_with(user) => return Err(EgressRefusal::InUse(other.to_string())),
        Some(_) | None => {}
    }
    let is_leaving = claim.metadata.deletion_timestamp.is_some();
    match unit_of_node(claim, node) {
        Some(_) if answers(claim, node) => Ok(EgressWay::Shared),
        Some(_) if cannot_answer(claim).is_some() => Err(EgressRefusal::NotAnswered {
            node: claim.spec.node_name.clone(),
            message: cannot_answer(claim).unwrap_or_default().to_owned(),
        }),
        // Also while no node answers: then nothing leaves, and the flows stay.
        Some(_) if !is_leaving => Ok(EgressWay::Through),
        Some(_) => Err(EgressRefusal::Unassigned),
        None => Err(EgressRefusal::NoPorts {
            nodes: claim.spec.shares.len(),
            exhausted: claim.spec.shares.len() >= UNITS.count(),
        }),
    }
}

/// Whether a claim assigns its address to a node. A node that has joined again under its name is another node.
pub fn is_assigned_to(claim: &EgressAddressClaim, node: &Holder) -> bool {
    !node.node_uid.is_empty() && claim.spec.node_name == node.node_name && claim.spec.node_uid == node.node_uid
}

/// Whether both are the same node of the cluster.
pub fn is_same_node(one: &Holder, other: &Holder) -> bool {
    !one.node_uid.is_empty() && one.node_name == other.node_name && one.node_uid == other.node_uid
}

/// The claim of an address.
pub fn claim_of(tables: &Tables, address: IpAddr) -> Option<&EgressAddressClaim> {
    tables.egress_claims.get("", &name_of(address)).map(AsRef::as_ref)
}

/// Who uses the address of a claim. `None` for a claim that names no user.
pub fn user_of(claim: &EgressAddressClaim) -> Option<EgressUser> {
    let policy = claim.spec.egress_policy.as_ref().map(|policy| {
        EgressUser::Policy(PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace: policy.namespace.clone(),
            name: policy.name.clone(),
        })
    });
    let network = || claim.spec.pod_network_name.as_ref()?.parse::<NetworkName>().ok();
    policy.or_else(|| network().map(EgressUser::Network))
}

/// What an address is where it belongs to a part of the cluster. Agents do not follow other nodes; kni-controller,
/// which does, creates no claim for their addresses.
pub fn reserved(tables: &Tables, networks: &Networks, address: IpAddr) -> Option<String> {
    let is_it = |other: &String| other.parse::<IpAddr>().is_ok_and(|other| other == address);
    let nodes = tables.nodes.rows().iter().chain(tables.own_node.rows());
    for (key, node) in nodes {
        if node.addresses.iter().chain(&node.external_addresses).any(is_it) {
            return Some(format!("the address of node {}", key.name));
        }
    }
    let slices = tables.slices.rows().values().filter_map(|row| row.as_ref().ok());
    let mut of_api_server = slices.filter(|slice| slice.namespace == "default" && slice.service == "kubernetes");
    if of_api_server.any(|slice| {
        slice
            .endpoints
            .iter()
            .any(|endpoint| endpoint.addresses.contains(&address))
    }) {
        return Some("the address of the API server".to_owned());
    }
    let services = tables.services.rows().values().filter_map(|row| row.as_ref().ok());
    for service in services {
        if service.cluster_ips.contains(&address) {
            return Some(format!("the address of Service {}", service.reference));
        }
    }
    networks.desired.networks.iter().find_map(|(spec, _)| {
        let mut ranges = spec.subnets.iter().chain(&spec.service_subnets);
        let range = ranges.find(|range| range.contains(&address))?;
        Some(format!("inside {range} of PodNetwork {}", spec.name))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Key;

    fn claim(spec: &serde_json::Value, holder: Option<(&str, &str)>) -> EgressAddressClaim {
        let holder = holder.map(|(name, uid)| json!({ "nodeName": name, "nodeUid": uid, "epoch": 1 }));
        let mut object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressClaim", "metadata": { "name": "192.0.2.25" },
            "spec": { "address": "192.0.2.25", "egressPolicy": { "namespace": "red", "name": "p" } },
        });
        for (name, value) in spec.as_object().unwrap() {
            object["spec"][name] = value.clone();
        }
        if let Some(holder) = holder {
            object["status"] = json!({ "holder": holder });
        }
        serde_json::from_value(object).unwrap()
    }

    fn policy(namespace: &str) -> EgressUser {
        EgressUser::Policy(PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace: namespace.to_owned(),
            name: "q".to_owned(),
        })
    }

    #[test]
    fn a_node_owns_what_it_is_assigned_and_has_confirmed() {
        let node = Holder {
            node_name: "n1".to_owned(),
            node_uid: "u1".to_owned(),
            epoch: 0,
        };
        let reason = |spec: &serde_json::Value, holder: Option<(&str, &str)>| {
            let claim = claim(spec, holder);
            ownership(Some(&claim), &policy("red"), &node).map_err(|refusal| refusal.reason())
        };
        let with = |node: &str, share: &str| {
            let shares = json!([{ "nodeName": share, "nodeUid": share.replace('n', "u"), "unit": 5 }]);
            json!({ "nodeName": node, "nodeUid": node.replace('n', "u"), "shares": shares })
        };
        for (spec, holder, expected) in [
            (with("n1", "n1"), Some(("n1", "u1")), Ok(EgressWay::Shared)),
            (with("n1", "n1"), Some(("n2", "u2")), Ok(EgressWay::Through)),
            (with("n1", "n1"), None, Ok(EgressWay::Through)),
            (with("n2", "n1"), Some(("n1", "u1")), Ok(EgressWay::Through)),
            (with("n2", "n1"), Some(("n2", "u2")), Ok(EgressWay::Through)),
            (with("n1", "n2"), Some(("n1", "u1")), Err("PortsNotAssigned")),
            (
                json!({ "nodeName": "n1", "nodeUid": "u1" }),
                Some(("n1", "u1")),
                Err("PortsNotAssigned"),
            ),
        ] {
            assert_eq!(reason(&spec, holder), expected, "{spec} {holder:?}");
        }
        let mut refused = claim(&with("n2", "n1"), Some(("n2", "u2")));
        let report = kni_api::Condition::now("Ready", false, "AddressConflict", "a host has it", None);
        refused.status.as_mut().unwrap().conditions.push(report);
        let result = ownership(Some(&refused), &policy("red"), &node);
        assert_eq!(result.map_err(|refusal| refusal.reason()), Err("AddressNotReady"));
        let claim = claim(&with("n1", "n1"), Some(("n1", "u1")));
        assert_eq!(ownership(None, &policy("red"), &node), Err(EgressRefusal::Unassigned));
        let other = ownership(Some(&claim), &policy("blue"), &node);
        assert_eq!(other, Err(EgressRefusal::InUse("EgressPolicy red/p".to_owned())));
        let unregistered = Holder::default();
        assert!(ownership(Some(&claim), &policy("red"), &unregistered).is_err());
    }

    #[test]
    fn addresses_of_the_cluster_are_reserved() {
        let mut tables = Tables::default();
        let node = crate::NodeRow {
            addresses: vec!["192.0.2.1".to_owned()],
            external_addresses: vec!["2001:DB8:0::1".to_owned()],
            ..crate::NodeRow::default()
        };
        tables.nodes.put(Key::new("", "n1"), Some(node));
        let what = |text: &str| reserved(&tables, &Networks::default(), text.parse().unwrap());
        assert_eq!(what("192.0.2.1").as_deref(), Some("the address of node n1"));
        assert_eq!(what("2001:db8::1").as_deref(), Some("the address of node n1"));
        assert_eq!(what("192.0.2.2"), None);
    }
}
