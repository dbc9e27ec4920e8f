//! Makes the archive of a Debian root with nothing but apt, git and certificates, once.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context, Result, bail};

use crate::{
    cold,
    command::{find, output, run_logged},
    packages::{self, Purpose},
    progress::say,
};

/// Packages besides those without which Debian does not work. A clone needs git, and everything that downloads needs
/// the certificates.
const INCLUDED: &str = "--include=ca-certificates,git";

/// The archive of a root.
#[derive(Debug)]
pub(super) struct Archive {
    pub(super) path: PathBuf,
    /// The folder to remove with it, if the cache does not have it.
    temporary: Option<PathBuf>,
}

impl Drop for Archive {
    fn drop(&mut self) {
        if let Some(folder) = &self.temporary
            && let Err(error) = fs::remove_dir_all(folder)
        {
            say(&format!("cannot remove {}: {error}", folder.display()));
        }
    }
}

/// The archive of this machine's release of Debian; makes it, with its log in the folder `logs`, if the cache has none
/// or one that is not what was kept.
pub(super) fn provide(logs: &Path) -> Result<Archive> {
    let text = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let suite = suite(&text)?;
    let (cache, key) = (cold::cache(), format!("{suite}-{}", env::consts::ARCH));
    let find = || cache.find("fresh", &key, &mut |line| say(line));
    if let Some(path) = find() {
        return Ok(Archive { path, temporary: None });
    }
    install_debootstrap(logs)?;
    // An own name: several commands may make it at once. Not in this checkout, all of which is seen in the root.
    let folder = env::temp_dir().join(format!("kni-fresh-{}", process::id()));
    let made = Archive {
        path: folder.join("archive.tar"),
        temporary: Some(folder.clone()),
    };
    let base = folder.join("base");
    fs::create_dir_all(&base).with_context(|| format!("cannot create {}", base.display()))?;
    make(suite, &base, &made.path, logs).context("cannot make the archive of a root")?;
    cache.keep("fresh", &key, &made.path, &mut |line| say(line));
    Ok(find().map_or(made, |path| Archive { path, temporary: None }))
}

fn make(suite: &str, base: &Path, archive: &Path, logs: &Path) -> Result<()> {
    let mut debootstrap = Command::new("debootstrap");
    debootstrap.args(["--variant=minbase", INCLUDED, suite]).arg(base);
    run_logged(&mut debootstrap, &logs.join("debootstrap.log"))
        .with_context(|| format!("the archive of Debian's packages for {suite} cannot be reached or is incomplete"))?;
    let mut tar = Command::new("tar");
    output(tar.arg("-C").arg(base).arg("-cf").arg(archive).arg(".")).map(drop)
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
