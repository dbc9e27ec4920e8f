//! Fetches Debian's 6.1 kernel into target/vm, without installing it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::command::{find, output, run_logged};

/// The package that depends on the newest kernel of Debian 12.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
const NAME_START: &str = "linux-image-6.1.";
const NAME_END: &str = "-cloud-amd64";

/// An unpacked kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The file to boot.
    pub(super) image: PathBuf,
    /// The folder with modules.dep.
    pub(super) modules: PathBuf,
}

/// The kernel in `folder`, fetched and unpacked there on the first call.
pub(super) fn fetch(folder: &Path) -> Result<Kernel> {
    if let Some(unpacked) = unpacked(folder)? {
        return open(&unpacked);
    }
    let log = folder.join("kernel.log");
    let package = resolve(&log)?;
    let work = folder.join("kernel.tmp");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let mut download = Command::new("apt-get");
    // The unprivileged user of apt cannot write into the folder.
    download
        .current_dir(&work)
        .args(["-o", "APT::Sandbox::User=root", "download", &package]);
    run_logged(&mut download, &log)?;
    let archive = only_entry(&work, is_wanted_archive)?;
    run_logged(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&work), &log)?;
    fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))?;
    let kernel = open(&work)?;
    let version = kernel.modules.file_name().context("a kernel without a version")?;
    // Normally done by the installation of the package.
    let depmod = find("depmod").unwrap_or_else(|| "/sbin/depmod".into());
    run_logged(Command::new(depmod).arg("-b").arg(&work).arg(version), &log)?;
    let finished = folder.join(package);
    fs::rename(&work, &finished).with_context(|| format!("cannot move {} into place", work.display()))?;
    open(&finished)
}

/// The newest kernel that an earlier run unpacked.
fn unpacked(folder: &Path) -> Result<Option<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let folders = entries
        .flatten()
        .filter(|entry| is_wanted(&entry.file_name().to_string_lossy()));
    Ok(folders.map(|entry| entry.path()).max())
}

/// The name of the package to fetch.
fn resolve(log: &Path) -> Result<String> {
    if let Some(name) = known()? {
        return Ok(name);
    }
    // A new machine has no package lists.
    run_logged(Command::new("apt-get").arg("update"), log)?;
    known()?.with_context(|| format!("no package {NAME_START}*{NAME_END} is in the sources of apt"))
}

fn known() -> Result<Option<String>> {
    let depends = output(Command::new("apt-cache").args(["depends", META_PACKAGE])).unwrap_or_default();
    if let Some(name) = newest(depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "))) {
        return Ok(Some(name));
    }
    let pattern = format!("^{NAME_START}.*{NAME_END}$");
    let found = output(Command::new("apt-cache").args(["search", "--names-only", &pattern]))?;
    Ok(newest(found.lines().filter_map(|line| line.split_whitespace().next())))
}

fn newest<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    names
        .filter(|name| is_wanted(name))
        .max_by_key(|name| numbers(name))
        .map(str::to_owned)
}

fn is_wanted(name: &str) -> bool {
    name.starts_with(NAME_START) && name.ends_with(NAME_END)
}

fn is_wanted_archive(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "deb")
}

/// All numbers in a name, to compare `6.1.0-9` with `6.1.0-56`.
fn numbers(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn open(unpacked: &Path) -> Result<Kernel> {
    let image = only_entry(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let modules = only_entry(&unpacked.join("lib/modules"), |_| true)?;
    Ok(Kernel { image, modules })
}

fn only_entry(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found: Vec<_> = entries
        .flatten()
        .filter(|entry| wanted(&entry.file_name().to_string_lossy()))
        .map(|e| e.path())
        .collect();
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (_, _) => bail!(
            "{} does not hold exactly one such file; remove its parent to fetch it anew",
            folder.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_is_found_by_number() {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
            "linux-image-6.12.1-cloud-amd64",
        ];
        assert_eq!(
            newest(names.into_iter()).as_deref(),
            Some("linux-image-6.1.0-56-cloud-amd64")
        );
        assert_eq!(newest(std::iter::empty()), None);
    }
}
