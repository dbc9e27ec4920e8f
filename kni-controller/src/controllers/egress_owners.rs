//! Decides which node is to own each egress address, and when the claim of a lost node passes on. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use kni_api::{
    EgressAddressClaim,
    egress_address_claim::{EgressShare, Holder},
};
use kni_cluster::{
    Key, Networks, NodeRow, Tables,
    egress::{cluster_egress_rights, egress_requests, is_same_node, user_of},
};
use kni_model::{
    NetworkName,
    egress::EgressUser,
    network::EgressMode,
    policy::{Policy, PolicyScope},
};
use kni_policy::{EgressRight, matches};
use tokio::time::Instant;

use super::egress_shares::{Shares, Unused};

/// Taint of a node that an operator, or a cloud provider, declares to be shut down (KEP-2268).
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The use of one address: who has the right to it, and how many interfaces on each node leave with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) user: EgressUser,
    pub(super) pool: Option<String>,
    pub(super) nodes: BTreeMap<String, usize>,
}

/// The egress of the cluster: all rights, and the use of each address that a user has the right to.
#[derive(Debug, Default)]
pub(super) struct EgressOverview {
    pub(super) rights: BTreeMap<(EgressUser, IpAddr), EgressRight>,
    pub(super) uses: BTreeMap<IpAddr, Use>,
}

impl EgressOverview {
    pub(super) fn of(tables: &Tables, networks: &Networks, policies: &[Arc<Policy>]) -> Self {
        let requests = egress_requests(policies.iter().map(AsRef::as_ref), networks);
        let rights = cluster_egress_rights(tables, networks, &requests);
        let mut overview = Self {
            rights,
            uses: BTreeMap::new(),
        };
        for ((user, address), right) in &overview.rights {
            let Ok(pool) = right else { continue };
            overview.uses.entry(*address).or_insert_with(|| Use {
                user: user.clone(),
                pool: pool.clone(),
                nodes: BTreeMap::new(),
            });
        }
        overview.count(tables, networks, policies);
        overview
    }

    /// Counts the interfaces that leave with each address, as the policy engine of an agent selects them.
    fn count(&mut self, tables: &Tables, networks: &Networks, policies: &[Arc<Policy>]) {
        for (key, interface) in tables.interfaces.rows() {
            let spec = &interface.spec;
            let Some(pod) = tables.pods.get(&key.namespace, &spec.pod_name) else {
                continue;
            };
            // An interface that its pod does not vouch for counts for nothing.
            if pod.uid != spec.pod_uid || pod.node != spec.node_name {
                continue;
            }
            let Ok(network) = spec.pod_network_name.parse::<NetworkName>() else {
                continue;
            };
            let Some(network) = networks
                .spec(&network)
                .filter(|spec| spec.egress == EgressMode::Masquerade)
            else {
                continue;
            };
            let status = interface.status.iter().flat_map(|status| &status.addresses);
            let families: BTreeSet<bool> = status
                .filter_map(|address| Some(address.ip.parse::<IpAddr>().ok()?.is_ipv4()))
                .collect();
            for v4 in families {
                let selecting = policies.iter().filter(|policy| {
                    policy.reference.namespace == key.namespace
                        && matches(&policy.pods, &pod.labels)
                        && match &policy.scope {
                            PolicyScope::Networks(names) => names.contains(&network.name),
                            PolicyScope::All => true,
                            PolicyScope::Primary | PolicyScope::Named(_) => false,
                        }
                });
                let mut requested = selecting.flat_map(|policy| {
                    let addresses = policy.external.iter().flat_map(|rules| &rules.egress_addresses);
                    addresses.map(|address| (*address, EgressUser::Policy(policy.reference.clone())))
                });
                let of_policy = requested.find(|(address, _)| address.is_ipv4() == v4);
                let of_network = network.egress_addresses.iter().find(|address| address.is_ipv4() == v4);
                let of_network = of_network.map(|address| (*address, EgressUser::Network(network.name.clone())));
                let Some((address, user)) = of_policy.or(of_network) else {
                    continue;
                };
                if let Some(found) = self.uses.get_mut(&address)
                    && found.user.shares_with(&user)
                {
                    *found.nodes.entry(spec.node_name.clone()).or_default() += 1;
                }
            }
        }
        self.uses.retain(|_, found| !found.nodes.is_empty());
    }
}

