//! Pins threads to CPUs and describes the machine.

use std::fs;

use anyhow::{Context as _, Result, ensure};
pub(crate) use kni_integration::one_cpu::pin;
use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

/// The CPUs of the measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpus {
    /// The CPU of both ends.
    pub(crate) one: usize,
    /// The CPU of the other end if two are used; `None` on a machine with one CPU.
    pub(crate) other: Option<usize>,
}

impl Cpus {
    /// `one` as requested, or the last available CPU: the first ones get most of the interrupts.
    pub(crate) fn choose(wanted: Option<usize>) -> Result<Self> {
        let allowed = sched_getaffinity(Pid::from_raw(0)).context("own CPUs")?;
        let allowed: Vec<usize> = (0..CpuSet::count())
            .filter(|cpu| allowed.is_set(*cpu).unwrap_or(false))
            .collect();
        let one = wanted.or(allowed.last().copied()).context("no CPU")?;
        ensure!(allowed.contains(&one), "--cpu {one}: not among {allowed:?}");
        let other = allowed.iter().rev().copied().find(|cpu| *cpu != one);
        Ok(Self { one, other })
    }
}

/// The release of the kernel.
pub(crate) fn kernel() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel release")?;
    Ok(release.trim().to_owned())
}

/// The model name of the CPU, as reported by the kernel.
pub(crate) fn model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
