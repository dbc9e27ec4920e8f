//! Knows from heartbeats whether every loop goes round.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// A loop that has not reported for this long hangs. Each reports at least every few seconds.
const SILENCE: Duration = Duration::from_mins(1);

/// When each running loop last reported. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Health(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

/// The entry of one loop, for as long as it runs.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    health: Health,
    name: &'static str,
}

impl Health {
    /// Begins to expect reports of a loop.
    pub(crate) fn expect(&self, name: &'static str) -> Heartbeat {
        self.beats().insert(name, Instant::now());
        Heartbeat {
            health: self.clone(),
            name,
        }
    }

    fn beats(&self) -> MutexGuard<'_, BTreeMap<&'static str, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loops that hang at `now`.
    pub(crate) fn silent(&self, now: Instant) -> Vec<&'static str> {
        let beats = self.beats();
        let silent = beats
            .iter()
            .filter(|(_, last)| now.saturating_duration_since(**last) > SILENCE);
        silent.map(|(name, _)| *name).collect()
    }
}

impl Heartbeat {
    /// The loop goes round.
    pub(crate) fn beat(&self) {
        self.health.beats().insert(self.name, Instant::now());
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.health.beats().remove(self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_that_hangs_is_named_and_one_that_ended_is_not() {
        let health = Health::default();
        let (first, second) = (health.expect("first"), health.expect("second"));
        let now = Instant::now();
        assert!(health.silent(now).is_empty());
        let later = now + SILENCE + Duration::from_secs(1);
        assert_eq!(health.silent(later), ["first", "second"]);
        drop(second);
        assert_eq!(health.silent(later), ["first"]);
        first.beat();
        assert!(health.silent(Instant::now()).is_empty());
    }
}
