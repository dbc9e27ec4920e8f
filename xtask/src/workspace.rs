//! Locates the repository, its target folder, and the cargo that runs this command.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    // The manifest is xtask/Cargo.toml, so its folder always has a parent.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

/// The folder of all build output, absolute.
pub(crate) fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The finished eBPF object.
pub(crate) fn ebpf_object() -> PathBuf {
    target().join("ebpf/kni-ebpf.o")
}

/// The cargo that runs this command, or the one in `PATH`.
pub(crate) fn cargo_path() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// A cargo command in the root of the repository.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(cargo_path());
    command.current_dir(root());
    clear_own_build(&mut command);
    // The build of the agent finds the object in the default folder without the variable. Setting it there would make a
    // manual build, which does not set it, compile the agent again.
    if env::var_os("CARGO_TARGET_DIR").is_some() {
        command.env("KNI_EBPF_OBJECT", ebpf_object());
    }
    if env::var_os(INCREMENTAL).is_none() && !is_incremental(&target()) {
        command.env(INCREMENTAL, "0");
    }
    command
}

/// Cargo's variable for compiling with data that makes the next compilation of the same crate faster.
const INCREMENTAL: &str = "CARGO_INCREMENTAL";

/// Whether something was compiled incrementally into `target` before, for example by `cargo build`.
///
/// Without such data the first build takes a third less time, so commands make none in a new folder. A direct
/// call of cargo makes it, and from then on all commands use and update it: with another setting they
/// would compile every crate a second time.
fn is_incremental(target: &Path) -> bool {
    // Cargo makes the folder in any case.
    fs::read_dir(target.join("debug/incremental")).is_ok_and(|mut entries| entries.next().is_some())
}

/// Removes the variables that `cargo run` set for this process, so that a nested cargo neither rebuilds nor links
/// because of them.
pub(crate) fn clear_own_build(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") || text == "LD_LIBRARY_PATH" {
            command.env_remove(name);
        }
    }
}

/// The home folder of the user.
pub(crate) fn home() -> PathBuf {
    env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from)
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    // /proc/self belongs to the effective user of the process.
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_target_folder_with_incremental_data_is_incremental() {
        let target = env::temp_dir().join(format!("xtask-workspace-{}", std::process::id()));
        assert!(!is_incremental(&target), "a fresh clone");
        let data = target.join("debug/incremental");
        fs::create_dir_all(&data).unwrap();
        assert!(!is_incremental(&target), "cargo makes the folder in any case");
        fs::create_dir(data.join("kni_agent-0123")).unwrap();
        assert!(is_incremental(&target));
        fs::remove_dir_all(&target).unwrap();
    }
}
