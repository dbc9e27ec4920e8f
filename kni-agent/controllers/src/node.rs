//! Reports the state of the node in its `NodeNetwork`, by which kni-controller sets the node's taint and extended
//! resources.

use std::{
    collections::BTreeMap,
    hash::Hasher as _,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use fnv::FnvHasher;
use kni_api::{
    Condition, NodeNetwork, NodeNetworkSpec, NodeNetworkStatus, NodeNetworkSummary,
    node_network::{ClosedNamespace, NodeNetworkEntry, PolicySummary, RefusedPolicy},
    set_condition,
};
use kni_model::view::{NetworkView, StatusView};
use kni_reflectors::version_of;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{ObjectControllers, interfaces::FIELD_MANAGER};
use kni_cluster::{Key, Tables, needs_blocks, taken_blocks};

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are written together.
const GATHER: Duration = Duration::from_millis(100);
/// Minimum time between writes that change only figures.
const FIGURES: Duration = Duration::from_secs(10);
/// The same where the versions of policies change too, as long as no egress policy is new: only these wait for them.
const VERSIONS: Duration = Duration::from_secs(5);
/// The same in a cluster of many nodes, for each of them. The nodes learn of a policy at the same time; each waits for
/// its part of the whole time, so that together they write at most a hundred versions a second.
const VERSIONS_PER_NODE: Duration = Duration::from_millis(10);
/// Into how many parts the time is divided in which the nodes of a cluster write; a prime number.
const PARTS: u16 = 9973;
/// Maximum number of refused policies, and of namespaces beyond their quota, that are listed.
const MOST_REFUSED: usize = 64;

/// The last written status of the node.
#[derive(Debug)]
pub(super) struct SentStatus {
    sent: NodeNetworkStatus,
    /// What the API server made of it.
    stored: Option<NodeNetworkStatus>,
    at: Instant,
    /// Since when versions of policies wait.
    versions_wait: Option<Instant>,
    /// The egress policies and their generations.
    egress: BTreeMap<Key, i64>,
}

impl SentStatus {
    /// Whether the difference to what was sent last can wait. `egress` are the present egress policies.
    fn can_wait(
        &mut self,
        now: Instant,
        status: &NodeNetworkStatus,
        egress: &BTreeMap<Key, i64>,
        times: &VersionTimes,
    ) -> bool {
        let written = now.saturating_duration_since(self.at);
        let mut same = status.clone();
        take_figures(&mut same, &self.sent);
        if same == self.sent {
            return written < FIGURES;
        }
        take_versions(&mut same, &self.sent);
        if same != self.sent || self.egress != *egress {
            return false;
        }
        let since = *self.versions_wait.get_or_insert(now);
        now.saturating_duration_since(since) < times.delay || written < times.pause
    }
}

/// When a node writes versions of policies.
#[derive(Debug, PartialEq)]
struct VersionTimes {
    /// Minimum time between two writes.
    pause: Duration,
    /// How long after a change: different for each node.
    delay: Duration,
}

impl VersionTimes {
    /// The times of `node` in a cluster of so many nodes.
    fn new(node: &str, nodes: usize) -> Self {
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
        entry.used = before.used;
        if entry.allocatable.is_some() && before.allocatable.is_some() {
            entry.allocatable = before.allocatable;
        }
    }
}

/// Takes the number and the versions of policies from `other`.
fn take_versions(status: &mut NodeNetworkStatus, other: &NodeNetworkStatus) {
    let (policies, other) = (&mut status.policies, &other.policies);
    policies.known = other.known;
    policies.resource_version.clone_from(&other.resource_version);
    policies.resource_versions.clone_from(&other.resource_versions);
}

/// The egress policies and their generations.
fn egress_generations(tables: &Tables) -> BTreeMap<Key, i64> {
    let rows = tables.egress_policies.rows().iter();
    rows.map(|(key, row)| (key.clone(), row.generation)).collect()
}

impl ObjectControllers {
    fn sent_status(&self) -> MutexGuard<'_, Option<SentStatus>> {
        self.sent_status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the node's state for as long as the agent runs.
    pub(super) async fn reconcile_node(self) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attached = self.state.changes.clone();
        loop {
            kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => {}
                    _ = attached.changed() => tokio::time::sleep(GATHER).await,
                    () = self.node_changed.notified() => tokio::time::sleep(GATHER).await,
                }
            })
            .await;
            let read = Arc::clone(&self.state.status);
            let Ok((status, views)) = tokio::task::spawn_blocking(move || read()).await else {
                continue;
            };
            if let Err(error) = self.write_node_network(&status, &views).await {
                // The next round retries.
                tracing::debug!(%error, "cannot write the status of the node");
            }
        }
    }

    async fn write_node_network(&self, agent: &StatusView, views: &[NetworkView]) -> Result<(), kube::Error> {
        let (since, known, egress, times, mut status) = {
            let tables = self.cache.tables();
            if !tables.own_network.is_synced() {
                // Without the present conditions, their times would be lost.
                return Ok(());
            }
            let known = tables.own_network.get("", &self.node).cloned();
            let status = self.node_status(&tables, agent, views);
            let egress = egress_generations(&tables);
            let times = VersionTimes::new(&self.node, tables.node_endpoints.rows().len());
            (tables.own_network.newest(), known, egress, times, status)
        };
        let before = known.as_ref().and_then(|known| known.status.clone());
        let mut conditions = before
            .as_ref()
            .map(|status| status.conditions.clone())
            .unwrap_or_default();
        for condition in std::mem::take(&mut status.conditions) {
            set_condition(&mut conditions, condition);
        }
        status.conditions = conditions;
        // Definitions of an earlier release drop fields, so that the object never equals the status.
        let dropped = |sent: &SentStatus| before == sent.stored && sent.sent == status;
        if before.as_ref() == Some(&status) || self.sent_status().as_ref().is_some_and(dropped) {
            return Ok(());
        }
        let can_wait =
            |sent: &mut SentStatus| before == sent.stored && sent.can_wait(Instant::now(), &status, &egress, &times);
        if self.sent_status().as_mut().is_some_and(can_wait) {
            // A later round writes it.
            return Ok(());
        }
        let api: Api<NodeNetwork> = Api::all(self.client.clone());
        if known.is_none() {
            let apply = PatchParams::apply(FIELD_MANAGER).force();
            let object = NodeNetwork::new(&self.node, NodeNetworkSpec {});
            api.patch(&self.node, &apply, &Patch::Apply(&object)).await?;
        }
        // The whole status, but not by server-side apply: that refuses fields that definitions of an earlier release do
        // not have, while this leaves them out.
        let patch = json!([{ "op": "add", "path": "/status", "value": status }]);
        let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError)?;
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let mut written = api.patch_status(&self.node, &params, &Patch::Json::<()>(patch)).await?;
        written.metadata.managed_fields = None;
        *self.sent_status() = Some(SentStatus {
            sent: status,
            stored: written.status.clone(),
            at: Instant::now(),
            versions_wait: None,
            egress,
        });
        let version = version_of(&written.metadata);
        self.cache.change_written(|tables| {
            let key = Key::new("", &self.node);
            tables
                .own_network
                .put_written(key, since, version, Some(Arc::new(written)))
        });
        Ok(())
    }

    fn node_status(&self, tables: &Tables, agent: &StatusView, views: &[NetworkView]) -> NodeNetworkStatus {
        let problems = agent.reasons.join("; ");
        let ready = if agent.ready {
            ("Serving", "pods can be attached".to_owned())
        } else {
            ("NotReady", problems.clone())
        };
        let degraded = !agent.reasons.is_empty();
        let (why, message) = if degraded {
            ("Problems", problems)
        } else {
            ("AsExpected", "everything works".to_owned())
        };
        let degraded = Condition::now("Degraded", degraded, why, &message, None);
        let conflicts = self.cache.blocks().conflicts();
        let (reason, message) = if conflicts.is_empty() {
            ("NoConflict", "no pod has an address of another node's block".to_owned())
        } else {
            ("OtherNodesBlock", conflicts.join("; "))
        };
        let conflict = Condition::now("AddressConflict", !conflicts.is_empty(), reason, &message, None);
        let sources = &agent.uplink.sources;
        let addresses: Vec<String> = if sources.is_empty() {
            let node = tables.own_node.get("", &self.node);
            node.map(|node| node.addresses.clone()).unwrap_or_default()
        } else {
            sources.iter().map(ToString::to_string).collect()
        };
        let networks: Vec<NodeNetworkEntry> = views.iter().map(|view| self.entry(tables, view)).collect();
        let mut status = NodeNetworkStatus {
            conditions: vec![
                Condition::now("Ready", agent.ready, ready.0, &ready.1, None),
                degraded,
                conflict,
                state_lost(agent),
                addresses_available(&networks),
                number_conflict(views),
            ],
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            tunnel_endpoints: addresses,
            features: features(agent),
            network_names: views.iter().map(|view| view.network.spec.name.to_string()).collect(),
            networks,
            policies: self.policy_summary(tables),
            interfaces: agent.attachments.into(),
            summary: NodeNetworkSummary::default(),
        };
        status.summary = NodeNetworkSummary::new(&status);
        status
    }

    fn entry(&self, tables: &Tables, view: &NetworkView) -> NodeNetworkEntry {
        let spec = &view.network.spec;
        let object = tables.networks.get("", spec.name.as_str());
        let families = [(true, &view.ipv4), (false, &view.ipv6)];
        let has = |ipv4: bool| spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
        let fits = families
            .iter()
            .filter(|(ipv4, _)| has(*ipv4))
            .map(|(_, usage)| usage.total);
        NodeNetworkEntry {
            name: spec.name.to_string(),
            generation: object.and_then(|object| object.metadata.generation).unwrap_or(0),
            ready: view.ready,
            reason: view.reason.clone(),
            blocks: spec.blocks.iter().flatten().map(ToString::to_string).collect(),
            capacity: fits.min().map_or(0, saturate),
            used: view.attachments.into(),
            allocatable: object
                .filter(|object| object.spec.extended_resource)
                .map(|_requested| self.pods_that_fit(tables, view)),
            exhausted: self.is_used_up(view),
            network_id: view.network.id.get(),
            number: view.number,
            number_problem: view
                .number_problem
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
        }
    }

    /// Whether no address is left and no block can be allocated.
    fn is_used_up(&self, view: &NetworkView) -> bool {
        needs_blocks(view, 1) && self.cache.blocks().is_exhausted(&view.network.spec.name)
    }

    fn policy_summary(&self, tables: &Tables) -> PolicySummary {
        let kinds = [
            ("NetworkPolicy", &tables.network_policies),
            ("MultiNetworkPolicy", &tables.multi_policies),
            ("EgressPolicy", &tables.egress_policies),
        ];
        let mut refused = Vec::new();
        let mut known = 0;
        for (kind, table) in kinds {
            let undecoded = table.refused().iter();
            refused.extend(undecoded.map(|(key, reason)| RefusedPolicy {
                kind: kind.to_owned(),
                namespace: key.namespace.clone(),
                name: key.name.clone(),
                reason: reason.clone(),
            }));
            for (key, row) in table.rows() {
                known += 1;
                if let Err(reason) = &row.policy {
                    refused.push(RefusedPolicy {
                        kind: kind.to_owned(),
                        namespace: key.namespace.clone(),
                        name: key.name.clone(),
                        reason: reason.to_string(),
                    });
                }
            }
        }
        refused.truncate(MOST_REFUSED);
        let versions = self.policy_versions();
        let enforcement = (self.state.enforcement)();
        let closed = enforcement.closed.into_iter().take(MOST_REFUSED);
        PolicySummary {
            known,
            programmed: enforcement.problem.is_none(),
            // Earlier releases compare this one with egress policies only.
            resource_version: versions.egress.to_string(),
            resource_versions: versions.by_kind(),
            refused,
            closed: closed
                .map(|(namespace, reason)| ClosedNamespace { namespace, reason })
                .collect(),
        }
    }

    /// The number of pods that have addresses, plus those for which addresses are free: in the node's blocks, and in
    /// blocks that it could still allocate, once it knows those of all nodes.
    fn pods_that_fit(&self, tables: &Tables, view: &NetworkView) -> i64 {
        let used = i64::from(view.attachments);
        if self.is_used_up(view) {
            return used;
        }
        let spec = &view.network.spec;
        let taken = taken_blocks(tables, &spec.name);
        let covered = tables.other_blocks.covers(&spec.name);
        let room = |ipv4: bool| {
            let size = |nets: &[ipnet::IpNet]| -> u128 {
                let of_family = nets.iter().filter(|net| net.addr().is_ipv4() == ipv4);
                of_family
                    .map(|net| {
                        1_u128
                            .checked_shl(u32::from(net.max_prefix_len() - net.prefix_len()))
                            .unwrap_or(u128::MAX)
                    })
                    .fold(0, u128::saturating_add)
            };
            let usage = if ipv4 { &view.ipv4 } else { &view.ipv6 };
            let all = if covered { size(&spec.subnets) } else { 0 };
            all.saturating_sub(size(&taken))
                .saturating_add(usage.free)
                .saturating_add(usage.resting)
        };
        let has = |ipv4: bool| spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
        let least = [true, false].into_iter().filter(|ipv4| has(*ipv4)).map(room).min();
        used.saturating_add(least.map_or(0, saturate))
    }
}

