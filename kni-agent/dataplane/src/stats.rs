//! Reads the kernel's run counts and run times of the programs.

use std::os::fd::OwnedFd;

use aya::{
    Ebpf,
    sys::{Stats, enable_stats},
};

use super::DataplaneError;

/// The kernel's counts of one program since it was loaded, for the time that counting was on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramStats {
    /// Name of the program.
    pub name: String,
    /// Times it ran.
    pub runs: u64,
    /// Time of all runs together, in nanoseconds.
    pub run_time_ns: u64,
}

/// While it is held, the kernel counts runs of all BPF programs on the node, which costs each run two readings of the
/// clock.
#[derive(Debug)]
pub struct CountingRuns(#[expect(dead_code, reason = "counting ends when it closes")] OwnedFd);

pub(super) fn count_runs() -> Result<CountingRuns, DataplaneError> {
    enable_stats(Stats::RunTime)
        .map(CountingRuns)
        .map_err(|error| DataplaneError::Kernel(format!("counting program runs: {}", error.io_error)))
}

pub(super) fn of_programs(ebpf: &Ebpf) -> Result<Vec<ProgramStats>, DataplaneError> {
    let mut stats = Vec::new();
    for (name, program) in ebpf.programs() {
        // Those of the uplink and of the tunnel are loaded with their first interface.
        if program.fd().is_err() {
            continue;
        }
        let info = program
            .info()
            .map_err(|error| DataplaneError::Kernel(format!("reading program {name}: {error}")))?;
        stats.push(ProgramStats {
            name: name.to_owned(),
            runs: info.run_count(),
            run_time_ns: u64::try_from(info.run_time().as_nanos()).unwrap_or(u64::MAX),
        });
    }
    stats.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(stats)
}
