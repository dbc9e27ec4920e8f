//! Decides how many namespaces are prewarmed: as many as clients have recently asked for at once.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// At least this many: the pods of a small Deployment.
const LEAST: usize = 8;
/// At most this many: about the pods that the kubelet runs by default (110). Bounds what a client can make the agent
/// keep.
const MOST: usize = 128;
/// Requests within this time count as one burst.
const BURST: Duration = Duration::from_secs(1);
/// How long the size of the largest burst is remembered.
const REMEMBERED: Duration = Duration::from_mins(10);

/// How many namespaces are prewarmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolSize {
    /// Exactly this many.
    Fixed(u32),
    /// As many as were requested at once within the last ten minutes, 8 to 128, and at most a quarter of the endpoints
    /// that no pod has.
    ByDemand,
}

/// The requests of the last time.
#[derive(Debug, Default)]
pub(super) struct Demand {
    recent: VecDeque<Instant>,
    largest: usize,
    largest_at: Option<Instant>,
}

impl Demand {
    /// Notes a request.
    pub(super) fn note(&mut self, now: Instant) {
        let is_old = |at: &Instant| now.duration_since(*at) > BURST;
        while self.recent.front().is_some_and(is_old) || self.recent.len() >= MOST {
            self.recent.pop_front();
        }
        self.recent.push_back(now);
        if self.recent.len() >= self.largest(now) {
            self.largest = self.recent.len();
            self.largest_at = Some(now);
        }
    }

    /// How many namespaces serve the largest burst.
    pub(super) fn desired(&self, now: Instant) -> usize {
        self.largest(now).clamp(LEAST, MOST)
    }

    fn largest(&self, now: Instant) -> usize {
        let is_known = |at: Instant| now.duration_since(at) <= REMEMBERED;
        if self.largest_at.is_some_and(is_known) {
            self.largest
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_grows_with_bursts_and_shrinks_later() {
        let mut demand = Demand::default();
        let start = Instant::now();
        assert_eq!(demand.desired(start), LEAST);
        for pod in 0..100 {
            demand.note(start + Duration::from_secs(pod) * 2);
        }
        let later = start + Duration::from_mins(4);
        assert_eq!(demand.desired(later), LEAST, "one after the other");
        for pod in 0..30 {
            demand.note(later + Duration::from_millis(pod));
        }
        assert_eq!(demand.desired(later + Duration::from_mins(9)), 30);
        // A smaller burst does not replace the larger one.
        demand.note(later + Duration::from_mins(5));
        assert_eq!(demand.desired(later + Duration::from_mins(9)), 30);
        assert_eq!(demand.desired(later + Duration::from_mins(11)), LEAST);
    }

    #[test]
    fn a_client_that_asks_without_end_fills_no_memory() {
        let mut demand = Demand::default();
        let start = Instant::now();
        for request in 0..100_000 {
            demand.note(start + Duration::from_nanos(request));
        }
        assert_eq!((demand.recent.len(), demand.desired(start)), (MOST, MOST));
    }
}
