//! Keeps what was built outside the clone, so that a new clone need not build it: in `$KNI_CACHE`, by default in
//! `$XDG_CACHE_HOME/kni` or `~/.cache/kni`. `KNI_COLD=1` makes every command ignore that folder.
//!
//! An entry is one file, whose name is its key and the digest of its content. A key identifies everything that
//! determines the content, also the compiler. No failure of the cache is one of the build: it reports and builds.

use std::{
    env,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio, id},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, ensure};

/// Maximum size of all entries together: about three versions of everything.
const LIMIT: u64 = 4_000_000_000;
/// Digits of a digest.
const DIGITS: usize = 64;
/// Unfinished files of this age have no writer any more.
const ABANDONED: Duration = Duration::from_hours(24);

/// The entries of this user.
#[derive(Debug)]
pub(crate) struct Cache {
    /// None if it is ignored.
    folder: Option<PathBuf>,
    limit: u64,
}

impl Cache {
    /// The cache of this user, or one that keeps nothing if it `is_ignored` or the environment requests that.
    pub(crate) fn open(is_ignored: bool) -> Self {
        let is_cold = is_ignored || env::var_os("KNI_COLD").is_some_and(|value| value == "1");
        Self {
            folder: if is_cold { None } else { place() },
            limit: LIMIT,
        }
    }

    /// The file kept as `kind` for `key`. One whose content is not what was kept is reported, removed and not used.
    pub(crate) fn find(&self, kind: &str, key: &str, report: &mut dyn FnMut(&str)) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?.join(kind);
        let (path, sum) = newest(&folder, key)?;
        match digest(&path) {
            Ok(found) if found == sum => {
                // The time of its last use: those that were not used for longest are removed first.
                File::open(&path)
                    .and_then(|file| file.set_modified(SystemTime::now()))
                    .ok();
                Some(path)
            }
            Ok(_) => {
                report(&format!(
                    "{} is not what was kept: removed, built again",
                    path.display()
                ));
                fs::remove_file(&path).ok();
                None
            }
            Err(error) => {
                report(&format!("{} cannot be used: {error:#}", path.display()));
                None
            }
        }
    }

    /// Copies what is kept as `kind` for `key` to `to`, atomically; returns whether it is there.
    pub(crate) fn fetch(&self, kind: &str, key: &str, to: &Path, report: &mut dyn FnMut(&str)) -> bool {
        let Some(from) = self.find(kind, key, report) else {
            return false;
        };
        let copied = write(&from, to);
        if let Err(error) = &copied {
            report(&format!("{} cannot be copied: {error:#}", from.display()));
        }
        copied.is_ok()
    }

    /// Keeps a copy of the file `from` as `kind` for `key`, and removes old entries.
    pub(crate) fn keep(&self, kind: &str, key: &str, from: &Path, report: &mut dyn FnMut(&str)) {
        let Some(folder) = &self.folder else { return };
        let kept = digest(from).and_then(|sum| write(from, &folder.join(kind).join(format!("{key}.{sum}"))));
        if let Err(error) = kept.and_then(|()| shrink(folder, self.limit)) {
            report(&format!("{kind} is built, but not kept for the next clone: {error:#}"));
        }
    }
}

/// A key: the digest of a text that names everything that determines a result.
pub(crate) fn key(text: &[u8]) -> Result<String> {
    sum(Command::new("sha256sum"), text)
}

/// None for a user without a home.
fn place() -> Option<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("KNI_CACHE")
        .or_else(|| Some(named("XDG_CACHE_HOME")?.join("kni")))
        .or_else(|| Some(named("HOME")?.join(".cache/kni")))
}

/// The entry for `key` that was used last, and the digest in its name. Two builds may have kept different contents.
fn newest(folder: &Path, key: &str) -> Option<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((of, sum)) = name.rsplit_once('.') else {
            continue;
        };
        let time = entry.metadata().and_then(|metadata| metadata.modified());
        if let Ok(time) = time
            && of == key
            && sum.len() == DIGITS
        {
            found.push((time, entry.path(), sum.to_owned()));
        }
    }
    found.into_iter().max().map(|(_, path, sum)| (path, sum))
}

