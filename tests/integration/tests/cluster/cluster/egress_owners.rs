//! Tests that an egress address has one owner at any time: in a capture of everything that the nodes answer and
//! announce.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kni_api::EgressAddressClaim;
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    frames::{Mac, PacketSocket, arp_request, parse_mac},
    require,
    traffic::{Servers, udp_ask},
    wait,
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    egress_refused, egress_writes,
    scene::{PORT, SILENCE, tenants},
};

/// The address that moves.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 70);
/// The host on the fabric that pods reach.
const OUTSIDE: &str = "198.51.100.1";
/// A MAC address of no host; the fabric delivers answers to it to every port.
const ASKING: Mac = [2, 0, 0, 0, 0, 0x77];
/// Its address.
const ASKER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 250);
/// The EtherType of ARP.
const ARP: [u8; 2] = [0x08, 0x06];
/// Pause between two questions who has the address.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// After a pod is gone, the time in which its node would have released the address.
const SETTLED: Duration = Duration::from_secs(3);

/// Asks all the time who has [`ADDRESS`], and records every claim to it on the fabric.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Seen>>,
}

/// The MAC addresses that claimed the address, in order and without repetitions; and questions with two answers.
#[derive(Debug, Default)]
struct Seen {
    owners: Vec<Mac>,
    frames: usize,
    doubles: usize,
}

impl Watch {
    fn start(cluster: &Cluster) -> Result<Self> {
        let inside = cluster.fabric.inside().clone();
        let asking = PacketSocket::open(&inside, "fabric0")?;
        // One socket: those of two ports would not show in which order frames came.
        let fabric = PacketSocket::open_all(&inside)?;
        let stop = Arc::new(AtomicBool::new(false));
        let ending = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut seen = Seen::default();
            let mut answers = BTreeSet::new();
            while !ending.load(Ordering::Relaxed) {
                asking.send(&arp_request(ASKING, ASKER, ADDRESS))?;
                let is_seen = |frame: &[u8]| claim(frame).is_some() || is_question(frame);
                while let Some(frame) = fabric.receive(ASK_EVERY, is_seen)? {
                    let Some(mac) = claim(&frame) else {
                        answers.clear();
                        continue;
                    };
                    seen.frames += 1;
                    if seen.owners.last() != Some(&mac) {
                        seen.owners.push(mac);
                    }
                    // Not an announcement: the next owner may have the address before the next question.
                    if is_answer(&frame) && answers.insert(mac) {
                        seen.doubles += usize::from(answers.len() == 2);
                    }
                }
            }
            Ok(seen)
        });
        Ok(Self { stop, thread })
    }

    fn finish(self) -> Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a watch does not panic")
    }
}

/// The MAC address that claims [`ADDRESS`] in a frame: the sender of ARP, or of an IPv4 packet.
fn claim(frame: &[u8]) -> Option<Mac> {
    let address = match frame.get(12..14)? {
        [0x08, 0x06] => frame.get(28..32)?,
        [0x08, 0x00] => frame.get(26..30)?,
        _ => return None,
    };
    (address == ADDRESS.octets()).then(|| frame.get(6..12)?.try_into().ok())?
}

/// Whether a frame asks for [`ADDRESS`] on behalf of [`ASKING`].
fn is_question(frame: &[u8]) -> bool {
    frame.get(6..12) == Some(&ASKING[..]) && frame.get(12..14) == Some(&ARP[..])
}

/// Whether a frame is an ARP reply to [`ASKER`].
fn is_answer(frame: &[u8]) -> bool {
    let is_reply = frame.get(12..14) == Some(&ARP[..]) && frame.get(20..22) == Some(&[0, 2][..]);
    is_reply && frame.get(38..42) == Some(&ASKER.octets()[..])
}

async fn claim_object(cluster: &Cluster) -> Result<EgressAddressClaim> {
    let claims: Api<EgressAddressClaim> = Api::all(cluster.client.clone());
    Ok(claims.get(&ADDRESS.to_string()).await?)
}

/// Waits until a node holds the address and has it on its uplink; `None`: whichever. Returns the node's position.
async fn wait_for_owner(cluster: &Cluster, node: Option<usize>) -> Result<usize> {
    let found = wait::until_some("the address has an owner", patience(), async || {
        let claim = claim_object(cluster).await?;
        let status = claim.status.context("no status")?;
        let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready");
        let holder = status.holder.context("no holder")?.node_name;
        let ready = ready.is_some_and(|ready| ready.reason == "OnUplink");
        let position = cluster.nodes.iter().position(|node| node.name == holder);
        let right = ready && holder == claim.spec.node_name && node.is_none_or(|node| Some(node) == position);
        ensure!(right, "holder {holder}, spec {:?}, {:?}", claim.spec, status.conditions);
        Ok(position)
    });
    found.await.with_context(|| {
        let logs = cluster.nodes.iter().map(|member| {
            let log = member.agent.log();
            let last: Vec<&str> = log.lines().rev().take(25).collect();
            format!("{}, newest first:\n{}", member.name, last.join("\n"))
        });
        logs.collect::<Vec<_>>().join("\n")
    })
}

