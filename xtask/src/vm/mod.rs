//! `vmtest`: boots other kernels in virtual machines, runs `kni-vmtest` on each, and compares what their verifiers
//! count with the committed page.

mod archive;
mod boot;
mod cpio;
mod initrd;
mod kept;
mod kernel;
mod modules;
mod results;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use self::{
    kernel::{Kernel, LINES, Line},
    results::Results,
};
use crate::{
    build_ebpf,
    goal::{self, Build, Goal},
    packages::{self, Purpose},
    programs::{Profile, programs},
    progress::{Progress, say},
    setup,
    workspace::{ebpf_object, target},
};

/// Output of the program if all checks have passed.
const PASS: &str = "KNI-VM: PASS";
/// The kernel modules that the test needs, without their dependencies.
const MODULES: &[&str] = &["veth", "vxlan", "8021q", "sch_ingress", "cls_bpf"];

/// Output of the first process after a program that has succeeded.
const CLEAN_EXIT: &str = "the test program ended with exit code 0";
/// Number of steps of [`run`].
pub(crate) const STEPS: usize = 4;

/// Arguments of `vmtest`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run this program in the machines instead of kni-vmtest, and compare nothing
    #[arg(long, value_name = "PATH", conflicts_with = "accept")]
    program: Option<PathBuf>,
    /// Boot only this kernel: 6.1, 6.12 or newest [default: all]
    #[arg(long, value_name = "NAME", value_parser = LINES.map(|line| line.name))]
    kernel: Option<String>,
    /// Write what the verifiers count into docs/reference/kernels.md instead of comparing it
    #[arg(long)]
    accept: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let mut progress = Progress::new(setup::STEPS + 1 + STEPS);
    setup::run(Goal::Vm, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    machines(args, &mut progress)
}

/// Boots every kernel with kni-vmtest, as [`STEPS`] steps of `progress`; the eBPF object must be built.
///
/// Ok only if all programs report success; otherwise the serial log of a failure is printed.
pub(crate) fn run(progress: &mut Progress) -> Result<()> {
    let args = Args {
        program: None,
        kernel: None,
        accept: false,
    };
    machines(&args, progress)
}

fn machines(args: &Args, progress: &mut Progress) -> Result<()> {
    goal::declared(Build::Machines)?;
    let missing = packages::missing(&[Purpose::Vm]);
    if !missing.is_empty() {
        bail!(
            "`cargo xtask setup` has not installed these yet:\n{}",
            packages::listing(&missing)
        );
    }
    let folder = target().join("vm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let wanted = |line: &Line| args.kernel.as_ref().is_none_or(|name| name == line.name);
    let lines: Vec<Line> = LINES.into_iter().filter(wanted).collect();
    let kernels = progress.step("kernels", || {
        let fetched = lines.iter().map(|line| Ok((*line, kernel::fetch(*line, &folder)?)));
        fetched.collect::<Result<Vec<_>>>()
    })?;
    let program = progress.step("test program", || args.program.clone().map_or_else(build_program, Ok))?;
    // Each is emulated on one CPU.
    let results = progress.step("virtual machines", || {
        let ended = thread::scope(|scope| {
            let mut running = Vec::new();
            for (line, kernel) in &kernels {
                running.push(scope.spawn(|| machine(line, kernel, &program, &folder)));
            }
            let joined = running.into_iter().map(thread::ScopedJoinHandle::join);
            joined.collect::<Vec<_>>()
        });
        let mut results = Results::default();
        for found in ended {
            // Joining fails only if the thread has panicked; its message is on the terminal already.
            let Ok(found) = found else {
                bail!("a machine could not be followed")
            };
            results.extend(found?);
        }
        Ok(results)
    })?;
    progress.step("verified instructions", || {
        if args.program.is_some() {
            return Ok(());
        }
        for line in results.table() {
            say(&line);
        }
        results.is_whole(&lines)?;
        if args.accept {
            results.accept()
        } else {
            results.compare(&lines)
        }
    })
}

/// Boots one kernel and returns what its console reports.
fn machine(line: &Line, kernel: &Kernel, program: &Path, above: &Path) -> Result<Results> {
    let folder = above.join(line.name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let image = folder.join("initrd");
    let content = initrd::Content {
        kernel,
        modules: MODULES,
        program,
        object: &ebpf_object(),
    };
    initrd::write(&content, &image)?;
    let start = Instant::now();
    let log = folder.join("serial.log");
    let ended = boot::boot(&kernel.image, &image, &log);
    let console = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    let console = String::from_utf8_lossy(&console);
    let result = ended.and_then(|()| check(&console));
    if let Err(error) = result {
        say(&format!(
            "---- serial log of {} ----\n{}\n---- end of the serial log ----",
            kernel.release(),
            console.trim_end()
        ));
        return Err(error.context(format!("kernel {}", kernel.release())));
    }
    say(&format!(
        "{PASS} on {} after {:.1} s (serial log: {})",
        kernel.release(),
        start.elapsed().as_secs_f64(),
        log.display()
    ));
    Ok(Results::read(line.name, &kernel.release(), &console))
}

/// Checks that the console of a machine that has powered off reports success.
fn check(console: &str) -> Result<()> {
    let mut lines = console.lines().map(str::trim);
    match lines.clone().find(|line| line.starts_with("KNI-VM: ")) {
        Some(PASS) if lines.any(|line| line == CLEAN_EXIT) => Ok(()),
        Some(PASS) => bail!("the test program reported `{PASS}`, but did not exit with code 0"),
        Some(line) => bail!("the machine reported `{line}`"),
        None => bail!("the machine ended without `{PASS}`"),
    }
}

fn build_program() -> Result<PathBuf> {
    programs(Profile::Dev, &["kni-vmtest"])?;
    Ok(Profile::Dev.program("kni-vmtest"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pass_with_a_clean_exit_is_a_success() {
        let pass = format!("[    1.0] Run /init\r\n{PASS}\r\n{CLEAN_EXIT}\r\n");
        assert!(check(&pass).is_ok());
        assert!(check(&format!("{PASS}\r\nthe test program ended with exit code 1\r\n")).is_err());
        assert!(
            check(&format!("KNI-VM: FAIL no map\r\n{pass}")).is_err(),
            "the first word counts"
        );
        assert!(check(&format!("{CLEAN_EXIT}\r\n")).is_err());
        assert!(check("KNI-VM: PASSED not\n").is_err());
    }

    #[test]
    fn the_first_process_writes_the_line_that_is_looked_for() {
        let script = include_str!("init.sh");
        assert!(script.contains(&format!("\"{}$code\"", CLEAN_EXIT.trim_end_matches('0'))));
    }
}
