//! Tests that pods of all nodes leave with one egress address by the node that answers for it, and what it costs when
//! another node takes its place.

mod late;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kni_api::{ConditionStatus, EgressAddressClaim, EgressPolicy, egress_address_claim::name_of};
use kni_integration::{
    Cluster, Pod,
    cluster::{Member, MemberOptions, objects, patience},
    frames::{Ip, Link, Payload, TcpFlags},
    require,
    traffic::{Servers, Stream, StreamReport, tcp_get, udp_ask},
    wait,
};
use kni_proto::runtime::ListDropsRequest;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::scene::{ANSWER, PORT, SILENCE, prompt, tenants};

/// The address of each family that pods of all nodes leave with, and the host on the fabric that they reach.
const ADDRESSES: [&str; 2] = ["198.51.100.70", "2001:db8:100::70"];
const OUTSIDE: [&str; 2] = ["198.51.100.1", "2001:db8:100::1"];
/// UDP port of the tunnels.
const OVERLAY_PORT: u16 = 4789;
/// How long traffic runs before and after an event: hundreds of requests of each stream.
const AROUND: Duration = Duration::from_secs(1);
/// The longest silence while another node takes the place of the owner is this and [`prompt`]; twice this if the owner
/// is gone.
const MOVE: Duration = Duration::from_secs(3);

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Three nodes with a pod on each that leaves with both addresses, and a server outside.
struct Scene {
    cluster: Cluster,
    pods: Vec<Pod>,
    server: Servers,
}

