//! Finds the nodes on which a pod may still join a network that is being deleted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kni_crd::PodNetwork;
use kube::ResourceExt as _;
use tokio::time::Instant;

use super::overview::Overview;

/// How long a network that is being deleted waits for the reports of nodes: an agent may have ended, or not reach the
/// API server. One that attaches a pod later keeps the pod's interface working, in a network without an object.
const LONGEST: Duration = Duration::from_mins(1);

/// Since when this replica knows of each network, by its UID, that it is being deleted.
#[derive(Debug, Default)]
pub(super) struct OpenNodes {
    since: BTreeMap<String, Instant>,
}

impl OpenNodes {
    /// Removes the networks that are gone.
    pub(super) fn retain<'a>(&mut self, networks: impl Iterator<Item = &'a PodNetwork>) {
        let leaving: BTreeSet<String> = networks.filter(|object| is_leaving(object)).filter_map(uid).collect();
        self.since.retain(|uid, _| leaving.contains(uid));
    }

    /// The nodes whose agents have not reported that the network is closed and has no pod. An agent reports both as of
    /// one moment, and attaches no pod to a closed network. None once the network has waited for a minute, and for a
    /// refused network that no agent has.
    pub(super) fn of<'a>(
        &mut self,
        overview: &Overview<'a>,
        object: &PodNetwork,
        is_refused: bool,
        now: Instant,
    ) -> Vec<&'a str> {
        if !is_leaving(object) {
            return Vec::new();
        }
        let entries = overview.entries(&object.name_any());
        if is_refused && entries.is_empty() {
            return Vec::new();
        }
        let since = uid(object).map_or(now, |uid| *self.since.entry(uid).or_insert(now));
        if now.saturating_duration_since(since) >= LONGEST {
            return Vec::new();
        }
        let generation = object.metadata.generation.unwrap_or(0);
        let closed = entries
            .iter()
            .filter(|(_, entry)| entry.generation == generation && !entry.ready && entry.used == 0);
        let closed: BTreeSet<&str> = closed.map(|(node, _)| *node).collect();
        let nodes = overview.nodes.iter().copied();
        nodes.filter(|node| !closed.contains(node)).collect()
    }
}

fn is_leaving(object: &PodNetwork) -> bool {
    object.metadata.deletion_timestamp.is_some()
}

fn uid(object: &PodNetwork) -> Option<String> {
    object.metadata.uid.clone()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_api::{NodeNetwork, NodeNetworkSpec, NodeNetworkStatus, node_network::NodeNetworkEntry};
    use kni_cluster::{Key, Networks, Tables};
    use serde_json::json;

    use super::*;

    fn network(generation: i64, leaving: bool) -> PodNetwork {
        let mut object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": { "name": "red", "uid": "u1", "generation": generation },
            "spec": { "subnets": ["10.0.0.0/16"] },
        });
        if leaving {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-02T03:04:05Z");
        }
        serde_json::from_value(object).unwrap()
    }

    /// The reports of n1, n2, ...: generation, ready, used.
    fn tables(reports: &[Option<(i64, bool, i64)>]) -> Tables {
        let mut tables = Tables::default();
        for (number, report) in (1..).zip(reports) {
            let key = Key::new("", &format!("n{number}"));
            tables.nodes.put(key.clone(), Some(kni_cluster::NodeRow::default()));
            let networks = report.iter().map(|(generation, ready, used)| NodeNetworkEntry {
                name: "red".to_owned(),
                generation: *generation,
                ready: *ready,
                used: *used,
                ..NodeNetworkEntry::default()
            });
            let mut object = NodeNetwork::new(&key.name, NodeNetworkSpec {});
            object.status = Some(NodeNetworkStatus {
                networks: networks.collect(),
                ..NodeNetworkStatus::default()
            });
            tables.node_networks.put(key, Some(Arc::new(object)));
        }
        tables
    }

    #[test]
    fn a_deleted_network_waits_until_every_node_has_closed_it() {
        let networks = Networks::default();
        let now = Instant::now();
        let open = |reports: &[_], object: &PodNetwork| {
            let tables = tables(reports);
            let overview = Overview::of(&tables, &networks);
            let nodes = OpenNodes::default().of(&overview, object, false, now);
            nodes.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let leaving = network(3, true);
        let closed = Some((3, false, 0));
        assert_eq!(open(&[closed, closed], &leaving), [""; 0]);
        assert_eq!(open(&[closed, Some((2, true, 0))], &leaving), ["n2"], "not seen yet");
        assert_eq!(
            open(&[closed, Some((2, false, 0))], &leaving),
            ["n2"],
            "of a change before"
        );
        assert_eq!(
            open(&[Some((3, false, 1)), closed], &leaving),
            ["n1"],
            "a pod without an object yet"
        );
        assert_eq!(open(&[closed, None], &leaving), ["n2"], "its creation not seen yet");
        assert_eq!(open(&[Some((2, true, 5))], &network(3, false)), [""; 0], "it stays");
    }

    #[test]
    fn an_agent_that_does_not_report_delays_a_deletion_once() {
        let networks = Networks::default();
        let (tables, object, began) = (self::tables(&[Some((2, true, 0))]), network(3, true), Instant::now());
        let overview = Overview::of(&tables, &networks);
        let mut nodes = OpenNodes::default();
        assert_eq!(nodes.of(&overview, &object, false, began), ["n1"]);
        let before = began + LONGEST.checked_sub(Duration::from_millis(1)).unwrap();
        assert_eq!(nodes.of(&overview, &object, false, before), ["n1"]);
        assert_eq!(nodes.of(&overview, &object, false, began + LONGEST), [""; 0]);
        // Another network of the name begins anew.
        nodes.retain(std::iter::empty());
        assert_eq!(nodes.of(&overview, &object, false, began + LONGEST), ["n1"]);
        // One that has become invalid is open where the last valid version is.
        nodes.retain(std::iter::empty());
        assert_eq!(nodes.of(&overview, &object, true, began), ["n1"]);
        let none = self::tables(&[None]);
        let overview = Overview::of(&none, &networks);
        assert_eq!(nodes.of(&overview, &object, true, began), [""; 0], "no agent has it");
    }
}
