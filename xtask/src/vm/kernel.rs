//! Fetches kernels of Debian's archive into target/vm, without installing them, or takes them from the cache.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail};

use super::{
    archive::Archive,
    kept::{self, is_younger},
};
use crate::{
    command::{find, run_logged},
    progress::say,
};

const NAME_START: &str = "linux-image-";
const NAME_END: &str = "-cloud-amd64";
/// After this time the archive is asked for a newer kernel again.
const RECENT: Duration = Duration::from_hours(24);

/// A kernel that the programs must work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line {
    /// Its name in the page of results.
    pub(super) name: &'static str,
    /// Major and minor number; without them the newest of the archive.
    version: Option<[u32; 2]>,
}

/// All of them: the oldest that is supported, that of the stable release, and the newest.
pub(super) const LINES: [Line; 3] = [
    Line {
        name: "6.1",
        version: Some([6, 1]),
    },
    Line {
        name: "6.12",
        version: Some([6, 12]),
    },
    Line {
        name: "newest",
        version: None,
    },
];

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    /// The file to boot.
    pub(super) image: PathBuf,
    /// The folder with modules.dep; its name is the kernel's release.
    pub(super) modules: PathBuf,
}

impl Kernel {
    /// The release, as `uname -r` prints it.
    pub(super) fn release(&self) -> String {
        let name = self.modules.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// The kernel of that line in `folder`, fetched and unpacked there on the first call. The newest one is looked for once
/// a day; where the archive cannot be asked, the newest of an earlier day is used.
pub(super) fn fetch(line: Line, folder: &Path) -> Result<Kernel> {
    let mut here = unpacked(line, folder)?;
    if here.is_none() {
        kept::restore(line.name, folder);
        here = unpacked(line, folder)?;
    }
    if let Some(path) = &here
        && (line.version.is_some() || is_younger(path, RECENT))
    {
        return open(path);
    }
    match (from_archive(line, folder), here) {
        (Ok(kernel), _) => Ok(kernel),
        (Err(error), Some(path)) => {
            let kernel = open(&path)?;
            say(&format!(
                "no newer kernel could be fetched, using {} of an earlier run: {error:#}",
                kernel.release()
            ));
            Ok(kernel)
        }
        (Err(error), None) => Err(error.context(format!("kernel {}", line.name))),
    }
}

fn from_archive(line: Line, folder: &Path) -> Result<Kernel> {
    let log = folder.join("kernel.log");
    let archive = Archive::open(&folder.join("apt"), &log)?;
    let names = archive.kernels()?;
    let package = line.newest(names.iter().map(String::as_str)).with_context(|| {
        format!(
            "none of the {} kernels in the archive is {}",
            names.len(),
            line.described()
        )
    })?;
    let finished = folder.join(package);
    if finished.exists() {
        // Its age is that of the last answer of the archive.
        fs::File::open(&finished)
            .and_then(|file| file.set_modified(SystemTime::now()))
            .with_context(|| format!("cannot touch {}", finished.display()))?;
        return open(&finished);
    }
    let work = folder.join("kernel.tmp");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    let archives = work.join("archives");
    fs::create_dir_all(&archives).with_context(|| format!("cannot create {}", archives.display()))?;
    archive.download(package, &archives)?;
    for file in entries(&archives)? {
        run_logged(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&work), &log)?;
    }
    fs::remove_dir_all(&archives).with_context(|| format!("cannot remove {}", archives.display()))?;
    // depmod looks for /lib/modules, which later releases have below /usr.
    let [modules, below_usr] = ["lib", "usr/lib"].map(|lib| work.join(lib).join("modules"));
    if !modules.exists() {
        let folder = work.join("lib");
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        fs::rename(&below_usr, &modules).with_context(|| format!("{package} has no modules"))?;
    }
    let kernel = open(&work)?;
    // Normally done by the installation of the package.
    let depmod = find("depmod").unwrap_or_else(|| "/sbin/depmod".into());
    run_logged(Command::new(depmod).arg("-b").arg(&work).arg(kernel.release()), &log)?;
    fs::rename(&work, &finished).with_context(|| format!("cannot move {} into place", work.display()))?;
    kept::keep(line.name, &finished);
    open(&finished)
}

impl Line {
    /// The name with the highest version of this line.
    fn newest<'a>(self, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
        names.filter(|name| self.has(name)).max_by_key(|name| numbers(name))
    }

    fn has(self, name: &str) -> bool {
        let is_kernel = name.starts_with(NAME_START) && name.ends_with(NAME_END);
        let numbers = numbers(name);
        is_kernel
            && match self.version {
                Some(version) => numbers.starts_with(&version),
                // A kernel that another line has already would show nothing.
                None => LINES
                    .iter()
                    .filter_map(|line| line.version)
                    .all(|version| numbers[..] > version[..] && !numbers.starts_with(&version)),
            }
    }

    fn described(self) -> String {
        self.version.map_or_else(
            || "newer than those of the other lines".to_owned(),
            |[major, minor]| format!("{major}.{minor}"),
        )
    }
}

/// The newest kernel of that line that an earlier run unpacked.
fn unpacked(line: Line, folder: &Path) -> Result<Option<PathBuf>> {
    let names: Vec<String> = entries(folder)?
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    Ok(line
        .newest(names.iter().map(String::as_str))
        .map(|name| folder.join(name)))
}

/// All numbers in a name, to compare `6.1.0-9` with `6.1.0-56`.
fn numbers(name: &str) -> Vec<u32> {
    let version = name.strip_prefix(NAME_START).unwrap_or(name);
    let version = version.strip_suffix(NAME_END).unwrap_or(version);
    version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

fn open(unpacked: &Path) -> Result<Kernel> {
    let modules = only_entry(&unpacked.join("lib/modules"), "")?;
    // Later releases leave it to the installation to copy it to /boot.
    let beside = modules.join("vmlinuz");
    let image = if beside.is_file() {
        beside
    } else {
        only_entry(&unpacked.join("boot"), "vmlinuz-")?
    };
    Ok(Kernel { image, modules })
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

fn only_entry(folder: &Path, start: &str) -> Result<PathBuf> {
    let mut found = entries(folder)?;
    found.retain(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(start))
    });
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
    fn the_newest_kernel_of_a_line_is_found_by_number() {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
            "linux-image-6.12.9+deb13-cloud-amd64",
            "linux-image-6.12.107+deb13-cloud-amd64",
            "linux-image-6.19.14+deb13-cloud-amd64",
            "linux-image-7.2.13+deb14-cloud-amd64",
            "linux-image-7.2.13+deb14-amd64",
        ];
        let newest = LINES.map(|line| line.newest(names.into_iter()));
        assert_eq!(newest, [Some(names[1]), Some(names[4]), Some(names[6])]);
        assert_eq!(LINES[2].newest(names[..5].iter().copied()), None);
        assert_eq!(LINES[0].newest(std::iter::empty()), None);
    }
}
