//! A node with an example of everything that an agent records.

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Kubelet, Manifest, Namespaces, Node, Pod,
    agent::{KUBELET_SOCKET, SOCKET, agent_binary},
    eventually_sync,
    kubelet::Sandbox,
    manifest::network_policy,
    node::{FABRIC_V4, NODE_V4},
    traffic::{Servers, Stream, tcp_get},
};
use kni_proto::{
    kni::{PortMapping, Protocol},
    runtime::Interface,
};
use serde_json::Value;

use super::super::takeover::streams;
use crate::{
    cni::scene::{Call, PENDING, STATE, Scene},
    providers::scene::{self as networks, WIRE_V4},
    watched::Watched,
};

const MULTI: &str = "k8s.v1.cni.cncf.io/networks";
const NETWORK: &str = "kni.dev/network";
/// Where every server listens.
const OPEN: u16 = 8080;
/// Where the server behind the policy listens too.
const CLOSED: u16 = 8081;
const HOST_PORT: u16 = 18_080;
const ANSWER: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_millis(400);
const SETTLED: Duration = Duration::from_secs(30);

/// The node, its pods, and who serves in them.
pub(super) struct EarlierNode {
    scene: Scene,
    web: Pod,
    client: Pod,
    blue: [Pod; 2],
    devices: Pod,
    bridged: Pod,
    container: Container,
    /// A container that its runtime deletes while no agent runs.
    deleted: Container,
    servers: Vec<Servers>,
}

/// What the CNI plugin made for a runtime.
struct Container {
    call: Call,
    inside: Namespaces,
    result: Value,
}

impl Container {
    fn add(scene: &Scene, id: &str, netns: &str) -> Result<Self> {
        let inside = scene.netns(netns)?;
        let call = Call::new(id, netns);
        let result = scene.add(&call)?;
        Ok(Self { call, inside, result })
    }

    fn address(&self) -> Result<std::net::IpAddr> {
        let address = self.result["ips"][0]["address"].as_str().context("no address")?;
        Ok(address.split('/').next().unwrap_or_default().parse()?)
    }
}

fn manifests() -> Vec<Manifest> {
    let masquerade = "egress: {mode: Masquerade}";
    let mut all = networks::networks();
    let default = all.remove(0).spec(masquerade);
    let blue = Manifest::network("blue", &["10.10.0.0/16", "fd10::/64"]).spec(masquerade);
    let spec = "{podSelector: {}, ingress: [{ports: [{protocol: TCP, port: 8080}, {protocol: UDP, port: 8080}]}]}";
    let policy = Manifest::file("policy.yaml", network_policy("closed", "one-port", spec));
    all.extend([default, blue.spec("xdp: true"), policy]);
    all
}

impl EarlierNode {
    /// Runs the pods under the agent at `agent`, or under this release's.
    pub(super) async fn build(name: &str, agent: Option<PathBuf>) -> Result<Self> {
        let mut options = networks::options(manifests());
        options.args[1] = "2".into();
        options.args.extend(["--cni-state-dir".into(), STATE.into()]);
        options.embedded_programs = agent.is_some();
        options.binary = agent;
        let stage = Watched::with(name, options).await?;
        networks::write_chain(&stage.node)?;
        networks::wait_for_network(&stage, "bridged", true).await?;
        networks::add_device(&stage)?;
        let kubelet = stage.kubelet.clone();
        let host_port = |request: &mut kni_proto::kni::AttachInterfaceRequest| {
            request.port_mappings = vec![PortMapping {
                protocol: Protocol::Tcp.into(),
                container_port: OPEN.into(),
                host_port: HOST_PORT.into(),
                host_ip: String::new(),
            }];
        };
        let wish = [(MULTI, "blue"), ("kubernetes.io/ingress-bandwidth", "100M")];
        let web = kubelet.run_pod_with("closed", "web", &wish, host_port).await?;
        let client = kubelet.run_pod("earlier", "client", &[]).await?;
        let blue = [
            kubelet.run_pod("earlier", "blue-1", &[(NETWORK, "blue")]).await?,
            kubelet.run_pod("earlier", "blue-2", &[(NETWORK, "blue")]).await?,
        ];
        let devices = kubelet.run_pod("earlier", "devices", &[(MULTI, "lan,nic,vm")]).await?;
        let bridged = kubelet.run_pod("earlier", "bridged", &[(NETWORK, "bridged")]).await?;
        let scene = Scene::on(stage)?;
        let container = Container::add(&scene, "abc", "runtime-1")?;
        let deleted = Container::add(&scene, "def", "runtime-2")?;
        let servers = vec![
            Servers::start(&web.inside, "web", OPEN)?,
            Servers::start(&web.inside, "web", CLOSED)?,
            Servers::start(&blue[1].inside, "blue-2", OPEN)?,
            Servers::start(&container.inside, "container", OPEN)?,
            Servers::start(scene.stage.node.fabric(), "fabric", OPEN)?,
            Servers::start(&scene.stage.node, "node", OPEN)?,
        ];
        Ok(Self {
            scene,
            web,
            client,
            blue,
            devices,
            bridged,
            container,
            deleted,
            servers,
        })
    }

    pub(super) fn stage(&self) -> &Watched {
        &self.scene.stage
    }

    pub(super) fn node(&self) -> &Node {
        &self.scene.stage.node
    }

