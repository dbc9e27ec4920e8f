//! `build-ebpf`: compiles the package kni-ebpf for the BPF target into one object file.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    command, linker, toolchain,
    workspace::{clear_own_build, ebpf_object, root, target},
};

const PACKAGE: &str = "kni-ebpf";
const TARGET: &str = "bpfel-unknown-none";

/// Flags of rustc: the kernel's architecture picks the layout of its registers in aya-ebpf, and the linker turns the
/// debug information into BTF. By default bpf-linker has LLVM expand copies only, in order, and call a byte-wise loop to
/// clear memory: 32 ns per packet for clearing two small structs.
const RUSTFLAGS: &[&str] = &[
    "--cfg=bpf_target_arch=\"x86_64\"",
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    "-Clink-arg=--disable-expand-memcpy-in-order",
];

/// The release profile of the programs. In the environment, because the workspace's own release profile is that of
/// the agent.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "true"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "2"),
    ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
];

/// Arguments of `build-ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compile in the log records of the slow path; never for a released object
    #[arg(long)]
    trace: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let object = build(args.trace)?;
    println!("{}", object.display());
    Ok(())
}

/// Builds the programs and returns the absolute path of the object.
///
/// The object keeps its time of modification when its bytes did not change, so that nothing that embeds it is rebuilt.
pub(crate) fn build(trace: bool) -> Result<PathBuf> {
    let toolchain = toolchain::find()?;
    let linker = linker::find()?;
    let build_dir = target().join("ebpf-build");
    let mut cargo = Command::new(&toolchain.cargo);
    clear_own_build(&mut cargo);
    cargo
        .current_dir(root())
        .args([
            "build",
            "--release",
            "--package",
            PACKAGE,
            "--target",
            TARGET,
            "-Zbuild-std=core",
        ])
        .arg("--target-dir")
        .arg(&build_dir)
        .env("RUSTC", &toolchain.rustc)
        // Build-std is unstable: the compiler of a distribution refuses it otherwise.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", RUSTFLAGS.join("\u{1f}"))
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &linker)
        .envs(PROFILE.iter().copied())
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    if trace {
        cargo.args(["--features", "trace"]);
    }
    command::build(&mut cargo)
        .with_context(|| format!("with {} and {}", toolchain.rustc.display(), linker.display()))?;
    let object = ebpf_object();
    publish(&build_dir.join(TARGET).join("release").join(PACKAGE), &object)?;
    Ok(object)
}

/// Copies `built` to `object` in one step: a reader sees the old bytes or the new ones.
fn publish(built: &Path, object: &Path) -> Result<()> {
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    if fs::read(object).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let folder = object.parent().context("the object has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let fresh = object.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&fresh, bytes).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, object).with_context(|| format!("cannot move {} into place", fresh.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publishing_the_same_bytes_keeps_the_file() {
        let folder = std::env::temp_dir().join(format!("xtask-publish-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (built, object) = (folder.join("built"), folder.join("out/kni-ebpf.o"));
        fs::write(&built, "one").unwrap();
        publish(&built, &object).unwrap();
        let first = fs::metadata(&object).unwrap().modified().unwrap();
        publish(&built, &object).unwrap();
        assert_eq!(fs::metadata(&object).unwrap().modified().unwrap(), first);
        fs::write(&built, "two").unwrap();
        publish(&built, &object).unwrap();
        assert_eq!(fs::read(&object).unwrap(), b"two");
        assert_eq!(
            fs::read_dir(folder.join("out")).unwrap().count(),
            1,
            "no temporary file stays"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
