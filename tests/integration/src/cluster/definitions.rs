//! Installs the custom resource definitions that agents of a cluster need.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    runtime::{conditions, wait::await_condition},
};
use serde_json::{Value, json};

use super::{objects, patience};

/// Installs the definitions of `deploy/crds` and of other projects, and the namespace of the agents, and waits until
/// their objects can be created.
pub(super) async fn install(client: &Client) -> Result<()> {
    apply(client, all()?).await?;
    let home = objects::namespace("kni-system", &json!({}));
    let params = PatchParams::apply("test").force();
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(client.clone());
    namespaces.patch("kni-system", &params, &Patch::Apply(&home)).await?;
    Ok(())
}

/// The definitions of [`install`].
pub(super) fn all() -> Result<Vec<Value>> {
    let mut all = ours()?;
    ensure!(all.len() >= 5, "deploy/crds has {} definitions only", all.len());
    all.extend(of_others());
    Ok(all)
}

/// Applies definitions and waits until their objects can be created.
pub async fn apply(client: &Client, all: Vec<Value>) -> Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
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
        let waited = tokio::time::timeout(patience(), established).await;
        waited.with_context(|| format!("{name} is not established"))??;
    }
    Ok(())
}

/// The current definitions with a new field, `spec.zzz`, in those whose specifications agents read.
pub fn later() -> Result<Vec<Value>> {
    let mut all = ours()?;
    for definition in &mut all {
        let versions = definition["spec"]["versions"].as_array_mut().context("no versions")?;
        for version in versions {
            let spec = &mut version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
            if let Some(fields) = spec.as_object_mut() {
                fields.insert("zzz".to_owned(), json!({ "type": "string" }));
            }
        }
    }
    Ok(all)
}

/// Makes these the definitions of kni.dev: others are deleted.
pub async fn replace(client: &Client, definitions: Vec<Value>) -> Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let names: Vec<&str> = definitions
        .iter()
        .filter_map(|definition| definition["metadata"]["name"].as_str())
        .collect();
    for known in api.list(&ListParams::default()).await? {
        let name = known.name_any();
        if known.spec.group == kni_api::GROUP && !names.contains(&name.as_str()) {
            api.delete(&name, &DeleteParams::default()).await?;
        }
    }
    apply(client, definitions).await
}

/// The variable with another folder of manifests: those without a defence.
const DEPLOY: &str = "KNI_DEPLOY";

/// The folder with the deployment's manifests.
pub(super) fn deploy() -> PathBuf {
    let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");
    env::var_os(DEPLOY).map_or_else(|| ours.into(), PathBuf::from)
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
    read(&deploy().join("crds"))
}

/// The definitions in the files of a folder.
fn read(folder: &Path) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
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

/// The definition of `MultiNetworkPolicy` in one version.
pub fn multi_network_policy(version: &str) -> Value {
    foreign("MultiNetworkPolicy", "multi-networkpolicies", version)
}

/// Kinds of other projects that agents read. Their content is not validated.
fn of_others() -> [Value; 2] {
    [
        foreign("NetworkAttachmentDefinition", "network-attachment-definitions", "v1"),
        multi_network_policy("v1beta1"),
    ]
}

fn foreign(kind: &str, plural: &str, version: &str) -> Value {
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
}
