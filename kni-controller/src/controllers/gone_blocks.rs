//! Releases the address blocks of nodes that have left the cluster.
//!
//! Another node may claim a block some time after no report lists the pods of the node any more: until then other nodes
//! take its addresses for theirs. A node that comes back finds its blocks deleted, leases from none of them, and claims
//! each one anew in which it still has pods.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kni_api::{AddressBlock, LEASES_FINALIZER};
use kni_cluster::{Key, Networks, Tables};
use kni_ipam::REST;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use tokio::time::Instant;

use super::{
    gone_nodes::Missing,
    reconcile::{Context, Reconciler, ignore_gone, unless_changed},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct GoneBlocks {
    missing: Missing,
    /// Since when no report is left of nodes that are gone.
    withdrawn: BTreeMap<String, Instant>,
}

impl GoneBlocks {
    /// Those of the nodes whose reports are gone long enough.
    fn rested(&mut self, gone: BTreeSet<String>, tables: &Tables, now: Instant) -> BTreeSet<String> {
        if !tables.members.is_synced() {
            self.withdrawn.clear();
            return BTreeSet::new();
        }
        let reports = tables.members.rows().values();
        let listed: BTreeSet<&str> = reports.map(|report| report.spec.node_name.as_str()).collect();
        let mut rested = gone;
        rested.retain(|node| !listed.contains(node.as_str()));
        self.withdrawn.retain(|node, _| rested.contains(node));
        rested.retain(|node| {
            let since = *self.withdrawn.entry(node.clone()).or_insert(now);
            now.saturating_duration_since(since) >= REST
        });
        rested
    }
}

impl Reconciler for GoneBlocks {
    const NAME: &'static str = "gone-blocks";
    const NEEDS_NETWORKS: bool = false;
    /// The block's uid.
    type Write = String;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.blocks.version() + tables.interfaces.version() + tables.members.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, String)> {
        let gone = self.missing.gone(tables);
        let gone = self.rested(gone, tables, Instant::now());
        let rows = tables.blocks.rows().iter();
        rows.filter(|(_, row)| gone.contains(&row.spec.node_name))
            .filter_map(|(key, row)| Some((key.clone(), row.uid()?)))
            .collect()
    }

    async fn write(context: Context, key: Key, uid: String) -> kube::Result<()> {
        let api: Api<AddressBlock> = Api::all(context.client.clone());
        let is_it = |object: &AddressBlock| object.uid().as_ref() == Some(&uid);
        let Some(object) = api.get_opt(&key.name).await?.filter(is_it) else {
            return Ok(());
        };
        // The cache may be older than the node.
        let nodes: Api<Node> = Api::all(context.client.clone());
        if nodes.get_metadata_opt(&object.spec.node_name).await?.is_some() {
            return Ok(());
        }
        delete(&api, &key.name, &uid).await?;
        let Some(object) = api.get_opt(&key.name).await?.filter(is_it) else {
            return Ok(());
        };
        drop_finalizer(&api, &object).await?;
        tracing::info!(
            block = key.name,
            node = object.spec.node_name,
            "released a block of a node that is gone"
        );
        Ok(())
    }
}

/// Deletes a block with this UID. Its finalizer retains it while there is one.
pub(super) async fn delete(api: &Api<AddressBlock>, name: &str, uid: &str) -> kube::Result<()> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    ignore_gone(api.delete(name, &params).await)
}

/// Removes the finalizer of a deleted block: from then on another node may claim the range.
pub(super) async fn drop_finalizer(api: &Api<AddressBlock>, object: &AddressBlock) -> kube::Result<()> {
    let others: Vec<&String> = object
        .finalizers()
        .iter()
        .filter(|name| *name != LEASES_FINALIZER)
        .collect();
    let patch = serde_json::json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": others,
    }});
    let name = object.name_any();
    let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    unless_changed(patched).map(drop)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;

    #[test]
    fn blocks_rest_after_the_last_report_of_a_node() {
        let mut tables = Tables::default();
        let gone = || BTreeSet::from(["n1".to_owned(), "n2".to_owned()]);
        let (mut blocks, start) = (GoneBlocks::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(
            blocks.rested(gone(), &tables, start).is_empty(),
            "nothing is known of reports"
        );
        tables.members.begin();
        let key = Key::new("", "red.n1.0");
        let report = serde_json::json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": "red.n1.0" },
            "spec": { "network": "red", "networkUID": "r", "nodeName": "n1", "nodeUID": "u", "members": [] },
        });
        tables
            .members
            .put(key.clone(), Some(Arc::new(serde_json::from_value(report).unwrap())));
        tables.members.complete();
        assert!(blocks.rested(gone(), &tables, start).is_empty());
        let only_n2 = BTreeSet::from(["n2".to_owned()]);
        assert_eq!(blocks.rested(gone(), &tables, at(10)), only_n2);
        tables.members.remove(&key);
        assert_eq!(blocks.rested(gone(), &tables, at(20)), only_n2);
        assert_eq!(blocks.rested(gone(), &tables, at(29)), only_n2);
        assert_eq!(blocks.rested(gone(), &tables, at(30)), gone());
    }
}