    /// All interfaces but the one that goes while no agent runs, without what changes from one look to the next.
    pub(super) async fn interfaces(&self) -> Result<Vec<Interface>> {
        let mut all = self.stage().interfaces().await?;
        all.retain(|interface| interface.sandbox_id != self.deleted.call.container);
        for interface in &mut all {
            ensure!(interface.healthy, "{interface:#?}");
            interface.programs.clear();
            (interface.from_pod, interface.to_pod, interface.dropped) = (None, None, None);
        }
        all.sort_by_key(|interface| interface.endpoint_id);
        Ok(all)
    }

    /// Traffic across the takeover, with who answers it.
    pub(super) fn streams(&self) -> Result<Vec<(String, Stream)>> {
        let mut all = streams(&self.client.inside, &self.web)?;
        all.extend(streams(&self.blue[0].inside, &self.blue[1])?);
        Ok(all)
    }

    /// Every pair of pods that may talk does, on every kind of interface; and who may not does not.
    pub(super) fn assert_reached(&self, when: &str) -> Result<()> {
        let node: std::net::IpAddr = NODE_V4.parse()?;
        let fabric = self.node().fabric();
        let mut asked = vec![
            (&self.blue[0].inside, self.blue[1].ips()[0], OPEN, "blue-2"),
            (&self.client.inside, self.container.address()?, OPEN, "container"),
            (&self.client.inside, FABRIC_V4.parse()?, OPEN, "fabric"),
            (&self.devices.inside, WIRE_V4.parse()?, OPEN, "fabric"),
            (&self.bridged.inside, node, OPEN, "node"),
            (fabric, node, HOST_PORT, "web"),
        ];
        for ip in self.web.ips() {
            asked.push((&self.client.inside, ip, OPEN, "web"));
            // The node reaches its pods whatever the policies: the port would answer.
            asked.push((self.node(), ip, CLOSED, "web"));
            let answer = tcp_get(&self.client.inside, ip, CLOSED, SILENCE);
            ensure!(answer.is_err(), "{when}: {ip}:{CLOSED} answers {answer:?}");
        }
        for (from, to, port, expected) in asked {
            let answer = tcp_get(from, to, port, ANSWER).map(|answer| answer.identity);
            ensure!(
                answer.as_deref() == Ok(expected),
                "{when}: {}: {to}:{port}: {answer:?}, not {expected}",
                from.name()
            );
        }
        Ok(())
    }

    /// Kills the agent while it owes something. Returns a sandbox whose namespace it has made and not attached.
    pub(super) async fn kill_agent(&mut self) -> Result<Sandbox> {
        let netns = self.stage().kubelet.create_network("earlier", "given").await?;
        let warm = async || Ok(self.stage().status().await?.warm_sandboxes == 2);
        kni_integration::wait::until("the pool is full", SETTLED, warm).await?;
        let gone = self.stage().kubelet.run_pod("earlier", "gone", &[]).await?;
        self.stage().kubelet.kill_pod(gone).await?;
        self.scene.stage.agent.kill9()?;
        self.scene.del(&self.deleted.call)?;
        Ok(Sandbox::new("earlier", "given", &netns))
    }

    /// Starts this release's agent and waits until it has done what the other one owed.
    pub(super) async fn take_over(&mut self) -> Result<()> {
        let stage = &mut self.scene.stage;
        stage.agent.replace(&agent_binary()?)?;
        stage.kubelet = Kubelet::connect(&stage.node, SOCKET).await?;
        stage.settled().await?;
        eventually_sync(SETTLED, || {
            let pending = networks::files(&stage.node, PENDING)?;
            ensure!(pending.is_empty(), "deletes that are still to be done: {pending:?}");
            Ok(())
        })?;
        let left = self.stage().interfaces().await?;
        ensure!(
            !left
                .iter()
                .any(|interface| interface.sandbox_id == self.deleted.call.container),
            "the deleted container is attached: {left:#?}"
        );
        Ok(())
    }

    /// Queries and repeated calls answer what they answered before.
    pub(super) async fn assert_answers_the_same(&self) -> Result<()> {
        let kubelet = Kubelet::connect(self.node(), KUBELET_SOCKET).await?;
        for pod in [
            &self.web,
            &self.client,
            &self.blue[0],
            &self.blue[1],
            &self.devices,
            &self.bridged,
        ] {
            assert_eq!(kubelet.query(&pod.id).await?.ipconfigs, pod.interfaces, "{}", pod.name);
        }
        let check = self
            .container
            .call
            .clone()
            .with("prevResult", self.container.result.clone());
        self.scene.call("CHECK", &check)?.assert_silent_success();
        Ok(())
    }

    /// Takes everything away, each as the one who made it does.
    pub(super) async fn leave(self, given: Sandbox) -> Result<Watched> {
        drop(self.servers);
        let kubelet = self.scene.stage.kubelet.clone();
        kubelet
            .attach(&given)
            .await
            .context("a namespace of the earlier agent")?;
        kubelet.detach(&given.id).await?;
        kubelet.delete_network(&given.id).await?;
        for pod in self
            .blue
            .into_iter()
            .chain([self.web, self.client, self.devices, self.bridged])
        {
            kubelet.kill_pod(pod).await?;
        }
        self.scene.del(&self.container.call)?;
        let stage = self.scene.stage;
        stage.settled().await?;
        stage.node.wait_for_local("nic0", "fe80")?;
        let left = networks::files(&stage.node, networks::CACHE)?;
        assert!(!left.iter().any(|name| name.contains(".json")), "cached: {left:?}");
        assert_eq!(networks::leases(&stage.node)?, [""; 0]);
        let status = stage.status().await?;
        assert_eq!((status.sandboxes, status.attachments), (0, 0), "{status:#?}");
        Ok(stage)
    }
}
