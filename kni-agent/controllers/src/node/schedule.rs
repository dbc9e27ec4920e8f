//! Decides when a changed status of the node is written.

use std::{collections::BTreeMap, hash::Hasher as _, time::Duration};

use fnv::FnvHasher;
use kni_api::NodeNetworkStatus;
use kni_cluster::Key;
use tokio::time::Instant;

/// Minimum time between writes that change only figures.
const FIGURES: Duration = Duration::from_secs(10);

/// The same where the versions of policies change too, as long as no egress policy is new: only these wait for them.
const VERSIONS: Duration = Duration::from_secs(5);

/// The same in a cluster of many nodes, for each of them. The nodes learn of a policy at the same time; each waits for
/// its part of the whole time, so that together they write at most a hundred versions a second.
const VERSIONS_PER_NODE: Duration = Duration::from_millis(10);

/// Into how many parts the time is divided in which the nodes of a cluster write; a prime number.
const PARTS: u16 = 9973;

/// The last written status of the node.
#[derive(Debug)]
pub(crate) struct SentStatus {
    pub(super) sent: NodeNetworkStatus,
    /// What the API server made of it.
    pub(super) stored: Option<NodeNetworkStatus>,
    pub(super) at: Instant,
    /// Since when versions of policies wait.
    pub(super) versions_wait: Option<Instant>,
    /// The egress policies that the last status with all of them acknowledged, and their generations.
    pub(super) egress: BTreeMap<Key, i64>,
}

impl SentStatus {
    /// Whether the difference to what was sent last can wait. `egress` are the present egress policies, if `status`
    /// acknowledges all of them: one that does not yet has nothing that kni-controller waits for.
    pub(super) fn can_wait(
        &mut self,
        now: Instant,
        status: &NodeNetworkStatus,
        egress: Option<&BTreeMap<Key, i64>>,
        times: &VersionTimes,
    ) -> bool {
        let written = now.saturating_duration_since(self.at);
        let mut same = status.clone();
        take_figures(&mut same, &self.sent);
        if same == self.sent {
            return written < FIGURES;
        }
        take_versions(&mut same, &self.sent);
        if same != self.sent || egress.is_some_and(|present| self.egress != *present) {
            return false;
        }
        let since = *self.versions_wait.get_or_insert(now);
        now.saturating_duration_since(since) < times.delay || written < times.pause
    }
}

/// When a node writes versions of policies.
#[derive(Debug, PartialEq)]
pub(super) struct VersionTimes {
    /// Minimum time between two writes.
    pause: Duration,
    /// How long after a change: different for each node.
    delay: Duration,
}

impl VersionTimes {
    /// The times of `node` in a cluster of so many nodes.
    pub(super) fn new(node: &str, nodes: usize) -> Self {
        let all = VERSIONS_PER_NODE.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX));
        let mut hash = FnvHasher::default();
        hash.write(node.as_bytes());
        // Remainders of the whole hash are spread better than its upper or lower bits.
        let part = u16::try_from(hash.finish() % u64::from(PARTS)).unwrap_or(0);
        Self {
            pause: VERSIONS.max(all),
            delay: all.mul_f64(f64::from(part) / f64::from(PARTS)),
        }
    }
}

/// Takes what changes with every pod or claim from `other`.
fn take_figures(status: &mut NodeNetworkStatus, other: &NodeNetworkStatus) {
    status.interfaces = other.interfaces;
    for entry in &mut status.networks {
        let Some(before) = other.networks.iter().find(|before| before.name == entry.name) else {
            continue;
        };
        entry.blocks.clone_from(&before.blocks);
        entry.capacity = before.capacity;
        // The deletion of a closed network waits for its last pod.
        if entry.ready || entry.used > 0 {
            entry.used = before.used;
        }
        if entry.allocatable.is_some() && before.allocatable.is_some() {
            entry.allocatable = before.allocatable;
        }
    }
}

/// Takes the number and the versions of policies from `other`.
fn take_versions(status: &mut NodeNetworkStatus, other: &NodeNetworkStatus) {
    let (policies, other) = (&mut status.policies, &other.policies);
    policies.known = other.known;
    policies.resource_versions.clone_from(&other.resource_versions);
}

#[cfg(test)]
mod tests {
    use kni_api::Condition;

    use super::*;

    #[test]
    fn versions_of_policies_wait_for_the_part_of_the_node() {
        let times = VersionTimes {
            pause: Duration::from_secs(5),
            delay: Duration::from_secs(2),
        };
        let (egress, start) = (BTreeMap::new(), Instant::now());
        let mut sent = SentStatus {
            sent: NodeNetworkStatus::default(),
            stored: None,
            at: start,
            versions_wait: None,
            egress: egress.clone(),
        };
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut status = sent.sent.clone();
        status.policies.known = 1;
        assert!(sent.can_wait(at(60), &status, Some(&egress), &times));
        status.policies.known = 2;
        let again = sent.can_wait(at(61), &status, Some(&egress), &times);
        assert!(again, "a second change begins no new delay");
        assert!(!sent.can_wait(at(62), &status, Some(&egress), &times));
        sent.at = at(62);
        let written = sent.can_wait(at(66), &status, Some(&egress), &times);
        assert!(written, "it was written a moment ago");
        let new = BTreeMap::from([(Key::new("a", "b"), 1)]);
        let unknown = sent.can_wait(at(66), &status, None, &times);
        assert!(unknown, "it is not applied yet");
        let new = sent.can_wait(at(66), &status, Some(&new), &times);
        assert!(!new, "the status of an egress policy waits");
        status.conditions = vec![Condition::now("Ready", false, "NotReady", "", None)];
        let condition = sent.can_wait(at(66), &status, Some(&egress), &times);
        assert!(!condition, "a condition never waits");
    }

    #[test]
    fn the_last_pod_of_a_closed_network_is_reported_at_once() {
        let entry = |ready, used| kni_api::node_network::NodeNetworkEntry {
            name: "red".to_owned(),
            ready,
            used,
            ..Default::default()
        };
        let status = |ready, used| NodeNetworkStatus {
            networks: vec![entry(ready, used)],
            ..NodeNetworkStatus::default()
        };
        let waits = |before: (bool, i64), after: (bool, i64)| {
            let (before, mut after) = (status(before.0, before.1), status(after.0, after.1));
            take_figures(&mut after, &before);
            after == before
        };
        assert!(waits((true, 1), (true, 0)));
        assert!(waits((false, 3), (false, 2)));
        assert!(!waits((false, 1), (false, 0)));
        assert!(!waits((true, 1), (false, 1)), "it was closed");
    }

    #[test]
    fn many_nodes_share_the_time_in_which_they_write() {
        assert_eq!(VersionTimes::new("node1", 3).pause, VERSIONS);
        assert!(VersionTimes::new("node1", 3).delay < Duration::from_millis(30));
        let mut tenths = [0; 10];
        for number in 0..5000 {
            let times = VersionTimes::new(&format!("node-{number}.example"), 5000);
            assert_eq!(times.pause, Duration::from_secs(50));
            tenths[usize::try_from(times.delay.as_secs() / 5).unwrap()] += 1;
        }
        assert!(tenths.iter().all(|count| (400..=600).contains(count)), "{tenths:?}");
    }
}
