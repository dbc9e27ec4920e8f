//! Keeps packets in order, so that a packet which must not arrive can be proved by one that must: a fence.

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity},
    unistd::Pid,
};

/// Pins the calling thread to a CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu).with_context(|| format!("CPU {cpu}"))?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("pin to CPU {cpu}"))
}

/// Runs `work` on one CPU, with the threads that it starts.
///
/// A link between namespaces has a queue for each CPU. Packets that one CPU sends on the same way do not overtake each
/// other: what has not arrived before a later packet of that way was dropped, whatever the speed of the machine.
pub fn on_one_cpu<R>(work: impl FnOnce() -> Result<R>) -> Result<R> {
    let this = Pid::from_raw(0);
    let before = sched_getaffinity(this).context("the CPUs of a thread")?;
    pin(sched_getcpu().context("the CPU of a thread")?)?;
    let done = work();
    sched_setaffinity(this, &before).context("release a thread")?;
    done
}
