//! Runs a node of a cluster: its namespaces, its object, its agent and its fake kubelet.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kni_local_node::{ControlPlane, Fabric};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{fake_kubelet::FakeKubelet, fault_proxy::FaultProxy, rights::pod_token};
use crate::{
    agent::{Agent, AgentOptions, KUBELET_SOCKET, Membership},
    kubelet::{Kubelet, random_hex},
    manifest::Manifest,
    node::Node,
};

/// The service account of the agents.
const ACCOUNT: &str = "kni-agent";
/// The number on the fabric before that of the first node.
const BEFORE_FIRST: usize = 10;
const KUBECONFIG: &str = "/run/node/agent.conf";

/// Options of a node.
#[derive(Debug, Clone)]
pub struct MemberOptions {
    /// Its name in the cluster. By default `node` and its number.
    pub name: Option<String>,
    /// Additional arguments for the agent. By default it prewarms no sandboxes, so that a node without pods always
    /// looks the same.
    pub args: Vec<String>,
    /// The manifests of a standalone agent: a fake kubelet of a cluster without an agent of the cluster.
    pub standalone: Option<Vec<Manifest>>,
    /// Whether a proxy with faults is between the agent and the API server.
    pub proxied: bool,
}

impl Default for MemberOptions {
    fn default() -> Self {
        Self {
            name: None,
            args: vec!["--warm-sandboxes".into(), "0".into()],
            standalone: None,
            proxied: false,
        }
    }
}

impl MemberOptions {
    /// An agent behind a proxy with faults, that ends its requests after a second.
    pub fn with_faults() -> Self {
        let mut options = Self {
            proxied: true,
            ..Self::default()
        };
        options.args.extend(["--test-api-limit", "1"].map(str::to_owned));
        options
    }
}

/// A node. The fake kubelet is dropped first, then the agent, then the node.
pub struct Member {
    /// Runs the pods that are assigned to the node.
    pub kubelet: FakeKubelet,
    /// Its agent; it can be killed and started again.
    pub agent: Agent,
    /// Its namespaces.
    pub node: Node,
    /// Its name in the cluster.
    pub name: String,
    /// The agent's user in the audit log.
    pub user: String,
    /// The proxy between the agent and the API server, if the options demand one.
    pub proxy: Option<FaultProxy>,
    /// Of the default routes, while it is without power.
    gateways: Vec<String>,
}

impl Member {
    pub(super) async fn join(
        fabric: &Fabric,
        control: &ControlPlane,
        client: &Client,
        number: usize,
        options: MemberOptions,
    ) -> Result<Self> {
        let name = options.name.clone().unwrap_or_else(|| format!("node{number}"));
        let user = format!("system:serviceaccount:kni-system:{ACCOUNT}@{name}");
        let node = Node::on(fabric, &name, u8::try_from(BEFORE_FIRST + number)?)?;
        register(client, &name, node.addresses()).await?;
        let mut kubeconfig = control.token_kubeconfig(&pod_token(client, ACCOUNT, &name).await?);
        let mut proxy = None;
        if options.proxied {
            let (started, redirected) = FaultProxy::start(&node, fabric.inside(), &kubeconfig).await?;
            (proxy, kubeconfig) = (Some(started), redirected);
        }
        node.enter(|| {
            fs::create_dir_all("/run/node")?;
            fs::write(KUBECONFIG, &kubeconfig)
        })?
        .context("write the agent's kubeconfig")?;
        let agent = Agent::start(&node, agent_options(&name, options))?;
        let kubelet = FakeKubelet::start(
            client.clone(),
            &name,
            node.addresses().map(str::to_owned),
            Kubelet::connect(&node, KUBELET_SOCKET).await?,
        );
        Ok(Self {
            kubelet,
            agent,
            node,
            name,
            user,
            proxy,
            gateways: Vec::new(),
        })
    }

    /// Writes the node's object, as a kubelet does that starts: a new one after its deletion.
    pub async fn register(&self, client: &Client) -> Result<()> {
        register(client, &self.name, self.node.addresses()).await
    }

