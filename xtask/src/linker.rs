//! Provides bpf-linker: the one named in the environment, or one in target/tools, which is built or from the cache.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    cache, cold,
    command::{build, output},
    progress::say,
    workspace::{cargo, target},
};

/// The LLVM version of bpf-linker; the compiler must have the same version, because it passes bitcode.
pub(crate) const LLVM_MAJOR: u32 = 22;
/// Variable with the path of another bpf-linker.
const VARIABLE: &str = "KNI_BPF_LINKER";
const VERSION: &str = "0.13.0";
/// Debian's folder of that LLVM version. bpf-linker's own search ends at /usr/lib64, which contains no LLVM.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// The note beside one that is from the cache, of which cargo has no record.
const KEPT: &str = ".bpf-linker";

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

/// Puts bpf-linker into target/tools: the kept one that was built from the same version by the same compiler against
/// the same LLVM, or a new one.
pub(crate) fn install() -> Result<()> {
    let (key, cache) = (key()?, cold::cache());
    if cache.fetch("bpf-linker", &key, &own(), &mut |line| say(line)) {
        // Its libraries are those of this machine.
        if output(Command::new(own()).arg("--version")).is_ok() {
            return note_kept(&target().join("tools"));
        }
        say("the kept bpf-linker does not run here");
    }
    compile()?;
    cache.keep("bpf-linker", &key, &own(), &mut |line| say(line));
    Ok(())
}

/// Identifies everything that determines the program, and the release of the system, whose libraries it loads.
fn key() -> Result<String> {
    let mut text = format!("{VERSION} {} {PROFILE:?} {}\n", feature(), env::consts::ARCH);
    for mut program in [
        cargo(),
        Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())),
    ] {
        text += &output(program.arg("-vV"))?;
    }
    let prefix = env::var_os("LLVM_PREFIX").map_or_else(|| PathBuf::from(LLVM_PREFIX), PathBuf::from);
    let llvm = prefix.join("bin/llvm-config");
    text += &output(Command::new(llvm).args(["--version", "--shared-mode", "--libdir"]))?;
    text += &fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    cache::key(text.as_bytes())
}

fn compile() -> Result<()> {
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

/// Whether this version with this LLVM version is in `tools`, according to the install records of cargo or to the
/// note of the one from the cache.
fn is_current(tools: &Path) -> bool {
    let read = |name: &str| fs::read_to_string(tools.join(name)).unwrap_or_default();
    let record = read(".crates2.json");
    let is_installed =
        record.contains(&format!("\"bpf-linker {VERSION} ")) && record.contains(&format!("{:?}", feature()));
    own().is_file() && (is_installed || read(KEPT) == kept())
}

fn note_kept(tools: &Path) -> Result<()> {
    let note = tools.join(KEPT);
    fs::write(&note, kept()).with_context(|| format!("cannot write {}", note.display()))
}

fn kept() -> String {
    format!("bpf-linker {VERSION} {}\n", feature())
}