impl Scene {
    async fn start(name: &str) -> Result<Self> {
        let mut cluster = Cluster::start(name, 2).await?;
        let proxied = MemberOptions {
            proxied: true,
            ..MemberOptions::default()
        };
        cluster.add_node(proxied).await?;
        tenants(&cluster).await?;
        let pool = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressPool", "metadata": { "name": "all" },
            "spec": {
                "ranges": ["198.51.100.64/27", "2001:db8:100::40/122"], "access": { "namespaces": { "from": "All" } },
            },
        });
        let policy = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
            "metadata": { "name": "web", "namespace": "red-team" },
            "spec": { "podSelector": { "matchLabels": { "app": "web" } }, "egressAddresses": ADDRESSES },
        });
        cluster.apply(&[pool, policy]).await?;
        let server = Servers::start(cluster.fabric.inside(), "outside", PORT)?;
        let web = (1..=3).map(|node| {
            let labels = json!({ "labels": { "app": "web" } });
            objects::pod_with("red-team", &format!("web-{node}"), &format!("node{node}"), &labels)
        });
        let pods = cluster.run(&web.collect::<Vec<_>>()).await?;
        let scene = Self { cluster, pods, server };
        scene.all_leave(&[0, 1, 2]).await?;
        Ok(scene)
    }

    async fn claim(&self, family: usize) -> Result<EgressAddressClaim> {
        let claims: Api<EgressAddressClaim> = Api::all(self.cluster.client.clone());
        Ok(claims.get(&name_of(ip(ADDRESSES[family]))).await?)
    }

    /// The position of the node that has both addresses on its uplink.
    async fn owner(&self) -> Result<usize> {
        wait::until_some("one node answers for both addresses", patience(), async || {
            let mut owners = Vec::new();
            for family in [0, 1] {
                let claim = self.claim(family).await?;
                let status = claim.status.context("no status")?;
                let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
                ensure!(
                    ready.is_some_and(|ready| ready.reason == "OnUplink"),
                    "{:?}",
                    status.conditions
                );
                owners.push(status.holder.context("no holder")?.node_name);
            }
            ensure!(owners[0] == owners[1], "{owners:?}");
            Ok(self.cluster.nodes.iter().position(|node| node.name == owners[0]))
        })
        .await
    }

    /// The units of the address by node.
    async fn units(&self, family: usize) -> Result<BTreeMap<String, u8>> {
        let shares = self.claim(family).await?.spec.shares.into_iter();
        Ok(shares.map(|share| (share.node_name, share.unit)).collect())
    }

    /// Waits until these pods leave with both addresses.
    async fn all_leave(&self, pods: &[usize]) -> Result<()> {
        wait::until("pods of all nodes leave with the address", patience(), async || {
            for pod in pods.iter().map(|pod| &self.pods[*pod]) {
                for family in [0, 1] {
                    let answer = udp_ask(&pod.inside, ip(OUTSIDE[family]), PORT, SILENCE);
                    let answer = answer.with_context(|| format!("{}, family {family}", pod.name))?;
                    ensure!(answer.client.ip() == ip(ADDRESSES[family]), "{}: {answer:?}", pod.name);
                }
            }
            Ok(true)
        })
        .await
        .map(drop)
        .with_context(|| self.state())
    }

    fn state(&self) -> String {
        let logs = self.cluster.nodes.iter().map(|member| {
            let log = member.agent.log();
            let last: Vec<&str> = log.lines().rev().take(20).collect();
            format!("{}, newest first:\n{}", member.name, last.join("\n"))
        });
        let controller = self.cluster.controllers.iter().map(|controller| {
            let log = controller.log();
            log.lines().rev().take(20).collect::<Vec<_>>().join("\n")
        });
        logs.chain(controller).collect::<Vec<_>>().join("\n")
    }

    /// Connections and datagrams of the pods on these nodes, in both families.
    fn traffic(&self, nodes: &[usize]) -> Result<Vec<(&'static str, Stream)>> {
        let mut streams = Vec::new();
        for node in nodes {
            for there in OUTSIDE {
                let (inside, there) = (&self.pods[*node].inside, SocketAddr::new(ip(there), PORT));
                streams.push(("TCP", Stream::tcp(inside, there)?));
                streams.push(("UDP", Stream::udp(inside, there)?));
            }
        }
        Ok(streams)
    }

    /// Patches both claims as kni-controller would, to name another node.
    async fn assign(&self, node: usize) -> Result<()> {
        let claims: Api<EgressAddressClaim> = Api::all(self.cluster.client.clone());
        let nodes: Api<NodeObject> = Api::all(self.cluster.client.clone());
        let node = nodes.get(&self.cluster.nodes[node].name).await?.metadata;
        for address in ADDRESSES {
            let name = name_of(ip(address));
            let epoch = claims.get(&name).await?.spec.epoch + 1;
            let spec = json!({ "spec": { "nodeName": node.name, "nodeUid": node.uid, "epoch": epoch } });
            claims
                .patch(&name, &PatchParams::default(), &Patch::Merge(&spec))
                .await?;
        }
        Ok(())
    }

    /// An operator declares a node to be shut down.
    async fn declare_out_of_service(&self, node: usize) -> Result<()> {
        let nodes: Api<NodeObject> = Api::all(self.cluster.client.clone());
        let taint =
            json!({ "key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute" });
        let patch = Patch::Merge(json!({ "spec": { "taints": [taint] } }));
        nodes
            .patch(&self.cluster.nodes[node].name, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }
}