/// Whether a pod is answered within this time, with the address. With another one is an error.
fn leaves(pod: &Pod, within: Duration) -> Result<bool> {
    match udp_ask(&pod.inside, OUTSIDE.parse()?, PORT, within) {
        Ok(answer) if answer.client.ip() == IpAddr::V4(ADDRESS) => Ok(true),
        Ok(answer) => anyhow::bail!("{} left with {}", pod.name, answer.client),
        Err(_) => Ok(false),
    }
}

async fn wait_until_all(pods: &[&Pod]) -> Result<()> {
    wait::until("the pods leave with the address", patience(), async || {
        for pod in pods {
            ensure!(leaves(pod, SILENCE)?, "{} does not leave", pod.name);
        }
        Ok(true)
    })
    .await
    .map(drop)
}

/// The MAC address of a node's uplink.
pub(super) fn mac(cluster: &Cluster, node: usize) -> Result<Mac> {
    let shown = cluster.nodes[node]
        .node
        .run("ip", &["link", "show", "dev", "uplink0"])?;
    let text = shown
        .split("link/ether ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    parse_mac(text.context("no MAC address")?).context("a MAC address")
}

fn web(name: &str, node: &str) -> Value {
    objects::pod_with("red-team", name, node, &json!({ "labels": { "app": "web" } }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "the life of one address, in order")]
async fn an_address_has_one_owner_at_any_time() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-egress-owners", 2).await?;
    tenants(&cluster).await?;
    egress_refused::addresses_of_others_are_refused_with_the_reason(&cluster).await?;
    let _server = Servers::start(cluster.fabric.inside(), "outside", PORT)?;
    let watch = Watch::start(&cluster)?;
    let policy = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
        "metadata": { "name": "web", "namespace": "red-team" },
        "spec": { "podSelector": { "matchLabels": { "app": "web" } }, "egressAddresses": [ADDRESS] },
    });
    cluster.apply(&[policy]).await?;
    let mut pods = cluster.run(&[web("web-0", "node1"), web("web-1", "node2")]).await?;
    let first = wait_for_owner(&cluster, None).await?;
    let second = 1 - first;
    let names = [0, 1].map(|node: usize| cluster.nodes[node].name.clone());
    wait_until_all(&[&pods[0], &pods[1]]).await?;
    egress_writes::an_agent_writes_only_itself(&cluster, &ADDRESS.to_string(), &names[first], &names[second]).await?;

    // An agent that is killed keeps the address: nothing else could remove it from the uplink.
    cluster.nodes[first].agent.kill9()?;
    for _ in 0..5 {
        assert!(leaves(&pods[first], patience())?, "the node needs no agent for it");
        assert!(leaves(&pods[second], patience())?, "nor for pods of other nodes");
    }
    assert_eq!(claim_object(&cluster).await?.spec.node_name, names[first]);
    cluster.nodes[first].agent.restart()?;
    wait_for_owner(&cluster, Some(first)).await?;
    wait_until_all(&[&pods[0], &pods[1]]).await?;

    // Without pods there, it stays.
    cluster.remove("red-team", &[&format!("web-{first}")]).await?;
    tokio::time::sleep(SETTLED).await;
    wait_for_owner(&cluster, Some(first)).await?;
    wait_until_all(&[&pods[second]]).await?;
    pods[first] = cluster.run(&[web("web-again", &names[first])]).await?.remove(0);
    wait_until_all(&[&pods[0], &pods[1]]).await?;

    // A node that is declared to be shut down while only its agent is dead still answers: the next owner finds that
    // out. Without its object the token of its agent would end, at a moment that the API server's cache decides.
    cluster.nodes[first].agent.kill9()?;
    let nodes: Api<NodeObject> = Api::all(cluster.client.clone());
    let taint = json!({ "key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute" });
    let taints = Patch::Merge(json!({ "spec": { "taints": [taint] } }));
    nodes.patch(&names[first], &PatchParams::default(), &taints).await?;
    wait::until(
        "the next owner finds the host that has the address",
        patience(),
        async || {
            let claim = claim_object(&cluster).await?;
            let status = claim.status.context("no status")?;
            let conflict = status
                .conditions
                .iter()
                .find(|condition| condition.reason == "AddressConflict");
            let conflict = conflict.with_context(|| format!("{:?}", status.conditions))?;
            println!("claim: {}", conflict.message);
            Ok(claim.spec.node_name == names[second])
        },
    )
    .await?;
    assert!(!leaves(&pods[second], SILENCE)?, "not before the address is free");
    cluster.nodes[first].agent.restart()?;
    wait_for_owner(&cluster, Some(second)).await?;
    wait_until_all(&[&pods[0], &pods[1]]).await?;

    let seen = watch.finish()?;
    println!("{seen:02x?}");
    let expected = [first, second].map(|node| mac(&cluster, node));
    let expected: Vec<Mac> = expected.into_iter().collect::<Result<_>>()?;
    assert_eq!(
        seen.owners, expected,
        "the owners in the order in which they claimed the address"
    );
    assert_eq!(seen.doubles, 0, "two nodes answered at once");
    assert!(seen.frames > 100, "{seen:?}");
    Ok(())
}
