//! Reads how long the CPUs of the machine were busy and idle.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};

/// Milliseconds of the kernel's unit, `USER_HZ`.
const TICK_MS: u64 = 10;

/// Times of all CPUs since boot, in ticks.
#[derive(Debug, Clone, Copy)]
pub struct CpuTimes {
    /// Waiting for storage included.
    idle: u64,
    all: u64,
}

impl CpuTimes {
    /// The times until now.
    pub fn read() -> Result<Self> {
        Self::parse(&fs::read_to_string("/proc/stat")?).context("/proc/stat")
    }

    /// `proc_stat(5)`: user, nice, system, idle, iowait, irq, softirq, steal. Time for guests is part of the first two.
    fn parse(stat: &str) -> Option<Self> {
        let line = stat.lines().next()?.strip_prefix("cpu ")?;
        let times = line.split_whitespace().take(8).map_while(|time| time.parse().ok());
        let times: Vec<u64> = times.collect();
        Some(Self {
            idle: times.get(3)? + times.get(4)?,
            all: times.iter().sum(),
        })
    }

    /// The time that was spent on anything.
    pub fn busy(self) -> Duration {
        Duration::from_millis(self.all.saturating_sub(self.idle) * TICK_MS)
    }

    /// The idle share of the time since then, rounded down; 0 where no time has passed.
    pub fn idle_percent_since(self, before: Self) -> u64 {
        let (idle, all) = (
            self.idle.saturating_sub(before.idle),
            self.all.saturating_sub(before.all),
        );
        (idle * 100).checked_div(all).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_is_what_the_kernel_counts_as_idle() {
        let times = |stat| CpuTimes::parse(stat).unwrap();
        let before = times("cpu  100 0 50 800 50 0 0 0 90 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n");
        assert_eq!((before.idle, before.all), (850, 1000));
        assert_eq!(before.busy(), Duration::from_millis(1500));
        assert_eq!(times("cpu  150 0 54 840 56 0 0 0 90 0").idle_percent_since(before), 46);
        assert_eq!(times("cpu  150 0 56 844 50 0 0 0 90 0").idle_percent_since(before), 44);
        assert_eq!(before.idle_percent_since(before), 0);
        assert!(CpuTimes::parse("intr 1 2 3").is_none());
    }
}
