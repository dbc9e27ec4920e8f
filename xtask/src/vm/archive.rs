//! Asks Debian's archive for kernels of any release, with apt lists of its own beside those of the machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::command::{output, run_logged};

/// The releases that are looked at, from the oldest kernel to the newest. One that does not exist (any more) is
/// skipped.
const SUITES: [&str; 4] = ["bookworm", "trixie", "trixie-backports", "unstable"];
/// The keys of the archive, also those of releases after the machine's own.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// A search pattern for the packages with kernels for virtual machines.
const PATTERN: &str = "^linux-image-[0-9].*-cloud-amd64$";
/// Lists of this age are fetched again.
const STALE: Duration = Duration::from_hours(24);

/// The archive, as this machine's sources of apt name it.
#[derive(Debug)]
pub(super) struct Archive {
    /// The folder of its lists.
    folder: PathBuf,
    log: PathBuf,
}

impl Archive {
    /// Prepares lists in `folder` and fetches them if they are missing or old.
    pub(super) fn open(folder: &Path, log: &Path) -> Result<Self> {
        let archive = Self {
            folder: folder.to_owned(),
            log: log.to_owned(),
        };
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let mark = folder.join("updated");
        let age = fs::metadata(&mark)
            .and_then(|mark| mark.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if age.is_none_or(|age| age > STALE) {
            let sources = archive.sources();
            fs::write(&sources, lines(&mirror()?)).with_context(|| format!("cannot write {}", sources.display()))?;
            run_logged(archive.apt("apt-get").arg("update"), log).context("cannot fetch the lists of the archive")?;
            fs::write(&mark, "").with_context(|| format!("cannot write {}", mark.display()))?;
        }
        Ok(archive)
    }

    /// All packages with kernels for virtual machines.
    pub(super) fn kernels(&self) -> Result<Vec<String>> {
        let found = output(self.apt("apt-cache").args(["search", "--names-only", PATTERN]))?;
        let names = found.lines().filter_map(|line| line.split_whitespace().next());
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads the package, and those that a newer release has divided it into, to `folder`.
    pub(super) fn download(&self, image: &str, folder: &Path) -> Result<()> {
        let parts = output(self.apt("apt-cache").args(["depends", image]))?;
        let mut download = self.apt("apt-get");
        download.current_dir(folder).args(["download", image]);
        download.args(parts.lines().filter_map(divided));
        run_logged(&mut download, &self.log)
    }

    fn sources(&self) -> PathBuf {
        self.folder.join("sources.list")
    }

    /// A command of apt that uses these lists only.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, value) in [
            ("Dir::Etc::sourcelist", self.sources()),
            ("Dir::Etc::sourceparts", "-".into()),
            ("Dir::State::lists", self.folder.join("lists")),
            ("Dir::State::status", "/dev/null".into()),
            ("Dir::Cache", self.folder.join("cache")),
        ] {
            command.arg("-o").arg(format!("{name}={}", value.display()));
        }
        command.args(["-o", "Acquire::Languages=none", "-o", "Acquire::Retries=3"]);
        // Descriptions for software catalogues, which are as large as the lists of packages.
        command.args(["-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false"]);
        // The unprivileged user of apt cannot write into the folders.
        command.args(["-o", "APT::Sandbox::User=root"]);
        command
    }
}

/// The part of a kernel's package that a line of `apt-cache depends` names.
fn divided(line: &str) -> Option<&str> {
    let name = line.trim().strip_prefix("Depends: ")?;
    ["linux-base-", "linux-binary-", "linux-modules-"]
        .iter()
        .any(|part| name.starts_with(part))
        .then_some(name)
}

/// The address of the archive in the machine's own sources.
fn mirror() -> Result<String> {
    let listed = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
        "Origin: Debian",
        "Label: Debian",
        "Component: main",
    ]))?;
    match listed.lines().next() {
        Some(address) => Ok(address.to_owned()),
        None => bail!("the sources of apt name no archive of Debian; `apt-get update` has to succeed first"),
    }
}

fn lines(mirror: &str) -> String {
    let line = |suite: &str| format!("deb [arch=amd64 signed-by={KEYS}] {mirror} {suite} main\n");
    SUITES.map(line).concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_divided_package_are_found() {
        assert_eq!(divided("  Depends: linux-modules-7.2.13"), Some("linux-modules-7.2.13"));
        assert_eq!(divided("  Depends: linux-binary-7.2.13"), Some("linux-binary-7.2.13"));
        assert_eq!(divided("  Depends: kmod"), None);
        assert_eq!(divided(" |Depends: dracut"), None);
        assert_eq!(divided("linux-image-7.2.13"), None);
    }

    #[test]
    fn every_release_has_one_line() {
        let text = lines("mirror:/debian");
        assert_eq!(text.lines().count(), SUITES.len());
        assert!(text.contains("] mirror:/debian trixie main\n"));
    }
}
