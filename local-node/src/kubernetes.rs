//! The cluster of one node: its certificates, its parts in their order, and kubectl.

use std::{collections::BTreeMap, io::Write as _, path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};

use crate::{
    config::{self, API_SERVER, NODE_NAME},
    local::{LocalNode, Part, output},
    node::{NODE_V4, NODE_V6},
    pki::{Pki, Subject},
};

const PATIENCE: Duration = Duration::from_mins(2);

impl LocalNode {
    /// Starts everything that a cluster needs beside containerd, which must run, and waits until the node is known.
    ///
    /// It gets ready once its runtime has a network. `server` is the address of the API server in the kubeconfig that
    /// is returned; inside the node any kubeconfig below [`Self::kubectl`] leads to it.
    pub fn start_cluster(&mut self, server: &str) -> Result<String> {
        let (texts, kubeconfig) = certificates(server)?;
        self.write_texts(&texts)?;
        self.start(Part::Etcd)?;
        self.start(Part::ApiServer)?;
        self.wait("the API server is ready", PATIENCE, |node| {
            Ok(node.kubectl(&["get", "--raw", "/readyz"])? == "ok")
        })?;
        for part in [Part::ControllerManager, Part::Scheduler, Part::Kubelet, Part::KubeProxy] {
            self.start(part)?;
        }
        self.wait("the node is known", PATIENCE, |node| {
            node.kubectl(&["get", "node", NODE_NAME]).map(|_shown| true)
        })?;
        // No pod is admitted before this exists.
        self.wait("the default service account is there", PATIENCE, |node| {
            node.kubectl(&["get", "serviceaccount", "default"]).map(|_shown| true)
        })?;
        Ok(kubeconfig)
    }

    /// Runs kubectl as the cluster's administrator and returns what it prints.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        output(self.kubectl_command().args(args))
    }

    /// kubectl as the cluster's administrator, for more than its output.
    pub fn kubectl_command(&self) -> std::process::Command {
        let mut kubectl = self.command(self.programs().path("kubectl"));
        kubectl.args(["--kubeconfig", &config::pki("admin.conf")]);
        kubectl
    }

    /// Creates objects, or brings those that are there to what `objects` say: one object, or a `List`.
    pub fn apply(&self, objects: &serde_json::Value) -> Result<()> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(["apply", "--server-side", "-f", "-"]);
        kubectl
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("run kubectl")?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        stdin
            .write_all(objects.to_string().as_bytes())
            .context("objects for kubectl")?;
        drop(stdin);
        let done = child.wait_with_output().context("wait for kubectl")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "kubectl apply: {}", said.trim());
        Ok(())
    }

    /// Waits until the condition Ready of the node is `ready`.
    pub fn wait_ready(&mut self, ready: bool) -> Result<()> {
        let wanted = if ready { "True" } else { "False" };
        self.wait(&format!("Ready is {wanted}"), PATIENCE, |node| {
            Ok(node.ready_condition()?.starts_with(wanted))
        })
    }

    /// Status, reason and message of the node's condition Ready, separated by spaces.
    pub fn ready_condition(&self) -> Result<String> {
        let path = "{range .status.conditions[?(@.type==\"Ready\")]}{.status} {.reason} {.message}{end}";
        self.kubectl(&["get", "node", NODE_NAME, "-o", &format!("jsonpath={path}")])
    }
}

/// Every file of the cluster's certificates, and the administrator's kubeconfig for `server`.
fn certificates(server: &str) -> Result<(BTreeMap<PathBuf, String>, String)> {
    let mut pki = issue_parts(&[NODE_V4, NODE_V6])?;
    let user = format!("system:node:{NODE_NAME}");
    pki.issue_kubeconfig(
        &Subject {
            file: "kubelet",
            name: &user,
            organization: "system:nodes",
            alternatives: &[NODE_NAME, NODE_V4, NODE_V6, "127.0.0.1"],
        },
        API_SERVER,
    )?;
    let outside = client("outside", "admin", "system:masters");
    let kubeconfig = pki.issue_kubeconfig(&outside, server).context("kubeconfig")?;
    Ok((texts(&pki), kubeconfig))
}

/// A fresh authority that has issued what the parts of a control plane need; its API server has `addresses`.
pub(crate) fn issue_parts(addresses: &[&str]) -> Result<Pki> {
    let mut pki = Pki::new()?;
    let always = ["127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"];
    pki.issue(&Subject {
        file: "apiserver",
        name: "kube-apiserver",
        organization: "",
        alternatives: &[addresses, &always[..]].concat(),
    })?;
    for subject in [
        client("controller-manager", "system:kube-controller-manager", ""),
        client("scheduler", "system:kube-scheduler", ""),
        client("proxy", "system:kube-proxy", ""),
        client("admin", "admin", "system:masters"),
    ] {
        pki.issue_kubeconfig(&subject, API_SERVER)?;
    }
    Ok(pki)
}

/// The files of an authority, by their paths inside a node.
pub(crate) fn texts(pki: &Pki) -> BTreeMap<PathBuf, String> {
    let files = pki.files().iter();
    files
        .map(|(name, text)| (config::pki(name).into(), text.clone()))
        .collect()
}

fn client<'a>(file: &'a str, name: &'a str, organization: &'a str) -> Subject<'a> {
    Subject {
        file,
        name,
        organization,
        alternatives: &[],
    }
}
