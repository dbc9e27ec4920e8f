//! Starts a cluster of one node: issues its certificates, starts its parts in order, and runs kubectl.

use std::{collections::BTreeMap, io::Write as _, net::TcpStream, path::PathBuf, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};

use crate::{
    config::{self, API_SERVER},
    local::{LocalNode, Part, output},
    pki::{Pki, Subject},
};

const PATIENCE: Duration = Duration::from_mins(2);

impl LocalNode {
    /// Starts the parts of a cluster in addition to containerd, which must run, and waits until the node is registered.
    ///
    /// The node becomes ready once its runtime has a network. Returns the administrator's kubeconfig for use outside
    /// the node, where the API server is reached at `server`.
    pub fn start_cluster(&mut self, server: &str) -> Result<String> {
        let (texts, kubeconfig) = self.certificates(server)?;
        self.write_texts(&texts)?;
        self.start(Part::Etcd)?;
        self.start(Part::ApiServer)?;
        self.wait_for_api_server(PATIENCE)?;
        for part in [Part::ControllerManager, Part::Scheduler, Part::Kubelet, Part::KubeProxy] {
            self.start(part)?;
        }
        self.wait("the node is registered", PATIENCE, |node| {
            node.kubectl(&["get", "node", node.name()]).map(|_shown| true)
        })?;
        // Pods are rejected until it exists.
        self.wait("the default service account exists", PATIENCE, |node| {
            node.kubectl(&["get", "serviceaccount", "default"]).map(|_shown| true)
        })?;
        Ok(kubeconfig)
    }

    /// Waits until the API server is ready. Runs no kubectl, which uses the CPU for a tenth of a second, before the
    /// server accepts connections.
    pub(crate) fn wait_for_api_server(&mut self, patience: Duration) -> Result<()> {
        self.wait("the API server is ready", patience, |node| {
            let accepts = node
                .inside()
                .enter(|| TcpStream::connect(config::API_SERVER_SOCKET))?
                .is_ok();
            Ok(accepts && node.kubectl(&["get", "--raw", "/readyz"])? == "ok")
        })
    }

    /// Runs kubectl as the cluster's administrator and returns its standard output.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        output(self.kubectl_command().args(args))
    }

    /// The nodes, pods and warnings of the cluster, for error messages. Empty on a node without an API server.
    pub(crate) fn pods(&self) -> String {
        if !self.runs(Part::ApiServer) {
            return String::new();
        }
        let shown = [
            &["get", "nodes,pods", "-o", "wide"][..],
            &["get", "events", "--field-selector", "type=Warning"],
        ];
        let shown = shown.map(|args| {
            let limits = ["--all-namespaces", "--request-timeout=10s"];
            let answer = self.kubectl(&[args, &limits[..]].concat());
            answer.unwrap_or_else(|error| format!("{error:#}"))
        });
        format!("\n{}", shown.join("\n"))
    }

    /// A command that runs kubectl as the cluster's administrator.
    pub fn kubectl_command(&self) -> std::process::Command {
        let mut kubectl = self.command(self.programs().path("kubectl"));
        kubectl.args(["--kubeconfig", &Self::admin_kubeconfig()]);
        kubectl.env(config::COLLECTION.0, config::COLLECTION.1);
        kubectl
    }

    /// The path, inside the node, of the administrator's kubeconfig.
    pub fn admin_kubeconfig() -> String {
        config::pki("admin.conf")
    }

    /// Creates or updates objects: one, or a `List`.
    pub fn apply(&self, objects: &serde_json::Value) -> Result<()> {
        self.apply_text(&objects.to_string())
    }

    /// Creates or updates the objects of a manifest, YAML or JSON.
    pub fn apply_text(&self, manifest: &str) -> Result<()> {
        self.kubectl_with_input(&["apply", "--server-side", "-f", "-"], manifest)
            .map(drop)
    }

    /// [`Self::kubectl`] with standard input.
    pub(crate) fn kubectl_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let mut kubectl = self.kubectl_command();
        kubectl.args(args);
        kubectl
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = kubectl.spawn().context("run kubectl")?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        // A kubectl that rejects its input stops reading; its message contains the reason.
        drop(stdin.write_all(input.as_bytes()));
        drop(stdin);
        let done = child.wait_with_output().context("wait for kubectl")?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "kubectl {}: {}", args.join(" "), stderr.trim());
        String::from_utf8(done.stdout).context("kubectl does not answer in UTF-8")
    }

    /// Waits until the condition Ready of the node is `ready`.
    pub fn wait_ready(&mut self, ready: bool) -> Result<()> {
        let desired = if ready { "True" } else { "False" };
        self.wait(&format!("Ready is {desired}"), PATIENCE, |node| {
            Ok(node.ready_condition()?.starts_with(desired))
        })
    }

    /// Status, reason and message of the node's condition Ready, separated by spaces.
    pub fn ready_condition(&self) -> Result<String> {
        let path = "{range .status.conditions[?(@.type==\"Ready\")]}{.status} {.reason} {.message}{end}";
        self.kubectl(&["get", "node", self.name(), "-o", &format!("jsonpath={path}")])
    }

    /// Every file of the cluster's certificates, and the administrator's kubeconfig for `server`.
    fn certificates(&self, server: &str) -> Result<(BTreeMap<PathBuf, String>, String)> {
        let mut pki = issue_parts(Pki::new()?, &self.addresses())?;
        issue_node(&mut pki, self.name(), &self.addresses(), API_SERVER)?;
        let outside = client("outside", "admin", "system:masters");
        let kubeconfig = pki.issue_kubeconfig(&outside, server).context("kubeconfig")?;
        Ok((texts(&pki), kubeconfig))
    }
}

/// Issues the certificate of a node's kubelet and the kubeconfigs of its parts, for the API server at `server`.
pub(crate) fn issue_node(pki: &mut Pki, name: &str, addresses: &[&str], server: &str) -> Result<()> {
    let user = format!("system:node:{name}");
    let kubelet = Subject {
        file: "kubelet",
        name: &user,
        organization: "system:nodes",
        alternatives: &[&[name, "127.0.0.1"], addresses].concat(),
    };
    for subject in [kubelet, client("proxy", "system:kube-proxy", "")] {
        pki.issue_kubeconfig(&subject, server)?;
    }
    Ok(())
}

/// Issues the certificates of a control plane whose API server has `addresses`.
pub(crate) fn issue_parts(mut pki: Pki, addresses: &[&str]) -> Result<Pki> {
    let always = [
        "127.0.0.1",
        "10.96.0.1",
        "fd00:96::1",
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ];
    pki.issue(&Subject {
        file: "apiserver",
        name: "kube-apiserver",
        organization: "",
        alternatives: &[addresses, &always[..]].concat(),
    })?;
    for subject in [
        client("controller-manager", "system:kube-controller-manager", ""),
        client("scheduler", "system:kube-scheduler", ""),
        client("admin", "admin", "system:masters"),
    ] {
        pki.issue_kubeconfig(&subject, API_SERVER)?;
    }
    Ok(pki)
}

/// The files of a certificate authority, by their paths inside a node.
pub(crate) fn texts(pki: &Pki) -> BTreeMap<PathBuf, String> {
    let files = pki.files().iter();
    files
        .map(|(name, text)| (config::pki(name).into(), text.clone()))
        .collect()
}

pub(crate) fn client<'a>(file: &'a str, name: &'a str, organization: &'a str) -> Subject<'a> {
    Subject {
        file,
        name,
        organization,
        alternatives: &[],
    }
}
