//! Provides pods of manifests on the node, which the runtime knows by another UID than the API server.

use std::{fs, path::PathBuf};

use anyhow::{Result, ensure};
use kni_local_node::LocalNode;
use serde_json::json;

use super::scene::{PATIENCE, PORT, Scene, server};

/// A pod of a manifest on the node.
pub(crate) struct StaticPod {
    /// The name in the manifest, with which it answers.
    name: String,
    file: PathBuf,
    /// The name of the pod at the API server.
    pub(crate) mirror: String,
}

impl StaticPod {
    /// Writes the manifest.
    pub(crate) fn write(scene: &Scene, name: &str) -> Result<Self> {
        let file = LocalNode::static_pods().join(format!("{name}.json"));
        let manifest = server(name, &json!({})).to_string();
        scene.local().inside().enter(|| fs::write(&file, manifest))??;
        Ok(Self {
            name: name.to_owned(),
            file,
            mirror: format!("{name}-{}", scene.local().name()),
        })
    }

    /// Waits until it is ready, and has it answer a pod at each of its addresses.
    pub(crate) fn answers(&self, scene: &mut Scene, client: &str) -> Result<()> {
        let ready = "{.status.conditions[?(@.type==\"Ready\")].status}";
        scene.wait_for(&format!("pod/{}", self.mirror), ready, "True")?;
        for address in scene.addresses(&self.mirror)? {
            ensure!(scene.ask(client, &address.to_string(), PORT, "tcp")? == self.name);
        }
        Ok(())
    }

    /// Waits until its interface is reported and belongs to the mirror pod, also after the kubelet has replaced that
    /// while the static pod runs.
    pub(crate) fn is_reported(&self, scene: &mut Scene) -> Result<()> {
        let mirror = format!("pod/{}", self.mirror);
        let hash = scene.get(&mirror, r"{.metadata.annotations.kubernetes\.io/config\.mirror}")?;
        let uid = scene.get(&mirror, "{.metadata.uid}")?;
        ensure!(!hash.is_empty() && hash != uid, "the runtime sends {hash:?}");
        self.wait_for_owner(scene, &uid)?;
        scene.local().kubectl(&["delete", &mirror, "--wait=false"])?;
        let mut other = String::new();
        scene
            .machine
            .local
            .wait("the mirror pod is replaced", PATIENCE, |node| {
                other = node.kubectl(&["get", &mirror, "-o", "jsonpath={.metadata.uid}"])?;
                Ok(other != uid)
            })?;
        self.wait_for_owner(scene, &other)
    }

    /// Waits until the only interface that is reported for the pod has this owner.
    fn wait_for_owner(&self, scene: &mut Scene, uid: &str) -> Result<()> {
        let of_pod = format!("@.spec.podName==\"{}\"", self.mirror);
        let owners = format!("{{.items[?({of_pod})].metadata.ownerReferences[*].uid}}");
        scene.wait_for("podinterfaces.kni.dev", &owners, uid)
    }

    /// Removes the manifest, and waits until the API server has no pod of it.
    pub(crate) fn remove(self, scene: &mut Scene) -> Result<()> {
        scene.local().inside().enter(|| fs::remove_file(&self.file))??;
        scene.machine.local.wait("the static pod is gone", PATIENCE, |node| {
            let get = ["get", "pod", &self.mirror, "--ignore-not-found", "-o", "name"];
            Ok(node.kubectl(&get)?.is_empty())
        })
    }
}