/// Copies a file, with its permissions, atomically: another process sees all of it or nothing.
fn write(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let fresh = unfinished(folder);
    let written = copy(from, &fresh)
        .with_context(|| format!("cannot write {}", fresh.display()))
        .and_then(|()| fs::rename(&fresh, to).with_context(|| format!("cannot move {} into place", fresh.display())));
    if written.is_err() {
        fs::remove_file(&fresh).ok();
    }
    written
}

/// A name that no other writer uses.
fn unfinished(folder: &Path) -> PathBuf {
    folder.join(format!(".{}-{:?}.tmp", id(), thread::current().id()))
}

fn copy(from: &Path, fresh: &Path) -> io::Result<()> {
    let mut source = File::open(from)?;
    let mut file = File::create(fresh)?;
    io::copy(&mut source, &mut file)?;
    file.set_permissions(source.metadata()?.permissions())
}

/// Removes what was not used for longest, until at most `limit` bytes are left.
fn shrink(folder: &Path, limit: u64) -> Result<()> {
    let mut entries = Vec::new();
    let mut size = 0;
    for kind in list(folder)? {
        for path in if kind.is_dir() { list(&kind)? } else { Vec::new() } {
            // Another process may have removed it.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            let Ok(time) = metadata.modified() else { continue };
            if !metadata.is_file() {
                continue;
            }
            let is_unfinished = path.extension().is_some_and(|kind| kind == "tmp");
            if !is_unfinished {
                size += metadata.len();
                entries.push((time, metadata.len(), path));
            } else if time.elapsed().is_ok_and(|age| age > ABANDONED) {
                fs::remove_file(&path).ok();
            }
        }
    }
    entries.sort();
    for (_, length, path) in entries {
        if size <= limit {
            break;
        }
        fs::remove_file(&path).ok();
        size -= length;
    }
    Ok(())
}

fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    Ok(entries.flatten().map(|entry| entry.path()).collect())
}

/// The digest of a file, computed by a program: neither this crate nor `cargo xtask`, which has this module too, should
/// wait for a library to compile.
fn digest(path: &Path) -> Result<String> {
    let mut command = Command::new("sha256sum");
    command.arg("--").arg(path);
    sum(command, &[]).with_context(|| format!("digest of {}", path.display()))
}

