//! Confirms and releases the claims of egress addresses that concern this node, and passes the rights to the uplink.
//!
//! A claim names the node that is to answer for an address. The node adds the address only after the API server has
//! recorded it as the holder, and is removed as the holder only after it has removed the address: see
//! docs/design/egress.md.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use kni_api::{Condition, EgressAddressClaim, EgressAddressClaimStatus, egress_address_claim::Holder, set_condition};
use kni_cluster::{
    Key, Tables,
    egress::{
        EgressRequests, answered_addresses, cluster_egress_rights, egress_requests, is_assigned_to, is_same_node,
        node_egress_rights, user_of,
    },
};
use kni_model::{PodRef, egress::EgressRefusal};
use kube::{Api, ResourceExt as _, api::PostParams};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use super::{
    Cluster,
    retry::{Retries, Retry},
};

/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(20);

/// A change of a claim's status by its own node.
enum Step {
    /// Records the node as the holder.
    Confirm,
    /// Removes the node as the holder.
    Release,
    /// Reports whether the address is on the uplink.
    Report(Condition),
}

impl Cluster {
    /// Follows claims, pools and policies for as long as the agent runs.
    pub(super) async fn reconcile_egress(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut changes = self.objects.cache.changes();
        let mut applied = self.uplink.applied();
        let mut published = BTreeMap::new();
        let (mut claims, mut events) = (Retries::default(), Retry::default());
        let mut seen = None;
        loop {
            let next = async {
                tokio::select! {
                    _ = ticks.tick() => true,
                    sent = applied.changed() => sent.is_ok(),
                    sent = self.other_rights(&mut changes, seen) => {
                        tokio::time::sleep(GATHER).await;
                        sent
                    }
                }
            };
            if !kni_tasks::waiting(next).await {
                return;
            }
            seen = Some(rights_versions(&self.objects.cache.tables()));
            self.write_claims(&mut claims).await;
            if events.is_due() {
                events.ended(self.report_refusals(&mut published).await);
            }
        }
    }

    /// Waits until an object has changed that rights depend on: most changes, such as those of pods, do not concern
    /// them. Returns `false` when the cache is gone.
    async fn other_rights(&self, changes: &mut watch::Receiver<()>, seen: Option<[u64; 9]>) -> bool {
        while changes.changed().await.is_ok() {
            if Some(rights_versions(&self.objects.cache.tables())) != seen {
                return true;
            }
        }
        false
    }

    /// Applies the rights as they are, before the node's egress is applied for the first time.
    pub async fn apply_egress_rights(&self) {
        let (rights, answering) = {
            let tables = self.objects.cache.tables();
            let networks = self.objects.networks(&tables);
            let requests = requests(&tables, &networks);
            let own = self.own(&tables);
            let by_objects = cluster_egress_rights(&tables, &networks, &requests);
            (
                node_egress_rights(&tables, &networks, &requests, &own),
                answered_addresses(&tables, &by_objects, &own),
            )
        };
        let uplink = Arc::clone(&self.uplink);
        // Waits for a change of the uplink that is being carried out.
        let done = tokio::task::spawn_blocking(move || uplink.set_rights(rights, answering)).await;
        if let Err(error) = done {
            tracing::error!(%error, "cannot apply the rights to egress addresses");
        }
    }

    /// The node as a holder. Without a UID while it is not registered: then it owns nothing.
    fn own(&self, tables: &Tables) -> Holder {
        let row = tables.own_node.get("", &self.objects.node);
        Holder {
            node_name: self.objects.node.clone(),
            node_uid: row.map(|row| row.uid.clone()).unwrap_or_default(),
            epoch: 0,
        }
    }

