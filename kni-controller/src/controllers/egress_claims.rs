//! Writes the claims of egress addresses: which node is to answer for each.
//!
//! The status of a claim belongs to the node that holds the address. Only the holder of a fenced node is removed here.

use std::sync::Arc;

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use kni_api::{
    EgressAddressClaim, EgressAddressClaimSpec, EgressAddressClaimStatus,
    egress_address_claim::{EgressShare, HELD_FINALIZER, Holder, PolicyReference},
};
use kni_cluster::{Key, Networks, Tables};
use kni_model::{egress::EgressUser, policy::Policy};
use kni_reflectors::node_row;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use tokio::time::Instant;

use super::{
    egress_owners::{ClaimStep, EgressOverview, Times, Use, claim_steps, is_fenced},
    egress_shares::Unused,
    reconcile::{Context, Reconciler, unless_changed},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct EgressClaims {
    /// The units of ports that no pod leaves from.
    unused: Unused,
}

/// A step, and the version of the claim that it was decided on.
pub(super) struct Write {
    version: Option<String>,
    step: ClaimStep,
}

/// What is enforced of the egress policies of the cluster, by name.
pub(super) fn enforced_policies(tables: &Tables) -> Vec<Arc<Policy>> {
    let policies = tables.egress_objects.rows().values();
    policies.map(|policy| Arc::clone(&policy.row.policy)).collect()
}

/// Changes with everything that rights and owners depend on.
pub(super) fn egress_version(tables: &Tables) -> u64 {
    tables.egress_objects.version()
        + tables.egress_pools.version()
        + tables.egress_claims.version()
        + tables.namespaces.version()
        + tables.networks.version()
        + tables.nodes.version()
        + tables.interfaces.version()
        + tables.pods.version()
        + tables.services.version()
        + tables.slices.version()
}

impl Reconciler for EgressClaims {
    const NAME: &'static str = "egress-claims";
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        egress_version(tables)
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Write)> {
        let overview = EgressOverview::of(tables, networks, &enforced_policies(tables));
        let mut unused = Unused::new();
        let times = Times {
            now: (Timestamp::now(), Instant::now()),
            seen: &self.unused,
            unused: &mut unused,
        };
        let steps = claim_steps(tables, &overview, times).into_iter();
        self.unused = unused;
        let writes = steps.map(|(key, step)| {
            let version = tables
                .egress_claims
                .rows()
                .get(&key)
                .and_then(|claim| claim.resource_version());
            (key, Write { version, step })
        });
        writes.collect()
    }

    async fn write(context: Context, key: Key, Write { version, step }: Write) -> kube::Result<()> {
        let api: Api<EgressAddressClaim> = Api::all(context.client.clone());
        let params = PatchParams::default();
        // A claim that has changed meanwhile is looked at again.
        let patch = |field: &str, content: serde_json::Value| {
            Patch::Merge(serde_json::json!({ "metadata": { "resourceVersion": version }, field: content }))
        };
        match step {
            ClaimStep::Create(address, found, node, shares) => {
                tracing::info!(%address, user = %found.user, node = node.node_name, "an egress address gets an owner");
                let claim = new_claim(&key.name, address, &found, (&node, shares));
                unless_changed(api.create(&PostParams::default(), &claim).await).map(drop)
            }
            ClaimStep::Assign(node) => {
                tracing::info!(
                    claim = key.name,
                    node = node.node_name,
                    "an egress address gets another owner"
                );
                let spec = serde_json::json!({
                    "nodeName": node.node_name, "nodeUid": node.node_uid, "epoch": node.epoch,
                });
                unless_changed(api.patch(&key.name, &params, &patch("spec", spec)).await).map(drop)
            }
            ClaimStep::Share(shares) => {
                let spec = serde_json::json!({ "shares": shares });
                unless_changed(api.patch(&key.name, &params, &patch("spec", spec)).await).map(drop)
            }
            ClaimStep::RemoveHolder(holder) => {
                // The cache may be older than the node.
                let nodes: Api<Node> = Api::all(context.client.clone());
                let node = nodes.get_opt(&holder.node_name).await?.map(node_row);
                if !is_fenced(node.as_ref(), &holder) {
                    return Ok(());
                }
                tracing::warn!(
                    claim = key.name,
                    node = holder.node_name,
                    "the holder of an egress address is fenced"
                );
                let patch = patch("status", serde_json::json!({ "holder": null }));
                unless_changed(api.patch_status(&key.name, &params, &patch).await).map(drop)
            }
            ClaimStep::Delete => {
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        resource_version: version,
                        uid: None,
                    }),
                    ..DeleteParams::default()
                };
                unless_changed(api.delete(&key.name, &params).await).map(drop)
            }
            ClaimStep::Finish => {
                let metadata = serde_json::json!({ "finalizers": [], "resourceVersion": version });
                let patch = patch("metadata", metadata);
                unless_changed(api.patch(&key.name, &params, &patch).await).map(drop)
            }
        }
    }
}

fn new_claim(
    name: &str,
    address: std::net::IpAddr,
    found: &Use,
    (node, shares): (&Holder, Vec<EgressShare>),
) -> EgressAddressClaim {
    let (egress_policy, pod_network_name) = match &found.user {
        EgressUser::Policy(policy) => {
            let reference = PolicyReference {
                namespace: policy.namespace.clone(),
                name: policy.name.clone(),
            };
            (Some(reference), None)
        }
        EgressUser::Network(name) => (None, Some(name.to_string())),
    };
    let spec = EgressAddressClaimSpec {
        address: address.to_string(),
        pool_name: found.pool.clone(),
        egress_policy,
        pod_network_name,
        node_name: node.node_name.clone(),
        node_uid: node.node_uid.clone(),
        epoch: node.epoch,
        shares,
    };
    let mut claim = EgressAddressClaim::new(name, spec);
    claim.metadata.finalizers = Some(vec![HELD_FINALIZER.to_owned()]);
    claim.status = Some(EgressAddressClaimStatus::default());
    claim
}
