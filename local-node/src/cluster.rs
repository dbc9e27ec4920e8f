//! Runs a cluster of real nodes: a control plane, and nodes with containerd, kubelet and kube-proxy in subnets of their
//! own with a router between them.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    control_plane::{ControlPlane, Nodes},
    dns,
    fabric::Fabric,
    kni::Kni,
    kustomize,
    local::{LocalNode, Part},
    namespaces::Namespaces,
    node::Node,
    programs::Programs,
    static_programs::StaticPrograms,
};

/// How long to wait for steps that usually take seconds: a machine that compiles at the same time needs minutes.
const PATIENCE: Duration = Duration::from_mins(5);
/// The number of the first node on the fabric is one more.
const BEFORE_FIRST: u8 = 10;
/// How many nodes a cluster may have.
const MAX_NODES: u8 = 20;
/// Pods of `CoreDNS`.
const DNS_PODS: usize = 2;

/// A control plane and its nodes, called `node1`, `node2` and so on, in their own namespaces.
///
/// Everything ends when the value is dropped or this process ends, for any reason; see [`LocalNode`].
#[derive(Debug)]
pub struct LocalCluster {
    nodes: Vec<LocalNode>,
    control: ControlPlane,
    fabric: Fabric,
    by_kni: bool,
}

impl LocalCluster {
    /// Starts a cluster and waits until its nodes are registered; they become ready once their runtimes have a network.
    /// Logs go to a folder for each node below `logs`. With `kni`, pods get their networks by KNI.
    pub fn start(
        count: u8,
        programs: &Programs,
        statics: &StaticPrograms,
        kni: Option<&Kni>,
        logs: &Path,
    ) -> Result<Self> {
        ensure!((1..=MAX_NODES).contains(&count), "a cluster has 1 to {MAX_NODES} nodes");
        let fabric = Fabric::routed("cluster")?;
        let (control, nodes) = thread::scope(|scope| {
            let control = scope.spawn(|| {
                let logs = logs.join("control-plane");
                ControlPlane::start(&fabric, Nodes::WithKubelets, programs, statics, &logs)
            });
            let worker = |number| worker((number, kni), &fabric, programs, statics, logs);
            let nodes: Vec<_> = (1..=count).map(|number| scope.spawn(move || worker(number))).collect();
            let nodes: Vec<_> = nodes.into_iter().map(joined).collect();
            (joined(control), nodes)
        });
        let mut cluster = Self {
            nodes: nodes.into_iter().collect::<Result<_>>()?,
            control: control.context("control plane")?,
            fabric,
            by_kni: kni.is_some(),
        };
        cluster.join_nodes()?;
        Ok(cluster)
    }

