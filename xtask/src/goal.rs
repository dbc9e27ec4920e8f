//! What each goal of a command builds, and from that the packages that it needs.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::packages::Purpose;

/// Something that commands build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// The eBPF object, for either architecture.
    Ebpf,
    /// Programs of this workspace, for this machine.
    Programs,
    /// The small static CNI plugin.
    CniPlugin,
    /// The programs of a Kubernetes node, with Go and, for runc, C.
    NodePrograms,
    /// The agent's image.
    Image,
    /// Programs of this workspace for arm64.
    Arm64,
    /// Virtual machines with other kernels.
    Machines,
}

impl Build {
    /// The purposes of the packages that it needs.
    pub(crate) const fn needs(self) -> &'static [Purpose] {
        match self {
            Self::Ebpf => &[Purpose::Compiler, Purpose::Linker],
            Self::Programs | Self::CniPlugin | Self::Image => &[Purpose::Links],
            Self::NodePrograms => &[Purpose::Links, Purpose::Runc],
            Self::Arm64 => &[Purpose::Links, Purpose::Cross],
            Self::Machines => &[Purpose::Vm],
        }
    }
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
    /// Building, and a Kubernetes node or cluster to try it on
    Node,
    /// Every command
    All,
}

impl Goal {
    /// What the commands with this goal build. A build function refuses what is not listed here.
    pub(crate) const fn builds(self) -> &'static [Build] {
        use Build::{Arm64, CniPlugin, Ebpf, Image, Machines, NodePrograms, Programs};
        match self {
            Self::Build | Self::Bench => &[Ebpf, Programs],
            Self::Demo => &[Ebpf, Programs, NodePrograms],
            Self::Test | Self::Node => &[Ebpf, Programs, CniPlugin, NodePrograms, Image],
            Self::Vm => &[Ebpf, Programs, Machines],
            Self::Cross => &[Ebpf, Arm64],
            Self::All => &[Ebpf, Programs, CniPlugin, NodePrograms, Image, Arm64, Machines],
        }
    }

    /// The purposes of the packages that its commands run, besides those for building.
    const fn runs(self) -> &'static [Purpose] {
        match self {
            Self::Build | Self::Vm | Self::Cross => &[],
            Self::Demo => &[Purpose::Demo],
            Self::Test => &[Purpose::Test, Purpose::Node],
            Self::Bench => &[Purpose::Bench],
            Self::Node => &[Purpose::Node],
            Self::All => &[
                Purpose::Demo,
                Purpose::Test,
                Purpose::Bench,
                Purpose::Node,
                Purpose::Fresh,
            ],
        }
    }

    /// The purposes of all packages that its commands need: follows from what they build and run.
    pub(crate) fn purposes(self) -> Vec<Purpose> {
        let mut all = self.runs().to_vec();
        for need in self.builds().iter().flat_map(|build| build.needs()) {
            if !all.contains(need) {
                all.push(*need);
            }
        }
        all
    }
}

/// The goal that this process has prepared the machine for, if any.
static PREPARED: Mutex<Option<Goal>> = Mutex::new(None);

/// Records that the packages of `goal` are installed.
pub(crate) fn prepared(goal: Goal) {
    *PREPARED.lock().unwrap_or_else(PoisonError::into_inner) = Some(goal);
}

/// Refuses to build what the prepared goal does not list: its packages may be missing. A command that only builds
/// prepares nothing and may build everything.
pub(crate) fn declared(build: Build) -> Result<()> {
    let goal = *PREPARED.lock().unwrap_or_else(PoisonError::into_inner);
    goal.map_or(Ok(()), |goal| check(goal, build))
}

