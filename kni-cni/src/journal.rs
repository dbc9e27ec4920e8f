//! Records deletes while the agent is unreachable: a file for each, which the agent reads when it returns.

use std::{
    ffi::OsStr,
    fs::{DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::Path,
};

use kni_proto::cni::PendingDelete;

/// The kernel's suffix of the path of a running program whose file was deleted (`proc_pid_exe(5)`).
const DELETED: &[u8] = b" (deleted)";

/// Writes the file. When this returns, the file survives a crash of this process and of the machine.
///
/// A plugin that was uninstalled while it waited for the agent writes nothing: no later agent will read it, and the
/// cleanup of the node may be over.
pub(crate) fn write(state_dir: &Path, pending: &PendingDelete) -> io::Result<()> {
    if !is_installed(&std::fs::read_link("/proc/self/exe")?) {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "this plugin was uninstalled meanwhile",
        ));
    }
    let folder = PendingDelete::folder(state_dir);
    DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let file = PendingDelete::file(state_dir, &pending.sandbox());
    // Hidden until it is complete, with a unique name among processes that write the same delete.
    let unfinished = folder.join(format!(".{}-{}", std::process::id(), pending.sandbox()));
    let written = write_whole(&unfinished, pending).and_then(|()| std::fs::rename(&unfinished, &file));
    if let Err(error) = written {
        // The first error is the one to report.
        std::fs::remove_file(&unfinished).ok();
        return Err(error);
    }
    // The folders' own names may be as new as the file's.
    for folder in folder.ancestors().take(3) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

/// Whether the program, or another that replaced it, is at the path in `running`, from which this one was started.
fn is_installed(running: &Path) -> bool {
    let name = running.as_os_str().as_bytes();
    match name.strip_suffix(DELETED) {
        Some(started_from) => Path::new(OsStr::from_bytes(started_from)).exists(),
        None => true,
    }
}

fn write_whole(path: &Path, pending: &PendingDelete) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(&serde_json::to_vec(pending)?)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn pending(ifname: &str) -> PendingDelete {
        PendingDelete {
            version: PendingDelete::VERSION,
            container: "abc".into(),
            ifname: ifname.into(),
            network: "kni".into(),
            invocation: None,
        }
    }

    #[test]
    fn one_whole_file_for_each_interface() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("deep/state");
        for ifname in ["eth0", "net1", "eth0"] {
            write(&state, &pending(ifname)).unwrap();
        }
        let folder = PendingDelete::folder(&state);
        let mut names: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["abc.json", "abc:net1.json"]);
        let file = PendingDelete::file(&state, "abc:net1");
        let read: PendingDelete = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(read, pending("net1"));
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_program_is_installed_while_there_is_one_where_it_came_from() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("kni");
        assert!(is_installed(&program), "the kernel says that it is there");
        let deleted = dir.path().join("kni (deleted)");
        assert!(!is_installed(&deleted));
        std::fs::write(&program, "the next version").unwrap();
        assert!(is_installed(&deleted), "upgraded");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("file");
        std::fs::write(&state, "").unwrap();
        assert!(write(&state, &pending("eth0")).is_err());
    }
}
