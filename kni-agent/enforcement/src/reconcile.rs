//! Runs the background work: retries failures, removes detached pods, and sweeps the tables.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use kni_dataplane::DataplaneError;
use tokio::time::{MissedTickBehavior, interval};

use super::{Enforcer, PolicySide, lock};

/// Interval at which the dataplane expects its flows to be counted.
const TICK: Duration = Duration::from_secs(1);
/// Pods that are detached within this time are removed together.
const GATHER: Duration = Duration::from_millis(20);
/// Ticks between two searches for hits of removed policy sets.
const HITS_EVERY: u64 = 10;

impl Enforcer {
    /// Applies changes and retries failures for as long as the agent runs.
    pub async fn reconcile(self: Arc<Self>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut number = 0_u64;
        loop {
            let ticked = kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => true,
                    () = self.wake.notified() => false,
                }
            })
            .await;
            let sync = Arc::clone(&self);
            let done = if ticked {
                number += 1;
                tokio::task::spawn_blocking(move || sync.tick(number)).await
            } else {
                tokio::time::sleep(GATHER).await;
                tokio::task::spawn_blocking(move || {
                    sync.catch_up();
                    sync.catch_up_services();
                })
                .await
            };
            if let Err(error) = done {
                // A panic is a bug; the next round starts from the inputs again.
                tracing::error!(%error, "the update of policies and services panicked");
            }
        }
    }

    /// The work of each second.
    fn tick(&self, number: u64) {
        lock(&self.services).engine.tick();
        self.catch_up_services();
        if lock(&self.health).policy.has_failed() {
            self.catch_up();
        }
        let swept = self.dataplane.sweep_flows();
        lock(&self.health).sweep_ended(swept.as_ref().err());
        if number.is_multiple_of(HITS_EVERY)
            && let Err(error) = self.remove_unused_hits()
        {
            tracing::warn!(%error, "cannot remove hits of removed policy sets");
        }
    }

    fn catch_up_services(&self) {
        let may_try = lock(&self.health).services.may_try(Instant::now());
        if may_try {
            // The failure is logged, recorded for the health status and retried there.
            let _logged = self.sync_services().is_err();
        }
    }

    fn catch_up(&self) {
        if lock(&self.health).policy.may_try(Instant::now()) {
            // As above.
            let _logged = self.sync_policies().is_err();
        }
    }

    /// Removes the hits of unused sets at the second search, so that a query just after a change still finds them.
    fn remove_unused_hits(&self) -> Result<(), DataplaneError> {
        let hit: BTreeSet<u32> = self.dataplane.hits()?.into_keys().map(|key| key.set).collect();
        let gone = lock(&self.policy).gone(&hit);
        if gone.is_empty() {
            return Ok(());
        }
        self.dataplane.remove_hits(&gone)
    }
}

impl PolicySide {
    /// Sets with hits that are not in the tables, and were not at the previous search either.
    fn gone(&mut self, hit: &BTreeSet<u32>) -> Vec<u32> {
        let active: BTreeSet<u32> = self.engine.tables().policy.keys().map(|key| key.set).collect();
        let unused: BTreeSet<u32> = hit.difference(&active).copied().collect();
        let gone = unused.intersection(&self.unused).copied().collect();
        self.unused = unused;
        gone
    }
}

#[cfg(test)]
mod tests {
    use kni_common::policy::{PolicyKey, PolicyValue};
    use kni_model::PolicyTables;
    use kni_policy::PolicyEngine;

    use super::*;

    #[test]
    fn hits_are_forgotten_at_the_second_look_and_only_of_sets_that_are_gone() {
        let mut tables = PolicyTables::default();
        let key = PolicyKey {
            set: 7,
            identity: 0,
            direction: 0,
        };
        tables.policy.insert(key, PolicyValue { ports: 1, rule: 0 });
        let mut side = PolicySide {
            engine: PolicyEngine::new(tables),
            has_objects: true,
            has_pods: true,
            unused: BTreeSet::new(),
        };
        assert!(side.gone(&[7, 8].into()).is_empty());
        assert!(side.gone(&[7, 9].into()).is_empty(), "8 has no hits any more, 9 is new");
        assert_eq!(side.gone(&[7, 9].into()), [9]);
    }
}
