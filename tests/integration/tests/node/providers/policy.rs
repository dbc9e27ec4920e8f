//! Tests policies at the host ends of interfaces of the bridge plugin: both directions, both families, also while no
//! agent is running. The datapath of the plugin carries the packets.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Manifest, Namespaces, Pod, eventually, patience, require,
    traffic::{self, NoAnswer, Servers, Stream},
};
use kni_proto::runtime::ListDropsRequest;

use super::scene::{self, address};
use crate::watched::Watched;

/// The server takes TCP 8080 from friends; strangers may not send to friends.
const POLICIES: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: server, namespace: team}
spec:
  podSelector: {matchLabels: {app: server}}
  ingress: [{from: [{podSelector: {matchLabels: {app: friend}}}], ports: [{protocol: TCP, port: 8080}]}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: stranger, namespace: team}
spec:
  podSelector: {matchLabels: {app: stranger}}
  policyTypes: [Egress]
  egress: [{to: [{podSelector: {matchLabels: {app: server}}}]}]
";

fn policies() -> Manifest {
    Manifest::file("policies.yaml", POLICIES)
}

async fn run(stage: &Watched, app: &str) -> Result<Pod> {
    let label = |request: &mut kni_proto::kni::AttachInterfaceRequest| {
        request.labels.insert("app".into(), app.into());
    };
    Ok(stage.kubelet.run_pod_with("team", app, &[], label).await?)
}

/// Whether a connection succeeds. Denied packets are dropped without an answer, so the timeout determines the duration.
fn reaches(from: &Namespaces, address: &str) -> bool {
    let address = address.parse().expect("an address");
    traffic::tcp_get(from, address, 8080, Duration::from_secs(1)).is_ok()
}

pub(super) struct Scene {
    pub(super) server: Pod,
    pub(super) friend: Pod,
    stranger: Pod,
    servers: Vec<Servers>,
    pub(super) stage: Watched,
}

impl Scene {
    pub(super) async fn set(name: &str) -> Result<Self> {
        let manifests = vec![scene::bridged("bridged", true)];
        let stage = Watched::unsettled(name, scene::options(manifests)).await?;
        scene::write_chain(&stage.node)?;
        scene::wait_for_network(&stage, "bridged", true).await?;
        let pods = [
            run(&stage, "server").await?,
            run(&stage, "friend").await?,
            run(&stage, "stranger").await?,
        ];
        let servers = pods
            .iter()
            .map(|pod| Servers::start(&pod.inside, &pod.name, 8080))
            .collect::<Result<_>>()?;
        let [server, friend, stranger] = pods;
        Ok(Self {
            server,
            friend,
            stranger,
            servers,
            stage,
        })
    }

    /// The results of connections over TCP in both families: from the friend, the stranger and the node to the server,
    /// and from the stranger and the server to the friend.
    fn reached(&self) -> Result<[bool; 5]> {
        let node: &Namespaces = &self.stage.node;
        let asked = [
            (&self.friend.inside, &self.server),
            (&self.stranger.inside, &self.server),
            (node, &self.server),
            (&self.stranger.inside, &self.friend),
            (&self.server.inside, &self.friend),
        ];
        let mut reached = [false; 5];
        for (place, (from, to)) in reached.iter_mut().zip(asked) {
            let [v4, v6] = [true, false].map(|v4| reaches(from, &address(to, "eth0", v4)));
            ensure!(v4 == v6, "{}: IPv4 {v4}, IPv6 {v6}", to.name);
            *place = v4;
        }
        Ok(reached)
    }

    async fn wait_until(&self, wanted: [bool; 5]) -> Result<()> {
        let reached = eventually(patience(), async || {
            let found = self.reached()?;
            ensure!(found == wanted, "{found:?}, not {wanted:?}");
            Ok(())
        })
        .await;
        // Only then: the agent may be away on purpose.
        if reached.is_err() {
            let drops = self.stage.kubelet.runtime().list_drops(ListDropsRequest {}).await?;
            return reached.with_context(|| format!("drops: {:?}", drops.into_inner().drops));
        }
        Ok(())
    }

    pub(super) async fn drops(&self, pod: &Pod, reason: &str) -> Result<u64> {
        let listed = self.stage.kubelet.runtime().list_drops(ListDropsRequest {}).await?;
        let drops = listed.into_inner().drops.into_iter();
        let ours = drops.filter(|drop| drop.pod_name == pod.name && drop.reason == reason);
        Ok(ours.filter_map(|drop| drop.count).map(|count| count.packets).sum())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_hold_at_interfaces_of_the_bridge_plugin() -> Result<()> {
    require!(root, netns, bpf, ip, nft, tc, bpftool, cni_plugins);
    let mut scene = Scene::set("guarded").await?;
    scene.wait_until([true; 5]).await?;
    let to = SocketAddr::new(address(&scene.server, "eth0", true).parse()?, 8080);
    // The pod itself refuses a closed port: ICMP errors are delivered.
    let refused = traffic::udp_ask(&scene.friend.inside, to.ip(), 9999, scene::patience());
    assert_eq!(refused.err(), Some(NoAnswer::Refused));
    let stream = Stream::tcp(&scene.friend.inside, to)?;
    Manifest::apply(&[policies()], &scene.stage.node)?;
    let judged = [true, false, true, false, true];
    scene.wait_until(judged).await?;
    assert!(
        scene.drops(&scene.stranger, "policy_egress").await? > 0,
        "egress to the friend"
    );
    let denied =
        scene.drops(&scene.stranger, "policy_ingress").await? + scene.drops(&scene.server, "policy_ingress").await?;
    assert!(denied > 0, "ingress of the server");
    let shown = scene.stage.interface(&scene.server, "eth0").await?;
    assert!(
        shown.healthy && shown.policy_enforced && shown.programs.len() == 2,
        "{shown:?}"
    );

    // Enforcement does not depend on a running agent.
    scene.stage.agent.kill9()?;
    scene.wait_until(judged).await?;
    scene.stage.restart().await?;
    scene.wait_until(judged).await?;
    stream.stop().assert_whole("server");
    let shown = scene.stage.interface(&scene.server, "eth0").await?;
    assert!(shown.healthy, "{:?}", shown.problems);

    // Without a denial the reverse direction is open again.
    let open = Manifest::file("policies.yaml", String::new());
    Manifest::apply(&[open], &scene.stage.node)?;
    scene.wait_until([true; 5]).await?;
    let Scene {
        server,
        friend,
        stranger,
        servers,
        stage,
    } = scene;
    drop(servers);
    for pod in [server, friend, stranger] {
        stage.kubelet.kill_pod(pod).await?;
    }
    stage.settled().await?;
    assert_eq!(scene::leases(&stage.node)?, Vec::<String>::new());
    let pins = scene::files(&stage.node, "/sys/fs/bpf/kni/links")?;
    assert!(pins.iter().all(|pin| pin.starts_with("uplink")), "{pins:?}");
    Ok(())
}