fn check(goal: Goal, build: Build) -> Result<()> {
    if !goal.builds().contains(&build) {
        bail!("this command builds {build:?}, which its goal {goal:?} does not list: packages may be missing");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packages::PACKAGES;

    /// A build function, as its callers write it, and what it builds.
    const CALLS: [(&str, Build); 9] = [
        ("build_ebpf::build", Build::Ebpf),
        ("programs(", Build::Programs),
        ("programs::build", Build::Programs),
        ("build_cni::", Build::CniPlugin),
        ("build_programs(", Build::NodePrograms),
        ("image::build", Build::Image),
        ("cross::compile", Build::Arm64),
        ("vm::run", Build::Machines),
        ("machines(", Build::Machines),
    ];

    const PREPARE: &str = include_str!("prepare.rs");
    const NODE: &str = include_str!("node.rs");
    const CROSS: &str = include_str!("cross.rs");
    const VM: &str = include_str!("vm/mod.rs");
    const IMAGE: &str = include_str!("image.rs");

    /// A command, its goal, and the sources of what it builds.
    const COMMANDS: [(&str, Goal, &[&str]); 9] = [
        ("demo", Goal::Demo, &[include_str!("demo.rs"), PREPARE]),
        ("simulate", Goal::Test, &[include_str!("simulate.rs"), PREPARE]),
        ("bench", Goal::Bench, &[include_str!("bench.rs"), PREPARE]),
        ("node", Goal::Node, &[NODE]),
        ("cluster", Goal::Node, &[include_str!("cluster.rs"), NODE, IMAGE]),
        ("cross", Goal::Cross, &[CROSS]),
        ("vmtest", Goal::Vm, &[VM]),
        (
            "test",
            Goal::All,
            &[include_str!("test/mod.rs"), include_str!("test/programs.rs"), CROSS, VM],
        ),
        ("ci", Goal::All, &[include_str!("ci.rs")]),
    ];

    /// What the code of `source` calls, without its tests.
    fn called(source: &str) -> Vec<Build> {
        let code = source.split("#[cfg(test)]").next().unwrap();
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let calls = |name: &str| {
            code.match_indices(name)
                .any(|(at, _)| at == 0 || !is_word(code.as_bytes()[at - 1]))
        };
        CALLS
            .iter()
            .filter(|(name, _)| calls(name))
            .map(|(_, build)| *build)
            .collect()
    }

    fn packages(purposes: &[Purpose]) -> Vec<&'static str> {
        let is_needed = |package: &&crate::packages::Package| package.purposes.iter().any(|p| purposes.contains(p));
        PACKAGES.iter().filter(is_needed).map(|package| package.name).collect()
    }

    #[test]
    fn commands_build_only_what_their_goal_lists() {
        for (command, goal, sources) in COMMANDS {
            let calls: Vec<Build> = sources.iter().flat_map(|source| called(source)).collect();
            assert!(!calls.is_empty(), "{command} builds nothing that this test recognises");
            for build in calls {
                check(goal, build).unwrap_or_else(|error| panic!("{command}: {error}"));
            }
        }
    }

    #[test]
    fn the_calls_of_the_demo_are_recognised() {
        let calls: Vec<Build> = COMMANDS[0].2.iter().flat_map(|source| called(source)).collect();
        for build in Goal::Demo.builds() {
            assert!(calls.contains(build), "{build:?}");
        }
        assert!(check(Goal::Bench, Build::NodePrograms).is_err());
    }

    #[test]
    fn goals_install_what_their_builds_need() {
        let runc = ["gcc", "libc6-dev", "libseccomp-dev", "pkgconf"];
        let needed = packages(Build::NodePrograms.needs());
        assert!(runc.iter().all(|name| needed.contains(name)), "{needed:?}");
        for goal in Goal::value_variants() {
            let installed = packages(&goal.purposes());
            for build in goal.builds() {
                for name in packages(build.needs()) {
                    assert!(
                        installed.contains(&name),
                        "{goal:?} does not install {name} for {build:?}"
                    );
                }
            }
        }
        for goal in [Goal::Demo, Goal::Test, Goal::Node, Goal::All] {
            let installed = packages(&goal.purposes());
            assert!(runc.iter().all(|name| installed.contains(name)), "{goal:?}");
        }
    }

    #[test]
    fn all_is_every_goal() {
        for goal in Goal::value_variants() {
            let of_all = Goal::All.purposes();
            assert!(
                goal.purposes().iter().all(|purpose| of_all.contains(purpose)),
                "{goal:?}"
            );
        }
    }
}
