//! Reports the state of the node in its `NodeNetwork`, by which kni-controller sets the node's taint and extended
//! resources.

mod schedule;

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use kni_api::{
    Condition, NodeNetwork, NodeNetworkSpec, NodeNetworkStatus, NodeNetworkSummary,
    node_network::{ClosedNamespace, NodeNetworkEntry, PolicySummary, RefusedPolicy},
    set_condition,
};
use kni_crd::PodNetwork;
use kni_model::{
    policy::PolicyKind,
    view::{NetworkView, StatusView},
};
use kni_reflectors::version_of;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{ObjectControllers, interfaces::FIELD_MANAGER, retry::Retry};
use kni_cluster::{Key, PolicySource, Tables, needs_blocks, taken_blocks};
pub(super) use schedule::SentStatus;
use schedule::VersionTimes;

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are written together.
const GATHER: Duration = Duration::from_millis(100);
/// Maximum number of refused policies, and of namespaces over their quota, that are listed.
const MOST_REFUSED: usize = 64;

/// The egress policies and their generations, if the status acknowledges all of them.
fn acknowledged_egress(tables: &Tables, status: &NodeNetworkStatus) -> Option<BTreeMap<Key, i64>> {
    let acknowledged = status.policies.resource_versions.get(PolicyKind::EgressPolicy.as_str());
    if *acknowledged? != tables.egress_policies.newest().to_string() {
        return None;
    }
    let rows = tables.egress_policies.rows().iter();
    Some(rows.map(|(key, row)| (key.clone(), row.generation)).collect())
}

impl ObjectControllers {
    fn sent_status(&self) -> MutexGuard<'_, Option<SentStatus>> {
        self.sent_status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the node's state for as long as the agent runs.
    pub(super) async fn reconcile_node(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attached = self.state.changes.clone();
        let mut retry = Retry::up_to(self.longest_pause);
        loop {
            kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => {}
                    _ = attached.changed() => tokio::time::sleep(GATHER).await,
                    () = self.node_changed.notified() => tokio::time::sleep(GATHER).await,
                }
            })
            .await;
            if !retry.is_due() {
                continue;
            }
            let read = Arc::clone(&self.state.status);
            let Ok((status, views)) = tokio::task::spawn_blocking(move || read()).await else {
                continue;
            };
            let written = self.write_node_network(&status, &views).await;
            retry.ended(written.is_ok());
            if let Err(error) = written {
                tracing::debug!(%error, "cannot write the status of the node; trying again");
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
            let egress = acknowledged_egress(&tables, &status);
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
        let can_wait = |sent: &mut SentStatus| {
            before == sent.stored && sent.can_wait(Instant::now(), &status, egress.as_ref(), &times)
        };
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
        self.note_sent(status, written.status.clone(), egress);
        let version = version_of(&written.metadata);
        self.cache.change_written(|tables| {
            let key = Key::new("", &self.node);
            tables
                .own_network
                .put_written(key, since, version, Some(Arc::new(written)))
        });
        Ok(())
    }

    /// Notes a written status. `egress` are the egress policies that it acknowledges, if these are all.
    fn note_sent(
        &self,
        status: NodeNetworkStatus,
        stored: Option<NodeNetworkStatus>,
        egress: Option<BTreeMap<Key, i64>>,
    ) {
        let mut sent = self.sent_status();
        let before = sent.take().map(|sent| sent.egress);
        *sent = Some(SentStatus {
            sent: status,
            stored,
            at: Instant::now(),
            versions_wait: None,
            egress: egress.or(before).unwrap_or_default(),
        });
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
            generation: object.map_or(0, |object| applied(object, spec.enabled)),
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
            for (key, row) in table.rows() {
                known += 1;
                let (reason, instead) = match &row.source {
                    PolicySource::Object => continue,
                    PolicySource::LastValid(reason) => (reason, "the last valid version is active"),
                    PolicySource::Closed(reason) => (reason, "nothing is allowed"),
                };
                refused.push(RefusedPolicy {
                    kind: kind.to_owned(),
                    namespace: key.namespace.clone(),
                    name: key.name.clone(),
                    reason: format!("{reason}; {instead}"),
                });
            }
        }
        refused.truncate(MOST_REFUSED);
        let versions = self.policy_versions();
        let enforcement = (self.state.enforcement)();
        let closed = enforcement.closed.into_iter().take(MOST_REFUSED);
        PolicySummary {
            known,
            programmed: enforcement.problem.is_none(),
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

/// The generation of the object that the node has applied: that of a deletion once no pod can join here any more.
/// kni-controller lets a network go only then.
fn applied(object: &PodNetwork, is_open: bool) -> i64 {
    let generation = object.metadata.generation.unwrap_or(0);
    if is_open && object.metadata.deletion_timestamp.is_some() {
        generation.saturating_sub(1)
    } else {
        generation
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
    fn a_deletion_is_applied_once_the_network_is_closed() {
        let object = |metadata: serde_json::Value| -> PodNetwork {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": metadata,
                "spec": { "subnets": ["10.0.0.0/16"] },
            });
            serde_json::from_value(object).unwrap()
        };
        let stays = object(json!({ "name": "red", "generation": 3 }));
        let leaves = object(json!({
            "name": "red", "generation": 4, "deletionTimestamp": "2026-01-02T03:04:05Z",
        }));
        assert_eq!([applied(&stays, true), applied(&stays, false)], [3, 3]);
        assert_eq!([applied(&leaves, true), applied(&leaves, false)], [3, 4]);
    }
}
