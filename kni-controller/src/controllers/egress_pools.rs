//! Writes the status of pools of egress addresses: whether each is accepted, and how many of its addresses are in use.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_api::{Condition, EgressAddressPool, EgressAddressPoolStatus, EgressAddressPoolSummary, set_condition};
use kni_cluster::{
    Key, Networks, Tables,
    egress::{egress_pools, reserved},
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};

use super::{
    count,
    reconcile::{Context, Reconciler, ignore_gone},
};

/// Maximum number of reserved addresses that a message names.
const MOST_NAMED: usize = 4;

/// The controller.
pub(super) struct EgressPoolStatus;

impl Reconciler for EgressPoolStatus {
    const NAME: &'static str = "egress-address-pools";
    type Write = EgressAddressPoolStatus;

    fn version(tables: &Tables) -> u64 {
        tables.egress_pools.version()
            + tables.egress_claims.version()
            + tables.nodes.version()
            + tables.namespaces.version()
            + tables.networks.version()
            + tables.services.version()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, EgressAddressPoolStatus)> {
        let pools = egress_pools(tables);
        let mut writes = Vec::new();
        for (key, object) in tables.egress_pools.rows() {
            let mut status = object.status.clone().unwrap_or_default();
            let generation = object.metadata.generation;
            let accepted = match pools.refused.get(&key.name) {
                Some(reason) if reason.contains("overlaps") => {
                    Condition::now("Accepted", false, "RangesOverlap", reason, generation)
                }
                Some(reason) => Condition::now("Accepted", false, "Refused", reason, generation),
                None => {
                    let message = accepted_message(tables, networks, object);
                    Condition::now("Accepted", true, "Valid", &message, generation)
                }
            };
            set_condition(&mut status.conditions, accepted);
            let namespaces = &object.spec.access.namespaces;
            let selected = tables
                .namespaces
                .rows()
                .values()
                .filter(|labels| namespaces.admits(labels))
                .count();
            let (reason, message) = match selected {
                0 => ("NoNamespaces", "no namespace may use it".to_owned()),
                some => ("Selected", format!("policies of {some} namespaces may use it")),
            };
            set_condition(
                &mut status.conditions,
                Condition::now("NamespacesSelected", selected > 0, reason, &message, generation),
            );
            let claims = tables.egress_claims.rows().values();
            let used = claims.filter(|claim| claim.spec.pool_name.as_deref() == Some(&key.name));
            status.used = count(used.count());
            status.summary = EgressAddressPoolSummary::new(&object.spec);
            if object.status.as_ref() != Some(&status) {
                writes.push((key.clone(), status));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, status: EgressAddressPoolStatus) -> kube::Result<()> {
        let api: Api<EgressAddressPool> = Api::all(context.client.clone());
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

/// The message of an accepted pool: it names addresses of nodes and Services inside, which are never used.
fn accepted_message(tables: &Tables, networks: &Networks, object: &EgressAddressPool) -> String {
    let ranges: Vec<IpNet> = object
        .spec
        .ranges
        .iter()
        .filter_map(|range| range.parse().ok())
        .collect();
    let nodes = tables.nodes.rows().values();
    let of_nodes = nodes.flat_map(|node| node.addresses.iter().chain(&node.external_addresses));
    let of_nodes = of_nodes.filter_map(|text| text.parse::<IpAddr>().ok());
    let services = tables.services.rows().values().filter_map(|row| row.as_ref().ok());
    let of_services = services.flat_map(|service| service.cluster_ips.iter().copied());
    let inside = of_nodes
        .chain(of_services)
        .filter(|address| ranges.iter().any(|range| range.contains(address)));
    let inside: std::collections::BTreeSet<IpAddr> = inside.collect();
    if inside.is_empty() {
        return "the pool is valid".to_owned();
    }
    let named = inside.iter().take(MOST_NAMED).map(|address| {
        let what = reserved(tables, networks, *address).unwrap_or_default();
        format!("{address} is {what}")
    });
    let named: Vec<String> = named.collect();
    let more = match inside.len().saturating_sub(named.len()) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("the pool is valid; never used of it: {}{more}", named.join(", "))
}
