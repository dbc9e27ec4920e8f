//! Prepares the machine for a command that runs an agent, and builds what it runs.

use anyhow::{Result, bail};

use crate::{
    announce::announce,
    build_ebpf,
    goal::{Build, Goal},
    programs::{Profile, programs},
    progress::Progress,
    setup,
    workspace::is_root,
};

/// Prepares the machine for `goal` and builds the agent, knictl and `others`.
pub(crate) fn prepare(goal: Goal, profile: Profile, others: &[&str]) -> Result<()> {
    if !is_root() {
        bail!("this makes network namespaces and loads eBPF programs, which needs root");
    }
    if profile == Profile::Dev {
        announce(&[Build::Ebpf, Build::Programs]);
    }
    let mut progress = Progress::new(STEPS);
    build(goal, profile, others, &mut progress)
}

/// Number of steps of [`build`].
pub(crate) const STEPS: usize = setup::STEPS + 2;

/// [`prepare`] as [`STEPS`] steps of `progress`, for a command that is root and has announced its builds.
pub(crate) fn build(goal: Goal, profile: Profile, others: &[&str], progress: &mut Progress) -> Result<()> {
    setup::run(goal, progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    progress.step("agent and tools", || {
        programs(profile, &[&["kni-agent", "knictl"], others].concat())
    })
}