/// Whether every network has an address for another pod. Those that have none are named: new pods of theirs wait.
fn addresses_available(networks: &[NodeNetworkEntry]) -> Condition {
    let full = networks.iter().filter(|entry| entry.exhausted);
    let full: Vec<String> = full
        .map(|entry| format!("{} (0 of {} free)", entry.name, entry.capacity))
        .collect();
    if full.is_empty() {
        let message = "every network has a free address, or can get an address block";
        Condition::now("AddressesAvailable", true, "Available", message, None)
    } else {
        let message = format!("no address is left in network {}", full.join(", "));
        Condition::now("AddressesAvailable", false, "Exhausted", &message, None)
    }
}

/// Whether a network has changed its number while pods of the node are in it, or shares it with another one.
fn number_conflict(views: &[NetworkView]) -> Condition {
    let problems = views.iter().filter_map(|view| {
        let problem = view.number_problem.as_ref().filter(|problem| problem.is_conflict())?;
        Some(format!("network {}: {problem}", view.network.spec.name))
    });
    let problems: Vec<String> = problems.collect();
    let (reason, message) = if problems.is_empty() {
        (
            "NoConflict",
            "no number of a network has changed while pods are in it, or is that of two networks".to_owned(),
        )
    } else {
        ("NumberInUse", problems.join("; "))
    };
    Condition::now("NumberConflict", !problems.is_empty(), reason, &message, None)
}

