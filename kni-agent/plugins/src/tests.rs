//! Runs chains of real processes: shell scripts in place of plugins.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Instant};

use kni_model::provider::CniSource;
use serde_json::json;
use tempfile::TempDir;

use super::{Call, CniError, PluginOptions, Plugins, call, check, delete};

/// A node's folders, and a log that the scripts write.
struct Folders {
    root: TempDir,
    plugins: Plugins,
}

impl Folders {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for folder in ["bin", "conf"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        let plugins = Plugins::new(PluginOptions {
            bin_dirs: vec![root.path().join("none"), root.path().join("bin")],
            conf_dir: root.path().join("conf"),
            cache_dir: root.path().join("cache"),
        });
        Self { root, plugins }
    }

    fn plugin(&self, name: &str, body: &str) {
        let path = self.root.path().join("bin").join(name);
        let log = self.log_path();
        let text = format!(
            "#!/bin/sh\ninput=$(cat)\necho \"{name} $CNI_COMMAND $CNI_IFNAME [$CNI_NETNS] $input\" >> {}\n{body}\n",
            log.display()
        );
        let unfinished = path.with_extension("new");
        fs::write(&unfinished, text).unwrap();
        fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(unfinished, path).unwrap();
    }

    fn chain(&self, plugins: &[&str]) {
        let list: Vec<_> = plugins
            .iter()
            .map(|kind| json!({ "type": kind, "capabilities": { "portMappings": *kind == "second" } }))
            .collect();
        let text = json!({ "cniVersion": "1.0.0", "name": "chain", "plugins": list }).to_string();
        fs::write(self.root.path().join("conf/10-chain.conflist"), text).unwrap();
    }

    fn log_path(&self) -> PathBuf {
        self.root.path().join("log")
    }

    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.log_path()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn entry(&self) -> PathBuf {
        self.plugins.entry_path(
            &"blue".parse().unwrap(),
            &"s1".parse().unwrap(),
            &"eth0".parse().unwrap(),
        )
    }

    async fn add(&self) -> Result<super::Outcome, CniError> {
        let configuration = self.plugins.find(&CniSource::Name("chain".to_owned()))?;
        let call: Call = call::tests::call();
        self.plugins.add(&self.entry(), &configuration, &call).await
    }
}

const ANSWERS: &str =
    r#"[ $CNI_COMMAND = ADD ] && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.1.0.5/24"}]}' || true"#;

#[tokio::test]
async fn a_chain_runs_in_order_and_is_undone_in_reverse_after_its_configuration_was_deleted() {
    let folders = Folders::new();
    folders.plugin("first", ANSWERS);
    folders.plugin("second", ANSWERS);
    folders.chain(&["first", "second"]);
    let outcome = folders.add().await.unwrap();
    assert_eq!(outcome.addresses.len(), 1);
    let log = folders.log();
    assert!(log[0].starts_with("first ADD eth0 [/run/netns/x]"), "{log:?}");
    assert!(
        !log[0].contains("prevResult") && !log[0].contains("runtimeConfig"),
        "{log:?}"
    );
    assert!(
        log[1].starts_with("second ADD") && log[1].contains("prevResult"),
        "{log:?}"
    );
    assert!(
        log[1].contains(r#""hostPort":8080"#) && log[1].contains(r#""name":"chain""#),
        "{log:?}"
    );
    check(&folders.entry(), "/run/netns/x".as_ref()).await.unwrap();

    fs::remove_file(folders.root.path().join("conf/10-chain.conflist")).unwrap();
    delete(&folders.entry(), None).await.unwrap();
    let log = folders.log().split_off(2);
    assert!(
        log[0].starts_with("first CHECK") && log[1].starts_with("second CHECK"),
        "{log:?}"
    );
    assert!(
        log[2].starts_with("second DEL eth0 []") && log[2].contains("prevResult"),
        "{log:?}"
    );
    assert!(log[3].starts_with("first DEL"), "{log:?}");
    // No file is left, and a second call does nothing.
    assert_eq!(fs::read_dir(folders.root.path().join("cache")).unwrap().count(), 0);
    delete(&folders.entry(), None).await.unwrap();
    assert_eq!(folders.log().len(), 6);
}

#[tokio::test]
async fn an_error_has_code_and_details_and_can_be_undone() {
    let folders = Folders::new();
    folders.plugin("first", ANSWERS);
    let refuse =
        r#"[ $CNI_COMMAND = DEL ] || { echo '{"code":11,"msg":"not now","details":"the moon is full"}'; exit 1; }"#;
    folders.plugin("second", refuse);
    folders.chain(&["first", "second"]);
    let error = folders.add().await.unwrap_err();
    assert!(error.is_transient());
    assert_eq!(
        error.to_string(),
        "chain: plugin second: ADD: not now: the moon is full (code 11)"
    );
    assert_eq!(folders.plugins.entries().unwrap(), [folders.entry()]);
    delete(&folders.entry(), None).await.unwrap();
    assert!(folders.plugins.entries().unwrap().is_empty());
}

#[tokio::test]
async fn a_failed_undo_keeps_the_entry_and_continues_with_the_others() {
    let folders = Folders::new();
    folders.plugin("first", ANSWERS);
    folders.plugin(
        "second",
        &format!("{ANSWERS}\n[ $CNI_COMMAND != DEL ] || {{ echo broken >&2; exit 3; }}"),
    );
    folders.chain(&["first", "second"]);
    folders.add().await.unwrap();
    let error = delete(&folders.entry(), None).await.unwrap_err().to_string();
    assert!(error.contains("plugin second: DEL: exit status: 3: broken"), "{error}");
    assert!(folders.log().last().unwrap().starts_with("first DEL"));
    folders.plugin("second", "");
    delete(&folders.entry(), None).await.unwrap();
    assert!(folders.plugins.entries().unwrap().is_empty());
}

#[tokio::test]
async fn too_much_output_and_invalid_output_are_errors() {
    let folders = Folders::new();
    folders.chain(&["first"]);
    folders.plugin("first", "yes | head -c 3000000; exec sleep 60");
    let started = Instant::now();
    let error = folders.add().await.unwrap_err().to_string();
    assert!(started.elapsed().as_secs() < 20, "its process group was not killed");
    assert!(error.contains("answered more than 1048576 bytes"), "{error}");
    folders.plugin("first", "echo hello");
    let error = folders.add().await.unwrap_err().to_string();
    assert!(error.contains("plugin first: ADD: its answer is not JSON"), "{error}");
}

#[test]
fn readiness_follows_configuration_and_plugins() {
    let folders = Folders::new();
    let name = CniSource::Name("chain".to_owned());
    let found = || folders.plugins.find(&name).map_err(|error| error.to_string());
    assert!(found().unwrap_err().contains("configuration \"chain\" is not in"));
    folders.chain(&["first", "second"]);
    folders.plugin("first", "");
    let missing = found().unwrap_err();
    assert!(missing.contains("plugin second is in none of"), "{missing}");
    folders.plugin("second", "");
    let capabilities = folders.plugins.readiness(&name).unwrap();
    assert_eq!(capabilities, ["portMappings".to_owned()].into());
}