/// What an event cost: every connection lives, and each of its requests was answered.
fn assess(event: &str, streams: Vec<(&'static str, Stream)>) -> BTreeMap<&'static str, StreamReport> {
    let mut sums: BTreeMap<&'static str, StreamReport> = BTreeMap::new();
    for (kind, stream) in streams {
        let report = stream.stop();
        if kind == "TCP" {
            assert!(report.broken.is_none() && report.lost() == 0, "{event}: {report:?}");
        }
        assert!(
            report.identities.iter().eq(["outside"]),
            "{event}: {:?}",
            report.identities
        );
        let sum = sums.entry(kind).or_default();
        sum.sent += report.sent;
        sum.answered += report.answered;
        sum.longest_silence = sum.longest_silence.max(report.longest_silence);
    }
    for (kind, sum) in &sums {
        println!(
            "{event:<22} {kind}: {} requests, {} lost, longest silence {:?}",
            sum.sent,
            sum.lost(),
            sum.longest_silence
        );
    }
    sums
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_survive_the_node_that_they_leave_by() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::start("cluster-egress-failover").await?;
    let owner = scene.owner().await?;
    let others: Vec<usize> = (0..3).filter(|node| *node != owner).collect();

    let streams = scene.traffic(&[0, 1, 2])?;
    tokio::time::sleep(2 * AROUND).await;
    let control = assess("no event", streams);
    assert!(control.values().all(|report| report.lost() == 0), "{control:?}");

    // Only their own node has their flows: the next owner knows nothing of them.
    let streams = scene.traffic(&[0, 1, 2])?;
    tokio::time::sleep(AROUND).await;
    let begun = Instant::now();
    scene.assign(others[0]).await?;
    wait::until("the next owner has the addresses", patience(), async || {
        Ok(scene.owner().await? == others[0])
    })
    .await?;
    scene.all_leave(&[0, 1, 2]).await?;
    println!("all pods leave by another node after {:?}", begun.elapsed());
    tokio::time::sleep(AROUND).await;
    let moved = assess("planned move", streams);
    let limit = MOVE + prompt(&scene.cluster).await?;
    assert!(moved["UDP"].longest_silence < limit, "{moved:?}, limit {limit:?}");

    late::the_owner_knows_the_other_nodes_late(&mut scene, others[0]).await?;

    // The node fails: agent and network. Pods of the other nodes continue once an operator has declared it to be shut
    // down.
    let (failed, rest) = (late::PROXIED, [0, 1]);
    let streams = scene.traffic(&rest)?;
    tokio::time::sleep(AROUND).await;
    scene.cluster.nodes[failed].agent.kill9()?;
    scene.cluster.nodes[failed].node.ip(&["link set uplink0 down"])?;
    let begun = Instant::now();
    scene.declare_out_of_service(failed).await?;
    scene.all_leave(&rest).await?;
    println!("the pods of the other nodes leave after {:?}", begun.elapsed());
    tokio::time::sleep(AROUND).await;
    let lost = assess("node out of service", streams);
    assert!(rest.contains(&scene.owner().await?));
    let limit = 2 * MOVE + prompt(&scene.cluster).await?;
    assert!(lost["UDP"].longest_silence < limit, "{lost:?}, limit {limit:?}");
    ensure!(
        scene.server.seen() > 100,
        "{} requests were answered",
        scene.server.seen()
    );
    Ok(())
}

async fn dropped(member: &Member, direction: &str, reason: &str) -> Result<u64> {
    let request = ListDropsRequest::default();
    let listed = member.kubelet.kni().runtime().list_drops(request).await?;
    let drops = listed.into_inner().drops.into_iter();
    let found = drops.filter(|drop| drop.direction == direction && drop.reason == reason);
    Ok(found.filter_map(|drop| drop.count).map(|count| count.packets).sum())
}

/// A datagram of the tunnel with a segment in the virtual network of egress addresses.
fn forged(from: (IpAddr, u16), to: (IpAddr, u16)) -> Vec<u8> {
    let packet = Ip::new(from.0, to.0).packet(&Payload::tcp(from.1, to.1, TcpFlags::ACK));
    let frame = Link::new([2, 0, 0, 0, 9, 9], [2, 0, 0, 0, 9, 8]).frame(&packet);
    [&[8, 0, 0, 0, 0, 0, 0, 0], &frame[..]].concat()
}

/// A host of the underlay that is no node, or not the right one, neither leaves with the address nor replies to a pod.
async fn forgeries_are_dropped(scene: &Scene, owner: usize) -> Result<()> {
    let fabric = scene.cluster.fabric.inside();
    let (egress, outside) = (ip(ADDRESSES[0]), ip(OUTSIDE[0]));
    let units = scene.units(0).await?;
    let sender = fabric.enter(|| std::net::UdpSocket::bind((outside, 0)))??;
    for (position, member) in scene.cluster.nodes.iter().enumerate() {
        let answers = position == owner;
        let other = scene.cluster.nodes.iter().position(|node| node.name != member.name);
        let unit_of = |position: usize| units.get(&scene.cluster.nodes[position].name).copied();
        let unit = unit_of(if answers {
            other.context("another node")?
        } else {
            position
        });
        let port = u16::from(unit.context("a unit")?) * 1024 + 1;
        let datagram = if answers {
            forged((egress, port), (outside, PORT))
        } else {
            forged((outside, PORT), (egress, port))
        };
        let before = dropped(member, "from_overlay", "foreign_node").await?;
        let to: IpAddr = member.node.addresses()[0].parse()?;
        for _ in 0..100 {
            sender.send_to(&datagram, (to, OVERLAY_PORT))?;
        }
        wait::until("forged packets are dropped", patience(), async || {
            let more = dropped(member, "from_overlay", "foreign_node").await? - before;
            ensure!(more == 100, "{}: {more} of 100", member.name);
            Ok(true)
        })
        .await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pods_of_every_node_leave_with_the_address_from_ports_of_their_node() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut scene = Scene::start("cluster-egress-shared").await?;
    let owner = scene.owner().await?;
    for family in [0, 1] {
        let units = scene.units(family).await?;
        ensure!(units.len() == 3, "{units:?}");
        for (pod, member) in scene.pods.iter().zip(&scene.cluster.nodes) {
            for _ in 0..20 {
                let answer = tcp_get(&pod.inside, ip(OUTSIDE[family]), PORT, ANSWER)?;
                let unit = answer.client.port() / 1024;
                ensure!(
                    answer.client.ip() == ip(ADDRESSES[family])
                        && Some(&u8::try_from(unit)?) == units.get(&member.name),
                    "{}: {answer:?}, {units:?}",
                    pod.name
                );
            }
        }
    }
    for (position, member) in scene.cluster.nodes.iter().enumerate() {
        let shown = member.node.run("ip", &["address", "show", "dev", "uplink0"])?;
        for address in ADDRESSES {
            let has = shown.contains(&format!(" {address}/"));
            ensure!(has == (position == owner), "{}: {shown}", member.name);
        }
    }
    policy_is_ready(&scene).await?;
    forgeries_are_dropped(&scene, owner).await?;

    // Without a pod the owner stays the owner, and the others leave by it; also while its agent is dead.
    scene
        .cluster
        .remove("red-team", &[&format!("web-{}", owner + 1)])
        .await?;
    let others: Vec<usize> = (0..3).filter(|node| *node != owner).collect();
    wait::until("the unit of the node rests", patience(), async || {
        let shares = scene.claim(0).await?.spec.shares;
        Ok(shares.iter().filter(|share| share.unused_since.is_some()).count() == 1)
    })
    .await?;
    scene.all_leave(&others).await?;
    ensure!(scene.owner().await? == owner);
    for node in [owner, others[0]] {
        let streams = scene.traffic(&others)?;
        scene.cluster.nodes[node].agent.kill9()?;
        tokio::time::sleep(AROUND).await;
        scene.cluster.nodes[node].agent.restart()?;
        tokio::time::sleep(AROUND).await;
        let reports = assess("agent restarted", streams);
        assert!(reports.values().all(|report| report.lost() == 0), "{reports:?}");
    }
    Ok(())
}

async fn policy_is_ready(scene: &Scene) -> Result<()> {
    let policies: Api<EgressPolicy> = Api::namespaced(scene.cluster.client.clone(), "red-team");
    wait::until("the policy reports that all pods leave", patience(), async || {
        let status = policies.get("web").await?.status.context("no status")?;
        let ready = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == "AddressesReady");
        ensure!(
            ready.is_some_and(|ready| ready.status == ConditionStatus::True),
            "{:?}",
            status.conditions
        );
        Ok(true)
    })
    .await
    .map(drop)
}
