use std::{collections::BTreeMap, os::unix::fs::MetadataExt as _};

use super::*;

struct Scene {
    dir: tempfile::TempDir,
    args: CniInstallArgs,
}

fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let shim = dir.path().join("built/kni-cni");
    fs::create_dir(dir.path().join("built")).unwrap();
    fs::write(&shim, [b"ELF ".as_slice(), ABOUT, b", version 1"].concat()).unwrap();
    let args = CniInstallArgs {
        config: None,
        bin_dir: dir.path().join("opt/cni/bin"),
        conf_dir: dir.path().join("etc/cni/net.d"),
        conf_name: "10-kni.conflist".to_owned(),
        shim: Some(shim),
        socket: "/run/kni/kni.sock".into(),
        network_name: "kni".to_owned(),
        cni_state_dir: "/var/lib/kni".into(),
        log: "info".to_owned(),
    };
    Scene { dir, args }
}

impl Scene {
    /// All files below the folder, with content, mode and inode.
    fn files(&self) -> BTreeMap<PathBuf, (Vec<u8>, u32, u64)> {
        let mut files = BTreeMap::new();
        let mut folders = vec![self.dir.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let metadata = path.metadata().unwrap();
                    files.insert(
                        path.clone(),
                        (fs::read(&path).unwrap(), metadata.mode() & 0o7777, metadata.ino()),
                    );
                }
            }
        }
        files
    }

    fn conflist(&self) -> PathBuf {
        self.args.conf_dir.join("10-kni.conflist")
    }
}

#[test]
fn what_is_installed_is_whole_and_stays_when_done_again() {
    let scene = scene();
    install(&scene.args).unwrap();
    let files = scene.files();
    assert_eq!(files.len(), 3, "{files:?}");
    let (program, mode, _) = &files[&scene.args.bin_dir.join("kni-cni")];
    assert!(is_plugin(program) && *mode == 0o755);
    let (conflist, mode, _) = &files[&scene.conflist()];
    assert_eq!(*mode, 0o644);
    let read: Value = serde_json::from_slice(conflist).unwrap();
    assert_eq!((&read["cniVersion"], &read["name"]), (&json!("1.1.0"), &json!("kni")));
    let plugin = &read["plugins"][0];
    assert_eq!(plugin["type"], "kni-cni");
    assert_eq!(
        (&plugin["socket"], &plugin["stateDir"]),
        (&json!("/run/kni/kni.sock"), &json!("/var/lib/kni"))
    );
    assert_eq!(plugin["capabilities"]["io.kubernetes.cri.pod-annotations"], true);
    install(&scene.args).unwrap();
    assert_eq!(scene.files(), files, "not even an inode changes");
}

#[test]
fn a_new_version_replaces_the_old_one_by_a_new_file() {
    let mut scene = scene();
    install(&scene.args).unwrap();
    let before = scene.files();
    fs::write(scene.args.shim.as_ref().unwrap(), [ABOUT, b", version 2"].concat()).unwrap();
    scene.args.network_name = "other".to_owned();
    install(&scene.args).unwrap();
    let after = scene.files();
    for path in [scene.args.bin_dir.join("kni-cni"), scene.conflist()] {
        assert_ne!(before[&path].0, after[&path].0);
        assert_ne!(
            before[&path].2,
            after[&path].2,
            "{} was written in place",
            path.display()
        );
    }
}

#[test]
fn files_of_others_stay_as_they_are() {
    let scene = scene();
    fs::create_dir_all(&scene.args.bin_dir).unwrap();
    fs::create_dir_all(&scene.args.conf_dir).unwrap();
    fs::write(scene.args.bin_dir.join("bridge"), "ELF bridge").unwrap();
    fs::write(scene.args.conf_dir.join("05-bridge.conflist"), r#"{"name":"bridge"}"#).unwrap();
    let before = scene.files();
    install(&scene.args).unwrap();
    uninstall(&scene.args).unwrap();
    assert_eq!(scene.files(), before);
    uninstall(&scene.args).unwrap();
    assert_eq!(scene.files(), before);
}

#[test]
fn what_is_not_ours_is_neither_replaced_nor_removed() {
    for (name, content) in [
        ("conf", r#"{"name":"kni","plugins":[{"type":"kni-cni"}]}"#),
        ("conf", "not even JSON"),
        ("bin", "ELF of somebody"),
    ] {
        let scene = scene();
        let path = if name == "conf" {
            scene.conflist()
        } else {
            scene.args.bin_dir.join("kni-cni")
        };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        let before = scene.files();
        let error = install(&scene.args).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        assert_eq!(scene.files(), before);
        uninstall(&scene.args).unwrap();
        assert_eq!(scene.files(), before);
    }
}

#[test]
fn something_else_is_not_installed_as_the_plugin() {
    let scene = scene();
    fs::write(scene.args.shim.as_ref().unwrap(), "ELF of somebody").unwrap();
    let before = scene.files();
    assert!(
        install(&scene.args)
            .unwrap_err()
            .to_string()
            .contains("is not the CNI plugin")
    );
    assert_eq!(scene.files(), before);
}
