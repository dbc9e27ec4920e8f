//! Defines a histogram of durations that any component can update and a reader can copy.

use std::time::Duration;

/// Upper bounds of the buckets in seconds; one more bucket holds longer durations.
pub const BOUNDS: [f64; 16] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Counts durations by size.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Durations {
    counts: [u64; BOUNDS.len() + 1],
    sum: Duration,
}

impl Durations {
    /// Adds one duration.
    pub fn observe(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.partition_point(|bound| *bound < seconds);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum = self.sum.saturating_add(took);
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all durations, in seconds.
    pub fn sum_seconds(&self) -> f64 {
        self.sum.as_secs_f64()
    }

    /// Upper bound and own count of each bucket, not cumulative; the last bound is infinity.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        BOUNDS.into_iter().chain([f64::INFINITY]).zip(self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket_and_nothing_is_left_out() {
        let mut durations = Durations::default();
        for micros in [0, 100, 101, 10_000_000, 10_000_001] {
            durations.observe(Duration::from_micros(micros));
        }
        let filled: Vec<_> = durations.buckets().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.0001, 2), (0.00025, 1), (10.0, 1), (f64::INFINITY, 1)]);
        assert_eq!(durations.count(), 5);
        assert!((durations.sum_seconds() - 20.000_202).abs() < 1e-9);
        assert!(BOUNDS.is_sorted());
    }
}
