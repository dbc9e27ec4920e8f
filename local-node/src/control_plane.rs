//! Runs the control plane of a cluster of several nodes, in its own namespaces.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::{
    config,
    fabric::Fabric,
    kubernetes::{client, issue_node, issue_parts, texts},
    local::{LocalNode, Part},
    node::Node,
    pki::{Pki, Subject},
    programs::Programs,
    saved,
    static_programs::StaticPrograms,
};

/// Its number on the fabric.
const NUMBER: u8 = 10;
const PATIENCE: Duration = Duration::from_mins(3);

/// What manages the nodes of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nodes {
    /// A kubelet on each, and a scheduler.
    WithKubelets,
    /// Tests: no controller checks the health of nodes, there is no scheduler, pods are created for a node and get no
    /// service account. The API server writes an audit log.
    WithoutKubelets,
}

/// etcd, kube-apiserver, kube-controller-manager, and a kube-scheduler for nodes with kubelets.
#[derive(Debug)]
pub struct ControlPlane {
    local: LocalNode,
    node: Node,
    pki: Pki,
    address: String,
    nodes: Nodes,
}

impl ControlPlane {
    /// Starts it and waits until the API server is ready. Logs go to the folder `logs`, which is emptied.
    pub fn start(
        fabric: &Fabric,
        nodes: Nodes,
        programs: &Programs,
        statics: &StaticPrograms,
        logs: &Path,
    ) -> Result<Self> {
        Self::start_with(fabric, nodes, (programs, statics), logs, None)
    }

    /// [`Self::start`] with the data and the keys that [`Self::save`] wrote into the folder `saved`.
    pub fn start_from(
        saved: &Path,
        fabric: &Fabric,
        nodes: Nodes,
        (programs, statics): (&Programs, &StaticPrograms),
        logs: &Path,
    ) -> Result<Self> {
        Self::start_with(fabric, nodes, (programs, statics), logs, Some(saved))
    }

    fn start_with(
        fabric: &Fabric,
        nodes: Nodes,
        (programs, statics): (&Programs, &StaticPrograms),
        logs: &Path,
        saved: Option<&Path>,
    ) -> Result<Self> {
        let name = "control-plane";
        let node = Node::whole_on(fabric, name, NUMBER)?;
        let local = LocalNode::named(name, &node, programs, statics, logs)?;
        let roots = match saved {
            Some(saved) => saved::restore(&node, saved)?,
            None => Pki::new()?,
        };
        let pki = issue_parts(roots, &node.addresses())?;
        local.write_texts(&texts(&pki))?;
        local.write_texts(&BTreeMap::from([(config::AUDIT_POLICY.into(), config::audit_policy())]))?;
        let [v4, _] = node.addresses().map(str::to_owned);
        let mut plane = Self {
            local,
            node,
            pki,
            address: v4,
            nodes,
        };
        plane.local.start(Part::Etcd)?;
        plane.start_api_server()?;
        plane.start_managers()?;
        Ok(plane)
    }

    /// Starts the API server, also after [`LocalNode::stop`] or [`LocalNode::kill`], and waits until it is ready.
    pub fn start_api_server(&mut self) -> Result<()> {
        match self.nodes {
            Nodes::WithKubelets => self.local.start(Part::ApiServer)?,
            Nodes::WithoutKubelets => {
                let arguments = config::api_server_without_kubelets(&self.address);
                self.local.start_with(Part::ApiServer, arguments)?;
            }
        }
        self.local.wait_for_api_server(PATIENCE)
    }

    /// Ends all processes, and writes the data and the keys into the new folder `saved`, for [`Self::start_from`].
    pub fn save(mut self, saved: &Path) -> Result<()> {
        self.local.stop(Part::ControllerManager)?;
        if self.nodes == Nodes::WithKubelets {
            self.local.stop(Part::Scheduler)?;
        }
        // It would wait for its watchers for a minute.
        self.local.kill(Part::ApiServer)?;
        self.local.stop(Part::Etcd)?;
        saved::save(&self.node, &self.pki, saved)
    }

