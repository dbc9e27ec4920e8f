//! Sets the taint of nodes whose addresses of the default network are used up, as their agents report it.
//!
//! A taint keeps away all pods but those that tolerate it, whatever their network. So a network that pods of chosen
//! namespaces join gives none: a tenant could close nodes for others.

use k8s_openapi::api::core::v1::{Node, Taint};
use kni_api::EXHAUSTED_TAINT;
use kni_cluster::{Key, Networks, NodeRow, Tables};
use kni_reflectors::node_row;
use kube::{
    Api,
    api::{Patch, PatchParams},
};

use super::reconcile::{Context, Reconciler, unless_changed};

/// The controller. Running pods stay on a node with the taint; new ones are scheduled elsewhere.
pub(super) struct Taints;

impl Reconciler for Taints {
    const NAME: &'static str = "taints";
    /// The exhausted network; `None`: the taint goes.
    type Write = Option<String>;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.node_networks.version() + tables.networks.version()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Option<String>)> {
        let default = networks.default_network();
        let mut writes = Vec::new();
        for (key, node) in tables.nodes.rows() {
            let report = tables.node_networks.rows().get(key);
            let status = report.and_then(|report| report.status.as_ref());
            let mut entries = status.iter().flat_map(|status| &status.networks);
            let full = entries.find(|entry| entry.exhausted && default.is_some_and(|name| name.as_str() == entry.name));
            let full = full.map(|entry| entry.name.clone());
            if with_taint(node, full.as_deref()).is_some() {
                writes.push((key.clone(), full));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, full: Option<String>) -> kube::Result<()> {
        let api: Api<Node> = Api::all(context.client.clone());
        // The list is replaced as a whole, with the resource version that was read, so that concurrent changes are not
        // lost.
        let Some(current) = unless_changed(api.get(&key.name).await)? else {
            return Ok(());
        };
        let version = current.metadata.resource_version.clone();
        let Some(taints) = with_taint(&node_row(current), full.as_deref()) else {
            return Ok(());
        };
        let patch = Patch::Merge(serde_json::json!({
            "metadata": {"resourceVersion": version},
            "spec": {"taints": taints},
        }));
        unless_changed(api.patch(&key.name, &PatchParams::default(), &patch).await).map(drop)
    }
}

/// The desired taints of the node; `None` if they are up to date.
fn with_taint(node: &NodeRow, network: Option<&str>) -> Option<Vec<Taint>> {
    let is_ours = |taint: &&Taint| taint.key == EXHAUSTED_TAINT;
    let present = node.taints.iter().find(is_ours);
    if present.is_some() == network.is_some() {
        return None;
    }
    let mut taints: Vec<Taint> = node.taints.iter().filter(|taint| !is_ours(taint)).cloned().collect();
    taints.extend(network.map(|network| Taint {
        key: EXHAUSTED_TAINT.to_owned(),
        value: Some(network.to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    }));
    Some(taints)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::HeldBlocks;
    use serde_json::json;

    use super::*;

    fn taint(key: &str) -> Taint {
        Taint {
            key: key.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        }
    }

    #[test]
    fn the_taint_comes_and_goes_and_others_stay() {
        let mut node = NodeRow {
            taints: vec![taint("other")],
            ..NodeRow::default()
        };
        assert_eq!(with_taint(&node, None), None);
        let tainted = with_taint(&node, Some("red")).unwrap();
        let keys: Vec<_> = tainted
            .iter()
            .map(|taint| (taint.key.as_str(), taint.value.as_deref()))
            .collect();
        assert_eq!(keys, [("other", None), (EXHAUSTED_TAINT, Some("red"))]);
        node.taints = tainted;
        assert_eq!(with_taint(&node, Some("red")), None);
        assert_eq!(with_taint(&node, None), Some(vec![taint("other")]));
    }

    /// The planned taints of node n1, which has no address left in the network `full`.
    fn planned(full: &str) -> Vec<Option<String>> {
        let mut tables = Tables::default();
        let selector = json!({ "matchLabels": { "tenant": "red" } });
        for (name, more) in [("main", json!(true)), ("red", json!(false))] {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name },
                "spec": { "subnets": ["10.0.0.0/16"], "default": more, "namespaceSelector":
                    (name == "red").then_some(&selector) },
            });
            let object = serde_json::from_value(object).unwrap();
            tables.networks.put(Key::new("", name), Some(Arc::new(object)));
        }
        let report = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NodeNetwork", "metadata": { "name": "n1" }, "spec": {},
            "status": { "networks": [{ "name": full, "exhausted": true }] },
        });
        let report = serde_json::from_value(report).unwrap();
        tables.node_networks.put(Key::new("", "n1"), Some(Arc::new(report)));
        tables.nodes.put(Key::new("", "n1"), Some(NodeRow::default()));
        let networks = Networks::of(&tables, &HeldBlocks::new());
        let writes = Taints.plan(&tables, &networks);
        writes.into_iter().map(|(_, write)| write).collect()
    }

    #[test]
    fn a_full_default_network_taints_the_node() {
        assert_eq!(planned("main"), [Some("main".to_owned())]);
    }

    #[test]
    fn a_full_network_of_namespaces_taints_no_node() {
        assert_eq!(planned("red"), []);
    }
}