    async fn write_claims(self: &Arc<Self>, retries: &mut Retries<String>) {
        let cluster = Arc::clone(self);
        // Waits for a change of the uplink that is being carried out.
        let planned = tokio::task::spawn_blocking(move || cluster.plan_claims()).await;
        let planned = planned.unwrap_or_default();
        retries.retain(|name| planned.iter().any(|(claim, _)| claim.name_any() == *name));
        for (claim, step) in planned {
            let name = claim.name_any();
            if !retries.is_due(&name) {
                continue;
            }
            let is_confirmation = matches!(step, Step::Confirm);
            let written = self.write_claim(&claim, step).await;
            let changed =
                |error: &kube::Error| matches!(error, kube::Error::Api(status) if matches!(status.code, 404 | 409));
            retries.ended(name, written.as_ref().err().is_none_or(changed));
            match written {
                Ok(()) if is_confirmation => self.apply_egress_rights().await,
                Ok(()) => {}
                // The claim has changed; the watch reports it.
                Err(error) if changed(&error) => {}
                Err(error) => {
                    tracing::debug!(%error, claim = claim.name_any(), "cannot write an EgressAddressClaim; trying again");
                }
            }
        }
    }

    fn plan_claims(&self) -> Vec<(Arc<EgressAddressClaim>, Step)> {
        let (rights, answering, by_objects, claims, own) = {
            let tables = self.objects.cache.tables();
            let networks = self.objects.networks(&tables);
            let requests = requests(&tables, &networks);
            let own = self.own(&tables);
            let claims: Vec<_> = tables.egress_claims.rows().values().map(Arc::clone).collect();
            let by_objects = cluster_egress_rights(&tables, &networks, &requests);
            (
                node_egress_rights(&tables, &networks, &requests, &own),
                answered_addresses(&tables, &by_objects, &own),
                by_objects,
                claims,
                own,
            )
        };
        let version = self.uplink.set_rights(rights, answering);
        let applied = self.uplink.applied_rights() >= version;
        let held = self.uplink.held_addresses();
        let problems = self.uplink.address_problems();
        let mut steps = Vec::new();
        for claim in claims {
            let Ok(address) = claim.spec.address.parse::<IpAddr>() else {
                continue;
            };
            let holder = claim.status.as_ref().and_then(|status| status.holder.clone());
            let is_leaving = claim.metadata.deletion_timestamp.is_some();
            let assigned = is_assigned_to(&claim, &own) && !is_leaving;
            let step = match holder {
                // The rule is evaluated here too: a claim alone gives no right.
                None if assigned => {
                    let user = user_of(&claim);
                    let mut granted = by_objects.iter();
                    let granted = granted.any(|((other, requested), right)| {
                        *requested == address
                            && right.is_ok()
                            && user.as_ref().is_some_and(|user| user.shares_with(other))
                    });
                    granted.then_some(Step::Confirm)
                }
                Some(holder) if holder.node_name == own.node_name => {
                    if assigned && is_same_node(&holder, &own) {
                        report(&claim, &own, held.contains(&address), problems.get(&address), address)
                    } else {
                        (applied && !held.contains(&address)).then_some(Step::Release)
                    }
                }
                None | Some(_) => None,
            };
            steps.extend(step.map(|step| (claim, step)));
        }
        steps
    }

    /// Writes the status with the resource version that the decision was made on.
    async fn write_claim(&self, claim: &EgressAddressClaim, step: Step) -> Result<(), kube::Error> {
        let mut object = claim.clone();
        let status = object.status.get_or_insert_with(EgressAddressClaimStatus::default);
        match step {
            Step::Confirm => {
                let own = self.own(&self.objects.cache.tables());
                status.holder = Some(Holder {
                    epoch: claim.spec.epoch,
                    ..own
                });
                let message = format!("node {} has not added the address yet", self.objects.node);
                set_condition(
                    &mut status.conditions,
                    Condition::now("Ready", false, "Confirmed", &message, None),
                );
                tracing::info!(address = claim.spec.address, "this node owns the egress address");
            }
            Step::Release => {
                status.holder = None;
                let message = format!("node {} has released the address", self.objects.node);
                set_condition(
                    &mut status.conditions,
                    Condition::now("Ready", false, "Released", &message, None),
                );
                tracing::info!(
                    address = claim.spec.address,
                    "this node has released the egress address"
                );
            }
            Step::Report(condition) => drop(set_condition(&mut status.conditions, condition)),
        }
        let api: Api<EgressAddressClaim> = Api::all(self.objects.client.clone());
        let name = claim.name_any();
        let mut written = api.replace_status(&name, &PostParams::default(), &object).await?;
        written.metadata.managed_fields = None;
        self.objects.cache.change(|tables| {
            let newest = tables.egress_claims.get("", &name);
            // The watch may have reported a later state already.
            if newest.is_some_and(|newest| newest.resource_version() == claim.resource_version()) {
                tables.egress_claims.put(Key::new("", &name), Some(Arc::new(written)));
            }
        });
        Ok(())
    }