    /// Identifies the programs and the settings with which data is made, for users of [`Self::save`].
    pub fn data_version(programs: &Programs) -> String {
        let managers = [
            config::controller_manager(),
            config::controller_manager_without_kubelets(),
        ];
        let arguments = [config::etcd(), config::api_server_without_kubelets("")];
        format!("{} {arguments:?} {managers:?}", programs.version())
    }

    fn start_managers(&mut self) -> Result<()> {
        match self.nodes {
            Nodes::WithKubelets => {
                self.local.start(Part::ControllerManager)?;
                self.local.start(Part::Scheduler)
            }
            Nodes::WithoutKubelets => self
                .local
                .start_with(Part::ControllerManager, config::controller_manager_without_kubelets()),
        }
    }

    /// A kubeconfig for `user`, a member of `group`, with the API server's address on the fabric.
    pub fn kubeconfig(&mut self, user: &str, group: &str) -> Result<String> {
        let subject = Subject {
            file: user,
            name: user,
            organization: group,
            alternatives: &[],
        };
        let server = self.server();
        self.pki.issue_kubeconfig(&subject, &server)
    }

    /// The administrator's kubeconfig for use where the API server is reached at `server`.
    pub fn outside_kubeconfig(&mut self, server: &str) -> Result<String> {
        let outside = client("outside", "admin", "system:masters");
        self.pki.issue_kubeconfig(&outside, server)
    }

    /// A kubeconfig with a token of a service account, with the API server's address on the fabric.
    pub fn token_kubeconfig(&self, token: &str) -> String {
        self.pki.token_kubeconfig(token, &self.server())
    }

    /// The certificates and kubeconfigs of a node's kubelet and kube-proxy, by their paths inside it.
    pub(crate) fn issue_for(&mut self, node: &LocalNode) -> Result<BTreeMap<PathBuf, String>> {
        let server = self.server();
        issue_node(&mut self.pki, node.name(), &node.addresses(), &server)?;
        let for_node = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name == "ca.crt" || name.starts_with("kubelet.") || name.starts_with("proxy.")
        };
        Ok(texts(&self.pki)
            .into_iter()
            .filter(|(path, _)| for_node(path))
            .collect())
    }

    /// The audit log of the API server of [`Nodes::WithoutKubelets`]: a line of JSON (`audit.k8s.io/v1`) per answered
    /// request.
    pub fn audit_log(&self) -> Result<String> {
        self.local.audit_log()
    }

    /// The part of [`Self::audit_log`] from a byte on, and where it ends: large logs are read in parts.
    pub fn audit_log_from(&self, offset: u64) -> Result<(String, u64)> {
        let read = self.node.enter(|| -> std::io::Result<Vec<u8>> {
            let mut file = fs::File::open(config::AUDIT_LOG)?;
            file.seek(SeekFrom::Start(offset))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(bytes)
        })?;
        let bytes = read.with_context(|| format!("read {}", config::AUDIT_LOG))?;
        let end = offset + u64::try_from(bytes.len())?;
        Ok((String::from_utf8(bytes).context("the audit log is not UTF-8")?, end))
    }

    /// Its processes. [`Self::start_api_server`] starts a stopped API server again.
    pub fn local(&mut self) -> &mut LocalNode {
        &mut self.local
    }

    /// Runs kubectl as the cluster's administrator and returns its standard output.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.local.kubectl(args)
    }

    /// As [`LocalNode::pods`].
    pub(crate) fn pods(&self) -> String {
        self.local.pods()
    }

    /// The namespaces of the control plane.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Names and process ids of its processes.
    pub fn processes(&self) -> impl Iterator<Item = (&str, u32)> {
        self.local.processes()
    }

    fn server(&self) -> String {
        format!("https://{}:6443", self.address)
    }
}
