//! `test`: prepares the machine, runs all tests of the workspace and the virtual machine, and sums up the results.

mod programs;
mod run;
mod tally;

use std::process::ExitCode;

use anyhow::{Result, bail};
pub(crate) use tally::Tally;

use self::run::Outcome;
use crate::{
    build_cni, build_ebpf, crds,
    cross::{self, Depth},
    node,
    progress::Progress,
    setup::{self, Goal},
    vm,
    workspace::is_root,
};

/// Arguments of `test`.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Stop at a tier: 0 needs no privilege, 1 adds network namespaces, 2 adds loaded programs and the tests of a
    /// whole node, 3 adds the other kernel [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3))]
    tier: Option<u8>,
    /// Run the tests that take minutes in full length, and compile for arm64
    #[arg(long)]
    long: bool,
}

/// The parts of a tier.
struct Plan {
    /// The value of `KNI_REQUIRE`: privileges that must be present.
    require: &'static str,
    /// Whether to build the eBPF object and to include the package of the integration tests.
    programs: bool,
    /// Whether to run the virtual machine.
    vm: bool,
    /// Whether to run long tests in full length.
    long: bool,
}

impl Plan {
    fn new(args: &Args) -> Self {
        let (require, programs, vm) = match args.tier {
            Some(0) => ("", false, false),
            Some(1) => ("root,netns", false, false),
            Some(2) => ("root,netns,bpf,machine", true, false),
            _ => ("root,netns,bpf,machine", true, true),
        };
        Self {
            require,
            programs,
            vm,
            long: args.long,
        }
    }

    /// Whether to compile for arm64.
    fn crosses(&self) -> bool {
        self.long && self.vm
    }

    fn steps(&self) -> usize {
        let plugin = usize::from(self.long);
        let before = if self.programs { setup::STEPS + 2 + plugin } else { 0 };
        let after = if self.vm { vm::STEPS } else { 0 };
        let other = if self.crosses() { cross::STEPS } else { 0 };
        1 + before + 2 + after + other
    }
}

/// Runs the command; the last line of its output is the sum.
pub(crate) fn command(args: &Args) -> ExitCode {
    let mut tally = Tally::default();
    let result = run(&Plan::new(args), &mut tally);
    conclude(result, tally)
}

/// Prints the reason of a failure, if any, and the sum as the last line.
pub(crate) fn conclude(result: Result<()>, mut tally: Tally) -> ExitCode {
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            // A failure outside of any test, such as a compile error, must not end with zero failed tests.
            tally.failed = tally.failed.max(1);
            ExitCode::FAILURE
        }
    };
    println!("{tally}");
    code
}

fn run(plan: &Plan, tally: &mut Tally) -> Result<()> {
    if !plan.require.is_empty() && !is_root() {
        bail!(
            "the tests make network namespaces and load eBPF programs, which needs root; \
             `cargo xtask test --tier 0` runs those that need no privilege"
        );
    }
    let mut progress = Progress::new(plan.steps());
    progress.step("definitions", crds::up_to_date)?;
    if plan.programs {
        setup::run(if plan.vm { Goal::All } else { Goal::Test }, &mut progress)?;
        progress.step("eBPF programs", || build_ebpf::build(false))?;
        if plan.long {
            progress.step("CNI plugin", || build_cni::build().map(drop))?;
        }
        // Built before the tests, so that the build time is not part of the first test that needs them.
        node::build_programs(&mut progress, &["--helm", "--kni", "--e2e"])?;
    }
    // A step of its own, so that its time is not part of that of the tests.
    let built = progress.step("test programs", || {
        if plan.programs {
            programs::build().map(Some)
        } else {
            programs::build_unprivileged().map(|()| None)
        }
    });
    let tests = built.and_then(|built| {
        progress.step("tests", || {
            let mut outcome = run::tests(plan, built, tally)?;
            outcome.report_times();
            judge(plan, *tally, &outcome)
        })
    });
    // The virtual machine runs in any case: its result may explain the others.
    let machine = if plan.vm {
        let result = vm::run(&mut progress);
        tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    let other = if plan.crosses() {
        let result = cross::compile(Depth::Check, &mut progress);
        tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    tests.and(machine).and(other)
}

/// Decides whether the tests are a success from their output and the exit status of cargo.
fn judge(plan: &Plan, tally: Tally, outcome: &Outcome) -> Result<()> {
    if tally.failed > 0 {
        // Printed last: the output of the failed tests may be many thousand lines above.
        let mut lines = vec![format!("{} tests failed", tally.failed)];
        lines.extend(outcome.failures.iter().map(ToString::to_string));
        bail!("{}", lines.join("\n"));
    }
    if !outcome.success {
        bail!("`cargo test` failed outside of any test");
    }
    if tally.passed == 0 {
        bail!("no test ran");
    }
    if plan.programs && tally.reported_skip > 0 {
        bail!(
            "{} tests were skipped, though this run requires {}",
            tally.reported_skip,
            plan.require
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(tally: Tally, success: bool) -> Result<()> {
        let outcome = Outcome {
            success,
            ..Outcome::default()
        };
        judge(&Plan::new(&Args::default()), tally, &outcome)
    }

    #[test]
    fn only_tests_that_ran_and_held_are_a_success() {
        let good = Tally {
            passed: 3,
            ..Tally::default()
        };
        assert!(judged(good, true).is_ok());
        assert!(judged(good, false).is_err(), "cargo itself failed");
        assert!(judged(Tally::default(), true).is_err(), "nothing ran");
        assert!(judged(Tally { failed: 1, ..good }, true).is_err());
        assert!(
            judged(
                Tally {
                    skipped: 1,
                    reported_skip: 1,
                    ..good
                },
                true
            )
            .is_err()
        );
        assert!(
            judged(Tally { skipped: 1, ..good }, true).is_ok(),
            "an ignored test was meant to be"
        );
    }
}