fn features(agent: &StatusView) -> BTreeMap<String, String> {
    let mut features: BTreeMap<String, String> = [("hook".to_owned(), agent.hook.clone())].into();
    if !agent.uplink.ifname.is_empty() {
        features.insert("uplink".to_owned(), agent.uplink.ifname.clone());
    }
    if !agent.uplink.xdp.is_empty() {
        features.insert("uplinkXDP".to_owned(), agent.uplink.xdp.clone());
    }
    features.insert("maxInterfaces".to_owned(), agent.endpoints_capacity.to_string());
    features
}

/// The API uses signed 64-bit numbers.
fn saturate(number: u128) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Whether the agent found its state lost at its start.
fn state_lost(agent: &StatusView) -> Condition {
    match &agent.state_lost {
        Some(report) => Condition::now("StateLost", true, "Recovered", report, None),
        None => Condition::now("StateLost", false, "AsExpected", "the state is complete", None),
    }
}

#[cfg(test)]
mod tests {
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
        assert!(sent.can_wait(at(60), &status, &egress, &times));
        status.policies.known = 2;
        let again = sent.can_wait(at(61), &status, &egress, &times);
        assert!(again, "a second change begins no new delay");
        assert!(!sent.can_wait(at(62), &status, &egress, &times));
        sent.at = at(62);
        let written = sent.can_wait(at(66), &status, &egress, &times);
        assert!(written, "it was written a moment ago");
        let new = BTreeMap::from([(Key::new("a", "b"), 1)]);
        let new = sent.can_wait(at(66), &status, &new, &times);
        assert!(!new, "the status of an egress policy waits");
        status.conditions = vec![Condition::now("Ready", false, "NotReady", "", None)];
        let condition = sent.can_wait(at(66), &status, &egress, &times);
        assert!(!condition, "a condition never waits");
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