fn sum(mut command: Command, input: &[u8]) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot run sha256sum")?;
    // Closed at the end of the statement, which ends the input.
    let pipe = child.stdin.take().context("sha256sum has no input")?;
    if !input.is_empty() {
        { pipe }.write_all(input).context("cannot write to sha256sum")?;
    }
    let output = child.wait_with_output().context("cannot wait for sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // A name with special characters is announced by a backslash.
    let sum = text.trim_start_matches('\\').split(' ').next().unwrap_or_default();
    ensure!(output.status.success() && sum.len() == DIGITS, "sha256sum failed");
    Ok(sum.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// A cache of its own with a file to keep, removed when dropped.
    struct Own {
        folder: PathBuf,
        cache: Cache,
    }

    impl Own {
        fn new(name: &str, limit: u64) -> Self {
            let folder = env::temp_dir().join(format!("kni-cache-{name}-{}", id()));
            fs::create_dir_all(&folder).unwrap();
            let cache = Cache {
                folder: Some(folder.join("cache")),
                limit,
            };
            Self { folder, cache }
        }

        /// Keeps `content` and returns the messages.
        fn keep(&self, key: &str, content: &str) -> Vec<String> {
            let from = self.folder.join(format!("built-{key}-{:?}", thread::current().id()));
            fs::write(&from, content).unwrap();
            let mut said = Vec::new();
            self.cache
                .keep("kind", key, &from, &mut |line| said.push(line.to_owned()));
            said
        }

        /// What is kept for `key`, and the messages.
        fn find(&self, key: &str) -> (Option<String>, Vec<String>) {
            let mut said = Vec::new();
            let path = self.cache.find("kind", key, &mut |line| said.push(line.to_owned()));
            (path.map(|path| fs::read_to_string(path).unwrap()), said)
        }

        fn entries(&self) -> Vec<PathBuf> {
            list(&self.folder.join("cache/kind")).unwrap()
        }
    }

    impl Drop for Own {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.folder).unwrap();
        }
    }

    #[test]
    fn a_result_is_found_by_its_own_key_only() {
        let own = Own::new("key", LIMIT);
        assert_eq!(own.find("one"), (None, vec![]));
        assert_eq!(own.keep("one", "first"), Vec::<String>::new());
        assert_eq!(own.find("one"), (Some("first".to_owned()), vec![]));
        for other in ["two", "on", "one.two", ""] {
            assert_eq!(own.find(other), (None, vec![]), "{other}");
        }
        assert_eq!(key(b"gcc 1").unwrap(), key(b"gcc 1").unwrap());
        assert_ne!(key(b"gcc 1").unwrap(), key(b"gcc 2").unwrap());
    }

    #[test]
    fn a_corrupt_entry_is_named_removed_and_can_be_kept_again() {
        let own = Own::new("corrupt", LIMIT);
        own.keep("one", "first");
        let entry = own.entries().remove(0);
        for damaged in ["First", ""] {
            fs::write(&entry, damaged).unwrap();
            let (found, said) = own.find("one");
            let expected = format!("{} is not what was kept: removed, built again", entry.display());
            assert_eq!((found, said), (None, vec![expected]));
            assert_eq!(own.find("one"), (None, vec![]));
            own.keep("one", "first");
            assert_eq!(own.find("one").0.as_deref(), Some("first"));
        }
    }

    #[test]
    fn a_program_stays_one() {
        let own = Own::new("program", LIMIT);
        let program = own.folder.join("program");
        fs::write(&program, "x").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let ignore = &mut |_: &str| {};
        own.cache.keep("kind", "program", &program, ignore);
        let to = own.folder.join("new/folder/program");
        assert!(own.cache.fetch("kind", "program", &to, ignore));
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(list(to.parent().unwrap()).unwrap(), [to], "no unfinished file stays");
    }

    #[test]
    fn two_writers_at_once_leave_whole_entries() {
        let own = Own::new("writers", LIMIT);
        let contents = ["a".repeat(300_000), "b".repeat(300_000)];
        thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| {
                    for _ in 0..10 {
                        assert_eq!(own.keep("one", content), Vec::<String>::new());
                        let (found, said) = own.find("one");
                        assert!(contents.contains(&found.unwrap()) && said.is_empty(), "{said:?}");
                    }
                });
            }
        });
        assert_eq!(own.entries().len(), 2, "one for each content");
    }

    #[test]
    fn a_full_disk_costs_the_entry_and_not_the_build() {
        let own = Own::new("full", LIMIT);
        let folder = own.folder.join("cache/kind");
        fs::create_dir_all(&folder).unwrap();
        symlink("/dev/full", unfinished(&folder)).unwrap();
        let said = own.keep("one", "first").join("\n");
        assert!(
            said.starts_with("kind is built, but not kept for the next clone: "),
            "{said}"
        );
        assert!(said.contains("No space left on device"), "{said}");
        assert_eq!(own.entries(), Vec::<PathBuf>::new());
        assert_eq!(own.keep("one", "first"), Vec::<String>::new(), "there is space again");
        assert_eq!(own.find("one").0.as_deref(), Some("first"));
    }

    #[test]
    fn what_was_not_used_for_longest_makes_room() {
        let own = Own::new("room", 10);
        let age = |name: &str, hours| {
            let (path, _) = newest(&own.folder.join("cache/kind"), name).unwrap();
            let time = SystemTime::now() - Duration::from_hours(hours);
            File::open(path).unwrap().set_modified(time).unwrap();
        };
        own.keep("one", "11111");
        own.keep("two", "22222");
        age("one", 3);
        age("two", 2);
        assert_eq!(own.find("one").0.as_deref(), Some("11111"), "and is the last one used");
        own.keep("three", "33333");
        assert_eq!(own.find("two"), (None, vec![]));
        assert!(own.find("one").0.is_some() && own.find("three").0.is_some());
    }

    #[test]
    fn an_ignored_cache_keeps_and_finds_nothing() {
        let own = Own::new("ignored", LIMIT);
        own.keep("one", "first");
        let cold = Cache::open(true);
        let mut said = Vec::new();
        cold.keep("kind", "one", &own.entries()[0], &mut |line| said.push(line.to_owned()));
        assert_eq!(cold.find("kind", "one", &mut |line| said.push(line.to_owned())), None);
        assert_eq!(said, Vec::<String>::new());
    }
}