    /// Starts kubelet and kube-proxy on each node.
    fn join_nodes(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            node.write_texts(&self.control.issue_for(node)?)?;
            node.start(Part::Kubelet)?;
            node.start(Part::KubeProxy)?;
        }
        let names: Vec<String> = self.nodes.iter().map(|node| node.name().to_owned()).collect();
        self.wait("the nodes are registered", |control| {
            let listed = control.kubectl(&["get", "nodes", "-o", "name"])?;
            let is_listed = |name: &String| listed.lines().any(|line| line == format!("node/{name}"));
            Ok(names.iter().all(is_listed))
        })?;
        // Pods are rejected until it exists.
        self.wait("the default service account exists", |control| {
            control
                .kubectl(&["get", "serviceaccount", "default"])
                .map(|_shown| true)
        })
    }

    /// Imports an archive with the agent's image on every node, applies the folder `deploy` and the networks of its
    /// examples, and waits until agents, nodes and networks are ready. The kustomizations go to the folder `own`, whose
    /// files are visible inside the nodes.
    pub fn deploy(&mut self, deploy: &Path, own: &Path, archive: &Path, tag: &str) -> Result<()> {
        self.on_each_node(|node| {
            node.import_archive(archive)
                .with_context(|| format!("import {} on {}", archive.display(), node.name()))
        })?;
        let (objects, networks) = (own.join("deploy"), own.join("networks"));
        let text = if self.by_kni {
            kustomize::kni_deployment(&objects, &deploy.join("overlays/kni"), tag)?
        } else {
            kustomize::deployment(&objects, deploy, tag)?
        };
        kustomize::write(&objects, &text)?;
        kustomize::networks(&networks, &deploy.join("examples/networks"))?;
        self.apply_folder(&objects)?;
        // The API server serves a new kind some time after its definition was created.
        self.wait("the networks are created", |control| {
            apply(control, &networks).map(|()| true)
        })?;
        for program in ["daemonset/kni-agent", "deployment/kni-controller"] {
            self.roll_out("kni-system", program)?;
        }
        for kind in ["node", "podnetwork"] {
            let timeout = timeout();
            self.kubectl(&["wait", "--for=condition=Ready", kind, "--all", &timeout])
                .with_context(|| self.control.pods())?;
        }
        Ok(())
    }

    /// Runs `CoreDNS` in two pods, and waits until they are available.
    pub fn start_dns(&mut self) -> Result<()> {
        self.on_each_node(LocalNode::import_dns)?;
        self.control.local().apply_text(&dns::manifest(DNS_PODS))?;
        self.roll_out("kube-system", "deployment/coredns")
    }

    /// Runs kubectl as the cluster's administrator and returns its standard output.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        self.control.kubectl(args)
    }

    /// The nodes, `node1` first.
    pub fn nodes(&self) -> &[LocalNode] {
        &self.nodes
    }

    /// The control plane.
    pub fn control(&mut self) -> &mut ControlPlane {
        &mut self.control
    }

    /// The namespace of the router between the nodes.
    pub fn router(&self) -> &Namespaces {
        self.fabric.inside()
    }

    /// Names and process ids of the started parts, without pods; the names start with that of the node.
    pub fn processes(&self) -> impl Iterator<Item = (String, u32)> {
        let nodes = self.nodes.iter().flat_map(|node| {
            let processes = node.processes();
            processes.map(|(part, pid)| (format!("{}/{part}", node.name()), pid))
        });
        let control = self.control.processes();
        control
            .map(|(part, pid)| (format!("control-plane/{part}"), pid))
            .chain(nodes)
    }

    fn apply_folder(&self, kustomization: &Path) -> Result<()> {
        apply(&self.control, kustomization)
    }

    /// Waits until all pods of a Deployment or a `DaemonSet` have its template and are available.
    fn roll_out(&self, namespace: &str, object: &str) -> Result<()> {
        let timeout = timeout();
        self.kubectl(&["-n", namespace, "rollout", "status", object, &timeout])
            .map(drop)
            .with_context(|| self.control.pods())
    }

    /// Runs `f` for all nodes at once.
    fn on_each_node(&self, f: impl Fn(&LocalNode) -> Result<()> + Sync) -> Result<()> {
        let f = &f;
        thread::scope(|scope| {
            let nodes: Vec<_> = self.nodes.iter().map(|node| scope.spawn(move || f(node))).collect();
            nodes.into_iter().try_for_each(joined)
        })
    }

    /// Polls `done` until it returns true; fails when a part of the cluster ends meanwhile.
    fn wait(&mut self, what: &str, mut done: impl FnMut(&ControlPlane) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let last = done(&self.control);
            if matches!(last, Ok(true)) {
                return Ok(());
            }
            self.control.local().check().context("control plane")?;
            for node in &mut self.nodes {
                let name = node.name().to_owned();
                node.check().context(name)?;
            }
            if Instant::now() > deadline {
                let why = last.err().map(|error| format!(": {error:#}")).unwrap_or_default();
                bail!("waited {PATIENCE:?} in vain until {what}{why}{}", self.control.pods());
            }
            // Each round runs a large program.
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// A node with a running containerd, before it joins.
fn worker(
    (number, kni): (u8, Option<&Kni>),
    fabric: &Fabric,
    programs: &Programs,
    statics: &StaticPrograms,
    logs: &Path,
) -> Result<LocalNode> {
    let name = format!("node{number}");
    let node = Node::whole_on(fabric, &name, BEFORE_FIRST + number)?;
    let mut local = LocalNode::named(&name, &node, programs, statics, &logs.join(&name))?;
    if let Some(kni) = kni {
        local.use_kni(kni.clone())?;
    }
    local.start_containerd().context(name)?;
    Ok(local)
}

fn apply(control: &ControlPlane, kustomization: &Path) -> Result<()> {
    let folder = kustomization.display().to_string();
    control
        .kubectl(&["apply", "--server-side", "--force-conflicts", "-k", &folder])
        .map(drop)
}

fn timeout() -> String {
    format!("--timeout={}s", PATIENCE.as_secs())
}

/// The result of a thread; its panic is resumed.
fn joined<T>(handle: thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
