//! Writes kustomizations of the folder `deploy` with the settings of local nodes.

use std::{
    fs,
    path::{Component, Path},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::config::{CNI_BIN, CNI_CONF, SERVICE_RANGES};

/// The agent's image in `deploy/`, without a tag.
pub const AGENT_IMAGE: &str = "kni.local/kni-agent";

/// A kustomization, to be written into the folder `own`, of the kustomization in the folder `base`: with the agent's
/// image of this tag, and the folders in which containerd of a local node looks for CNI plugins. Both paths are
/// absolute. No node of a local cluster has the label of the control plane, so kni-controller runs on any.
pub fn deployment(own: &Path, base: &Path, tag: &str) -> Result<String> {
    let host_path = |name: &str, path: &str| json!({ "name": name, "hostPath": { "path": path } });
    let volumes = [host_path("cni-bin", CNI_BIN), host_path("cni-conf", CNI_CONF)];
    let patch = json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": { "name": "kni-agent", "namespace": "kni-system" },
        "spec": { "template": { "spec": { "volumes": volumes } } },
    });
    kustomization(own, base, tag, &[patch])
}

/// [`deployment`] of the overlay for KNI in the folder `base`, which has no folders of CNI.
pub fn kni_deployment(own: &Path, base: &Path, tag: &str) -> Result<String> {
    kustomization(own, base, tag, &[])
}

fn kustomization(own: &Path, base: &Path, tag: &str, patches: &[Value]) -> Result<String> {
    let anywhere = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": "kni-controller", "namespace": "kni-system" },
        "spec": { "template": { "spec": { "affinity": { "nodeAffinity": null } } } },
    });
    let patches: Vec<Value> = patches
        .iter()
        .chain([&anywhere])
        .map(|patch| json!({ "patch": patch.to_string() }))
        .collect();
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(own, base)?],
        "images": [{ "name": AGENT_IMAGE, "newTag": tag }],
        "patches": patches,
    });
    Ok(format!("{kustomization:#}\n"))
}

/// Copies the networks of the folder `examples` into the folder `own`, with a kustomization that lets pods of the
/// default network leave their node with the node's address, as the fabric has no routes to pods, and that names the
/// range of the cluster's Services.
pub fn networks(own: &Path, examples: &Path) -> Result<()> {
    fs::create_dir_all(own).with_context(|| format!("create {}", own.display()))?;
    let mut names = Vec::new();
    for entry in fs::read_dir(examples).with_context(|| format!("read {}", examples.display()))? {
        let example = entry?.path();
        let name = example.file_name().context("a file without a name")?;
        let copy = own.join(name);
        fs::copy(&example, &copy).with_context(|| format!("write {}", copy.display()))?;
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    let patch = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodNetwork",
        "metadata": { "name": "default" },
        "spec": {
            "egress": { "mode": "Masquerade" },
            "serviceSubnets": SERVICE_RANGES.split(',').collect::<Vec<_>>(),
        },
    });
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": names,
        "patches": [{ "patch": patch.to_string() }],
    });
    write(own, &format!("{kustomization:#}\n"))
}

/// Writes the text of a kustomization into the folder `own`.
pub(crate) fn write(own: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(own).with_context(|| format!("create {}", own.display()))?;
    let file = own.join("kustomization.yaml");
    fs::write(&file, text).with_context(|| format!("write {}", file.display()))
}

/// The way from one folder to another: kustomize refuses absolute paths.
fn relative(from: &Path, to: &Path) -> Result<String> {
    let to_root = "../".repeat(from.components().filter(|part| *part != Component::RootDir).count());
    let to = to
        .strip_prefix("/")
        .with_context(|| format!("{} is relative", to.display()))?;
    Ok(format!("{to_root}{}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_between_folders_leads_over_the_root() {
        let way = relative(Path::new("/run/kustomize/one"), Path::new("/src/deploy")).unwrap();
        assert_eq!(way, "../../../src/deploy");
    }

    #[test]
    fn networks_are_copied_and_the_default_one_masquerades_and_has_the_services() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("networks");
        let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/examples/networks");
        networks(&own, Path::new(examples)).unwrap();
        let text = fs::read_to_string(own.join("kustomization.yaml")).unwrap();
        let kustomization: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            kustomization["resources"],
            json!(["blue.yaml", "default.yaml", "red.yaml"])
        );
        assert!(own.join("default.yaml").is_file());
        assert!(text.contains("Masquerade") && text.contains("10.96.0.0/16") && text.contains("fd00:96::/112"));
    }
}
