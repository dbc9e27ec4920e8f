//! Tracks the health of the enforcement: failures, retry times and durations.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kni_dataplane::DataplaneError;
use kni_model::{EndpointId, durations::Durations, error_chain};
use kni_policy::Overrun;

/// Pause after the first failure; each additional one doubles it, up to [`LONGEST_PAUSE`].
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Maximum number of namespaces over their quota that the status lists.
const MOST_CLOSED: usize = 16;

/// An update that could not be applied. It is retried in the background.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    /// Policies: endpoints keep their previous policies, or an intermediate state, which denies nothing that both
    /// allow.
    #[error("policies: {}", error_chain(.0))]
    Policy(DataplaneError),
    /// Services: they keep their previous backends; some may have the new ones.
    #[error("services: {}", error_chain(.0))]
    Services(DataplaneError),
}

/// The counters of policies for the metrics page.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyCounts {
    /// Rows of `POLICY`.
    pub policy: usize,
    /// Rows of `PORTS`.
    pub ports: usize,
    /// Rows of `IDENTITIES`.
    pub identities: usize,
    /// Durations of policy updates, including failed attempts.
    pub times: Durations,
    /// Failed attempts, of policies and of services.
    pub failures: u64,
}

/// The attempts to apply one kind of object.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    failed: Option<Failure>,
    count: u64,
}

#[derive(Debug)]
struct Failure {
    reason: String,
    retry_at: Instant,
    pause: Duration,
}

impl Attempts {
    fn ended(&mut self, what: &'static str, error: Option<&DataplaneError>) {
        let Some(error) = error else {
            if self.failed.take().is_some() {
                tracing::info!("{what} are applied again");
            }
            return;
        };
        let reason = error_chain(error);
        let pause = self.failed.as_ref().map_or(SHORTEST_PAUSE, |before| {
            before.pause.saturating_mul(2).min(LONGEST_PAUSE)
        });
        tracing::error!(reason, retry = ?pause, "{what} cannot be applied");
        self.count += 1;
        self.failed = Some(Failure {
            reason,
            retry_at: Instant::now() + pause,
            pause,
        });
    }

    /// Whether the last attempt succeeded, or the pause after its failure is over.
    pub(super) fn may_try(&self, now: Instant) -> bool {
        self.failed.as_ref().is_none_or(|failure| failure.retry_at <= now)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }
}

#[derive(Debug, Default)]
pub(super) struct Health {
    pub(super) policy: Attempts,
    pub(super) services: Attempts,
    times: Durations,
    sweep: Option<String>,
    /// Namespaces whose policies are enforced without rules, and why.
    closed: BTreeMap<String, String>,
    /// The endpoints that this affects, with their namespaces.
    closed_endpoints: BTreeMap<EndpointId, String>,
    /// Namespaces with Services that are not applied because they exceed their share, and why.
    exceeding: BTreeMap<String, String>,
}

impl Health {
    /// Records the end of an attempt; `took` is `None` if there was nothing to do.
    pub(super) fn policy_ended(&mut self, took: Option<Duration>, error: Option<&DataplaneError>) {
        if let Some(took) = took {
            self.times.observe(took);
        }
        self.policy.ended("policies", error);
    }

    pub(super) fn services_ended(&mut self, error: Option<&DataplaneError>) {
        self.services.ended("services", error);
    }

    /// Records the end of a sweep. It runs each second, so a repeated failure is logged once.
    pub(super) fn sweep_ended(&mut self, error: Option<&DataplaneError>) {
        let reason = error.map(|error| error_chain(error));
        if self.sweep != reason
            && let Some(reason) = &reason
        {
            tracing::warn!(reason, "cannot sweep the flow tables");
        }
        self.sweep = reason;
    }

    /// Records the namespaces that exceed their quota of policy rows. Changes are logged once.
    pub(super) fn closed<'a>(
        &mut self,
        overruns: impl Iterator<Item = &'a Overrun>,
        endpoints: impl Iterator<Item = (EndpointId, &'a str)>,
    ) {
        let closed: BTreeMap<String, String> = overruns
            .map(|overrun| (overrun.namespace.clone(), overrun.to_string()))
            .collect();
        for (namespace, reason) in closed.iter().filter(|(name, _)| !self.closed.contains_key(*name)) {
            tracing::warn!(
                namespace,
                reason,
                "the policies of a namespace are enforced without their rules"
            );
        }
        for namespace in self.closed.keys().filter(|name| !closed.contains_key(*name)) {
            tracing::info!(
                namespace,
                "the policies of the namespace are enforced with their rules again"
            );
        }
        self.closed_endpoints = endpoints.map(|(endpoint, name)| (endpoint, name.to_owned())).collect();
        self.closed = closed;
    }

