//! Provides bpf-linker: the one named in the environment, or one built into target/tools.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

use crate::{
    command::build,
    workspace::{cargo, target},
};

/// The LLVM version of bpf-linker; the compiler must have the same version, because it passes bitcode.
pub(crate) const LLVM_MAJOR: u32 = 22;
/// Variable with the path of another bpf-linker.
const VARIABLE: &str = "KNI_BPF_LINKER";
const VERSION: &str = "0.13.0";
/// Debian's folder of that LLVM version. bpf-linker's own search ends at /usr/lib64, which contains no LLVM.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// Build profile: nearly all of its work is done in LLVM, and its own release profile has full debug information.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_LTO", "off"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
];

/// The linker to use, or an error with instructions for installing one.
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

/// Whether bpf-linker has to be installed.
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

/// Whether the install records of cargo list this version with this LLVM version in `tools`.
fn is_current(tools: &Path) -> bool {
    let record = fs::read_to_string(tools.join(".crates2.json")).unwrap_or_default();
    own().is_file()
        && record.contains(&format!("\"bpf-linker {VERSION} "))
        && record.contains(&format!("{:?}", feature()))
}
