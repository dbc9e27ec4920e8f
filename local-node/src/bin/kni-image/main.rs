//! Entry point of `kni-image`: writes the agent's container image around its programs, as an OCI archive or a folder.
//! `cargo xtask image` calls it.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool reports on its standard output")]

mod options;

use std::{collections::BTreeMap, fs, path::Path, process::ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Parser as _;
use kni_local_node::oci::{Entry, Image};

use crate::options::Args;

/// Where the programs are inside the image.
const BIN: &str = "bin";
/// Type of the program header that names a dynamic linker.
const PT_INTERP: u32 = 3;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // On standard output like all other output: a log that captures one stream still ends with the reason.
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let mut image = empty(&args.tag);
    for program in &args.programs {
        let name = program.file_name().context("a program has no name")?.to_string_lossy();
        let bytes = if args.files.is_empty() {
            read_static(program)?
        } else {
            fs::read(program).with_context(|| format!("read {}", program.display()))?
        };
        image.entries.insert(format!("{BIN}/{name}"), Entry::Program(bytes));
    }
    for file in &args.files {
        add_file(&mut image, file)?;
    }
    if let Some(folder) = &args.folder {
        image.write_folder(folder)?;
        println!("{}", folder.display());
        return Ok(());
    }
    let path = args.output.as_deref().context("neither --output nor --folder")?;
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    image.write(path, &args.tag)?;
    let bytes = fs::metadata(path)?.len();
    println!("{} ({}, {} MB)", path.display(), args.tag, bytes / 1_000_000);
    Ok(())
}

/// The image without its programs. Runtimes use the empty folders as mount points.
fn empty(tag: &str) -> Image {
    let folders = ["bin", "dev", "etc", "opt", "proc", "run", "sys", "var"];
    let mut entries: BTreeMap<String, Entry> = folders
        .iter()
        .map(|name| ((*name).to_owned(), Entry::Folder(0o755)))
        .collect();
    entries.insert("tmp".into(), Entry::Folder(0o1777));
    // Runtimes refer to network namespaces by either path.
    entries.insert("var/run".into(), Entry::Link("/run".into()));
    let label = |name: &str, value: &str| (format!("org.opencontainers.image.{name}"), value.to_owned());
    let version = tag.rsplit_once(':').map_or("", |(_, version)| version);
    Image {
        entries,
        entrypoint: vec![format!("/{BIN}/kni-agent")],
        arguments: Vec::new(),
        environment: vec![format!("PATH=/{BIN}")],
        labels: [
            label("title", "kni-agent"),
            label("version", version),
            label("licenses", "Apache-2.0"),
        ]
        .into(),
    }
}

/// Adds a file of this machine under its own path, and the folders above it.
fn add_file(image: &mut Image, file: &Path) -> Result<()> {
    let path = file
        .strip_prefix("/")
        .with_context(|| format!("{} is relative", file.display()))?;
    for folder in path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()) {
        let name = folder.to_string_lossy().into_owned();
        image.entries.entry(name).or_insert(Entry::Folder(0o755));
    }
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    image
        .entries
        .insert(path.to_string_lossy().into_owned(), Entry::Program(bytes));
    Ok(())
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
