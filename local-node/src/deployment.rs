//! Prepares a cluster for an agent: applies the objects of `deploy/` except the pods of the agent and of
//! kni-controller, which run as processes of the node.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{config, local::LocalNode};

const PATIENCE: Duration = Duration::from_mins(1);
/// How long the tokens of a local node are valid: 90 days.
const TOKEN_SECONDS: u32 = 90 * 24 * 3600;
/// Files of `deploy/base` apart from those of pods.
const BASE: [&str; 10] = [
    "namespace.yaml",
    "rbac.yaml",
    "controller-rbac.yaml",
    "in-use.yaml",
    "access.yaml",
    "addressblocks.yaml",
    "agent-writes.yaml",
    "controller-writes.yaml",
    "tenants.yaml",
    "egress-claims.yaml",
];

impl LocalNode {
    /// Applies the definitions, RBAC rules and the networks of the examples in the folder `deploy`.
    pub fn apply_deployment(&mut self, deploy: &Path) -> Result<()> {
        let mut objects = folder(&deploy.join("crds"))?;
        for name in BASE {
            objects.push(read(&deploy.join("base").join(name))?);
        }
        self.apply_text(&objects.join("\n---\n"))?;
        self.write_account(
            "agent",
            "kni-agent",
            &json!({ "kind": "Node", "apiVersion": "v1", "name": Self::NAME }),
        )?;
        self.write_account("controller", "kni-controller", &Value::Null)?;
        let networks = folder(&deploy.join("examples/networks"))?.join("\n---\n");
        // The API server serves a new kind some time after its definition was created.
        self.wait("the networks are created", PATIENCE, |node| {
            node.apply_text(&networks).map(|()| true)
        })
    }

    /// Writes `<file>.conf`, a kubeconfig with a token of a service account, bound to an object unless that is null.
    /// The token names the node that it is bound to, as that of the agent's pod does.
    fn write_account(&self, file: &str, account: &str, bound: &Value) -> Result<()> {
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": { "audiences": [], "boundObjectRef": bound, "expirationSeconds": TOKEN_SECONDS },
        });
        let path = format!("/api/v1/namespaces/kni-system/serviceaccounts/{account}/token");
        let answer = self.kubectl_with_input(&["create", "--raw", &path, "-f", "-"], &request.to_string())?;
        let answer: Value = serde_json::from_str(&answer).context("the answer to a TokenRequest")?;
        let token = answer
            .pointer("/status/token")
            .and_then(Value::as_str)
            .context("no token")?;
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "local", "cluster": {
                "server": config::API_SERVER, "certificate-authority": config::pki("ca.crt"),
            }}],
            "users": [{ "name": "local", "user": { "token": token } }],
            "contexts": [{ "name": "local", "context": { "cluster": "local", "user": "local" }}],
            "current-context": "local",
        });
        let path = config::pki(&format!("{file}.conf"));
        self.write_texts(&[(path.into(), kubeconfig.to_string())].into())
    }

    /// Starts the program of kni-controller, which is at `program` inside the node, with the permissions of
    /// `deploy/base`.
    pub fn start_controller(&mut self, program: &Path) -> Result<()> {
        let mut command = self.command(program);
        command.args(["--kubeconfig", &config::pki("controller.conf")]);
        self.start_as("kni-controller", command)
    }

    /// The kubeconfig of the agent, inside the node: its user has the permissions of `deploy/base`.
    pub fn agent_kubeconfig() -> String {
        config::pki("agent.conf")
    }
}

/// The manifests in a folder.
fn folder(path: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(path).with_context(|| format!("read {}", path.display()))?;
    let mut files = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()
        .with_context(|| format!("read {}", path.display()))?;
    files.sort();
    let is_manifest = |file: &Path| {
        file.extension().is_some_and(|extension| extension == "yaml")
            && file.file_name().is_some_and(|name| name != "kustomization.yaml")
    };
    files
        .iter()
        .filter(|file| is_manifest(file))
        .map(|file| read(file))
        .collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}
