//! `cross`: builds the programs of a node for arm64 on this machine, with the arm64 eBPF programs in the agent.

use std::{env, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{
    build_ebpf::{self, Architecture},
    command::{build, find, output},
    goal::{self, Build, Goal},
    programs::STATIC,
    progress::{Progress, say},
    setup,
    workspace::{cargo, target},
};

const TRIPLE: &str = "aarch64-unknown-linux-gnu";
/// Debian's cross compiler, which links the programs and compiles the C parts of their libraries.
const COMPILER: &str = "aarch64-linux-gnu-gcc";
const PROGRAMS: [&str; 4] = ["kni-agent", "kni-cni", "kni-controller", "knictl"];
/// Number of steps of [`compile`].
pub(crate) const STEPS: usize = 3;

/// Arguments of `cross`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only check that everything compiles; link nothing
    #[arg(long, conflicts_with = "release")]
    check: bool,
    /// Build as for users: optimised and static
    #[arg(long)]
    release: bool,
}

/// What [`compile`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Nothing: it only checks types.
    Check,
    /// Linked programs, faster to build.
    Dev,
    /// Linked programs as for users.
    Release,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let mut progress = Progress::new(setup::STEPS + STEPS);
    setup::run(Goal::Cross, &mut progress)?;
    let depth = match (args.check, args.release) {
        (true, _) => Depth::Check,
        (false, true) => Depth::Release,
        (false, false) => Depth::Dev,
    };
    compile(depth, &mut progress)
}

/// Compiles everything for arm64, as [`STEPS`] steps of `progress`; the packages must be installed.
pub(crate) fn compile(depth: Depth, progress: &mut Progress) -> Result<()> {
    goal::declared(Build::Arm64)?;
    progress.step("standard library for arm64", standard_library)?;
    let object = progress.step("eBPF programs for arm64", || {
        build_ebpf::build_for(Architecture::Aarch64, false)
    })?;
    progress.step("programs for arm64", || {
        let mut command = cargo();
        // As for this machine, every command selects all packages, so that none compiles dependencies again.
        command.arg(if depth == Depth::Check { "check" } else { "build" });
        command.args(["--workspace", "--target", TRIPLE]);
        for program in PROGRAMS {
            command.args(["--bin", program]);
        }
        command
            .env("KNI_EBPF_OBJECT", &object)
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", COMPILER)
            .env("CC_aarch64_unknown_linux_gnu", COMPILER);
        if depth == Depth::Release {
            command.arg("--release");
            command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS", STATIC);
        }
        build(&mut command)?;
        if depth == Depth::Check {
            return Ok(());
        }
        let folder = target().join(TRIPLE);
        let folder = folder.join(if depth == Depth::Release { "release" } else { "debug" });
        for program in PROGRAMS {
            let file = folder.join(program);
            ensure!(file.is_file(), "{} was not built", file.display());
        }
        say(&format!("{}: {}", folder.display(), PROGRAMS.join(", ")));
        Ok(())
    })
}

/// Installs Rust's standard library for the target, if it is missing.
fn standard_library() -> Result<()> {
    let compiler = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let libraries = output(Command::new(compiler).args(["--print", "target-libdir", "--target", TRIPLE]))?;
    if Path::new(libraries.trim()).is_dir() {
        return Ok(());
    }
    let rustup = find("rustup")
        .with_context(|| format!("Rust's standard library for {TRIPLE} is missing, and so is rustup to install it"))?;
    output(Command::new(rustup).args(["target", "add", TRIPLE])).map(drop)
}
