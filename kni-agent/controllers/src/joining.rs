//! Follows what other nodes have in the networks of this node's pods.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kni_cluster::{Tables, joining::networks_of};
use kni_model::NetworkName;
use kube::ResourceExt as _;

use super::ObjectControllers;

/// Changes that arrive within this time are processed together. Short, as the first pod of a network may be attached
/// soon.
const GATHER: Duration = Duration::from_millis(10);

impl ObjectControllers {
    /// Follows the networks of pods that are assigned to the node, for as long as the agent runs.
    pub(super) async fn watch_networks(self: Arc<Self>) {
        let mut attached = self.state.changes.clone();
        let mut known = self.cache.changes();
        let mut seen = None;
        loop {
            let versions = {
                let tables = self.cache.tables();
                (
                    [
                        tables.pods.version(),
                        tables.networks.version(),
                        tables.namespaces.version(),
                        tables.attachments.version(),
                        tables.definitions.version(),
                    ],
                    *attached.borrow_and_update(),
                )
            };
            if seen != Some(versions) {
                seen = Some(versions);
                self.join_networks();
            }
            let next = async {
                tokio::select! {
                    sent = attached.changed() => sent.is_ok(),
                    sent = known.changed() => sent.is_ok(),
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Follows the members and blocks of the networks that the node has pods in, or will have, and of the default
    /// network; and the blocks of networks with an extended resource, as the node offers what is free of them.
    pub fn join_networks(&self) {
        let sandboxes = (self.state.sandboxes)();
        let attached = sandboxes.iter().flat_map(|sandbox| &sandbox.attachments);
        let mut joined: BTreeSet<NetworkName> = attached.map(|attachment| attachment.network.clone()).collect();
        let counting: Vec<NetworkName> = {
            let tables = self.cache.tables();
            let networks = self.networks(&tables);
            for (key, pod) in tables.pods.rows() {
                if pod.node == self.node && !pod.host_network && !pod.finished {
                    joined.extend(networks_of(&tables, &networks, &key.namespace, pod));
                }
            }
            // The node itself exchanges packets with the pods of the default network.
            joined.extend(networks.default_network().cloned());
            joined.retain(|name| tables.networks.get("", name.as_str()).is_some());
            let counting = tables.networks.rows().values();
            let counting = counting.filter(|object| object.spec.extended_resource);
            counting.filter_map(|object| object.name_any().parse().ok()).collect()
        };
        self.cache.join(joined, counting);
    }

    /// The networks of this node that `covers`.
    pub(super) fn covered(&self, covers: impl Fn(&Tables, &NetworkName) -> bool) -> BTreeSet<NetworkName> {
        let views = (self.state.networks)().into_iter();
        let names: Vec<NetworkName> = views.map(|view| view.network.spec.name).collect();
        let tables = self.cache.tables();
        names.into_iter().filter(|name| covers(&tables, name)).collect()
    }
}
