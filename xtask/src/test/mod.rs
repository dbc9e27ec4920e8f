//! `test`: prepares the machine, runs all tests of the workspace and the virtual machine, and sums up the results.

mod calibration;
mod failure;
mod flakes;
mod gates;
mod grace;
mod ledger;
mod load;
mod machine;
mod programs;
mod reader;
mod repeat;
mod report;
mod run;
mod second;
mod selected;
mod selection;
mod suite;
mod tally;
mod times;
mod without;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Result, bail};
pub(crate) use flakes::command as flakes;
use tally::Tally;

use self::{calibration::Calibration, ledger::Ledger, programs::Built, run::Environment};
use crate::{
    build_cni, build_ebpf, cold, crds,
    cross::{self, Depth},
    goal::Goal,
    node,
    progress::{Progress, say},
    setup, vm,
    workspace::is_root,
};

/// Arguments of `test`.
#[derive(Default, clap::Args)]
pub(crate) struct Args {
    /// Stop at a tier: 0 needs no privilege, 1 adds network namespaces, 2 adds loaded programs and the tests of a
    /// whole node, 3 adds the other kernel [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=3))]
    tier: Option<u8>,
    /// Run the tests that take minutes in full length, and those that are ignored as `long`, and compile for arm64
    #[arg(long)]
    long: bool,
    /// Write the seconds of each privileged test of a good run into tests/times.toml
    #[arg(long)]
    record: bool,
    /// Run the table of editors in a build without the defence NAME, or without each one: files of
    /// `tests/integration/without`
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "",
          conflicts_with_all = ["tier", "long", "record"])]
    without: Option<String>,
    /// Ignore what earlier commands have kept outside the checkout
    #[arg(long)]
    cold: bool,
    #[command(flatten)]
    selection: selected::Choice,
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
    /// The file into which the times of the tests are written.
    record: Option<PathBuf>,
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
            record: args.record.then(times::file),
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

/// What a run reports at its end.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    tally: Tally,
    /// Lines before the sum.
    lines: Vec<String>,
}

/// Runs the command; the last line of its output is the sum.
pub(crate) fn command(args: &Args) -> ExitCode {
    command_with(args, || Ok(()))
}

/// As [`command`], with `then` after a run that passed.
pub(crate) fn command_with(args: &Args, then: impl FnOnce() -> Result<()>) -> ExitCode {
    cold::set(args.cold);
    let mut summary = Summary::default();
    let plan = Plan::new(args);
    let result = if let Some(name) = &args.without {
        without::run(name, &plan, &mut summary)
    } else if args.selection.is_empty() {
        run(&plan, &mut summary)
    } else {
        selected::run(&args.selection, &plan, &mut summary)
    };
    conclude(result.and_then(|()| then()), summary)
}

/// Prints the reason of a failure, if any, and the sum as the last line.
pub(crate) fn conclude(result: Result<()>, mut summary: Summary) -> ExitCode {
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            // A failure outside of any test, such as a compile error, must not end with zero failed tests.
            summary.tally.failed = summary.tally.failed.max(1);
            ExitCode::FAILURE
        }
    };
    for line in summary.lines {
        println!("{line}");
    }
    println!("{}", summary.tally);
    code
}

/// Checks the ledger of flaky tests.
pub(crate) fn check_ledger() -> Result<()> {
    Ledger::read().map(drop)
}

fn run(plan: &Plan, summary: &mut Summary) -> Result<()> {
    if !plan.require.is_empty() && !is_root() {
        bail!(
            "the tests make network namespaces and load eBPF programs, which needs root; \
             `cargo xtask test --tier 0` runs those that need no privilege"
        );
    }
    let ledger = Ledger::read()?;
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
    let tests = tests(plan, &ledger, &mut progress, summary);
    // The virtual machine runs in any case: its result may explain the others.
    let machine = if plan.vm {
        let result = vm::run(&mut progress);
        summary.tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    let other = if plan.crosses() {
        let result = cross::compile(Depth::Check, &mut progress);
        summary.tally.count(result.is_ok());
        result
    } else {
        Ok(())
    };
    tests.and(machine).and(other)
}

/// Builds the tests and runs them, as two steps of `progress`.
fn tests(plan: &Plan, ledger: &Ledger, progress: &mut Progress, summary: &mut Summary) -> Result<()> {
    // A step of its own, so that its time is not part of that of the tests.
    let built = progress.step("test programs", || {
        if plan.programs {
            programs::build()
        } else {
            programs::build_unprivileged()
        }
    })?;
    progress.step("tests", || {
        let (environment, slowness) = environment(&built, plan)?;
        let outcome = suite::run(&suite::whole(&built), &environment, ledger, plan.long)?;
        summary.tally = outcome.tally();
        summary.lines = outcome.settled.lines();
        gates::report(&outcome, slowness);
        report::write(&outcome, slowness)?;
        suite::check(&outcome, if plan.programs { plan.require } else { "" })?;
        if let Some(path) = &plan.record {
            times::record(&outcome, path)?;
        }
        Ok(())
    })
}

/// What tests read of the environment, and the slowness of the machine, which is measured here.
fn environment(built: &Built, plan: &Plan) -> Result<(Environment, f64)> {
    let variables = built.variables.iter();
    let mut environment: Environment = variables.map(|(name, path)| (*name, path.clone().into())).collect();
    environment.insert("KNI_REQUIRE", plan.require.into());
    if plan.long {
        environment.insert("KNI_LONG", "1".into());
    }
    if cold::is_set() {
        environment.insert(cold::VARIABLE, "1".into());
    }
    if !plan.programs {
        return Ok((environment, 1.0));
    }
    let calibration = Calibration::measure()?;
    say(&calibration.to_string());
    let slowness = calibration.slowness();
    environment.insert("KNI_SLOWNESS", format!("{slowness:.2}").into());
    environment.insert(times::VARIABLE, times::file().into());
    Ok((environment, slowness))
}
