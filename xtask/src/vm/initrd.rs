//! Packs the root of the test machine: busybox, the modules, the test program with its libraries, and the eBPF object.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{cpio::Archive, kernel::Kernel, modules};
use crate::{
    command::{find, output},
    libraries,
};

/// The first process.
const INIT: &str = include_str!("init.sh");
const BUSYBOX: &str = "/bin/busybox";

/// The content of the image.
#[derive(Debug)]
pub(super) struct Content<'a> {
    /// The kernel whose modules are used.
    pub(super) kernel: &'a Kernel,
    /// Modules to load, without their dependencies.
    pub(super) modules: &'a [&'a str],
    /// The program to run, as /kni-vmtest.
    pub(super) program: &'a Path,
    /// The eBPF object, as /kni-ebpf.o.
    pub(super) object: &'a Path,
}

/// Writes the image to `path`.
pub(super) fn write(content: &Content<'_>, path: &Path) -> Result<()> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "etc", "proc", "sys", "run", "tmp", "var"] {
        archive.folder(folder)?;
    }
    // The kernel opens it for the first process, before anything is mounted.
    archive.character_device("dev/console", (5, 1))?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file(BUSYBOX, 0o755, &read(Path::new(BUSYBOX))?)?;
    archive.file("kni-ebpf.o", 0o644, &read(content.object)?)?;
    archive.file("kni-vmtest", 0o755, &read(&stripped(content.program, path)?)?)?;
    add_modules(&mut archive, content)?;
    let mut files: BTreeSet<PathBuf> = libraries::needed(content.program)?;
    files.extend(libraries::needed(Path::new(BUSYBOX))?);
    for file in files {
        let name = file
            .to_str()
            .with_context(|| format!("{} is not UTF-8", file.display()))?;
        archive.file(name, 0o755, &read(&file)?)?;
    }
    fs::write(path, archive.finish()?).with_context(|| format!("cannot write {}", path.display()))
}

fn add_modules(archive: &mut Archive, content: &Content<'_>) -> Result<()> {
    let text = |name: &str| {
        let path = content.kernel.modules.join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let order = modules::load_order(&text("modules.dep")?, &text("modules.builtin")?, content.modules)?;
    let mut list = String::new();
    for (position, module) in order.iter().enumerate() {
        let name = format!("/modules/{position}.ko");
        archive.file(&name, 0o644, &uncompressed(&content.kernel.modules.join(module))?)?;
        list.push_str(&name);
        list.push('\n');
    }
    archive.file("/modules/order", 0o644, list.as_bytes())
}

/// The content of a module; insmod of busybox loads no compressed ones.
fn uncompressed(module: &Path) -> Result<Vec<u8>> {
    if !module.to_string_lossy().ends_with(modules::COMPRESSED) {
        return read(module);
    }
    let unpacked = Command::new("xz")
        .args(["--decompress", "--stdout"])
        .arg(module)
        .output()
        .context("cannot run xz (package xz-utils)")?;
    ensure!(
        unpacked.status.success(),
        "xz cannot read {}: {}",
        module.display(),
        String::from_utf8_lossy(&unpacked.stderr).trim()
    );
    Ok(unpacked.stdout)
}

/// A copy of `program` beside the image without its debug information, which is most of it; `program` itself if strip
/// is not installed.
fn stripped(program: &Path, image: &Path) -> Result<PathBuf> {
    let Some(strip) = find("strip") else {
        return Ok(program.to_owned());
    };
    let copy = image.with_file_name("kni-vmtest");
    output(
        Command::new(strip)
            .arg("--strip-debug")
            .arg("-o")
            .arg(&copy)
            .arg(program),
    )?;
    Ok(copy)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
