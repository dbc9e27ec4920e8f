//! Provides bpf-linker: the one that the environment names, or one built into target/tools.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

use crate::{
    command::build,
    workspace::{cargo, target},
};

/// The LLVM that bpf-linker is built with; the compiler must have the same, for it hands over bitcode.
pub(crate) const LLVM_MAJOR: u32 = 22;
/// Names a bpf-linker to use instead of our own.
const VARIABLE: &str = "KNI_BPF_LINKER";
const VERSION: &str = "0.13.0";
/// Debian's folder of that LLVM. bpf-linker's own search ends at /usr/lib64, which holds no LLVM.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// How it is compiled: nearly all of its work is done in LLVM, and its own release profile has full debug information.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
];

/// The linker to use, or what to do to get one.
pub(crate) fn find() -> Result<PathBuf> {
    let named = named();
    let path = named.clone().unwrap_or_else(own);
    if path.is_file() {
        return Ok(path);
    }
    if named.is_some() {
        bail!("{VARIABLE} is set to {}, which is not there", path.display());
    }
    bail!(
        "bpf-linker {VERSION} is missing; run `cargo xtask setup`, or set {VARIABLE} to one built with its feature \
         llvm-{LLVM_MAJOR}"
    )
}

/// Whether there is still something to install.
pub(crate) fn is_missing() -> bool {
    named().is_none() && !is_current(&target().join("tools"))
}

/// Builds bpf-linker into target/tools.
pub(crate) fn install() -> Result<()> {
    let mut command = cargo();
    command
        .args([
            "install",
            "bpf-linker",
            "--version",
            VERSION,
            "--locked",
            "--no-default-features",
        ])
        .args(["--features", &feature(), "--force"])
        .arg("--root")
        .arg(target().join("tools"))
        .arg("--target-dir")
        .arg(target().join("tools-build"))
        .envs(PROFILE.iter().copied())
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    if env::var_os("LLVM_PREFIX").is_none() {
        command.env("LLVM_PREFIX", LLVM_PREFIX);
    }
    build(&mut command)
}

fn named() -> Option<PathBuf> {
    env::var_os(VARIABLE).map(PathBuf::from)
}

fn own() -> PathBuf {
    target().join("tools/bin/bpf-linker")
}

fn feature() -> String {
    format!("llvm-{LLVM_MAJOR}")
}

/// Whether cargo's own record lists this version with this LLVM as installed in `tools`.
fn is_current(tools: &Path) -> bool {
    let record = fs::read_to_string(tools.join(".crates2.json")).unwrap_or_default();
    own().is_file()
        && record.contains(&format!("\"bpf-linker {VERSION} "))
        && record.contains(&format!("{:?}", feature()))
}
