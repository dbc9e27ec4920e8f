//! Decides when failed work is tried again: after a pause that grows with each failure, with jitter: nodes that failed
//! together do not try again together.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Longest pause after the first failure; each additional one doubles it, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_millis(500);
pub(super) const LONGEST: Duration = Duration::from_secs(30);

/// The failures of one piece of work since its last success.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retry {
    failed: Option<Failed>,
    longest: Duration,
}

/// The last failure.
#[derive(Debug, Clone, Copy)]
struct Failed {
    at: Instant,
    /// The longest pause after it, and the chosen one.
    most: Duration,
    pause: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Retry {
    /// Work whose pauses are this long at most.
    pub(super) const fn up_to(longest: Duration) -> Self {
        Self { failed: None, longest }
    }

    pub(super) fn ended(&mut self, succeeded: bool) {
        self.failed = (!succeeded).then(|| {
            let most = self.failed.map_or(SHORTEST, |failed| failed.most * 2).min(self.longest);
            Failed {
                at: Instant::now(),
                most,
                pause: most.mul_f64(fastrand::f64().mul_add(0.5, 0.5)),
            }
        });
    }

    /// Whether something failed, and the pause is over.
    pub(super) fn is_over(&self) -> bool {
        self.failed.is_some() && self.is_due()
    }

    /// Whether nothing failed, or the pause is over.
    pub(super) fn is_due(&self) -> bool {
        self.failed.is_none_or(|failed| failed.at.elapsed() >= failed.pause)
    }

    /// Waits for the end of the pause; for ever if nothing failed.
    pub(super) async fn wait(&self) {
        match self.failed {
            Some(failed) => tokio::time::sleep(failed.pause.saturating_sub(failed.at.elapsed())).await,
            None => std::future::pending().await,
        }
    }
}

/// The failures of many objects: one that fails delays no other.
#[derive(Debug)]
pub(super) struct Retries<K> {
    of: BTreeMap<K, Retry>,
    longest: Duration,
}

impl<K> Default for Retries<K> {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl<K> Retries<K> {
    /// Work whose pauses are this long at most.
    pub(super) const fn up_to(longest: Duration) -> Self {
        Self {
            of: BTreeMap::new(),
            longest,
        }
    }
}

impl<K: Ord> Retries<K> {
    pub(super) fn is_due(&self, key: &K) -> bool {
        self.of.get(key).is_none_or(Retry::is_due)
    }

    pub(super) fn ended(&mut self, key: K, succeeded: bool) {
        if succeeded {
            self.of.remove(&key);
        } else {
            let retry = self.of.entry(key).or_insert(Retry::up_to(self.longest));
            retry.ended(false);
        }
    }

    /// Whether nothing failed.
    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    /// Removes the failures of objects that need no work any more.
    pub(super) fn retain(&mut self, needed: impl Fn(&K) -> bool) {
        self.of.retain(|key, _| needed(key));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn one_failure_delays_no_other_object() {
        let mut retries = Retries::default();
        retries.ended("a", false);
        retries.ended("b", true);
        assert!(!retries.is_due(&"a") && retries.is_due(&"b") && retries.is_due(&"c"));
        retries.ended("a", true);
        assert!(retries.is_due(&"a"));
        retries.ended("a", false);
        retries.retain(|_| false);
        assert!(retries.is_due(&"a"));
    }

    #[test]
    fn pauses_grow_and_success_ends_them() {
        let mut retry = Retry::default();
        for most in [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            retry.ended(false);
            let (most, pause) = (Duration::from_millis(most), retry.failed.unwrap().pause);
            assert!((most / 2..=most).contains(&pause), "{pause:?} of {most:?}");
            assert!(!retry.is_due());
        }
        retry.ended(true);
        assert!(retry.is_due());
        let mut short = Retries::up_to(Duration::from_secs(1));
        for _failure in 0..5 {
            short.ended("a", false);
        }
        assert!(short.of["a"].failed.unwrap().pause <= Duration::from_secs(1));
    }

    #[test]
    fn nodes_that_failed_together_do_not_try_again_together() {
        let pauses: BTreeSet<Duration> = (0..100)
            .map(|_node| {
                let mut retry = Retry::default();
                retry.ended(false);
                retry.failed.unwrap().pause
            })
            .collect();
        assert!(pauses.len() > 90, "{pauses:?}");
    }
}
