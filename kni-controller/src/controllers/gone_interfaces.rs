//! Removes `PodInterface`s of nodes and pods that do not exist: no agent and no owner removes them, and they would keep
//! networks, and the blocks of their nodes, for ever.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kni_api::PodInterface;
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api,
    api::{DeleteParams, Preconditions},
};
use tokio::time::Instant;

use super::{
    gone_nodes::GRACE,
    reconcile::{Context, Reconciler, unless_changed},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct GoneInterfaces {
    /// Since when neither the node nor the pod of an object exists.
    lost: BTreeMap<Key, Instant>,
}

/// The object to remove.
#[derive(Debug)]
pub(super) struct Lost {
    uid: Option<String>,
    node: String,
}

impl GoneInterfaces {
    /// The objects that are lost long enough.
    fn expired(&mut self, tables: &Tables, now: Instant) -> Vec<(Key, Lost)> {
        let rows = tables.interfaces.rows();
        let is_lost = |row: &PodInterface, key: &Key| {
            let pod = tables.pods.get(&key.namespace, &row.spec.pod_name);
            tables.nodes.get("", &row.spec.node_name).is_none() && pod.is_none_or(|pod| pod.uid != row.spec.pod_uid)
        };
        self.lost
            .retain(|key, _| rows.get(key).is_some_and(|row| is_lost(row, key)));
        let mut expired = Vec::new();
        for (key, row) in rows.iter().filter(|(key, row)| is_lost(row, key)) {
            let since = *self.lost.entry(key.clone()).or_insert(now);
            if now.saturating_duration_since(since) >= GRACE {
                let lost = Lost {
                    uid: row.metadata.uid.clone(),
                    node: row.spec.node_name.clone(),
                };
                expired.push((key.clone(), lost));
            }
        }
        expired
    }
}

impl Reconciler for GoneInterfaces {
    const NAME: &'static str = "gone-interfaces";
    const NEEDS_NETWORKS: bool = false;
    type Write = Lost;

    fn version(tables: &Tables) -> u64 {
        tables.interfaces.version() + tables.nodes.version() + tables.pods.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Lost)> {
        self.expired(tables, Instant::now())
    }

    async fn write(context: Context, key: Key, lost: Lost) -> kube::Result<()> {
        // The cache may be older than the node.
        let nodes: Api<Node> = Api::all(context.client.clone());
        if nodes.get_metadata_opt(&lost.node).await?.is_some() {
            return Ok(());
        }
        let api: Api<PodInterface> = Api::namespaced(context.client.clone(), &key.namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: lost.uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        if unless_changed(api.delete(&key.name, &params).await)?.is_some() {
            tracing::info!(interface = %key, node = lost.node, "a PodInterface without node and pod is removed");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::NodeRow;
    use kni_crd::PodFacts;
    use serde_json::json;

    use super::*;

    /// Pod shop/web has UID `web` and is on node n1.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        tables.nodes.put(Key::new("", "n1"), Some(NodeRow::default()));
        let facts = PodFacts {
            uid: "web".to_owned(),
            node: "n1".to_owned(),
            ..PodFacts::default()
        };
        tables.pods.put(Key::new("shop", "web"), Some(Arc::new(facts)));
        tables
    }

    fn interface(tables: &mut Tables, name: &str, (pod, uid, node): (&str, &str, &str)) {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": {
                "podName": pod, "podUid": uid, "nodeName": node, "podNetworkName": "red", "interfaceName": "eth0",
                "sandboxId": "s",
            },
        });
        let object = serde_json::from_value(object).unwrap();
        tables.interfaces.put(Key::new("shop", name), Some(Arc::new(object)));
    }

    #[test]
    fn objects_without_node_and_pod_are_removed_after_a_minute() {
        let (mut gone, mut tables, start) = (GoneInterfaces::default(), tables(), Instant::now());
        interface(&mut tables, "ghost", ("ghost", "0", "n9"));
        interface(&mut tables, "earlier", ("web", "0", "n9"));
        let mut names = |tables: &Tables, now| -> Vec<String> {
            let expired = gone.expired(tables, now);
            expired.into_iter().map(|(key, _)| key.name).collect()
        };
        assert!(names(&tables, start).is_empty());
        interface(&mut tables, "late", ("late", "1", "n9"));
        assert!(names(&tables, start + GRACE / 2).is_empty());
        assert_eq!(names(&tables, start + GRACE), ["earlier", "ghost"]);
        tables.nodes.put(Key::new("", "n9"), Some(NodeRow::default()));
        assert!(names(&tables, start + 2 * GRACE).is_empty(), "the node is back");
        tables.nodes.remove(&Key::new("", "n9"));
        assert!(names(&tables, start + 2 * GRACE).is_empty(), "a minute begins anew");
    }

    #[test]
    fn objects_of_a_pod_or_a_node_that_exists_stay() {
        let (mut gone, mut tables, start) = (GoneInterfaces::default(), tables(), Instant::now());
        // Their agent removes them.
        interface(&mut tables, "of-node", ("ghost", "0", "n1"));
        interface(&mut tables, "of-pod", ("web", "web", "n9"));
        for now in [start, start + GRACE] {
            assert!(gone.expired(&tables, now).is_empty());
        }
    }
}
