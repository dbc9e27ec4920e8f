//! Takes unpacked kernels from the cache, and keeps them there, so that a new clone asks Debian's archive for none.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{cold, command::output, progress::say};

const KIND: &str = "kernels";
/// A kept kernel of this age is fetched again: the archive has one with more fixes.
const OLD: Duration = Duration::from_hours(24 * 30);

/// Whether the archive was asked for what is in `path` less than `limit` ago.
pub(super) fn is_younger(path: &Path, limit: Duration) -> bool {
    let age = fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .ok()
        .and_then(|time| time.elapsed().ok());
    age.is_some_and(|age| age < limit)
}

/// Unpacks the kernel that is kept as `name`, if there is one, into `folder`. A failure costs a download.
pub(super) fn restore(name: &str, folder: &Path) {
    let Some(archive) = cold::cache().find(KIND, name, &mut |line| say(line)) else {
        return;
    };
    if let Err(error) = unpack(&archive, folder) {
        say(&format!("the kept kernel {name} cannot be used: {error:#}"));
    }
}

fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let work = empty(&folder.join("kept.tmp"))?;
    // With the time of the folder, which is that of the archive's last answer.
    output(Command::new("tar").arg("-C").arg(&work).arg("-xf").arg(archive))?;
    let mut entries = fs::read_dir(&work).with_context(|| format!("cannot list {}", work.display()))?;
    let Some(Ok(kernel)) = entries.next() else {
        bail!("{} is empty", archive.display())
    };
    let kernel = kernel.path();
    if is_younger(&kernel, OLD) {
        let finished = folder.join(kernel.file_name().context("a kernel has a name")?);
        fs::rename(&kernel, &finished).with_context(|| format!("cannot move {} into place", kernel.display()))?;
    }
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

/// Keeps the kernel that is unpacked in `unpacked` as `name`. A failure costs the next clone a download.
pub(super) fn keep(name: &str, unpacked: &Path) {
    if let Err(error) = pack(name, unpacked) {
        say(&format!("the kernel {name} is not kept for the next clone: {error:#}"));
    }
}

fn pack(key: &str, unpacked: &Path) -> Result<()> {
    let folder = unpacked.parent().context("a kernel is in a folder")?;
    let name = unpacked.file_name().context("a kernel has a name")?;
    let work = empty(&folder.join("kept.tmp"))?;
    let archive = work.join("archive");
    let mut tar = Command::new("tar");
    output(tar.arg("-C").arg(folder).arg("-cf").arg(&archive).arg(name))?;
    cold::cache().keep(KIND, key, &archive, &mut |line| say(line));
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

fn empty(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_kernel_comes_back_with_its_age_and_an_old_one_does_not() {
        let folder = std::env::temp_dir().join(format!("xtask-kept-{}", std::process::id()));
        let kernel = folder.join("linux-image-6.1.0-9-cloud-amd64");
        for (days, expected) in [(29, true), (31, false)] {
            fs::create_dir_all(kernel.join("boot")).unwrap();
            let time = SystemTime::now() - Duration::from_hours(24 * days);
            fs::File::open(&kernel).unwrap().set_modified(time).unwrap();
            let archive = folder.join("archive");
            let mut tar = Command::new("tar");
            output(
                tar.arg("-C")
                    .arg(&folder)
                    .arg("-cf")
                    .arg(&archive)
                    .arg(kernel.file_name().unwrap()),
            )
            .unwrap();
            fs::remove_dir_all(&kernel).unwrap();
            unpack(&archive, &folder).unwrap();
            assert_eq!(kernel.join("boot").is_dir(), expected, "{days}");
            assert!(!expected || !is_younger(&kernel, Duration::from_hours(24)));
            assert!(!folder.join("kept.tmp").exists());
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
