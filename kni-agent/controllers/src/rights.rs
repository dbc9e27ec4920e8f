//! Follows the rights of running pods: reports those that are lost, and stops the traffic of interfaces whose network
//! demands it; some time later it detaches them.
//!
//! Traffic stops at once, and flows again as soon as the right is back: nothing of the interface is lost. Only a right
//! that stays away for [`GRACE`] ends it, because pods get no other interface until they start again. Interfaces whose
//! traffic cannot be stopped otherwise are detached at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_model::{AccessRule, IfName, SandboxId};
use kni_pods::LostRight;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Cluster;

/// Interval of the periodic round, and of retries after a failure.
const ROUND: Duration = Duration::from_secs(2);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(50);
/// How long the traffic of an interface is only stopped, before the interface is detached.
const GRACE: Duration = Duration::from_mins(1);
/// Reason of the events about a right that a pod does not have.
pub(super) const NOT_AUTHORIZED: &str = "NotAuthorized";

/// An interface of a running pod.
type Interface = (SandboxId, IfName);

/// Interfaces of running pods: `None` where the pod has the right.
type Rights = BTreeMap<Interface, Option<LostRight>>;

/// Since when the rights of interfaces are lost that their networks take back.
#[derive(Debug, Default)]
struct Revoked(BTreeMap<Interface, Instant>);

impl Revoked {
    /// Notes the present rights. Where a right is not known now, nothing changes. Returns which interfaces have their
    /// traffic stopped, or not.
    fn update(&mut self, rights: &Rights, now: Instant) -> BTreeMap<Interface, bool> {
        let mut stopped = BTreeMap::new();
        for (key, lost) in rights {
            let is_revoked = lost.as_ref().is_some_and(is_revoked);
            if is_revoked {
                self.0.entry(key.clone()).or_insert(now);
            } else {
                self.0.remove(key);
            }
            stopped.insert(key.clone(), is_revoked);
        }
        stopped
    }

    /// The sandboxes that are detached now.
    fn due(&self, rights: &Rights, now: Instant) -> BTreeSet<SandboxId> {
        let lost = rights.iter().filter_map(|(key, lost)| Some((key, lost.as_ref()?)));
        lost.filter(|(key, right)| {
            let since = self.0.get(*key);
            since.is_some_and(|since| !right.can_suspend || now.saturating_duration_since(*since) >= GRACE)
        })
        .map(|((sandbox, _), _)| sandbox.clone())
        .collect()
    }

    /// Drops interfaces that are gone.
    fn retain(&mut self, exists: impl Fn(&SandboxId) -> bool) {
        self.0.retain(|(sandbox, _), _| exists(sandbox));
    }
}

/// Whether the network takes the interface back. Whether an account has the verb is an answer of kni-controller, which
/// may be still due.
fn is_revoked(right: &LostRight) -> bool {
    right.revoke && right.refusal.rule != AccessRule::RequireJoin
}

impl Cluster {
    /// Runs as long as the agent.
    pub(super) async fn reconcile_rights(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.objects.cache.changes();
        let mut attached = self.attacher.changes();
        let mut reported = Rights::new();
        let mut revoked = Revoked::default();
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
            let rights = self.attacher.rights();
            let now = Instant::now();
            // Traffic stops before anything else is done.
            let (changed, problems) = self.attacher.suspend(&revoked.update(&rights, now));
            for problem in problems {
                tracing::error!(
                    problem,
                    "cannot stop the traffic of an interface, or let it flow again; retrying"
                );
            }
            if changed > 0 {
                tracing::info!(changed, "interfaces whose pods lost or regained a right");
            }
            for (key, right) in &rights {
                if let Some(right) = right
                    && reported.get(key).and_then(Option::as_ref) != Some(right)
                {
                    self.report_lost(key, right);
                }
            }
            for sandbox in revoked.due(&rights, now) {
                kni_tasks::progress();
                self.revoke(&sandbox).await;
            }
            revoked.retain(|sandbox| self.attacher.query(sandbox).is_some());
            reported = rights;
        }
    }

    fn report_lost(&self, (sandbox, ifname): &Interface, right: &LostRight) {
        let Some(found) = self.attacher.query(sandbox) else {
            return;
        };
        let end = match (is_revoked(right), right.can_suspend) {
            (true, true) => {
                "its traffic is stopped, and it is detached in 60 s unless the right is back (spec.access.revoke)"
            }
            (true, false) => "it is detached (spec.access.revoke)",
            (false, _) => "it stays until the pod ends",
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

#[cfg(test)]
mod tests {
    use kni_model::AccessRefusal;

    use super::*;

    fn key(sandbox: &str) -> Interface {
        (sandbox.parse().unwrap(), "eth0".parse().unwrap())
    }

    fn lost(rule: AccessRule, revoke: bool, can_suspend: bool) -> LostRight {
        let refusal = AccessRefusal {
            network: "red".parse().unwrap(),
            rule,
            reason: "no".to_owned(),
        };
        LostRight {
            refusal,
            revoke,
            can_suspend,
        }
    }

    #[test]
    fn a_label_that_is_away_for_a_second_detaches_nothing() {
        let (mut revoked, start) = (Revoked::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let away = Rights::from([(key("a"), Some(lost(AccessRule::Namespaces, true, true)))]);
        let back = Rights::from([(key("a"), None)]);
        assert!(revoked.update(&away, at(0))[&key("a")], "it stops at once");
        assert!(revoked.due(&away, at(0)).is_empty());
        assert!(!revoked.update(&back, at(1))[&key("a")]);
        // It begins anew.
        revoked.update(&away, at(30));
        revoked.update(&away, at(89));
        assert!(revoked.due(&away, at(89)).is_empty());
        assert_eq!(revoked.due(&away, at(90)).len(), 1);
    }

    #[test]
    fn nothing_flows_again_while_the_right_is_not_known() {
        let (mut revoked, start) = (Revoked::default(), Instant::now());
        let away = Rights::from([(key("a"), Some(lost(AccessRule::Namespaces, true, true)))]);
        revoked.update(&away, start);
        assert_eq!(revoked.update(&Rights::new(), start), BTreeMap::new());
        assert!(revoked.due(&Rights::new(), start + GRACE).is_empty());
        assert_eq!(revoked.due(&away, start + GRACE).len(), 1, "the time went on");
    }

    #[test]
    fn what_cannot_be_stopped_is_detached_at_once_and_the_rest_stays() {
        let (mut revoked, now) = (Revoked::default(), Instant::now());
        let rights = Rights::from([
            (key("macvlan"), Some(lost(AccessRule::Namespaces, true, false))),
            (key("kept"), Some(lost(AccessRule::Namespaces, false, true))),
            (key("verb"), Some(lost(AccessRule::RequireJoin, true, true))),
        ]);
        let stopped = revoked.update(&rights, now);
        let stopped: Vec<_> = stopped.into_iter().filter(|(_, stopped)| *stopped).collect();
        assert_eq!(stopped, [(key("macvlan"), true)]);
        let due = revoked.due(&rights, now + GRACE);
        assert_eq!(due, BTreeSet::from(["macvlan".parse().unwrap()]));
    }
}
