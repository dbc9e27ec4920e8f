//! Installs the custom resource definitions that agents of a cluster need.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
    runtime::{conditions, wait::await_condition},
};
use serde_json::{Value, json};

use super::{PATIENCE, objects};

/// Installs the definitions of `deploy/crds` and of other projects, and the namespace of the agents, and waits until
/// their objects can be created.
pub(super) async fn install(client: &Client) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut all = ours()?;
    ensure!(all.len() >= 5, "deploy/crds has {} definitions only", all.len());
    all.extend(of_others());
    let params = PatchParams::apply("test").force();
    let mut names = Vec::new();
    for definition in all {
        let name = definition["metadata"]["name"].as_str().context("a definition's name")?;
        let applied = definitions.patch(name, &params, &Patch::Apply(&definition)).await;
        applied.with_context(|| format!("definition {name}"))?;
        names.push(name.to_owned());
    }
    for name in names {
        let established = await_condition(definitions.clone(), &name, conditions::is_crd_established());
        let waited = tokio::time::timeout(PATIENCE, established).await;
        waited.with_context(|| format!("{name} is not established"))??;
    }
    let home = objects::namespace("kni-system", &json!({}));
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(client.clone());
    namespaces.patch("kni-system", &params, &Patch::Apply(&home)).await?;
    Ok(())
}

/// The folder with the deployment's manifests.
pub(super) fn deploy() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy"))
}

/// Every document of a YAML text.
pub(super) fn documents(text: &str) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for document in text.split("\n---") {
        let value: Value = serde_saphyr::from_str(document).context("YAML")?;
        if value.is_object() {
            found.push(value);
        }
    }
    Ok(found)
}

/// The objects of a manifest of the deployment, by its path below `deploy/`.
pub fn deployed(path: &str) -> Result<Vec<Value>> {
    let file = deploy().join(path);
    documents(&fs::read_to_string(&file).with_context(|| file.display().to_string())?)
}

fn ours() -> Result<Vec<Value>> {
    let folder = deploy().join("crds");
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let all = documents(&text).with_context(|| path.display().to_string())?;
        found.extend(
            all.into_iter()
                .filter(|object| object["kind"] == "CustomResourceDefinition"),
        );
    }
    Ok(found)
}

/// Kinds of other projects that agents read. Their content is not validated.
fn of_others() -> [Value; 2] {
    let definition = |kind: &str, plural: &str, version: &str| {
        json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": format!("{plural}.k8s.cni.cncf.io") },
            "spec": {
                "group": "k8s.cni.cncf.io",
                "scope": "Namespaced",
                "names": { "kind": kind, "plural": plural },
                "versions": [{
                    "name": version,
                    "served": true,
                    "storage": true,
                    "schema": { "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": true,
                    }},
                }],
            },
        })
    };
    [
        definition("NetworkAttachmentDefinition", "network-attachment-definitions", "v1"),
        definition("MultiNetworkPolicy", "multi-networkpolicies", "v1beta1"),
    ]
}
