//! Releases the address blocks of nodes that have left the cluster.
//!
//! A node that comes back finds its blocks deleted, leases from none of them, and claims each one anew in which it still
//! has pods.

use k8s_openapi::api::core::v1::Node;
use kni_api::{AddressBlock, LEASES_FINALIZER};
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};

use super::{
    gone_nodes::Missing,
    reconcile::{Context, Reconciler, ignore_gone, unless_changed},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct GoneBlocks {
    missing: Missing,
}

impl Reconciler for GoneBlocks {
    const NAME: &'static str = "gone-blocks";
    const NEEDS_NETWORKS: bool = false;
    /// The block's uid.
    type Write = String;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.blocks.version() + tables.interfaces.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, String)> {
        let gone = self.missing.gone(tables);
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
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        ignore_gone(api.delete(&key.name, &params).await)?;
        let Some(object) = api.get_opt(&key.name).await?.filter(is_it) else {
            return Ok(());
        };
        let others: Vec<&String> = object
            .finalizers()
            .iter()
            .filter(|name| *name != LEASES_FINALIZER)
            .collect();
        let patch = serde_json::json!({"metadata": {
            "uid": uid, "resourceVersion": object.resource_version(), "finalizers": others,
        }});
        let patched = api
            .patch(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        unless_changed(patched)?;
        tracing::info!(
            block = key.name,
            node = object.spec.node_name,
            "released a block of a node that is gone"
        );
        Ok(())
    }
}
