//! Clears condition `NetworkUnavailable` of nodes whose agent attaches pods.
//!
//! Cloud providers set it on new nodes, and kube-controller-manager keeps pods off such nodes by a taint until the
//! network plugin clears it. A condition that is not True is never written, and each Node is cleared once in a term:
//! what sets it again afterwards decides.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kni_api::{ConditionStatus, NodeNetwork};
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::reconcile::{Context, Reconciler, unless_changed};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct NetworkUnavailable {
    /// The Nodes that had the condition, by UID.
    found: BTreeMap<String, Found>,
}

/// What became of the condition of a Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It is to be cleared.
    True,
    /// It is no longer True.
    Cleared,
}

impl Reconciler for NetworkUnavailable {
    const NAME: &'static str = "network-unavailable";
    const NEEDS_NETWORKS: bool = false;
    /// The UID of the Node.
    type Write = String;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.node_networks.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, String)> {
        let nodes = tables.nodes.rows();
        let before = std::mem::take(&mut self.found);
        let mut writes = Vec::new();
        for (key, node) in nodes {
            let known = before.get(&node.uid).copied();
            let now = match (known, node.network_unavailable) {
                (None, false) => continue,
                (Some(_), false) | (Some(Found::Cleared), true) => Found::Cleared,
                // The kubelet is ready only where a network plugin is. A report may be of an agent that is gone.
                (_, true) if !node.ready || !is_ready(tables.node_networks.rows().get(key)) => continue,
                (_, true) => {
                    writes.push((key.clone(), node.uid.clone()));
                    Found::True
                }
            };
            self.found.insert(node.uid.clone(), now);
        }
        writes
    }

    async fn write(context: Context, key: Key, uid: String) -> kube::Result<()> {
        let api: Api<Node> = Api::all(context.client.clone());
        // Merges the conditions by their type, so those of others stay as they are.
        let patch = Patch::Strategic(cleared(&uid, Timestamp::now()));
        let written = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        if unless_changed(written)?.is_some() {
            tracing::info!(node = key.name, "condition NetworkUnavailable is cleared");
        }
        Ok(())
    }
}

/// Whether the agent of a node reports that it attaches pods.
fn is_ready(report: Option<&Arc<NodeNetwork>>) -> bool {
    let status = report.and_then(|report| report.status.as_ref());
    let mut conditions = status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == ConditionStatus::True)
}

/// The patch of the status of the Node with this UID.
fn cleared(uid: &str, now: Timestamp) -> Value {
    let now = Time(now);
    json!({
        "metadata": { "uid": uid },
        "status": { "conditions": [{
            "type": "NetworkUnavailable",
            "status": "False",
            "reason": "KniIsReady",
            "message": "the agent of KNI attaches pods",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }] },
    })
}

#[cfg(test)]
mod tests {
    use kni_cluster::NodeRow;

    use super::*;

    /// The nodes of which the condition is to be cleared, of n1.
    fn planned(controller: &mut NetworkUnavailable, node: (&str, bool, bool), agent: Option<&str>) -> Vec<String> {
        let mut tables = Tables::default();
        let (uid, network_unavailable, ready) = node;
        let row = NodeRow {
            uid: uid.to_owned(),
            network_unavailable,
            ready,
            ..NodeRow::default()
        };
        tables.nodes.put(Key::new("", "n1"), Some(row));
        if let Some(status) = agent {
            let report = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "NodeNetwork", "metadata": { "name": "n1" }, "spec": {},
                "status": { "conditions": [{
                    "type": "Ready", "status": status, "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }] },
            });
            let report = serde_json::from_value(report).unwrap();
            tables.node_networks.put(Key::new("", "n1"), Some(Arc::new(report)));
        }
        let writes = controller.plan(&tables, &Networks::default());
        writes.into_iter().map(|(_, uid)| uid).collect()
    }

    #[test]
    fn a_condition_that_is_true_is_cleared_where_agent_and_kubelet_are_ready() {
        let plan = |node, agent| planned(&mut NetworkUnavailable::default(), node, agent);
        assert_eq!(plan(("a", true, true), Some("True")), ["a"]);
        for agent in [None, Some("False"), Some("Unknown")] {
            assert!(plan(("a", true, true), agent).is_empty(), "{agent:?}");
        }
        assert!(plan(("a", true, false), Some("True")).is_empty(), "kubelet not ready");
        assert!(plan(("a", false, true), Some("True")).is_empty(), "nothing to clear");
    }

    #[test]
    fn a_node_is_cleared_once() {
        let mut controller = NetworkUnavailable::default();
        let mut plan = |uid, unavailable| planned(&mut controller, (uid, unavailable, true), Some("True"));
        assert_eq!(plan("a", true), ["a"]);
        assert_eq!(plan("a", true), ["a"], "the write has failed");
        assert!(plan("a", false).is_empty());
        assert!(plan("a", true).is_empty(), "set again by another component");
        assert_eq!(plan("b", true), ["b"], "another Node of this name");
    }

    #[test]
    fn the_patch_names_one_condition_of_one_node() {
        let patch = cleared("a", Timestamp::UNIX_EPOCH);
        let paths: Vec<&str> = patch.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(paths, ["metadata", "status"]);
        assert_eq!(patch["metadata"], json!({ "uid": "a" }));
        assert_eq!(patch["status"].as_object().unwrap().len(), 1);
        let conditions = patch["status"]["conditions"].as_array().unwrap();
        assert_eq!(conditions.len(), 1);
        assert_eq!(conditions[0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
    }
}
