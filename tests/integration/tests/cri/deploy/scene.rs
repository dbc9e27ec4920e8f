//! Provides a cluster of one node without a network, and an operator's actions with `deploy/`.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Machine, stage};
use kni_local_node::{LocalNode, image, kustomize};
use serde_json::{Value, json};

use super::image::root;

/// The port of a pod's servers, TCP and UDP.
pub(crate) const PORT: u16 = 7000;
/// Timeout for operations that usually take seconds.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);
/// The folder of the test's kustomizations, inside the node.
const KUSTOMIZATIONS: &str = "/run/kustomize";
/// The folder of image archives of the node.
const ARCHIVES: &str = "/run/images";

/// The node of the test.
pub(crate) struct Scene {
    pub(crate) machine: Machine,
}

impl Scene {
    /// A cluster whose node waits for a network.
    pub(crate) fn start(name: &str) -> Result<Self> {
        let machine = Machine::with_cluster(name)?;
        stage::forwarding(&machine.node)?;
        machine
            .node
            .enter(|| fs::create_dir_all(ARCHIVES).context(ARCHIVES))??;
        Ok(Self { machine })
    }

    /// The node's processes.
    pub(crate) fn local(&self) -> &LocalNode {
        &self.machine.local
    }

    /// Imports an archive into containerd, as an operator would.
    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        let bytes = fs::read(archive).with_context(|| archive.display().to_string())?;
        let inner = Path::new(ARCHIVES).join(archive.file_name().context("an archive without name")?);
        self.machine.node.enter(|| fs::write(&inner, bytes))??;
        self.local().import_archive(&inner)
    }

    /// Creates a kustomization of `folder`, below `deploy/`, with the settings of this node and the image's tag;
    /// returns its path inside the node.
    pub(crate) fn kustomize(&self, folder: &str, tag: &str) -> Result<PathBuf> {
        let own = Path::new(KUSTOMIZATIONS).join(folder.replace('/', "-") + tag);
        let text = kustomize::deployment(&own, &root().join("deploy").join(folder), tag)?;
        let file = own.join("kustomization.yaml");
        self.local().write_texts(&[(file, text)].into())?;
        Ok(own)
    }

    /// `kubectl apply -k`.
    pub(crate) fn apply_folder(&self, kustomization: &Path) -> Result<String> {
        let folder = kustomization.display().to_string();
        self.local().kubectl(&["apply", "--server-side", "-k", &folder])
    }

    /// Waits until all pods of the agent and of kni-controller have the latest template and are ready.
    pub(crate) fn wait_for_agents(&self) -> Result<()> {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        for programs in ["daemonset/kni-agent", "deployment/kni-controller"] {
            let rollout = ["-n", "kni-system", "rollout", "status", programs, &timeout];
            self.local().kubectl(&rollout).with_context(|| self.agents())?;
        }
        Ok(())
    }

    /// The descriptions and logs of the agents, for error messages.
    pub(crate) fn agents(&self) -> String {
        let ask = |args: &[&str]| {
            let asked = self.local().kubectl(&[&["-n", "kni-system"], args].concat());
            asked.unwrap_or_else(|error| format!("{error:#}"))
        };
        let label = "app.kubernetes.io/name in (kni-agent, kni-controller, kni-uninstall)";
        let described = ask(&["describe", "pods"]);
        let logs = ask(&["logs", "-l", label, "--tail=60", "--all-containers", "--prefix"]);
        format!("{described}\n{logs}")
    }

    /// Runs a program of the agent's image in the pod of the agent.
    pub(crate) fn in_agent(&self, words: &[&str]) -> Result<String> {
        let exec = ["-n", "kni-system", "exec", "daemonset/kni-agent", "--"];
        self.local().kubectl(&[&exec[..], words].concat())
    }

    /// Creates objects and waits until all pods of the default namespace are ready.
    pub(crate) fn create(&self, objects: &[Value]) -> Result<()> {
        self.local()
            .apply(&json!({ "apiVersion": "v1", "kind": "List", "items": objects }))?;
        let patience = format!("--timeout={}s", PATIENCE.as_secs());
        let wait = ["wait", "--for=condition=Ready", "pod", "--all", &patience];
        self.local().kubectl(&wait).map(drop).with_context(|| {
            let pods = self.local().kubectl(&["describe", "pods"]).unwrap_or_default();
            format!("pods:\n{pods}\nagents:\n{}", self.agents())
        })
    }

    /// The addresses of a pod, IPv4 first.
    pub(crate) fn addresses(&self, pod: &str) -> Result<Vec<IpAddr>> {
        let path = "jsonpath={.status.podIPs[*].ip}";
        let ips = self.local().kubectl(&["get", "pod", pod, "-o", path])?;
        let ips: Result<Vec<IpAddr>, _> = ips.split(' ').map(str::parse).collect();
        ips.with_context(|| format!("addresses of {pod}"))
    }

    /// The first word of the answer from `address` to a pod: the name of the server. No answer within half a second is
    /// an error.
    pub(crate) fn ask(&self, from: &str, address: &str, port: u16) -> Result<String> {
        ask(self.local(), from, address, port)
    }

    /// Waits until the server `wanted` answers a pod at this address.
    pub(crate) fn wait_for_answer(&mut self, from: &str, address: &str, port: u16, wanted: &str) -> Result<()> {
        let what = format!("{wanted} answers {from} at {address}:{port}");
        self.machine
            .local
            .wait(&what, PATIENCE, |node| Ok(ask(node, from, address, port)? == wanted))
    }

    /// Deletes the objects of a kustomization, and waits until they are gone.
    pub(crate) fn delete_folder(&self, kustomization: &Path) -> Result<String> {
        let folder = kustomization.display().to_string();
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        self.local()
            .kubectl(&["delete", "--ignore-not-found", &timeout, "-k", &folder])
    }

    /// Runs `kubectl kni` with the program of knictl.
    pub(crate) fn plugin(&self, program: &Path, words: &[&str]) -> Result<String> {
        let mut plugin = self.local().command(program);
        plugin.arg("--kube").args(words);
        plugin
            .env("KUBECONFIG", "/run/node/pki/admin.conf")
            .stdin(Stdio::null());
        let done = plugin.output().context("run knictl")?;
        let said = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "kubectl kni {words:?}: {said}");
        String::from_utf8(done.stdout).context("not UTF-8")
    }
}

fn ask(node: &LocalNode, from: &str, address: &str, port: u16) -> Result<String> {
    let port = port.to_string();
    let probe = ["/kni-probe", "ask", address, &port, "--timeout-ms", "500"];
    let said = node.kubectl(&[&["exec", from, "--"], &probe[..]].concat())?;
    let name = said.split(' ').next().unwrap_or_default();
    ensure!(!name.is_empty(), "{from} hears {said:?} from {address}");
    Ok(name.to_owned())
}

/// A pod with one container, which serves at [`PORT`].
pub(crate) fn server(name: &str, annotations: &Value) -> Value {
    let port = PORT.to_string();
    pod(
        name,
        annotations,
        &["serve", "--tcp", &port, "--udp", &port, "--name", name],
    )
}

/// A pod with the image of the probe that exits quickly on request.
pub(crate) fn pod(name: &str, annotations: &Value, args: &[&str]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "default", "labels": { "app": name }, "annotations": annotations,
        },
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "main", "image": image::PROBE, "imagePullPolicy": "Never", "args": args,
            }],
        },
    })
}
