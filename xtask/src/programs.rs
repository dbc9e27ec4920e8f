//! Builds the programs of this project: always with all packages selected, so that no command recompiles dependencies.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    command::{build, output},
    goal::{self, Build},
    workspace::{cargo, target},
};

/// Links the C library statically: the benchmarks run the same programs that are shipped.
pub(crate) const STATIC: &str = "-C target-feature=+crt-static";

/// How programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// For the tests, the demonstration and the local node: faster to build.
    Dev,
    /// As for users: static, with line tables in a separate file.
    Release,
}

impl Profile {
    /// The folder of the profile's programs.
    pub(crate) fn folder(self) -> PathBuf {
        target().join(match self {
            Self::Dev => "debug",
            Self::Release => "release",
        })
    }

    /// The program `name`, once [`programs`] has built it.
    pub(crate) fn program(self, name: &str) -> PathBuf {
        self.folder().join(name)
    }
}

/// The target triple. Naming it restricts [`STATIC`] to the programs, without build scripts and procedural macros.
pub(crate) fn triple() -> String {
    format!("{}-unknown-linux-gnu", env::consts::ARCH)
}

/// The variable with the compiler flags for [`triple`].
pub(crate) fn flags_variable() -> String {
    format!("CARGO_TARGET_{}_RUSTFLAGS", triple().to_uppercase().replace('-', "_"))
}

/// Builds the programs `names`, which embed the eBPF object if it has been built.
pub(crate) fn programs(profile: Profile, names: &[&str]) -> Result<()> {
    goal::declared(Build::Programs)?;
    let mut command = cargo();
    // Cargo unifies the features of a dependency over the packages of one command: another selection would recompile
    // the dependencies and all their dependents.
    command.args(["build", "--workspace"]);
    for name in names {
        command.args(["--bin", name]);
    }
    if profile == Profile::Dev {
        return build(&mut command);
    }
    command.args(["--release", "--target", &triple()]);
    command.env(flags_variable(), STATIC);
    build(&mut command)?;
    names.iter().try_for_each(|name| publish(name))
}

/// Copies a program that cargo has built into the release folder, and its debug information into a file beside it,
/// where a backtrace finds it.
fn publish(name: &str) -> Result<()> {
    let built = target().join(triple()).join("release").join(name);
    let program = Profile::Release.program(name);
    let modified = |path: &PathBuf| fs::metadata(path).and_then(|metadata| metadata.modified());
    let since = modified(&built).with_context(|| format!("cannot read {}", built.display()))?;
    if modified(&program).is_ok_and(|published| published >= since) {
        return Ok(());
    }
    let folder = Profile::Release.folder();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lines = folder.join(format!("{name}.debug"));
    output(Command::new("objcopy").arg("--only-keep-debug").arg(&built).arg(&lines))?;
    let fresh = folder.join(format!(".{name}.new"));
    let mut strip = Command::new("objcopy");
    // The debug link contains the file name without its folder.
    strip.current_dir(&folder).arg("--strip-all");
    output(
        strip
            .arg(format!("--add-gnu-debuglink={name}.debug"))
            .arg(&built)
            .arg(&fresh),
    )?;
    // Atomic: the old program may be running.
    fs::rename(&fresh, &program).with_context(|| format!("cannot move {} into place", fresh.display()))
}
