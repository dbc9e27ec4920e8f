//! Decides when failed work is tried again: after a pause that grows with each failure.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// Pause after the first failure; each additional one doubles it, up to [`LONGEST`].
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// The failures of one piece of work since its last success.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Retry {
    failed: Option<(Instant, Duration)>,
}

impl Retry {
    pub(super) fn ended(&mut self, succeeded: bool) {
        self.failed = (!succeeded).then(|| {
            let pause = self.failed.map_or(SHORTEST, |(_, pause)| (pause * 2).min(LONGEST));
            (Instant::now(), pause)
        });
    }

    /// Whether something failed, and the pause is over.
    pub(super) fn is_over(&self) -> bool {
        self.failed.is_some() && self.is_due()
    }

    /// Whether nothing failed, or the pause is over.
    fn is_due(&self) -> bool {
        self.failed.is_none_or(|(at, pause)| at.elapsed() >= pause)
    }

    /// Waits for the end of the pause; for ever if nothing failed.
    pub(super) async fn wait(&self) {
        match self.failed {
            Some((at, pause)) => tokio::time::sleep(pause.saturating_sub(at.elapsed())).await,
            None => std::future::pending().await,
        }
    }
}

/// The failures of many objects: one that fails delays no other.
#[derive(Debug)]
pub(super) struct Retries<K> {
    of: BTreeMap<K, Retry>,
}

impl<K> Default for Retries<K> {
    fn default() -> Self {
        Self { of: BTreeMap::new() }
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
            self.of.entry(key).or_default().ended(false);
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
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            retry.ended(false);
            assert_eq!(retry.failed.map(|(_, pause)| pause), Some(Duration::from_secs(pause)));
            assert!(!retry.is_due());
        }
        retry.ended(true);
        assert!(retry.is_due());
    }
}
