//! Reads the kernel's timer ticks (jiffies), in which the programs count time, and converts them to and from durations.

use std::time::Duration;

use aya::{
    Ebpf, TestRunOptions,
    programs::{SchedClassifier, TestRun as _},
};
use nix::time::{ClockId, clock_getres};

use super::{DataplaneError, object, program};

/// Length of an Ethernet header: a test run refuses shorter frames.
const FRAME: usize = 14;

/// Reads jiffies, which the kernel shows to programs alone. A program of its own does: a run of one that processes
/// packets would need its copy for dry runs, whose verification takes half a second of CPU time.
pub(super) struct Clock(SchedClassifier);

impl Clock {
    /// Loads the program, in less than a millisecond.
    pub(super) fn load(ebpf: &mut Ebpf) -> Result<Self, DataplaneError> {
        let classifier = object::classifier(ebpf, program::CLOCK)?;
        classifier.load().map_err(object::rejected(program::CLOCK))?;
        // A handle of its own, so that the other programs may be in use meanwhile.
        let own = classifier
            .info()
            .and_then(|info| SchedClassifier::from_program_info(info, program::CLOCK.into()));
        own.map(Self).map_err(object::rejected(program::CLOCK))
    }

    /// jiffies now. Microseconds.
    pub(super) fn jiffies(&self) -> Result<u64, DataplaneError> {
        let mut frame = [0; FRAME];
        let options = TestRunOptions {
            data_in: Some(&[0; FRAME]),
            data_out: Some(&mut frame),
            ..TestRunOptions::new()
        };
        self.0.test_run(options).map_err(object::rejected(program::CLOCK))?;
        match frame.first_chunk().copied().map(u64::from_ne_bytes) {
            // Never zero: the kernel begins to count five minutes before that.
            Some(now) if now != 0 => Ok(now),
            _ => Err(DataplaneError::Kernel("the kernel's time cannot be read".to_owned())),
        }
    }
}

/// The length of a tick.
///
/// The resolution of `CLOCK_MONOTONIC_COARSE` is exactly the tick: that clock advances with it. Unlike the kernel's
/// configuration file it is always available, and unlike two readings of jiffies it costs nothing and is exact on a
/// busy node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticks {
    length: Duration,
}

impl Ticks {
    pub(super) fn of_kernel() -> Result<Self, DataplaneError> {
        let length = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)
            .map(Duration::from)
            .map_err(|errno| DataplaneError::Kernel(format!("reading the length of a tick: {errno}")))?;
        // HZ is between 24 (alpha's least) and 1200 (alpha's most) on every architecture.
        if length < Duration::from_micros(500) || length > Duration::from_millis(50) {
            return Err(DataplaneError::Kernel(format!(
                "the length of a tick cannot be {length:?}"
            )));
        }
        Ok(Self { length })
    }

    /// Ticks per second: the kernel's `HZ`.
    pub(super) fn hz(self) -> u32 {
        let length = self.length.as_nanos().max(1);
        u32::try_from((1_000_000_000 + length / 2) / length).unwrap_or(u32::MAX)
    }

    /// Ticks of a duration, rounded up, at least one.
    pub(super) fn count(self, time: Duration) -> u32 {
        let ticks = time.as_nanos().div_ceil(self.length.as_nanos().max(1));
        u32::try_from(ticks).unwrap_or(u32::MAX).max(1)
    }

    /// The duration of so many ticks.
    pub(super) fn duration(self, ticks: u64) -> Duration {
        let nanos = u128::from(ticks) * self.length.as_nanos();
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
impl Ticks {
    /// Ticks of a kernel with this `HZ`.
    pub(super) fn with_hz(hz: u32) -> Self {
        let length = Duration::from_secs(1) / hz;
        Self { length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernels_tick_is_one_that_kernels_have() {
        let hz = Ticks::of_kernel().unwrap().hz();
        assert!([100, 250, 300, 1000].contains(&hz), "{hz}");
    }

    #[test]
    fn durations_round_up_to_at_least_one_tick() {
        for hz in [100, 250, 300, 1000] {
            let ticks = Ticks::with_hz(hz);
            assert_eq!(ticks.hz(), hz);
            assert_eq!(ticks.count(Duration::ZERO), 1);
            assert_eq!(ticks.count(Duration::from_nanos(1)), 1);
            // A third of a second is no whole number of nanoseconds at HZ=300.
            assert!((hz * 60..=hz * 60 + 1).contains(&ticks.count(Duration::from_mins(1))));
            assert_eq!(ticks.count(Duration::MAX), u32::MAX);
        }
        assert_eq!(Ticks::with_hz(250).duration(500), Duration::from_secs(2));
    }
}
