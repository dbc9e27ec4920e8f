//! Provides a cluster of one node with an agent, and pods through the API.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, Machine, Manifest, machine, stage};
use kni_local_node::{LocalNode, image};
use serde_json::{Value, json};

/// The port of a pod's servers, TCP and UDP.
pub(crate) const PORT: u16 = 7000;
/// Timeout for operations that usually take seconds.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// The node of a test. The agent is dropped before the machine.
pub(crate) struct Scene {
    pub(crate) agent: Agent,
    pub(crate) machine: Machine,
}

impl Scene {
    /// A cluster with a ready node.
    pub(crate) fn start(name: &str) -> Result<Self> {
        let mut machine = Machine::with_cluster(name)?;
        stage::forwarding(&machine.node)?;
        let agent = machine.start_agent(Manifest::overlapping())?;
        machine.local.wait_ready(true)?;
        Ok(Self { agent, machine })
    }

    /// [`Self::start`] on a node whose kubelet calls the agent. No file of CNI is installed.
    pub(crate) fn by_kni(name: &str) -> Result<Self> {
        let mut machine = Machine::with_kni(name, machine::kni()?)?;
        stage::forwarding(&machine.node)?;
        let agent = Agent::start(&machine.node, Machine::agent_options(Manifest::overlapping()))?;
        machine.local.wait_ready(true)?;
        Ok(Self { agent, machine })
    }

    /// [`Self::by_kni`] with an agent that watches the API server, which writes an audit log.
    pub(crate) fn joined_by_kni(name: &str) -> Result<Self> {
        let mut machine = Machine::with_kni_runtime(name, machine::kni()?)?;
        machine.local.keep_audit_log()?;
        machine.local.start_cluster("https://127.0.0.1:6443")?;
        stage::forwarding(&machine.node)?;
        let agent = machine.start_member_by_kni()?;
        machine.local.wait_ready(true)?;
        Ok(Self { agent, machine })
    }

    /// A cluster with a ready node, whose agent watches the API server, and with a DNS server.
    pub(crate) fn joined(name: &str) -> Result<Self> {
        let mut machine = Machine::with_cluster(name)?;
        stage::forwarding(&machine.node)?;
        let agent = machine.start_member()?;
        machine.local.wait_ready(true)?;
        machine.local.start_dns()?;
        Ok(Self { agent, machine })
    }

    /// The node's processes.
    pub(crate) fn local(&self) -> &LocalNode {
        &self.machine.local
    }

    /// Creates objects and waits until all pods of the cluster are ready.
    pub(crate) fn create(&self, objects: &[Value]) -> Result<()> {
        self.local()
            .apply(&json!({ "apiVersion": "v1", "kind": "List", "items": objects }))?;
        self.wait_for_pods("condition=Ready")
    }

    /// Waits for a condition of all pods.
    pub(crate) fn wait_for_pods(&self, condition: &str) -> Result<()> {
        let wanted = format!("--for={condition}");
        let patience = format!("--timeout={}s", PATIENCE.as_secs());
        let outcome = self.local().kubectl(&["wait", &wanted, "pod", "--all", &patience]);
        outcome.map(drop).with_context(|| {
            let pods = self.local().kubectl(&["describe", "pods"]).unwrap_or_default();
            format!("pods:\n{pods}")
        })
    }

    /// The result of a `JSONPath` expression for an object.
    pub(crate) fn get(&self, object: &str, path: &str) -> Result<String> {
        self.local()
            .kubectl(&["get", object, "-o", &format!("jsonpath={path}")])
    }

    /// Waits until the result is `wanted`.
    pub(crate) fn wait_for(&mut self, object: &str, path: &str, wanted: &str) -> Result<()> {
        let what = format!("{path} of {object} is {wanted:?}");
        let expression = format!("jsonpath={path}");
        self.machine.local.wait(&what, PATIENCE, |node| {
            Ok(node.kubectl(&["get", object, "-o", &expression])? == wanted)
        })
    }

    /// The addresses of a pod, IPv4 first.
    pub(crate) fn addresses(&self, pod: &str) -> Result<Vec<IpAddr>> {
        let ips = self.get(&format!("pod/{pod}"), "{.status.podIPs[*].ip}")?;
        let ips: Result<Vec<IpAddr>, _> = ips.split(' ').map(str::parse).collect();
        ips.with_context(|| format!("addresses of {pod}"))
    }

    /// The first word of the answer from `address` to a pod: the name of the server.
    pub(crate) fn ask(&self, from: &str, address: &str, port: u16, protocol: &str) -> Result<String> {
        let port = port.to_string();
        let probe = ["/kni-probe", "ask", address, &port, "--protocol", protocol];
        let said = self.local().kubectl(&[&["exec", from, "--"], &probe[..]].concat())?;
        let name = said.split(' ').next().unwrap_or_default();
        ensure!(!name.is_empty(), "{from} hears {said:?} from {address}");
        Ok(name.to_owned())
    }
}

/// A pod with one container, which serves at [`PORT`].
pub(crate) fn server(name: &str, labels: &Value) -> Value {
    let port = PORT.to_string();
    let serve = ["serve", "--tcp", &port, "--udp", &port, "--name", name];
    pod(name, labels, &json!([container("serves", &serve)]))
}

/// A container with the image of the probe.
pub(crate) fn container(name: &str, args: &[&str]) -> Value {
    json!({ "name": name, "image": image::PROBE, "imagePullPolicy": "Never", "args": args })
}

/// A pod that exits quickly on request.
pub(crate) fn pod(name: &str, labels: &Value, containers: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "labels": labels },
        "spec": { "terminationGracePeriodSeconds": 5, "containers": containers },
    })
}
