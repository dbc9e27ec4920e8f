//! Makes the archive of a Debian root with nothing but apt, git and certificates, once.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    cache,
    command::{find, output, run_logged},
    packages::{self, Purpose},
};

/// Packages besides those without which Debian does not work. A clone needs git, and everything that downloads needs
/// the certificates.
const INCLUDED: &str = "--include=ca-certificates,git";

/// The archive of this machine's release of Debian; makes it, with its log in the folder `logs`, if it is missing.
pub(super) fn provide(logs: &Path) -> Result<PathBuf> {
    let text = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let suite = suite(&text)?;
    let folder = cache::folder().join("fresh");
    let archive = folder.join(format!("{suite}-{}.tar", std::env::consts::ARCH));
    if archive.is_file() {
        return Ok(archive);
    }
    install_debootstrap(logs)?;
    // Own names: several commands may make it at once.
    let base = folder.join(format!("base-{}", std::process::id()));
    let unfinished = base.with_extension("tar");
    fs::create_dir_all(&base).with_context(|| format!("cannot create {}", base.display()))?;
    let made = make(suite, &base, &unfinished, &archive, logs);
    fs::remove_dir_all(&base).with_context(|| format!("cannot remove {}", base.display()))?;
    made.with_context(|| format!("cannot make {}", archive.display()))?;
    Ok(archive)
}

fn make(suite: &str, base: &Path, unfinished: &Path, archive: &Path, logs: &Path) -> Result<()> {
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", INCLUDED, suite]).arg(base);
    run_logged(&mut debootstrap, &logs.join("debootstrap.log"))
        .with_context(|| format!("the archive of Debian's packages for {suite} cannot be reached or is incomplete"))?;
    output(
        Command::new("tar")
            .arg("-C")
            .arg(base)
            .arg("-cf")
            .arg(unfinished)
            .arg("."),
    )?;
    fs::rename(unfinished, archive).with_context(|| format!("cannot move {} into place", unfinished.display()))
}

fn install_debootstrap(logs: &Path) -> Result<()> {
    if find("debootstrap").is_some() {
        return Ok(());
    }
    packages::install(&packages::missing(&[Purpose::Fresh]), &logs.join("packages.log"))
        .context("debootstrap is missing and cannot be installed")?;
    if find("debootstrap").is_none() {
        bail!("debootstrap is installed but not in PATH");
    }
    Ok(())
}

/// The name of the release in the text of `/etc/os-release`.
fn suite(text: &str) -> Result<&str> {
    let value = |key: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('='));
        lines
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.trim_matches('"'))
    };
    if value("ID") != Some("debian") {
        bail!("this machine does not run Debian, whose packages all commands install");
    }
    value("VERSION_CODENAME").context("/etc/os-release names no release")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_that_of_this_machine_and_only_debian_has_one() {
        let debian = "PRETTY_NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(suite(debian).unwrap(), "bookworm");
        assert!(suite("ID=fedora\nVERSION_CODENAME=\"\"\n").is_err());
        assert!(suite("ID=debian\n").is_err());
    }
}
