//! Prepares a cluster for an agent: applies the objects of `deploy/` except the pods of the agent and of
//! kni-controller, which run as processes of the node.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};

use crate::{config, local::LocalNode};

const PATIENCE: Duration = Duration::from_mins(1);
/// Files of `deploy/base` apart from those of pods.
const BASE: [&str; 5] = [
    "namespace.yaml",
    "rbac.yaml",
    "controller-rbac.yaml",
    "in-use.yaml",
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
        let networks = folder(&deploy.join("examples/networks"))?.join("\n---\n");
        // The API server serves a new kind some time after its definition was created.
        self.wait("the networks are created", PATIENCE, |node| {
            node.apply_text(&networks).map(|()| true)
        })
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