/// A change of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ClaimStep {
    /// Creates it, for a node.
    Create(IpAddr, Use, Holder, Vec<EgressShare>),
    /// Chooses another node. The address moves when the present holder has released it.
    Assign(Holder),
    /// Gives other nodes units of the ports.
    Share(Vec<EgressShare>),
    /// Removes a holder that is fenced.
    RemoveHolder(Holder),
    /// Deletes it: the address is no longer used. It stays until its holder has released it.
    Delete,
    /// Removes the finalizer of a deleted claim without a holder.
    Finish,
}

/// The times at which steps depend on.
pub(super) struct Times<'a> {
    /// The clock, and the time of this term.
    pub(super) now: (Timestamp, Instant),
    /// The units of ports that no pod leaves from, as of the round before.
    pub(super) seen: &'a Unused,
    /// Collects the present ones.
    pub(super) unused: &'a mut Unused,
}

/// The next step for each claim that needs one.
pub(super) fn claim_steps(tables: &Tables, overview: &EgressOverview, mut times: Times<'_>) -> Vec<(Key, ClaimStep)> {
    let mut steps = Vec::new();
    let claims = tables.egress_claims.rows();
    for (key, claim) in claims {
        let found = use_of(overview, claim);
        let shares = found.map(|found| shares(tables, claim, found, &mut times));
        let step = claim_step(tables, found, claim, shares);
        steps.extend(step.map(|step| (key.clone(), step)));
    }
    for (address, found) in &overview.uses {
        let key = Key::new("", &kni_api::egress_address_claim::name_of(*address));
        if !claims.contains_key(&key)
            && let Some(node) = choose(tables, found)
        {
            let shares = first_shares(tables, *address, found);
            steps.push((key, ClaimStep::Create(*address, found.clone(), node, shares)));
        }
    }
    steps
}

/// The use of the address of a claim by the claim's user, or by one who shares with it.
fn use_of<'a>(overview: &'a EgressOverview, claim: &EgressAddressClaim) -> Option<&'a Use> {
    let address: IpAddr = claim.spec.address.parse().ok()?;
    let user = user_of(claim)?;
    overview
        .uses
        .get(&address)
        .filter(|found| user.shares_with(&found.user))
}

/// The nodes with pods that leave with an address, with their UIDs.
pub(super) fn nodes_of(tables: &Tables, found: &Use) -> BTreeMap<String, String> {
    let nodes = found.nodes.keys();
    nodes
        .filter_map(|name| Some((name.clone(), tables.nodes.get("", name)?.uid.clone())))
        .collect()
}

fn shares(tables: &Tables, claim: &EgressAddressClaim, found: &Use, times: &mut Times<'_>) -> Vec<EgressShare> {
    let nodes = nodes_of(tables, found);
    let shares = Shares {
        address: &claim.spec.address,
        present: &claim.spec.shares,
        nodes: &nodes,
    };
    shares.next(times.seen, times.unused, times.now)
}

/// The shares of a new claim.
pub(super) fn first_shares(tables: &Tables, address: IpAddr, found: &Use) -> Vec<EgressShare> {
    let nodes = nodes_of(tables, found);
    let shares = Shares {
        address: &address.to_string(),
        present: &[],
        nodes: &nodes,
    };
    shares.next(&Unused::new(), &mut Unused::new(), (Timestamp::now(), Instant::now()))
}

fn claim_step(
    tables: &Tables,
    found: Option<&Use>,
    claim: &EgressAddressClaim,
    shares: Option<Vec<EgressShare>>,
) -> Option<ClaimStep> {
    let holder = claim.status.as_ref().and_then(|status| status.holder.as_ref());
    if let Some(holder) = holder.filter(|holder| is_fenced(tables.nodes.get("", &holder.node_name), holder)) {
        return Some(ClaimStep::RemoveHolder(holder.clone()));
    }
    if claim.metadata.deletion_timestamp.is_some() {
        let is_ours = claim
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|name| name == kni_api::egress_address_claim::HELD_FINALIZER);
        return (holder.is_none() && is_ours).then_some(ClaimStep::Finish);
    }
    let Some(found) = found else {
        return Some(ClaimStep::Delete);
    };
    let assigned = Holder {
        node_name: claim.spec.node_name.clone(),
        node_uid: claim.spec.node_uid.clone(),
        epoch: claim.spec.epoch,
    };
    // With shares it answers for pods of other nodes, also if it has none itself.
    let is_able = found.nodes.contains_key(&assigned.node_name) || !claim.spec.shares.is_empty();
    if !is_able || is_fenced(tables.nodes.get("", &assigned.node_name), &assigned) {
        let other = choose(tables, found).filter(|node| !is_same_node(node, &assigned));
        if let Some(node) = other {
            return Some(ClaimStep::Assign(Holder {
                epoch: claim.spec.epoch.saturating_add(1),
                ..node
            }));
        }
        // Without another node the address stays where it is.
    }
    shares
        .filter(|shares| *shares != claim.spec.shares)
        .map(ClaimStep::Share)
}

