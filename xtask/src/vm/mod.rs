//! `vmtest`: boots an older kernel in a virtual machine and runs `kni-vmtest` on it.

mod boot;
mod cpio;
mod initrd;
mod kernel;
mod modules;

use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result, bail};

use crate::{
    build_ebpf,
    packages::{self, Purpose},
    programs::{Profile, programs},
    progress::{Progress, say},
    setup::{self, Goal},
    workspace::{ebpf_object, target},
};

/// Output of the program if all checks have passed.
const PASS: &str = "KNI-VM: PASS";
/// The kernel modules that the test needs, without their dependencies.
const MODULES: &[&str] = &["veth", "vxlan", "sch_ingress", "cls_bpf"];

/// Output of the first process after a program that has succeeded.
const CLEAN_EXIT: &str = "the test program ended with exit code 0";
/// Number of steps of [`run`].
pub(crate) const STEPS: usize = 3;

/// Arguments of `vmtest`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run this program in the machine instead of kni-vmtest
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let mut progress = Progress::new(setup::STEPS + 1 + STEPS);
    setup::run(Goal::Vm, &mut progress)?;
    progress.step("eBPF programs", || build_ebpf::build(false))?;
    run(args.program.clone(), &mut progress)
}

/// Boots the machine with `program`, by default kni-vmtest, as [`STEPS`] steps of `progress`; the eBPF object must be
/// built.
///
/// Ok only if the program reports success; otherwise the whole serial log is printed.
pub(crate) fn run(program: Option<PathBuf>, progress: &mut Progress) -> Result<()> {
    let missing = packages::missing(&[Purpose::Vm]);
    if !missing.is_empty() {
        bail!(
            "`cargo xtask setup` has not installed these yet:\n{}",
            packages::listing(&missing)
        );
    }
    let folder = target().join("vm");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let kernel = progress.step("kernel", || kernel::fetch(&folder))?;
    let program = progress.step("test program", || program.map_or_else(build_program, Ok))?;
    progress.step("virtual machine", || {
        let image = folder.join("initrd");
        let content = initrd::Content {
            kernel: &kernel,
            modules: MODULES,
            program: &program,
            object: &ebpf_object(),
        };
        initrd::write(&content, &image)?;
        let start = Instant::now();
        let log = folder.join("serial.log");
        let ended = boot::boot(&kernel.image, &image, &log);
        let console = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        let console = String::from_utf8_lossy(&console);
        let result = ended.and_then(|()| judge(&console));
        if result.is_ok() {
            say(&format!(
                "{PASS} after {:.1} s (serial log: {})",
                start.elapsed().as_secs_f64(),
                log.display()
            ));
        } else {
            say(&format!(
                "---- serial log ----\n{}\n---- end of the serial log ----",
                console.trim_end()
            ));
        }
        result
    })
}

/// Checks that the console of a machine that has powered off reports success.
fn judge(console: &str) -> Result<()> {
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
        assert!(judge(&pass).is_ok());
        assert!(judge(&format!("{PASS}\r\nthe test program ended with exit code 1\r\n")).is_err());
        assert!(
            judge(&format!("KNI-VM: FAIL no map\r\n{pass}")).is_err(),
            "the first word counts"
        );
        assert!(judge(&format!("{CLEAN_EXIT}\r\n")).is_err());
        assert!(judge("KNI-VM: PASSED not\n").is_err());
    }

    #[test]
    fn the_first_process_writes_the_line_that_is_looked_for() {
        let script = include_str!("init.sh");
        assert!(script.contains(&format!("\"{}$code\"", CLEAN_EXIT.trim_end_matches('0'))));
    }
}
