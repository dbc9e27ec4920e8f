//! Grants the groups of the agents and of kni-controller the permissions that the deployment grants to their service
//! accounts.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    controller,
    definitions::{deploy, documents},
    member::AGENTS,
};

/// Applies the deployment's roles and binds them to the groups.
pub(super) async fn grant(client: &Client) -> Result<()> {
    let (cluster, local): (Vec<Value>, Vec<Value>) =
        roles()?.into_iter().partition(|role| role["kind"] == "ClusterRole");
    ensure!(!cluster.is_empty(), "the deployment has no ClusterRole");
    let params = PatchParams::apply("test").force();
    let binding = |kind: &str, role: &Value| {
        // A role has the name of its service account.
        let group = if role["metadata"]["name"] == "kni-controller" {
            controller::GROUP
        } else {
            AGENTS
        };
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": format!("{kind}Binding"),
            "metadata": { "name": role["metadata"]["name"] },
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": kind,
                "name": role["metadata"]["name"],
            },
            "subjects": [{ "kind": "Group", "name": group, "apiGroup": "rbac.authorization.k8s.io" }],
        })
    };
    for role in &cluster {
        let name = name(role)?;
        let roles: Api<ClusterRole> = Api::all(client.clone());
        roles.patch(name, &params, &Patch::Apply(role)).await.context("role")?;
        let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
        let bound = Patch::Apply(binding("ClusterRole", role));
        bindings.patch(name, &params, &bound).await.context("binding")?;
    }
    for role in &local {
        let name = name(role)?;
        let roles: Api<Role> = Api::namespaced(client.clone(), "kni-system");
        roles.patch(name, &params, &Patch::Apply(role)).await.context("role")?;
        let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), "kni-system");
        let bound = Patch::Apply(binding("Role", role));
        bindings.patch(name, &params, &bound).await.context("binding")?;
    }
    Ok(())
}

fn name(role: &Value) -> Result<&str> {
    role["metadata"]["name"].as_str().context("a role's name")
}

/// Every role of the deployment's base.
fn roles() -> Result<Vec<Value>> {
    let mut files = Vec::new();
    yaml_files(&deploy().join("base"), &mut files)?;
    let mut found = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let all = documents(&text).with_context(|| path.display().to_string())?;
        let is_role = |object: &Value| object["kind"] == "ClusterRole" || object["kind"] == "Role";
        found.extend(all.into_iter().filter(is_role));
    }
    Ok(found)
}

fn yaml_files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            yaml_files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            found.push(path);
        }
    }
    Ok(())
}
