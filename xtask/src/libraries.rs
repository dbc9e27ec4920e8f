//! Finds the shared libraries and the loader that a program needs at run time.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// The shared libraries and the loader that `program` requires; none for a static program.
pub(crate) fn needed(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("not a dynamic executable") {
        return Ok(BTreeSet::new());
    }
    if !output.status.success() {
        bail!("ldd {} failed: {}", program.display(), errors.trim());
    }
    parse(&text).with_context(|| format!("libraries of {}", program.display()))
}

/// Reads lines such as `libc.so.6 => /lib/libc.so.6 (0x1)` and `/lib64/ld.so (0x2)`; the kernel's own vdso has no file.
fn parse(text: &str) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for line in text.lines() {
        let (name, place) = line.split_once("=>").unwrap_or((line, line));
        let place = place.trim();
        if place.starts_with("not found") {
            bail!("{} is not on this machine", name.trim());
        }
        if place.starts_with('/') {
            files.extend(place.split(" (").next().map(PathBuf::from));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_the_loader_are_read() {
        let text = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f00)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x7f01)\n";
        let files: Vec<_> = parse(text).unwrap().into_iter().collect();
        assert_eq!(
            files,
            [
                Path::new("/lib/x86_64-linux-gnu/libc.so.6"),
                Path::new("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert!(parse("\tstatically linked\n").unwrap().is_empty());
    }

    #[test]
    fn a_missing_library_is_named() {
        assert_eq!(
            parse("\tlibx.so => not found\n").unwrap_err().to_string(),
            "libx.so is not on this machine"
        );
    }
}
