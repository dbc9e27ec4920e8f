//! `setup`: installs the requirements of the other commands, and returns at once if all are installed.

use anyhow::Result;
use clap::ValueEnum;

use crate::{
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

/// What the machine is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Goal {
    /// Building the eBPF programs and the agent
    Build,
    /// Building, and the demonstration
    Demo,
    /// Building, and the tests on this kernel
    Test,
    /// Building, and the tests on another kernel in a virtual machine
    Vm,
    /// Building for arm64
    Cross,
    /// Building, and the benchmarks
    Bench,
    /// Building, and a Kubernetes node to try it on
    Node,
    /// Every command
    All,
}

impl Goal {
    fn purposes(self) -> Vec<Purpose> {
        let mut purposes = match self {
            Self::Build => Vec::new(),
            Self::Demo => vec![Purpose::Demo],
            Self::Test => vec![Purpose::Test, Purpose::Node],
            Self::Vm => vec![Purpose::Vm],
            Self::Cross => vec![Purpose::Cross],
            Self::Bench => vec![Purpose::Bench],
            Self::Node => vec![Purpose::Node],
            Self::All => vec![
                Purpose::Demo,
                Purpose::Test,
                Purpose::Vm,
                Purpose::Cross,
                Purpose::Bench,
                Purpose::Node,
            ],
        };
        if linker::is_missing() {
            purposes.push(Purpose::Linker);
        }
        // A machine with a usable compiler needs no second one.
        if toolchain::is_missing() {
            purposes.push(Purpose::Compiler);
        }
        purposes
    }
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    run(args.goal, &mut Progress::new(STEPS))
}

/// Installs the requirements of `goal`, as [`STEPS`] steps of `progress`.
pub(crate) fn run(goal: Goal, progress: &mut Progress) -> Result<()> {
    let logs = target().join("setup");
    progress.step("packages", || {
        packages::install(&packages::missing(&goal.purposes()), &logs.join("packages.log"))?;
        // An older system has packages with these names, but with another LLVM version.
        toolchain::find().map(drop)
    })?;
    progress.step("bpf-linker", || {
        if linker::is_missing() {
            linker::install()?;
        }
        Ok(())
    })
}