    /// Ends everything on the node at once, as a power failure does: its link, its processes, and with them its pods,
    /// programs and memory. Who holds a pod's namespace must drop it.
    pub fn power_off(&mut self) -> Result<()> {
        self.kubelet.stop();
        for family in ["-4", "-6"] {
            let route = self.node.run("ip", &[family, "route", "show", "default"])?;
            let gateway = route.split_whitespace().nth(2).context("no default route")?;
            self.gateways.push(gateway.to_owned());
        }
        self.node.ip(&["link set uplink0 down"])?;
        self.agent.kill9()?;
        let cleaned = self.agent.cleanup()?;
        ensure!(cleaned.status.success(), "{cleaned:?}");
        self.node.run("rm", &["-rf", "/run/kni", "/run/netns"]).map(drop)
    }

    /// Starts the node again after [`Self::power_off`]: another boot, with a kubelet that starts all pods anew.
    pub fn power_on(&mut self, client: Client) -> Result<()> {
        const BOOT: &str = "/run/node/boot_id";
        let boot = format!("{}\n", random_hex(16));
        self.node.enter(|| fs::write(BOOT, boot))??;
        self.node
            .run("mount", &["--bind", BOOT, "/proc/sys/kernel/random/boot_id"])?;
        self.node.ip(&["link set uplink0 up"])?;
        // The kernel has removed the IPv6 addresses and all routes of the interface that was taken down.
        let [_, v6] = self.node.addresses();
        self.node.add_address("uplink0", &format!("{v6}/64"))?;
        for gateway in self.gateways.drain(..) {
            self.node.ip(&[&format!("route replace default via {gateway}")])?;
        }
        self.agent.restart()?;
        let host = self.node.addresses().map(str::to_owned);
        self.kubelet = FakeKubelet::start(client, &self.name, host, self.kubelet.kni().clone());
        Ok(())
    }

    /// Runs knictl on the node.
    pub fn knictl(&self, args: &[&str]) -> Result<String> {
        let program = self.node.install(&crate::agent::knictl_binary()?)?;
        self.node.run(program.to_str().context("not UTF-8")?, args)
    }
}

fn agent_options(name: &str, options: MemberOptions) -> AgentOptions {
    let cluster = options.standalone.is_none().then(|| Membership {
        kubeconfig: Path::new(KUBECONFIG).to_owned(),
        node_name: name.to_owned(),
    });
    AgentOptions {
        manifests: options.standalone.unwrap_or_default(),
        args: options.args,
        cluster,
        ..AgentOptions::default()
    }
}

/// Writes the node's object, as its kubelet would, and removes the taint of a node that is not ready, as
/// kube-controller-manager would.
async fn register(client: &Client, name: &str, addresses: [&str; 2]) -> Result<()> {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let params = PatchParams::apply("kubelet").force();
    // A label is shorter than a name may be.
    let host: String = name.chars().take(63).collect();
    let object = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": host, "kubernetes.io/os": "linux" } },
    });
    nodes
        .patch(name, &params, &Patch::Apply(&object))
        .await
        .context("node")?;
    // No server-side apply, which treats two addresses of one type as duplicates.
    let status = Patch::Merge(status(addresses));
    let patched = nodes.patch_status(name, &PatchParams::default(), &status).await;
    patched.with_context(|| format!("status of node {name}"))?;
    let ready = Patch::Merge(json!({ "spec": { "taints": null } }));
    let patched = nodes.patch(name, &PatchParams::default(), &ready).await;
    patched.with_context(|| format!("taints of node {name}")).map(drop)
}

fn status(addresses: [&str; 2]) -> Value {
    let room = json!({ "cpu": "64", "memory": "64Gi", "pods": "1000" });
    json!({
        "status": {
            "addresses": addresses.map(|address| json!({ "type": "InternalIP", "address": address })),
            "capacity": room,
            "allocatable": room,
            "conditions": [{
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
    })
}
