use std::os::unix::{
    fs::{DirBuilderExt as _, PermissionsExt as _, chown, symlink},
    net::{UnixDatagram, UnixStream},
};

use tempfile::TempDir;

use super::*;

fn folder() -> TempDir {
    // Whatever the umask, which another test changes.
    let mode = fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().permissions(mode).tempdir().unwrap()
}

fn bind(paths: &[PathBuf]) -> Result<Vec<BoundSocket>, BindError> {
    super::bind(paths, &mut Vec::new())
}

/// Binds at the path and returns the refusal; an existing file must be unchanged afterwards.
fn refused(path: &Path) -> String {
    let before = fs::symlink_metadata(path)
        .map(|m| (Identity::of(&m), m.mode(), m.uid()))
        .unwrap();
    let error = bind(&[path.to_owned()]).expect_err("must be refused").to_string();
    let after = fs::symlink_metadata(path)
        .map(|m| (Identity::of(&m), m.mode(), m.uid()))
        .unwrap();
    assert_eq!(before, after, "{error}");
    assert!(
        error.contains(&path.display().to_string()),
        "{error} does not name {}",
        path.display()
    );
    error
}

fn dead_socket(path: &Path) -> Identity {
    drop(UnixListener::bind(path).unwrap());
    Identity::of(&fs::symlink_metadata(path).unwrap())
}

#[test]
fn binds_in_a_missing_folder_for_its_own_user_only() {
    let folder = folder();
    let path = folder.path().join("run/kni/kni.sock");
    let sockets = bind(&[path.clone(), path.clone()]).unwrap();
    assert_eq!(sockets.len(), 1, "the same path twice is one socket");
    let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&path), 0o600);
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    UnixStream::connect(&path).expect("somebody listens");
    drop(sockets);
    assert!(!path.exists(), "removed with the socket");
}

#[test]
fn the_mode_does_not_depend_on_the_umask() {
    // The umask belongs to the whole process; the other tests do not check the modes that it would change.
    let folder = folder();
    let path = folder.path().join("kni.sock");
    let before = nix::sys::stat::umask(Mode::empty());
    let sockets = bind(std::slice::from_ref(&path));
    nix::sys::stat::umask(before);
    let _sockets = sockets.unwrap();
    assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn refuses_files_folders_fifos_and_links_and_leaves_them() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "precious").unwrap();
    fs::create_dir(at("folder")).unwrap();
    nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
    dead_socket(&at("dead"));
    symlink(at("dead"), at("link")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    for (name, kind) in [
        ("file", "a file of uid 0"),
        ("folder", "a folder of uid 0"),
        ("fifo", "a fifo of uid 0"),
        ("link", "a symbolic link of uid 0"),
        ("dangling", "a symbolic link of uid 0"),
    ] {
        let error = refused(&at(name));
        assert!(error.contains(kind), "{error}");
    }
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "precious");
    assert!(!at("nowhere").exists(), "a dangling link was followed");
    assert!(at("dead").exists(), "a link was followed");
}

#[test]
fn replaces_the_dead_socket_of_its_own_user() {
    let folder = folder();
    let path = folder.path().join("kni.sock");
    let dead = dead_socket(&path);
    let sockets = bind(std::slice::from_ref(&path)).unwrap();
    UnixStream::connect(&path).unwrap();
    // The inode number may be used again; the connection shows that the listener is another one.
    assert_eq!(
        fs::symlink_metadata(&path).unwrap().mode() & 0o7777,
        0o600,
        "was {dead:?}"
    );
    drop(sockets);
    assert!(!path.exists());
}

#[test]
fn refuses_a_socket_on_which_somebody_serves() {
    let folder = folder();
    let path = folder.path().join("kni.sock");
    let other = UnixListener::bind(&path).unwrap();
    assert!(refused(&path).contains("another process serves on"));
    other.set_nonblocking(true).unwrap();
    other.accept().expect("it was asked");
    // A socket whose queue is full also serves.
    let busy = folder.path().join("busy.sock");
    let slow = UnixListener::bind(&busy).unwrap();
    nix::sys::socket::listen(&slow, Backlog::new(0).unwrap()).unwrap();
    let _waiting = UnixStream::connect(&busy).unwrap();
    assert!(refused(&busy).contains("another process serves on"));
}

#[test]
fn refuses_sockets_of_others_and_of_another_type() {
    let folder = folder();
    let foreign = folder.path().join("foreign.sock");
    dead_socket(&foreign);
    chown(&foreign, Some(12345), Some(12345)).unwrap();
    assert!(refused(&foreign).contains("a socket of uid 12345"));
    let datagram = folder.path().join("datagram.sock");
    let _open = UnixDatagram::bind(&datagram).unwrap();
    assert!(refused(&datagram).contains("no stream socket"));
}

#[test]
fn refuses_folders_in_which_others_could_replace_it() {
    let folder = folder();
    let make = |name: &str, mode: u32| {
        let path = folder.path().join(name);
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let open = make("open", 0o777);
    let error = bind(&[open.join("kni.sock")]).unwrap_err();
    assert!(error.to_string().contains("mode 777"), "{error}");
    let foreign = make("foreign", 0o755);
    chown(&foreign, Some(12345), None).unwrap();
    let error = bind(&[foreign.join("kni.sock")]).unwrap_err();
    assert!(error.to_string().contains("uid 12345"), "{error}");
    // Like /tmp.
    let sticky = make("sticky", 0o1777);
    bind(&[sticky.join("kni.sock")]).unwrap();
}

#[test]
fn refuses_what_is_no_path_of_a_file() {
    for path in ["", "kni.sock", "/", "/run/.."] {
        let error = bind(&[PathBuf::from(path)]).unwrap_err();
        assert!(matches!(error, BindError::NotAPath { .. }), "{path}: {error}");
    }
    let folder = folder();
    let long = folder.path().join("x".repeat(120));
    assert!(bind(&[long]).unwrap_err().to_string().contains("socket address"));
}

#[test]
fn what_is_in_the_way_of_another_socket_stops_no_first_one() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    let (first, foreign, link, last) = (path("first"), path("foreign"), path("link"), path("last"));
    dead_socket(&foreign);
    chown(&foreign, Some(12345), Some(12345)).unwrap();
    symlink("/nonexistent", &link).unwrap();
    let mut refused = Vec::new();
    let paths = [first.clone(), foreign.clone(), link.clone(), last.clone()];
    let sockets = super::bind(&paths, &mut refused).unwrap();
    assert_eq!(
        sockets.iter().map(BoundSocket::path).collect::<Vec<_>>(),
        [&first, &last]
    );
    let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].contains("a socket of uid 12345"), "{refused:?}");
    assert!(refused[1].contains("a symbolic link"), "{refused:?}");
    drop(sockets);
    assert!(foreign.exists() && link.is_symlink(), "what is another's stays");
    super::bind(&[foreign, first.clone()], &mut Vec::new()).unwrap_err();
    assert!(!first.exists(), "without the first socket there is none");
}

#[test]
fn leaves_a_file_that_took_its_place() {
    let folder = folder();
    let path = folder.path().join("kni.sock");
    let sockets = bind(std::slice::from_ref(&path)).unwrap();
    fs::rename(&path, folder.path().join("away")).unwrap();
    fs::write(&path, "somebody else's").unwrap();
    drop(sockets);
    assert_eq!(fs::read_to_string(&path).unwrap(), "somebody else's");
}