    /// Records the namespaces whose Services exceed their share of rows. Changes are logged once.
    pub(super) fn exceeding(&mut self, namespaces: &BTreeMap<String, String>) {
        if self.exceeding == *namespaces {
            return;
        }
        for (namespace, reason) in namespaces
            .iter()
            .filter(|(name, _)| !self.exceeding.contains_key(*name))
        {
            tracing::warn!(namespace, reason, "Services of a namespace are not applied");
        }
        for namespace in self.exceeding.keys().filter(|name| !namespaces.contains_key(*name)) {
            tracing::info!(namespace, "the Services of the namespace are applied again");
        }
        self.exceeding.clone_from(namespaces);
    }

    pub(super) fn closed_namespaces(&self) -> &BTreeMap<String, String> {
        &self.closed
    }

    pub(super) fn closed_endpoint(&self, endpoint: EndpointId) -> Option<&String> {
        self.closed.get(self.closed_endpoints.get(&endpoint)?)
    }

    /// Why policies are not enforced.
    pub(super) fn policy_problem(&self) -> Option<String> {
        self.policy.failed.as_ref().map(|failure| failure.reason.clone())
    }

    /// Why services are not applied, or flows are not counted, and the namespaces over their quotas.
    pub(super) fn other_problems(&self) -> Vec<String> {
        let services = self.services.failed.as_ref();
        let services = services.map(|failure| format!("services are not applied: {}", failure.reason));
        let sweep = self.sweep.as_ref();
        let sweep = sweep.map(|reason| format!("flows are not counted: {reason}"));
        let closed = self.closed.values().take(MOST_CLOSED);
        let closed = closed.map(|reason| format!("policies are enforced without rules: {reason}"));
        let exceeding = self.exceeding.values().take(MOST_CLOSED);
        let exceeding = exceeding.map(|reason| format!("some Services are not applied: {reason}"));
        services
            .into_iter()
            .chain(sweep)
            .chain(closed)
            .chain(exceeding)
            .collect()
    }

    pub(super) fn counts(&self) -> PolicyCounts {
        PolicyCounts {
            times: self.times,
            failures: self.policy.count + self.services.count,
            ..PolicyCounts::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_success_ends_them() {
        let full = DataplaneError::Full {
            map: "POLICY",
            capacity: 8,
        };
        let mut health = Health::default();
        assert!(health.policy.may_try(Instant::now()));
        for (attempt, pause) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
            let before = Instant::now();
            health.policy_ended(Some(Duration::from_millis(3)), Some(&full));
            let pause = Duration::from_secs(pause);
            assert!(
                !health
                    .policy
                    .may_try(before + pause.saturating_sub(Duration::from_millis(1))),
                "{attempt}"
            );
            assert!(health.policy.may_try(Instant::now() + pause));
        }
        assert_eq!(
            health.policy_problem().unwrap(),
            "map POLICY is full: it has room for 8 rows"
        );
        assert!(health.other_problems().is_empty(), "services are another matter");
        health.policy_ended(Some(Duration::from_millis(3)), None);
        assert_eq!(health.policy_problem(), None);
        let counts = health.counts();
        assert_eq!((counts.failures, counts.times.count()), (7, 8));
        health.policy_ended(None, Some(&full));
        assert!(
            health.policy.may_try(Instant::now() + SHORTEST_PAUSE),
            "the pause begins anew"
        );
    }

    #[test]
    fn what_fails_beside_policy_is_named() {
        let mut health = Health::default();
        let error = DataplaneError::Kernel("no".to_owned());
        health.services_ended(Some(&error));
        health.sweep_ended(Some(&error));
        let problems = health.other_problems();
        assert_eq!(
            problems,
            [
                "services are not applied: kernel: no",
                "flows are not counted: kernel: no"
            ]
        );
        assert_eq!(health.policy_problem(), None);
        health.services_ended(None);
        health.sweep_ended(None);
        assert!(health.other_problems().is_empty());
        health.exceeding(&[("shop".to_owned(), "too many".to_owned())].into());
        assert_eq!(health.other_problems(), ["some Services are not applied: too many"]);
        health.exceeding(&BTreeMap::new());
        assert!(health.other_problems().is_empty());
    }
}
