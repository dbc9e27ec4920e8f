//! `build-ebpf`: compiles the package kni-ebpf for the BPF target into one object file.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    cache, cold, command,
    goal::{self, Build},
    linker,
    progress::say,
    toolchain,
    workspace::{clear_own_build, ebpf_object, root, target},
};

const PACKAGE: &str = "kni-ebpf";
const TARGET: &str = "bpfel-unknown-none";

/// Flags of rustc: the linker converts the debug information to BTF. By default bpf-linker lets LLVM expand copies
/// only, in order, and clear memory with a call to a byte-wise loop: 32 ns per packet for clearing two small structs.
const RUSTFLAGS: &[&str] = &[
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    "-Clink-arg=--disable-expand-memcpy-in-order",
];

/// The release profile of the programs. Set by environment variables, because the release profile of the workspace is
/// that of the agent.
const PROFILE: &[(&str, &str)] = &[
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "true"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "2"),
    ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
];

/// The processor of the kernel that the programs are for: it selects the layout of registers in aya-ebpf, and the
/// programs are otherwise the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Architecture {
    /// x86-64.
    #[value(name = "x86_64")]
    X86_64,
    /// arm64.
    #[value(name = "aarch64")]
    Aarch64,
}

impl Architecture {
    fn flag(self) -> &'static str {
        match self {
            Self::X86_64 => "--cfg=bpf_target_arch=\"x86_64\"",
            Self::Aarch64 => "--cfg=bpf_target_arch=\"aarch64\"",
        }
    }

    /// The finished object.
    pub(crate) fn object(self) -> PathBuf {
        match self {
            Self::X86_64 => ebpf_object(),
            Self::Aarch64 => target().join("ebpf/aarch64/kni-ebpf.o"),
        }
    }

    /// A folder of its own, as other flags would compile everything again.
    fn build_dir(self) -> PathBuf {
        target().join(match self {
            Self::X86_64 => "ebpf-build",
            Self::Aarch64 => "ebpf-build-aarch64",
        })
    }
}

/// Arguments of `build-ebpf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build for kernels of this architecture
    #[arg(long, value_enum, default_value_t = Architecture::X86_64)]
    target_arch: Architecture,
    /// Compile in the log records of the slow path; never for a released object
    #[arg(long)]
    trace: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let object = build_for(args.target_arch, args.trace)?;
    println!("{}", object.display());
    Ok(())
}

/// Builds the programs for this machine's tests and returns the absolute path of the object.
pub(crate) fn build(trace: bool) -> Result<PathBuf> {
    build_for(Architecture::X86_64, trace)
}

/// Builds the programs for kernels of an architecture and returns the absolute path of the object.
///
/// The modification time of the object changes only with its content, so that packages that embed it are not rebuilt.
pub(crate) fn build_for(architecture: Architecture, trace: bool) -> Result<PathBuf> {
    goal::declared(Build::Ebpf)?;
    let toolchain = toolchain::find()?;
    let linker = linker::find()?;
    let build_dir = architecture.build_dir();
    let flags = [&[architecture.flag()], RUSTFLAGS].concat();
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
        // Build-std is unstable; the compiler of a distribution accepts it only with this variable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &linker)
        .envs(PROFILE.iter().copied())
        .env_remove("RUSTC_WRAPPER")
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    if trace {
        cargo.args(["--features", "trace"]);
    }
    command::build(&mut cargo)
        .with_context(|| format!("with {} and {}", toolchain.rustc.display(), linker.display()))?;
    let object = architecture.object();
    publish(&build_dir.join(TARGET).join("release").join(PACKAGE), &object)?;
    Ok(object)
}

/// Like [`build_for`], but compiles only what was not compiled before from the same sources by the same compiler, in
/// any clone.
pub(crate) fn provide(architecture: Architecture) -> Result<PathBuf> {
    // That of this machine is what the tests load: cargo decides about it.
    if architecture == Architecture::X86_64 {
        return build_for(architecture, false);
    }
    let (key, kind, object) = (key(architecture)?, "ebpf-aarch64", architecture.object());
    let cache = cold::cache();
    if let Some(kept) = cache.find(kind, &key, &mut |line| say(line)) {
        publish(&kept, &object)?;
        return Ok(object);
    }
    build_for(architecture, false)?;
    cache.keep(kind, &key, &object, &mut |line| say(line));
    Ok(object)
}

/// Identifies everything that determines the object: sources, versions of dependencies, compiler, linker and flags.
fn key(architecture: Architecture) -> Result<String> {
    let toolchain = toolchain::find()?;
    let mut files = vec![root().join("Cargo.lock"), root().join("Cargo.toml")];
    for package in [PACKAGE, "kni-common"] {
        list(&root().join(package), &mut files)?;
    }
    files.sort();
    let mut text = format!("{} {RUSTFLAGS:?} {PROFILE:?} {TARGET}", architecture.flag());
    for program in [&toolchain.rustc, &toolchain.cargo] {
        text += &command::output(Command::new(program).arg("-vV"))?;
    }
    text += &command::output(Command::new(linker::find()?).arg("--version"))?;
    let mut bytes = text.into_bytes();
    for file in files {
        let content = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
        bytes.extend(format!("\n{name} {}\n", content.len()).into_bytes());
        bytes.extend(content);
    }
    cache::key(&bytes)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry
            .with_context(|| format!("cannot list {}", folder.display()))?
            .path();
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Copies `built` to `object` atomically: a reader sees either the old or the new content.
fn publish(built: &Path, object: &Path) -> Result<()> {
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    if fs::read(object).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let folder = object.parent().context("the object has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let fresh = object.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&fresh, &bytes).with_context(|| format!("cannot write {}", fresh.display()))?;
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
