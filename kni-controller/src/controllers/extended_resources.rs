//! Sets the extended resources of nodes: how many pods of a network each can run, as their agents report it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kni_api::RESOURCE_PREFIX;
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Map, Value};

use super::reconcile::{Context, Reconciler, ignore_gone};

/// The controller.
pub(super) struct ExtendedResources;

impl Reconciler for ExtendedResources {
    const NAME: &'static str = "extended-resources";
    const NEEDS_NETWORKS: bool = false;
    /// The changed resources; null for one that goes.
    type Write = Map<String, Value>;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.node_networks.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Map<String, Value>)> {
        let mut writes = Vec::new();
        for (key, node) in tables.nodes.rows() {
            let report = tables.node_networks.rows().get(key);
            let status = report.and_then(|report| report.status.as_ref());
            let entries = status.iter().flat_map(|status| &status.networks);
            let desired: BTreeMap<String, String> = entries
                .filter_map(|entry| {
                    Some((
                        format!("{RESOURCE_PREFIX}{}", entry.name),
                        entry.allocatable?.to_string(),
                    ))
                })
                .collect();
            let changed = changes(&node.resources, &desired);
            if !changed.is_empty() {
                writes.push((key.clone(), changed));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, changed: Map<String, Value>) -> kube::Result<()> {
        let api: Api<Node> = Api::all(context.client.clone());
        let patch = Patch::Merge(serde_json::json!({"status": {"capacity": changed, "allocatable": changed}}));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

/// The values of a merge patch from `known` to `desired`.
fn changes(known: &BTreeMap<String, String>, desired: &BTreeMap<String, String>) -> Map<String, Value> {
    let gone = known.keys().filter(|name| !desired.contains_key(*name));
    let gone = gone.map(|name| (name.clone(), Value::Null));
    let set = desired.iter().filter(|(name, count)| known.get(*name) != Some(count));
    gone.chain(set.map(|(name, count)| (name.clone(), Value::from(count.as_str()))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_come_change_and_go() {
        let map = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            let pairs = pairs.iter();
            pairs
                .map(|(name, count)| ((*name).to_owned(), (*count).to_owned()))
                .collect()
        };
        let known = map(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let desired = map(&[("b", "2"), ("c", "4"), ("d", "5")]);
        let changed = Value::Object(changes(&known, &desired));
        assert_eq!(changed, serde_json::json!({"a": null, "c": "4", "d": "5"}));
        assert!(changes(&desired, &desired).is_empty());
    }
}
