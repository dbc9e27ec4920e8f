//! Assembles the root with nothing in the mount namespace of this process, and runs a command in it.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    command::{output, run, run_logged},
    progress::Progress,
    workspace::{clear_own_build, home, root, target},
};

/// Where a clone lies in the root.
const CLONE: &str = "/kni";
/// Where the machine's root is until it is unmounted.
const OLD: &str = ".machine";
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Configuration of apt and what makes downloads work, copied from the machine.
const COPIED: [&str; 8] = [
    "/etc/apt",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/ssl",
    "/usr/local/share/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/share/keyrings",
    "/usr/local/share/keyrings",
];
/// Variables with a file of certificates.
const CERTIFICATES: [&str; 4] = ["SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO"];
/// What Rust itself needs to link; a clone cannot build `cargo xtask` without.
const RUST_NEEDS: [&str; 2] = ["gcc", "libc6-dev"];

/// What the root has besides Debian.
#[derive(Debug)]
pub(super) struct Content {
    /// Go, with the caches of its modules and compilations.
    pub(super) go: bool,
    /// This checkout with what cargo has compiled; otherwise a clone of its last commit.
    pub(super) built: bool,
}

/// Assembles the root from `archive` and runs `command` in it. Never returns to the machine's root, so that this is for
/// a process in mount and process namespaces of its own.
pub(super) fn run_in(archive: &Path, content: &Content, command: &[OsString]) -> Result<()> {
    let new = archive.with_extension("root");
    fs::create_dir_all(&new).with_context(|| format!("cannot create {}", new.display()))?;
    let folder = Progress::new(1).step("Debian root", || assemble(archive, &new, content))?;
    let path = enter(&new, content)?;
    let mut inside = environment(&path);
    if !content.built {
        Progress::new(1).step("what Rust needs to link", || install(&path))?;
    }
    let (program, arguments) = command.split_first().context("no command")?;
    // Not Command::new(program): it would search with the path of this process.
    run(inside.current_dir(folder).arg(program).args(arguments))
}

/// Fills `new`; returns the folder of the command.
fn assemble(archive: &Path, new: &Path, content: &Content) -> Result<PathBuf> {
    mount(&["-t", "tmpfs", "-o", "size=80%,mode=755", "tmpfs"], new)?;
    output(Command::new("tar").arg("-C").arg(new).arg("-xf").arg(archive))?;
    mount(&["-t", "proc", "proc"], &inside(new, Path::new("/proc")))?;
    for shared in ["/sys", "/dev"] {
        mount(&["--rbind", shared], &inside(new, Path::new(shared)))?;
    }
    let sources = inside(new, Path::new("/etc/apt"));
    fs::remove_dir_all(&sources).with_context(|| format!("cannot remove {}", sources.display()))?;
    for copied in COPIED.map(PathBuf::from).into_iter().chain(named_certificates()) {
        copy(&copied, new)?;
    }
    for folder in rust_folders() {
        bind(&folder, new)?;
    }
    if content.go {
        for folder in go_folders()? {
            bind(&folder, new)?;
        }
    }
    if !content.built {
        let clone = inside(new, Path::new(CLONE));
        output(git().arg("clone").arg("--quiet").arg(root()).arg(clone))?;
        return Ok(CLONE.into());
    }
    bind(root(), new)?;
    let target = target();
    if !target.starts_with(root()) {
        bind(&target, new)?;
    }
    // Only what cargo has compiled: bpf-linker and the programs of a node show which packages they need.
    let tools = target.join("tools");
    fs::create_dir_all(&tools).with_context(|| format!("cannot create {}", tools.display()))?;
    mount(&["-t", "tmpfs", "tmpfs"], &inside(new, &tools))?;
    Ok(root().to_owned())
}

/// Makes `new` the root of this process and hides the machine's; returns the path to search programs in.
fn enter(new: &Path, content: &Content) -> Result<OsString> {
    let mut path = vec![cargo_home().join("bin")];
    if content.go {
        path.push(go_value("GOROOT")?.join("bin"));
    }
    path.extend(env::split_paths(SYSTEM_PATH));
    let path = env::join_paths(path).context("a folder of programs has a colon in its name")?;
    let old = new.join(OLD);
    fs::create_dir(&old).with_context(|| format!("cannot create {}", old.display()))?;
    output(Command::new("pivot_root").current_dir(new).args([".", OLD]))?;
    env::set_current_dir("/").context("cannot enter the new root")?;
    let old = Path::new("/").join(OLD);
    output(Command::new("/usr/bin/umount").arg("--lazy").arg(&old))?;
    fs::remove_dir(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    Ok(path)
}

/// `env`, with the variables of a command in the root; the command follows.
fn environment(path: &OsString) -> Command {
    let mut command = Command::new("/usr/bin/env");
    clear_own_build(&mut command);
    command
        .env("PATH", path)
        // The checkout may belong to another user.
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "safe.directory")
        .env("GIT_CONFIG_VALUE_0", "*")
        // The machine's cache is not in the root.
        .env_remove("KNI_CACHE")
        .env_remove("TMPDIR");
    // The cargo and the rustc that called this command; the command calls its own.
    for own in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUST_RECURSION_COUNT"] {
        command.env_remove(own);
    }
    command
}

