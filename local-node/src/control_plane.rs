//! Runs the control plane of a cluster of several nodes, in its own namespaces.

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};

use crate::{
    config,
    fabric::Fabric,
    kubernetes::{issue_parts, texts},
    local::{LocalNode, Part},
    node::Node,
    pki::{Pki, Subject},
    programs::Programs,
    static_programs::StaticPrograms,
};

/// Its number on the fabric.
const NUMBER: u8 = 10;
const PATIENCE: Duration = Duration::from_mins(1);

/// etcd, kube-apiserver and kube-controller-manager. No scheduler: pods are created for a node.
///
/// Nodes work without a kubelet, because no controller checks their health. Pods get no service account.
#[derive(Debug)]
pub struct ControlPlane {
    local: LocalNode,
    node: Node,
    pki: Pki,
    address: String,
}

impl ControlPlane {
    /// Starts it and waits until the API server is ready. Logs go to the folder `logs`, which is emptied.
    pub fn start(fabric: &Fabric, programs: &Programs, statics: &StaticPrograms, logs: &Path) -> Result<Self> {
        let node = Node::whole_on(fabric, "control-plane", NUMBER)?;
        let local = LocalNode::new(&node, programs, statics, logs)?;
        let [v4, v6] = Fabric::addresses(NUMBER);
        let pki = issue_parts(&[&v4, &v6])?;
        local.write_texts(&texts(&pki))?;
        local.write_texts(&BTreeMap::from([(config::AUDIT_POLICY.into(), config::audit_policy())]))?;
        let mut plane = Self {
            local,
            node,
            pki,
            address: v4,
        };
        plane.local.start(Part::Etcd)?;
        plane.start_api_server()?;
        let mut manager = plane.command(Part::ControllerManager);
        manager.args(config::shared_controller_manager());
        plane.local.start_as(Part::ControllerManager.program(), manager)?;
        Ok(plane)
    }

    /// Starts the API server, also after [`LocalNode::stop`] or [`LocalNode::kill`], and waits until it is ready.
    pub fn start_api_server(&mut self) -> Result<()> {
        let mut server = self.command(Part::ApiServer);
        server.args(config::shared_api_server(&self.address));
        self.local.start_as(Part::ApiServer.program(), server)?;
        self.local.wait("the API server is ready", PATIENCE, |local| {
            Ok(local.kubectl(&["get", "--raw", "/readyz"])? == "ok")
        })
    }

    /// A kubeconfig for `user`, a member of `group`, with the API server's address on the fabric.
    pub fn kubeconfig(&mut self, user: &str, group: &str) -> Result<String> {
        let subject = Subject {
            file: user,
            name: user,
            organization: group,
            alternatives: &[],
        };
        let server = format!("https://{}:6443", self.address);
        self.pki.issue_kubeconfig(&subject, &server)
    }

    /// A kubeconfig with a token of a service account, with the API server's address on the fabric.
    pub fn token_kubeconfig(&self, token: &str) -> String {
        let server = format!("https://{}:6443", self.address);
        self.pki.token_kubeconfig(token, &server)
    }

    /// The audit log of the API server: a line of JSON (`audit.k8s.io/v1`) per answered request.
    pub fn audit_log(&self) -> Result<String> {
        let bytes = self.node.enter(|| fs::read(config::AUDIT_LOG))?;
        let bytes = bytes.with_context(|| format!("read {}", config::AUDIT_LOG))?;
        String::from_utf8(bytes).context("the audit log is not UTF-8")
    }

    /// Its processes. [`Self::start_api_server`] starts a stopped API server again.
    pub fn local(&mut self) -> &mut LocalNode {
        &mut self.local
    }

    /// The namespaces of the control plane.
    pub fn node(&self) -> &Node {
        &self.node
    }

    fn command(&self, part: Part) -> std::process::Command {
        self.local.command(self.local.programs().path(part.program()))
    }
}
