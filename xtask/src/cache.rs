//! Keeps what was built outside the clone, in `$KNI_CACHE` or `~/.cache/kni`, so that a new clone need not build it.
//!
//! `KNI_COLD=1` makes every command ignore it. A file is valid only with the digest that was recorded with it.

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::workspace::home;

/// The folder: `$KNI_CACHE`, by default `~/.cache/kni`. It may be missing.
pub(crate) fn folder() -> PathBuf {
    if let Some(named) = env::var_os("KNI_CACHE") {
        return named.into();
    }
    home().join(".cache/kni")
}

/// Whether every command ignores what earlier ones have recorded.
fn is_cold() -> bool {
    env::var_os("KNI_COLD").is_some_and(|value| value == "1")
}

/// The bytes recorded as `kind` for `key`; none if there are none, or not with the recorded digest.
pub(crate) fn read(kind: &str, key: &str) -> Option<Vec<u8>> {
    if is_cold() {
        return None;
    }
    read_in(&folder(), kind, key)
}

/// Records `bytes` as `kind` for `key`, and removes what was recorded as `kind` for other keys.
pub(crate) fn write(kind: &str, key: &str, bytes: &[u8]) -> Result<()> {
    if is_cold() {
        return Ok(());
    }
    write_in(&folder(), kind, key, bytes)
}

fn read_in(folder: &Path, kind: &str, key: &str) -> Option<Vec<u8>> {
    let recorded = fs::read(folder.join(kind).join(key)).ok()?;
    let (sum, bytes) = recorded.split_at_checked(64)?;
    (digest(bytes).ok()?.as_bytes() == sum).then(|| bytes.to_vec())
}

fn write_in(folder: &Path, kind: &str, key: &str, bytes: &[u8]) -> Result<()> {
    let folder = folder.join(kind);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Atomic: another process sees all of it or nothing.
    let fresh = folder.join(format!(".{}.tmp", std::process::id()));
    let sum = digest(bytes)?;
    fs::write(&fresh, [sum.as_bytes(), bytes].concat()).with_context(|| format!("cannot write {}", fresh.display()))?;
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
        let name = entry.file_name();
        if name != *key && !name.to_string_lossy().starts_with('.') {
            // Another process may have removed it.
            fs::remove_file(entry.path()).ok();
        }
    }
    fs::rename(&fresh, folder.join(key)).with_context(|| format!("cannot move {} into place", fresh.display()))
}

/// The SHA-256 digest of `bytes` in hexadecimal digits.
pub(crate) fn digest(bytes: &[u8]) -> Result<String> {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run sha256sum")?;
    // Closed at the end of the statement, which ends the input.
    let input = child.stdin.take().context("sha256sum has no input")?;
    { input }.write_all(bytes).context("cannot write to sha256sum")?;
    let output = child.wait_with_output().context("cannot wait for sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let sum = text.split(' ').next().unwrap_or_default();
    ensure!(output.status.success() && sum.len() == 64, "sha256sum failed");
    Ok(sum.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_recorded_is_read() {
        let folder = env::temp_dir().join(format!("xtask-cache-{}", std::process::id()));
        write_in(&folder, "object", "one", b"first").unwrap();
        assert_eq!(read_in(&folder, "object", "one").as_deref(), Some(&b"first"[..]));
        assert_eq!(read_in(&folder, "object", "two"), None);
        let file = folder.join("object/one");
        let damaged = fs::read(&file).unwrap().iter().map(|byte| byte ^ 1).collect::<Vec<_>>();
        fs::write(&file, damaged).unwrap();
        assert_eq!(read_in(&folder, "object", "one"), None);
        fs::write(&file, "short").unwrap();
        assert_eq!(read_in(&folder, "object", "one"), None);
        write_in(&folder, "object", "two", b"second").unwrap();
        assert_eq!(
            fs::read_dir(folder.join("object")).unwrap().count(),
            1,
            "the older one is removed"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
