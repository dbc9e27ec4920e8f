//! `image`: static programs, and the container image around them as an OCI archive.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use kni_local_node::oci::{Entry, Image};

use crate::{
    build_cni, build_ebpf, command,
    workspace::{cargo, ebpf_object, target},
};

/// Where the programs are inside the image.
const BIN: &str = "bin";
/// Type of the program header that names a dynamic linker.
const PT_INTERP: u32 = 3;

/// Arguments of `image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the image
    #[arg(long, value_name = "REFERENCE", default_value = concat!("kni.local/kni-agent:", env!("CARGO_PKG_VERSION")))]
    tag: String,
    /// Where the archive goes [default: target/image/kni-agent.tar]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Write the image's files into this folder, which must be empty or missing, instead of an archive
    #[arg(long, value_name = "DIR", conflicts_with_all = ["output", "tag"])]
    folder: Option<PathBuf>,
    /// Programs as for the tests: quicker to build, slower to run
    #[arg(long)]
    debug: bool,
}

/// Runs the command.
pub(crate) fn command(args: &Args) -> Result<()> {
    let mut image = empty(&args.tag);
    for (name, program) in programs(args.debug)? {
        image.entries.insert(format!("{BIN}/{name}"), Entry::Program(program));
    }
    if let Some(folder) = &args.folder {
        image.write_folder(folder)?;
        println!("{}", folder.display());
        return Ok(());
    }
    let path = args.output.clone().unwrap_or_else(|| folder().join("kni-agent.tar"));
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    image.write(&path, &args.tag)?;
    let bytes = fs::metadata(&path)?.len();
    println!("{} ({}, {} MB)", path.display(), args.tag, bytes / 1_000_000);
    Ok(())
}

/// The image without its programs. Runtimes mount onto the empty folders.
fn empty(tag: &str) -> Image {
    let folders = ["bin", "dev", "etc", "opt", "proc", "run", "sys", "var"];
    let mut entries: BTreeMap<String, Entry> = folders
        .iter()
        .map(|name| ((*name).to_owned(), Entry::Folder(0o755)))
        .collect();
    entries.insert("tmp".into(), Entry::Folder(0o1777));
    // Runtimes name network namespaces by either path.
    entries.insert("var/run".into(), Entry::Link("/run".into()));
    let label = |name: &str, value: &str| (format!("org.opencontainers.image.{name}"), value.to_owned());
    let version = tag.rsplit_once(':').map_or("", |(_, version)| version);
    Image {
        entries,
        entrypoint: vec![format!("/{BIN}/kni-agent")],
        environment: vec![format!("PATH=/{BIN}")],
        labels: [
            label("title", "kni-agent"),
            label("version", version),
            label("licenses", "Apache-2.0"),
        ]
        .into(),
    }
}

fn programs(debug: bool) -> Result<Vec<(&'static str, Vec<u8>)>> {
    if !(debug && ebpf_object().is_file()) {
        build_ebpf::build(false)?;
    }
    let mut found = Vec::new();
    for name in ["kni-agent", "knictl"] {
        found.push((name, build(name, debug)?));
    }
    let plugin = build_cni::build()?;
    found.push(("kni-cni", read_static(&plugin)?));
    Ok(found)
}

/// Links a program statically. Only the program itself is compiled otherwise than for the node: the libraries are those
/// of any other build, and the C library's kind is chosen by whoever links.
fn build(name: &str, debug: bool) -> Result<Vec<u8>> {
    let mut build = cargo();
    build.args(["rustc", "--package", name, "--bin", name]);
    if !debug {
        build.arg("--release").env("KNI_EBPF_OBJECT", ebpf_object());
    }
    build.args(["--", "-C", "target-feature=+crt-static", "-C", "strip=debuginfo"]);
    command::run(&mut build)?;
    let profile = if debug { "debug" } else { "release" };
    let program = target().join(profile).join(name);
    read_static(&program)
}

fn read_static(program: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(program).with_context(|| format!("read {}", program.display()))?;
    let interpreted = asks_for_a_linker(&bytes).with_context(|| format!("{} is no ELF file", program.display()))?;
    ensure!(!interpreted, "{} is linked dynamically", program.display());
    Ok(bytes)
}

/// Whether a 64-bit little-endian ELF file names a dynamic linker.
fn asks_for_a_linker(elf: &[u8]) -> Option<bool> {
    let number = |at: usize, length: usize| -> Option<usize> {
        let field = elf.get(at..at.checked_add(length)?)?;
        let value = field
            .iter()
            .rev()
            .fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        usize::try_from(value).ok()
    };
    elf.strip_prefix(b"\x7fELF\x02\x01")?;
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for position in 0..count {
        let kind = number(table.checked_add(position.checked_mul(size)?)?, 4)?;
        if u32::try_from(kind).ok()? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

/// The folder of images.
fn folder() -> PathBuf {
    target().join("image")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_for_this_system_asks_for_a_linker_and_text_is_no_program() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(asks_for_a_linker(&own), Some(true));
        assert_eq!(asks_for_a_linker(b"#!/bin/sh"), None);
        assert_eq!(asks_for_a_linker(own.get(..100).unwrap()), None);
    }

    #[test]
    fn the_image_has_what_runtimes_and_the_agent_look_for() {
        let image = empty("kni.local/kni-agent:7");
        assert_eq!(image.entries["var/run"], Entry::Link("/run".into()));
        assert_eq!(image.labels["org.opencontainers.image.version"], "7");
        for folder in ["proc", "sys", "run", "tmp", "bin"] {
            assert!(matches!(image.entries[folder], Entry::Folder(_)), "{folder}");
        }
    }
}
