//! Sets the taint of nodes whose addresses of a primary network are used up, as their agents report it.

use k8s_openapi::api::core::v1::{Node, Taint};
use kni_api::EXHAUSTED_TAINT;
use kni_cluster::{Key, Networks, NodeRow, Tables};
use kni_model::NetworkName;
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
        let mut writes = Vec::new();
        for (key, node) in tables.nodes.rows() {
            let report = tables.node_networks.rows().get(key);
            let status = report.and_then(|report| report.status.as_ref());
            let mut entries = status.iter().flat_map(|status| &status.networks);
            let full = entries.find(|entry| entry.exhausted && is_primary(networks, &entry.name));
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

fn is_primary(networks: &Networks, name: &str) -> bool {
    let name: Result<NetworkName, _> = name.parse();
    name.is_ok_and(|name| networks.is_primary(&name))
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
}
