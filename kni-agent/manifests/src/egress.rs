//! Decides which egress addresses the policies and networks of the folder may use.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kni_model::{
    egress::{EgressUser, EgressWay},
    policy::{PolicyKind, PolicyRef},
};
use kni_policy::{EgressFacts, EgressPools, egress_rights};

use super::{ManifestSet, Refusal};

/// Lines of the items of `spec.egressAddresses`, by policy.
pub(super) type Lines = BTreeMap<PolicyRef, [u32; 2]>;

/// Fills `egress` and reports what is refused. A policy with an address that it may not use stays: its rules hold, and
/// its pods do not leave.
pub(super) fn decide(set: &mut ManifestSet, lines: &Lines) {
    let pools = EgressPools::new(set.pools.iter().map(|(pool, _)| pool.clone()).collect());
    for (pool, origin) in &set.pools {
        if let Some(reason) = pools.refused.get(&pool.name) {
            set.refused.push(Refusal {
                file: origin.file.clone(),
                line: Some(origin.line),
                kind: Some("EgressAddressPool".to_owned()),
                name: Some(pool.name.clone()),
                field: Some("spec.ranges".to_owned()),
                reason: reason.clone(),
            });
        }
    }
    let facts = EgressFacts {
        pools: &pools,
        namespaces: &set.namespaces,
        reserved: &|address| reserved(set, address),
        holder: &|_| None,
    };
    let rights = egress_rights(&requests(set), &facts);
    for (policy, origin) in &set.policies {
        let addresses = policy.external.iter().flat_map(|rules| &rules.egress_addresses);
        for (index, address) in addresses.enumerate() {
            let right = rights.get(&(EgressUser::Policy(policy.reference.clone()), *address));
            if let Some(Err(refusal)) = right {
                let line = lines.get(&policy.reference).and_then(|lines| lines.get(index));
                set.refused.push(Refusal {
                    file: origin.file.clone(),
                    line: Some(line.copied().unwrap_or(origin.line)),
                    kind: Some(PolicyKind::EgressPolicy.as_str().to_owned()),
                    name: Some(format!("{}/{}", policy.reference.namespace, policy.reference.name)),
                    field: Some(format!("spec.egressAddresses[{index}]")),
                    reason: format!("{}; its pods do not leave the node", refusal.message(*address)),
                });
            }
        }
    }
    let rights = rights.into_iter();
    set.egress = rights
        .map(|(key, right)| (key, right.map(|_pool| EgressWay::Alone)))
        .collect();
}

fn requests(set: &ManifestSet) -> BTreeSet<(EgressUser, IpAddr)> {
    let of_policies = set.policies.iter().flat_map(|(policy, _)| {
        let addresses = policy.external.iter().flat_map(|rules| &rules.egress_addresses);
        addresses.map(|address| (EgressUser::Policy(policy.reference.clone()), *address))
    });
    let of_networks = set.networks.iter().flat_map(|(spec, _)| {
        let addresses = spec.egress_addresses.iter();
        addresses.map(|address| (EgressUser::Network(spec.name.clone()), *address))
    });
    of_policies.chain(of_networks).collect()
}

/// What an address is where it belongs to pods or Services. The node's own addresses and its gateways are the agent's
/// to refuse.
fn reserved(set: &ManifestSet, address: IpAddr) -> Option<String> {
    let service = set
        .services
        .iter()
        .find(|(service, _)| service.cluster_ips.contains(&address));
    if let Some((service, _)) = service {
        return Some(format!("the address of Service {}", service.reference));
    }
    set.networks.iter().find_map(|(spec, _)| {
        let ranges: Vec<&IpNet> = spec.subnets.iter().chain(&spec.service_subnets).collect();
        let range = ranges.into_iter().find(|range| range.contains(&address))?;
        Some(format!("inside {range} of PodNetwork {}", spec.name))
    })
}
