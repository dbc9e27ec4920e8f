//! Runs some of the tests: by name, by what has changed, or repeated. `cargo xtask ci` never does.

use std::collections::BTreeSet;

use anyhow::Result;

use super::{
    Plan, Summary, environment,
    ledger::Ledger,
    load::{Load, Speed},
    programs,
    repeat::{self, Manner},
    selection::{self, Changed},
    suite::Outcome,
};
use crate::{build_cni, build_ebpf, goal::Goal, node::require_root, progress::Progress, setup};

/// Arguments that select tests and repeat them.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Choice {
    /// Run only tests whose name, such as `node::egress::ports::a_port`, contains this, also if
    /// it is ignored; may be repeated
    #[arg(long, value_name = "NAME", conflicts_with_all = ["tier", "long", "record"])]
    only: Vec<String>,
    /// Run only what the files that differ from REVISION may break, and what git does not know
    #[arg(long, value_name = "REVISION", num_args = 0..=1, default_missing_value = "HEAD",
          conflicts_with_all = ["tier", "long", "record", "only"])]
    changed: Option<String>,
    /// Run the selected tests, or all of the privileged programs, N times; stop at the first wrong result
    #[arg(long, value_name = "N", conflicts_with_all = ["tier", "long", "record"],
          value_parser = clap::value_parser!(u32).range(1..))]
    repeat: Option<u32>,
    /// Beside the tests, keep CPUs busy with K loops
    #[arg(long, value_name = "K", conflicts_with_all = ["tier", "long", "record"])]
    load: Option<usize>,
    /// Give the tests P percent of the CPUs
    #[arg(long, value_name = "P", conflicts_with_all = ["tier", "long", "record"],
          value_parser = clap::value_parser!(u8).range(1..=100))]
    speed: Option<u8>,
    /// Begin the privileged tests in a random order
    #[arg(long, conflicts_with_all = ["tier", "long", "record"])]
    shuffle: bool,
    /// The seed of the first repetition: of its order, and of the choices that tests make; each next one has the next
    /// seed
    #[arg(long, value_name = "SEED", conflicts_with_all = ["tier", "long", "record"])]
    seed: Option<u64>,
}

impl Choice {
    /// Whether everything has to run, once.
    pub(super) fn is_empty(&self) -> bool {
        self.only.is_empty()
            && self.changed.is_none()
            && self.repeat.is_none()
            && self.load.is_none()
            && self.speed.is_none()
            && !self.shuffle
            && self.seed.is_none()
    }

    fn manner(&self) -> Manner {
        Manner {
            times: self.repeat.unwrap_or(1),
            shuffle: self.shuffle,
            seed: self.seed,
        }
    }
}

/// Builds the tests and runs the selected ones.
pub(super) fn run(args: &Choice, plan: &Plan, summary: &mut Summary) -> Result<()> {
    require_root("test")?;
    let ledger = Ledger::read()?;
    let changed = args.changed.as_deref().map(Changed::since).transpose()?;
    let suites: BTreeSet<&str> = match &changed {
        Some(changed) => changed.programs(),
        None => named_programs(&args.only),
    };
    let mut progress = Progress::new(setup::STEPS + 3 + usize::from(plan.long));
    setup::run(Goal::Test, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    if plan.long {
        progress.step("CNI plugin", || build_cni::build().map(drop))?;
    }
    let built = progress.step("test programs", || programs::build_some(&suites))?;
    progress.step("tests", || {
        let jobs = match &changed {
            Some(changed) => changed.jobs(&built)?,
            None => selection::named(&built, &args.only)?,
        };
        let _load = Load::start(args.load.unwrap_or(0))?;
        let _speed = args.speed.map(Speed::restrict).transpose()?;
        // Measured on the slower machine, so that patience fits it.
        let (environment, _) = environment(&built, plan)?;
        let mut outcome = Outcome::default();
        let result = repeat::run(&jobs, &args.manner(), &environment, &ledger, &mut outcome);
        summary.tally = outcome.tally();
        summary.lines = outcome.settled.lines();
        result
    })
}

/// The programs of integration tests that tests with one of these names may belong to: all, unless each name begins
/// with one.
fn named_programs(names: &[String]) -> BTreeSet<&str> {
    let programs = names.iter().map(|name| name.split("::").next().unwrap_or(name));
    let programs: BTreeSet<&str> = programs.collect();
    if !programs.is_empty() && programs.iter().all(|name| programs::CONCURRENT.contains(name)) {
        programs
    } else {
        programs::CONCURRENT.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_a_program_build_that_program_only() {
        let of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            named_programs(&names)
                .into_iter()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&["node::egress", "node::cni", "cri"]), ["cri", "node"]);
        assert_eq!(of(&["node::egress", "cni"]), programs::CONCURRENT);
        assert_eq!(of(&["kni_ipam::pool"]), programs::CONCURRENT);
        assert_eq!(of(&[]), programs::CONCURRENT);
    }
}
