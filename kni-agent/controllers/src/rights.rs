//! Follows the rights of running pods: reports those that are lost, and detaches the interfaces whose network demands
//! it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kni_model::{AccessRule, IfName, SandboxId};
use kni_pods::LostRight;
use tokio::time::{MissedTickBehavior, interval};

use super::Cluster;

/// Interval of the periodic round, and of retries after a failure.
const ROUND: Duration = Duration::from_secs(2);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(50);
/// Reason of the events about a right that a pod does not have.
pub(super) const NOT_AUTHORIZED: &str = "NotAuthorized";

/// Interfaces of running pods whose right is lost.
type Lost = BTreeMap<(SandboxId, IfName), LostRight>;

impl Cluster {
    /// Runs as long as the agent.
    pub(super) async fn reconcile_rights(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.objects.cache.changes();
        let mut attached = self.attacher.changes();
        let mut reported = Lost::new();
        let mut seen = None;
        loop {
            let next = async {
                tokio::select! {
                    _ = ticks.tick() => true,
                    _ = known.changed() => { tokio::time::sleep(GATHER).await; false }
                    _ = attached.changed() => { tokio::time::sleep(GATHER).await; true }
                }
            };
            let ticked = kni_tasks::waiting(next).await;
            let versions = {
                let tables = self.objects.cache.tables();
                (tables.namespaces.version(), tables.networks.version())
            };
            if !ticked && seen == Some(versions) {
                continue;
            }
            seen = Some(versions);
            let lost = self.attacher.lost_rights();
            for (key, right) in &lost {
                if reported.get(key) != Some(right) {
                    self.report_lost(key, right);
                }
            }
            for ((sandbox, _), right) in &lost {
                // Whether an account has the verb is an answer of kni-controller, which may be still due.
                if right.revoke && right.refusal.rule != AccessRule::RequireJoin {
                    kni_tasks::progress();
                    self.revoke(sandbox).await;
                }
            }
            reported = lost;
        }
    }

    fn report_lost(&self, (sandbox, ifname): &(SandboxId, IfName), right: &LostRight) {
        let Some(found) = self.attacher.query(sandbox) else {
            return;
        };
        let end = if right.revoke && right.refusal.rule != AccessRule::RequireJoin {
            "it is detached (spec.access.revoke)"
        } else {
            "it stays until the pod ends"
        };
        let note = format!("interface {ifname} lost its right: {}; {end}", right.refusal);
        tracing::warn!(pod = %found.pod, %sandbox, %ifname, refusal = %right.refusal, revoke = right.revoke, "a running pod lost the right to its network");
        self.events.warn_pod(&found.pod, NOT_AUTHORIZED, "Join", &note);
    }

    async fn revoke(&self, sandbox: &SandboxId) {
        if let Err(error) = self.attacher.detach(sandbox.clone()).await {
            tracing::warn!(%sandbox, %error, "cannot detach a sandbox that lost its right; retrying");
        }
    }
}
