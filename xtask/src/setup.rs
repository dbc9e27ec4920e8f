//! `setup`: installs the requirements of the other commands, and returns at once if all are installed.

use anyhow::Result;

use crate::{
    goal::{self, Goal},
    linker,
    packages::{self, Purpose},
    progress::Progress,
    toolchain,
    workspace::target,
};

/// Number of steps of [`run`].
pub(crate) const STEPS: usize = 2;

/// Arguments of `setup`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to prepare for
    #[arg(long = "for", value_enum, default_value_t = Goal::All)]
    goal: Goal,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    run(args.goal, &mut Progress::new(STEPS))
}

/// Installs the requirements of `goal`, as [`STEPS`] steps of `progress`. From then on this process builds only what
/// the goal lists.
pub(crate) fn run(goal: Goal, progress: &mut Progress) -> Result<()> {
    let logs = target().join("setup");
    progress.step("packages", || {
        packages::install(&packages::missing(&purposes(goal)), &logs.join("packages.log"))?;
        // An older system has packages with these names, but with another LLVM version.
        toolchain::find().map(drop)
    })?;
    progress.step("bpf-linker", || {
        if linker::is_missing() {
            linker::install()?;
        }
        Ok(())
    })?;
    goal::prepared(goal);
    Ok(())
}

/// The purposes of `goal`, without those of a compiler and a linker that this machine has already.
fn purposes(goal: Goal) -> Vec<Purpose> {
    let mut purposes = goal.purposes();
    purposes.retain(|purpose| match purpose {
        // A machine with a usable compiler needs no second one.
        Purpose::Compiler => toolchain::is_missing(),
        Purpose::Linker => linker::is_missing(),
        Purpose::Links
        | Purpose::Runc
        | Purpose::Demo
        | Purpose::Test
        | Purpose::Vm
        | Purpose::Cross
        | Purpose::Bench
        | Purpose::Node
        | Purpose::Fresh => true,
    });
    purposes
}
