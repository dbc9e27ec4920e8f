//! Tests named namespaces: created, recognised, removed; other files are not changed.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    time::{Duration, Instant},
};

use nix::{sys::stat::Mode, unistd::mkfifo};

use super::{netns_path, on_node};
use crate::{Error, Existing, Netlink, Netns, netns};

#[test]
fn are_created_and_removed_twice() {
    on_node("are_created_and_removed_twice", async || {
        let path = netns_path("a");
        // An earlier `ip netns` on this machine may have left one below the /run of this test.
        let before = folders(&fs::read_to_string("/proc/thread-self/mountinfo").unwrap()).len();
        let mut seen = Vec::new();
        for _round in 0..2 {
            let identity = netns::create(&path).await.unwrap();
            assert_eq!(netns::identity(&path).unwrap(), identity);
            assert_ne!(Netns::current().unwrap().id(), identity);
            seen.push(identity);
            let again = netns::create(&path).await.unwrap_err();
            assert!(
                matches!(
                    again,
                    Error::Exists {
                        what: Existing::File(_),
                        ..
                    }
                ),
                "{again}"
            );
            assert_eq!(
                netns::identity(&path).unwrap(),
                identity,
                "a refused creation leaves the first one alone"
            );
            assert!(netns::remove(&path).await.unwrap());
            assert!(!path.exists());
            assert!(!netns::remove(&path).await.unwrap());
        }
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let folders = folders(&mounts);
        assert_eq!(folders.len(), before + 1, "{mounts}");
        assert!(!mounts.contains("/run/netns/a"), "{mounts}");
        assert!(folders.last().unwrap().contains("shared:"), "{mounts}");
    });
}

/// The mounts of the folder of namespaces, oldest first.
fn folders(mounts: &str) -> Vec<&str> {
    mounts.lines().filter(|line| line.contains(" /run/netns ")).collect()
}

#[test]
fn a_failed_creation_leaves_nothing() {
    on_node("a_failed_creation_leaves_nothing", async || {
        fs::write("/run/file", "x").unwrap();
        let error = netns::create(Path::new("/run/file/ns")).await.unwrap_err();
        assert_eq!(error.errno(), Some(libc::EEXIST), "{error}");
        assert!(error.to_string().contains("/run/file"), "{error}");
        assert_eq!(fs::read_to_string("/run/file").unwrap(), "x");
    });
}

#[test]
fn foreign_files_are_neither_taken_nor_removed() {
    on_node("foreign_files_are_neither_taken_nor_removed", async || {
        fs::write("/run/text", "precious").unwrap();
        fs::create_dir("/run/folder").unwrap();
        mkfifo("/run/fifo", Mode::S_IRWXU).unwrap();
        symlink("/proc/self/ns/net", "/run/link").unwrap();
        let start = Instant::now();
        for path in [
            "/run/text",
            "/run/folder",
            "/run/fifo",
            "/dev/null",
            "/proc/self/ns/mnt",
        ] {
            let error = netns::open(Path::new(path)).unwrap_err();
            assert!(matches!(error, Error::NotANamespace { .. }), "{path}: {error}");
        }
        assert!(start.elapsed() < Duration::from_mins(1));
        for path in ["/run/text", "/run/folder", "/run/fifo", "/run/link", "/dev/null"] {
            let error = netns::remove(Path::new(path)).await.unwrap_err();
            assert!(matches!(error, Error::Foreign { .. }), "{path}: {error}");
            assert!(Path::new(path).exists());
        }
        let missing = netns::open(Path::new("/run/missing")).unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENOENT));
        assert!(missing.to_string().contains("/run/missing"), "{missing}");
    });
}

#[test]
fn are_opened_through_proc() {
    on_node("are_opened_through_proc", async || {
        let own = netns::open(Path::new("/proc/thread-self/ns/net")).unwrap();
        assert_eq!(own.id(), Netns::current().unwrap().id());
        let process = netns::open(Path::new("/proc/self/ns/net")).unwrap();
        assert_ne!(process.id(), own.id(), "the test thread has a namespace of its own");
    });
}

#[test]
fn code_runs_inside_and_only_there() {
    on_node("code_runs_inside_and_only_there", async || {
        let path = netns_path("inside");
        let identity = netns::create(&path).await.unwrap();
        let outside = Netns::current().unwrap().id();
        let opened = netns::open(&path).unwrap();
        let seen = opened.run(|| Netns::current().unwrap().id()).await.unwrap();
        assert_eq!(seen, identity);
        assert_eq!(Netns::current().unwrap().id(), outside);
        let panicked = opened.run(|| panic!("on purpose")).await.unwrap_err();
        assert!(matches!(panicked, Error::Ended { .. }), "{panicked}");
        // The name may be removed first: the namespace lives as long as a process has it open.
        netns::remove(&path).await.unwrap();
        let links = Netlink::in_namespace(&opened)
            .await
            .unwrap()
            .list_links()
            .await
            .unwrap();
        assert_eq!(links.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["lo"]);
        assert!(!links[0].up);
    });
}