/// Whether a node can no longer answer for an address: its object is gone, or replaced by one of the same name, or an
/// operator has declared it to be shut down. Time alone, or a node that is not ready, never counts.
pub(super) fn is_fenced(row: Option<&NodeRow>, node: &Holder) -> bool {
    match row {
        None => true,
        Some(row) => row.uid != node.node_uid || is_out_of_service(row),
    }
}

fn is_out_of_service(row: &NodeRow) -> bool {
    row.taints.iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// The node for an address: one that owns another address of the same user, so that both families leave from one node;
/// else a ready one; else the one with most interfaces; else the first by name.
fn choose(tables: &Tables, found: &Use) -> Option<Holder> {
    let claims = || tables.egress_claims.rows().values();
    let owns_other = |node: &str| {
        claims().any(|claim| {
            claim.spec.node_name == node && user_of(claim).is_some_and(|user| user.shares_with(&found.user))
        })
    };
    let candidates = found.nodes.iter().filter_map(|(name, count)| {
        let row = tables.nodes.get("", name).filter(|row| !is_out_of_service(row))?;
        Some((name, count, row))
    });
    let best = candidates.max_by(|one, other| {
        let rank = |(name, count, row): &(&String, &usize, &NodeRow)| (row.ready, owns_other(name), **count);
        // Of equal ones the first by name, which is the larger one in reverse order.
        rank(one).cmp(&rank(other)).then_with(|| other.0.cmp(one.0))
    });
    best.map(|(name, _, row)| Holder {
        node_name: name.clone(),
        node_uid: row.uid.clone(),
        epoch: 1,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Taint;
    use kni_model::policy::{PolicyKind, PolicyRef};
    use serde_json::json;

    use super::*;

    fn tables(nodes: &[(&str, &str)]) -> Tables {
        let mut tables = Tables::default();
        for (name, uid) in nodes {
            let row = NodeRow {
                uid: (*uid).to_owned(),
                ready: true,
                ..NodeRow::default()
            };
            tables.nodes.put(Key::new("", name), Some(row));
        }
        tables
    }

    fn overview(nodes: &[(&str, usize)]) -> EgressOverview {
        let user = EgressUser::Policy(PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace: "red".to_owned(),
            name: "p".to_owned(),
        });
        let found = Use {
            user,
            pool: Some("pool".to_owned()),
            nodes: nodes.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
        };
        let address = "192.0.2.25".parse().unwrap();
        EgressOverview {
            rights: BTreeMap::new(),
            uses: (!nodes.is_empty()).then_some((address, found)).into_iter().collect(),
        }
    }

    fn put_claim(tables: &mut Tables, node: (&str, &str), holder: Option<(&str, &str)>, deleted: bool) {
        let mut object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressClaim",
            "metadata": { "name": "192.0.2.25", "finalizers": ["kni.dev/egress-address"] },
            "spec": {
                "address": "192.0.2.25", "egressPolicy": { "namespace": "red", "name": "p" },
                "nodeName": node.0, "nodeUid": node.1, "epoch": 4,
            },
        });
        if deleted {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        if let Some((name, uid)) = holder {
            object["status"] = json!({ "holder": { "nodeName": name, "nodeUid": uid, "epoch": 4 } });
        }
        let claim = serde_json::from_value(object).unwrap();
        tables
            .egress_claims
            .put(Key::new("", "192.0.2.25"), Some(std::sync::Arc::new(claim)));
    }

    fn step(tables: &Tables, nodes: &[(&str, usize)]) -> String {
        let mut unused = Unused::new();
        let times = Times {
            now: (Timestamp::now(), Instant::now()),
            seen: &Unused::new(),
            unused: &mut unused,
        };
        let steps = claim_steps(tables, &overview(nodes), times);
        match steps.first() {
            None => "-".to_owned(),
            Some((_, ClaimStep::Create(_, _, node, _))) => format!("create {} {}", node.node_name, node.epoch),
            Some((_, ClaimStep::Assign(node))) => format!("assign {} {}", node.node_name, node.epoch),
            Some((_, ClaimStep::RemoveHolder(node))) => format!("fence {}", node.node_name),
            Some((_, ClaimStep::Share(shares))) => {
                let shares = shares.iter().map(|share| format!("{}={}", share.node_name, share.unit));
                format!("share {}", shares.collect::<Vec<_>>().join(" "))
            }
            Some((_, ClaimStep::Delete)) => "delete".to_owned(),
            Some((_, ClaimStep::Finish)) => "finish".to_owned(),
        }
    }

    #[test]
    fn an_owner_has_pods_and_stays() {
        let mut tables = tables(&[("n1", "u1"), ("n2", "u2"), ("n3", "u3")]);
        assert_eq!(step(&tables, &[("n1", 1), ("n2", 2), ("n3", 2)]), "create n2 1");
        assert_eq!(step(&tables, &[("gone", 9)]), "-", "a node that does not exist");
        assert_eq!(step(&tables, &[]), "-");
        put_claim(&mut tables, ("n1", "u1"), Some(("n1", "u1")), false);
        let both = [("n1", 1), ("n2", 9)];
        assert_eq!(step(&tables, &both), "share n1=1 n2=2");
        let mut shared = tables.egress_claims.rows().values().next().unwrap().as_ref().clone();
        assert_eq!(step(&tables, &[("n2", 9)]), "assign n2 5", "it serves no other nodes");
        shared.spec.shares = [("n1", 1), ("n2", 2)]
            .map(|(node, unit)| EgressShare {
                node_name: node.to_owned(),
                node_uid: node.replace('n', "u"),
                unit,
                unused_since: None,
            })
            .into();
        let mut put = |claim: &EgressAddressClaim| {
            let claim = std::sync::Arc::new(claim.clone());
            tables.egress_claims.put(Key::new("", "192.0.2.25"), Some(claim));
            step(&tables, &[("n2", 9)])
        };
        assert_eq!(put(&shared), "share n1=1 n2=2", "it is stable, and its unit rests");
        shared.spec.shares.remove(0);
        assert_eq!(put(&shared), "-", "without pods");
        assert_eq!(step(&tables, &[]), "delete");
        put_claim(&mut tables, ("n1", "u1"), Some(("n1", "u1")), true);
        assert_eq!(step(&tables, &[]), "-", "its holder releases it first");
        put_claim(&mut tables, ("n1", "u1"), None, true);
        assert_eq!(step(&tables, &[("n1", 1)]), "finish");
    }

    #[test]
    fn a_holder_is_removed_only_if_it_is_fenced() {
        let mut tables = tables(&[("n1", "u1"), ("n2", "u2")]);
        put_claim(&mut tables, ("n1", "u1"), Some(("n1", "u1")), false);
        let both = [("n1", 1), ("n2", 1)];
        let mut row = tables.nodes.get("", "n1").unwrap().clone();
        row.ready = false;
        tables.nodes.put(Key::new("", "n1"), Some(row.clone()));
        assert_eq!(
            step(&tables, &both),
            "share n1=1 n2=2",
            "a node that is not ready may still answer"
        );
        row.taints = vec![Taint {
            key: OUT_OF_SERVICE.to_owned(),
            effect: "NoExecute".to_owned(),
            ..Taint::default()
        }];
        tables.nodes.put(Key::new("", "n1"), Some(row.clone()));
        assert_eq!(step(&tables, &both), "fence n1");
        row.taints.clear();
        "u9".clone_into(&mut row.uid);
        tables.nodes.put(Key::new("", "n1"), Some(row));
        assert_eq!(step(&tables, &both), "fence n1", "another node has its name");
        tables.nodes.remove(&Key::new("", "n1"));
        assert_eq!(step(&tables, &both), "fence n1");
        put_claim(&mut tables, ("n1", "u1"), None, false);
        assert_eq!(step(&tables, &both), "assign n2 5");
    }
}