    /// Writes an event about each pod that nothing leaves the node from, once for each reason. Returns whether that
    /// succeeded.
    async fn report_refusals(&self, published: &mut BTreeMap<(PodRef, IpAddr), String>) -> bool {
        let uplink = Arc::clone(&self.uplink);
        let Ok(refused) = tokio::task::spawn_blocking(move || uplink.refused_interfaces()).await else {
            return false;
        };
        let mut current = BTreeMap::new();
        for sandbox in self.attacher.sandboxes() {
            let endpoints = sandbox
                .policy_pod()
                .interfaces
                .into_iter()
                .filter_map(|interface| interface.endpoint);
            for one in endpoints.filter_map(|endpoint| refused.get(&endpoint)).flatten() {
                if is_lasting(&one.refusal) {
                    current.insert((sandbox.pod.clone(), one.address), one.clone());
                }
            }
        }
        published.retain(|key, _| current.contains_key(key));
        for ((pod, address), one) in current {
            let text = one.to_string();
            let key = (pod, address);
            if published.get(&key) == Some(&text) {
                continue;
            }
            let note = format!("nothing leaves the node: {one}");
            let reported = self.events.publish(&key.0, one.refusal.reason(), "LeaveNode", &note);
            if let Err(error) = reported.await {
                tracing::debug!(%error, "cannot write an event; trying again");
                return false;
            }
            published.insert(key, text);
        }
        true
    }
}

/// The versions of the objects that rights to egress addresses depend on.
fn rights_versions(tables: &Tables) -> [u64; 9] {
    [
        tables.egress_claims.version(),
        tables.egress_pools.version(),
        tables.egress_policies.version(),
        tables.networks.version(),
        tables.numbers.version(),
        tables.namespaces.version(),
        tables.own_node.version(),
        // Their addresses are reserved.
        tables.services.version(),
        tables.slices.version(),
    ]
}

/// Whether a refusal is worth an event: not one that passes within a second.
fn is_lasting(refusal: &EgressRefusal) -> bool {
    !matches!(
        refusal,
        EgressRefusal::Unassigned
            | EgressRefusal::Unverified
            | EgressRefusal::Unforwarded
            | EgressRefusal::NoPorts { exhausted: false, .. }
    )
}

fn requests(tables: &Tables, networks: &kni_cluster::Networks) -> EgressRequests {
    let rows = tables.egress_policies.rows().values();
    egress_requests(rows.map(|row| row.policy.as_ref()), networks)
}

/// The report on an address of this node; `None` if the claim has it already.
fn report(
    claim: &EgressAddressClaim,
    own: &Holder,
    is_held: bool,
    problem: Option<&EgressRefusal>,
    address: IpAddr,
) -> Option<Step> {
    let node = &own.node_name;
    let desired = match (problem, is_held) {
        (Some(problem), _) => Condition::now("Ready", false, problem.reason(), &problem.message(address), None),
        (None, true) => Condition::now(
            "Ready",
            true,
            "OnUplink",
            &format!("node {node} answers for the address"),
            None,
        ),
        // This node takes it in any case, in a moment.
        (None, false) if !claim.spec.shares.is_empty() => return None,
        (None, false) => {
            let message = format!("no pod on node {node} leaves with the address");
            Condition::now("Ready", false, "NotUsed", &message, None)
        }
    };
    let mut conditions = claim
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    set_condition(&mut conditions, desired.clone()).then_some(Step::Report(desired))
}