fn install(path: &OsString) -> Result<()> {
    let log = Path::new("/var/log/fresh.log");
    run_logged(environment(path).args(["apt-get", "update"]), log)?;
    let mut install = environment(path);
    install.args(["apt-get", "install", "--yes", "--no-install-recommends"]);
    run_logged(install.env("DEBIAN_FRONTEND", "noninteractive").args(RUST_NEEDS), log)
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.args(["-c", "safe.directory=*"]);
    git
}

/// The place of the absolute `path` below the new root.
fn inside(new: &Path, path: &Path) -> PathBuf {
    new.join(path.strip_prefix("/").unwrap_or(path))
}

fn mount(arguments: &[&str], at: &Path) -> Result<()> {
    output(Command::new("mount").args(arguments).arg(at)).map(drop)
}

/// Shows a folder of the machine at the same path.
fn bind(folder: &Path, new: &Path) -> Result<()> {
    if !folder.is_dir() {
        bail!("{} is missing", folder.display());
    }
    let at = inside(new, folder);
    fs::create_dir_all(&at).with_context(|| format!("cannot create {}", at.display()))?;
    output(Command::new("mount").arg("--rbind").arg(folder).arg(&at)).map(drop)
}

/// Copies a file, or the content of a folder, to the same path; what the machine does not have stays as it is.
fn copy(path: &Path, new: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let at = inside(new, path);
    let above = at.parent().unwrap_or(new);
    fs::create_dir_all(above).with_context(|| format!("cannot create {}", above.display()))?;
    if path.is_file() {
        // Symbolic links are followed: their targets are not in the root.
        return fs::copy(path, &at)
            .map(drop)
            .with_context(|| format!("cannot copy {}", path.display()));
    }
    output(Command::new("cp").args(["-a", "-T"]).arg(path).arg(&at)).map(drop)
}

fn named_certificates() -> impl Iterator<Item = PathBuf> {
    let named = CERTIFICATES.into_iter().filter_map(env::var_os).map(PathBuf::from);
    named.filter(|file| file.is_absolute() && file.is_file())
}

fn cargo_home() -> PathBuf {
    env::var_os("CARGO_HOME").map_or_else(|| home().join(".cargo"), PathBuf::from)
}

fn rust_folders() -> [PathBuf; 2] {
    let rustup = env::var_os("RUSTUP_HOME").map_or_else(|| home().join(".rustup"), PathBuf::from);
    [rustup, cargo_home()]
}

/// Go, its caches and its settings.
fn go_folders() -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for name in ["GOROOT", "GOMODCACHE", "GOCACHE"] {
        let folder = go_value(name)?;
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        folders.push(folder);
    }
    let settings = go_value("GOENV")?;
    folders.extend(settings.parent().filter(|folder| folder.is_dir()).map(Path::to_owned));
    Ok(folders)
}

fn go_value(name: &str) -> Result<PathBuf> {
    let value = output(Command::new("go").args(["env", name])).context("--go needs Go on this machine")?;
    Ok(value.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_its_place_below_the_root() {
        assert_eq!(
            inside(Path::new("/new"), Path::new("/root/.cargo")),
            Path::new("/new/root/.cargo")
        );
    }

    #[test]
    fn the_root_has_what_rust_needs_but_no_other_package_of_the_table() {
        for name in RUST_NEEDS {
            assert!(crate::packages::PACKAGES.iter().any(|package| package.name == name));
        }
    }

    #[test]
    fn files_keep_their_path_and_folders_their_content() {
        let folder = env::temp_dir().join(format!("xtask-root-{}", std::process::id()));
        let (machine, new) = (folder.join("machine"), folder.join("new"));
        fs::create_dir_all(machine.join("apt")).unwrap();
        fs::write(machine.join("apt/sources"), "a").unwrap();
        std::os::unix::fs::symlink(machine.join("apt/sources"), machine.join("link")).unwrap();
        for copied in ["apt", "link", "missing"] {
            copy(&machine.join(copied), &new).unwrap();
        }
        let there = inside(&new, &machine);
        assert_eq!(fs::read_to_string(there.join("apt/sources")).unwrap(), "a");
        assert!(fs::symlink_metadata(there.join("link")).unwrap().is_file());
        assert!(!there.join("missing").exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
