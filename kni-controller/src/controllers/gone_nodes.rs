//! Removes the `NodeNetwork` of nodes that have left the cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kni_api::NodeNetwork;
use kni_cluster::{Key, Networks, Tables};
use kube::{Api, api::DeleteParams};
use tokio::time::Instant;

use super::{
    overview::missing_nodes,
    reconcile::{Context, Reconciler, ignore_gone},
};

/// A node that is missing this long, with all its pods, is gone: it loses its blocks and objects.
pub(super) const GRACE: Duration = Duration::from_mins(1);

/// When nodes were first seen to be missing.
#[derive(Debug, Default)]
pub(super) struct Missing(BTreeMap<String, Instant>);

impl Missing {
    /// The nodes that are gone now.
    pub(super) fn gone(&mut self, tables: &Tables) -> BTreeSet<String> {
        let missing = missing_nodes(tables);
        self.0.retain(|node, _| missing.contains(node));
        for node in missing {
            self.0.entry(node).or_insert_with(Instant::now);
        }
        let expired = self.0.iter().filter(|(_, since)| since.elapsed() >= GRACE);
        expired.map(|(node, _)| node.clone()).collect()
    }
}

/// The controller.
#[derive(Debug, Default)]
pub(super) struct GoneNodes {
    missing: Missing,
}

impl Reconciler for GoneNodes {
    const NAME: &'static str = "gone-nodes";
    const NEEDS_NETWORKS: bool = false;
    type Write = ();

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.node_networks.version() + tables.interfaces.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, ())> {
        let gone = self.missing.gone(tables).into_iter();
        gone.filter(|node| tables.node_networks.get("", node).is_some())
            .map(|node| (Key::new("", &node), ()))
            .collect()
    }

    async fn write(context: Context, key: Key, (): ()) -> kube::Result<()> {
        // The cache may be older than the node.
        let nodes: Api<Node> = Api::all(context.client.clone());
        if nodes.get_metadata_opt(&key.name).await?.is_some() {
            return Ok(());
        }
        let api: Api<NodeNetwork> = Api::all(context.client.clone());
        ignore_gone(api.delete(&key.name, &DeleteParams::default()).await)?;
        tracing::info!(
            node = key.name,
            "the node has left the cluster; its NodeNetwork is removed"
        );
        let node = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(key.name),
            ..ObjectReference::default()
        };
        let message = "the node has left the cluster: its NodeNetwork and its address blocks are removed";
        context.events.normal(&node, "NodeRemoved", "RemoveNode", message).await;
        Ok(())
    }
}
