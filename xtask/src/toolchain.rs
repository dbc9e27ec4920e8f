//! Finds a Rust compiler that can build core for the BPF target.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{command::output, linker::LLVM_MAJOR, workspace::cargo_path};

/// Variable with the rustc for the eBPF programs; its sysroot must contain the source of core.
const RUSTC_VARIABLE: &str = "KNI_BPF_RUSTC";
/// Variable with the cargo to use with it; by default the one that runs `cargo xtask`.
const CARGO_VARIABLE: &str = "KNI_BPF_CARGO";
/// Debian's compiler, from the package rustc-web.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// The path of the source of core in a sysroot.
const CORE_SOURCE: &str = "lib/rustlib/src/rust/library/core/src/lib.rs";

/// A compiler that can build the eBPF programs.
#[derive(Debug)]
pub(crate) struct Toolchain {
    /// The compiler.
    pub(crate) rustc: PathBuf,
    /// The cargo to run it with.
    pub(crate) cargo: PathBuf,
}

/// The first usable compiler: the one named in the environment, a rustup nightly, Debian's.
///
/// An unusable compiler that the environment names is an error and is never skipped.
pub(crate) fn find() -> Result<Toolchain> {
    if let Some(rustc) = env::var_os(RUSTC_VARIABLE) {
        let cargo = env::var_os(CARGO_VARIABLE).map_or_else(cargo_path, PathBuf::from);
        return check(rustc.into(), cargo).with_context(|| format!("{RUSTC_VARIABLE} is set but not usable"));
    }
    let mut refused = Vec::new();
    for (rustc, cargo) in candidates() {
        match check(rustc, cargo) {
            Ok(toolchain) => return Ok(toolchain),
            Err(error) => refused.push(format!("  {error:#}")),
        }
    }
    bail!(
        "no Rust compiler here can build eBPF programs; looked at:\n{}\nDo one of these:\n  \
         `cargo xtask setup` as root on Debian 12, which installs rustc-web and rust-web-src\n  \
         `rustup component add rust-src --toolchain nightly`, with a nightly that has LLVM {LLVM_MAJOR}\n  \
         set {RUSTC_VARIABLE} to a rustc with LLVM {LLVM_MAJOR} and core's source in its sysroot",
        refused.join("\n")
    )
}

/// Whether a compiler has to be installed; one that the environment names is the responsibility of the user.
pub(crate) fn is_missing() -> bool {
    env::var_os(RUSTC_VARIABLE).is_none() && find().is_err()
}

fn candidates() -> Vec<(PathBuf, PathBuf)> {
    let mut found: Vec<_> = rustup_nightlies()
        .into_iter()
        .map(|toolchain| (toolchain.join("bin/rustc"), toolchain.join("bin/cargo")))
        .collect();
    found.push((DEBIAN_RUSTC.into(), cargo_path()));
    found
}

/// The folders of all nightly toolchains of rustup, in a fixed order.
fn rustup_nightlies() -> Vec<PathBuf> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".rustup")));
    // A missing rustup is not an error.
    let Some(Ok(entries)) = home.map(|home| fs::read_dir(home.join("toolchains"))) else {
        return Vec::new();
    };
    let mut nightlies: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("nightly"))
        .map(|entry| entry.path())
        .collect();
    nightlies.sort();
    nightlies
}

fn check(rustc: PathBuf, cargo: PathBuf) -> Result<Toolchain> {
    let shown = rustc.display();
    if !rustc.is_file() {
        bail!("{shown}: not there");
    }
    // The cheap test first: toolchains without the source of core are common.
    let sysroot = output(Command::new(&rustc).args(["--print", "sysroot"]))?;
    let source = Path::new(sysroot.trim()).join(CORE_SOURCE);
    if !source.is_file() {
        bail!("{shown}: no source of core at {}", source.display());
    }
    let version = output(Command::new(&rustc).arg("-vV"))?;
    match llvm_major(&version) {
        Some(LLVM_MAJOR) => Ok(Toolchain { rustc, cargo }),
        Some(other) => bail!(
            "{shown}: has LLVM {other}, but bpf-linker is built for LLVM {LLVM_MAJOR} (feature llvm-{LLVM_MAJOR}) \
             and reads only that version's bitcode"
        ),
        None => bail!("{shown}: does not report its LLVM version"),
    }
}

fn llvm_major(version: &str) -> Option<u32> {
    let llvm = version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    llvm.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llvm_major_is_read_from_the_verbose_version() {
        assert_eq!(
            llvm_major("rustc 1.96.0\nrelease: 1.96.0\nLLVM version: 22.1.8\n"),
            Some(22)
        );
        assert_eq!(llvm_major("rustc 1.96.0\nrelease: 1.96.0\n"), None);
    }

    #[test]
    fn a_missing_compiler_is_named() {
        let error = check("/nonexistent/rustc".into(), "cargo".into()).unwrap_err();
        assert_eq!(error.to_string(), "/nonexistent/rustc: not there");
    }
}
