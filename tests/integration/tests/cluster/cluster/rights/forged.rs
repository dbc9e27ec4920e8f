//! Tests that no `NetworkMembers` gives an identity whose report other objects contradict, also if RBAC and admission
//! let it pass; and that false `PodInterface`s are removed, and let no namespace into a network.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1::Node, events::v1::Event};
use kni_api::{AddressBlock, NetworkMembers, PodInterface, network_members};
use kni_integration::{
    Cluster, Pod,
    cluster::{connect, objects, patience, token},
    wait,
};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::super::scene::{address, network_object};

/// A network that is created after a report about it.
const LATER: &str = "payments";
/// Number of the report that is true; those after it are false. No node has that many pods here.
const TRUE: usize = 100;

/// Holds a process that would remove false objects; it continues when dropped.
struct Held(Pid);

impl Held {
    fn new(pid: u32) -> Result<Self> {
        let pid = Pid::from_raw(i32::try_from(pid)?);
        kill(pid, Signal::SIGSTOP)?;
        Ok(Self(pid))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The signal fails for a process that has ended.
        kill(self.0, Signal::SIGCONT).ok();
    }
}

/// Pod web on node1 accepts pods with role admin. admin and stranger run on node2, local runs on node1.
#[expect(clippy::too_many_lines, reason = "one report after the other")]
pub(super) async fn no_identity(cluster: &Cluster, [_web, admin, stranger, local]: [&Pod; 4]) -> Result<()> {
    let ingress = json!({
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "role": "admin" } } }] }],
    });
    cluster.apply(&[objects::policy("plain", "admins", &ingress)]).await?;
    let (known, other) = (address(admin, true), address(stranger, true));
    wait::until("admin is accepted, others are not", patience(), async || {
        Ok(reaches(cluster, known)? && !reaches(cluster, other)?)
    })
    .await?;
    // It would remove reports that are not its own.
    let agent = Held::new(cluster.nodes[1].agent.pid())?;
    let free = free_addresses(cluster, "node2").await?;
    let nobodys: IpAddr = "10.244.255.77".parse()?;
    let (elsewhere, local) = (local, address(local, true));
    let (uid, ghost) = (&admin.uid, "ghost".to_owned());
    let claims = [
        (
            "the pod is on another node",
            &elsewhere.name,
            &elsewhere.uid,
            "node2",
            nobodys,
        ),
        ("the address is of a pod of node1", &admin.name, uid, "node2", local),
        ("the address is of no node", &admin.name, uid, "node2", nobodys),
        ("the pod has another UID", &admin.name, &stranger.uid, "node2", other),
        ("there is no such pod", &ghost, uid, "node2", other),
    ];
    for ((what, pod, uid, node, victim), number) in claims.into_iter().zip(1..) {
        let name = object_name(node, TRUE + number);
        report(cluster, &name, (pod, uid, node), victim).await?;
        // A report that is true arrives after the false one, by the same watches.
        let canary = *free.get(number).context("a free address of node2")?;
        let of_canary = object_name("node2", TRUE);
        report(cluster, &of_canary, (&admin.name, &admin.uid, "node2"), canary).await?;
        wait::until("the true report gives an identity", patience(), async || {
            reaches(cluster, canary)
        })
        .await?;
        ensure!(!reaches(cluster, victim)?, "{what}: {victim} has the identity of admin");
        let status = wait::until_some("the false report is refused", patience(), async || {
            let object = members(cluster).get(&name).await?;
            Ok(object.status.filter(|status| !status.refused.is_empty()))
        })
        .await?;
        ensure!(status.members.is_empty(), "{what}: {status:?}");
        println!(
            "{what}: {victim} gets no identity ({}); {canary} does",
            status.refused[0].reason
        );
    }
    ensure!(reaches(cluster, known)?, "admin keeps its own");
    // Where node1 reports its next pods.
    let taken = object_name("node1", TRUE);
    report(cluster, &taken, (&admin.name, uid, "node2"), known).await?;
    wait::until("the name of node1 is free again", patience(), async || {
        Ok(members(cluster).get_opt(&taken).await?.is_none())
    })
    .await?;
    // A relabelled pod of another node has its new identity soon.
    relabel(cluster, admin, "none").await?;
    wait::until("admin is no admin any more", patience(), async || {
        Ok(!reaches(cluster, known)?)
    })
    .await?;
    relabel(cluster, admin, "admin").await?;
    wait::until("admin is one again", patience(), async || reaches(cluster, known)).await?;
    false_interfaces(cluster, admin, stranger).await?;
    an_interface_before_its_network(cluster, stranger).await?;
    drop(agent);
    wait::until(
        "the agent of node2 removes what it did not report",
        patience(),
        async || {
            let of_canary = object_name("node2", TRUE);
            Ok(members(cluster).get_opt(&of_canary).await?.is_none())
        },
    )
    .await?;
    ensure!(reaches(cluster, known)?, "admin keeps its own");
    Ok(())
}

/// The token of node2 reports a pod of its node in a network that does not exist yet. The network is created without
/// `spec.access`: that contains afterwards what its author has written, and the report lets no namespace in.
async fn an_interface_before_its_network(cluster: &Cluster, stranger: &Pod) -> Result<()> {
    let token = token(&cluster.client, "kni-agent", Some("node2")).await?;
    let client = connect(cluster.fabric.inside(), &cluster.control.token_kubeconfig(&token)).await?;
    let forged: PodInterface = serde_json::from_value(json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": {
            "name": kni_api::pod_interface::name(&stranger.name, &stranger.uid, "net8"),
            "labels": { "kni.dev/network": LATER },
        },
        "spec": {
            "podName": stranger.name, "podUid": stranger.uid, "nodeName": "node2", "podNetworkName": LATER,
            "interfaceName": "net8", "sandboxId": "0",
        },
    }))?;
    let interfaces: Api<PodInterface> = Api::namespaced(client, &stranger.namespace);
    interfaces.create(&PostParams::default(), &forged).await?;
    let of_team = json!({ "namespaceSelector": { "matchLabels": { "team": LATER } } });
    cluster
        .apply(&[
            objects::network_without_access(LATER, &["10.77.0.0/16"], &of_team),
            objects::namespace("payments-team", &json!({ "team": LATER })),
        ])
        .await?;
    wait::until(
        "kni-controller has seen the report in the network",
        patience(),
        async || {
            let status = network_object(cluster, LATER).await?.status.context("no status")?;
            Ok(status.interfaces == 1 && status.fabric.is_some())
        },
    )
    .await?;
    // A pod that may join runs: the controllers and an agent have taken the network as it is.
    let own = cluster.run(&[objects::pod("payments-team", "own", "node1")]).await?;
    let kubelet = cluster.nodes[0].kubelet.kni();
    let joined = kubelet.interfaces_of("payments-team", &own[0].name).await?;
    ensure!(joined.iter().any(|interface| interface.network == LATER), "{joined:?}");
    let refused = kubelet
        .run_pod("plain", "intruder", &[("kni.dev/network", LATER)])
        .await;
    let refused = refused.err().context("a pod of another namespace has joined")?;
    ensure!(refused.message().contains("spec.access.namespaces"), "{refused:?}");
    let access = network_object(cluster, LATER).await?.spec.access;
    ensure!(access.is_none(), "{access:?}");
    Ok(())
}

/// Objects of one node that claim the pod, or the name of the object, of another one are removed.
async fn false_interfaces(cluster: &Cluster, admin: &Pod, stranger: &Pod) -> Result<()> {
    claim(cluster, "forged1", (&admin.name, &admin.uid)).await?;
    // The next interface of a pod of node2 has no object yet; its name is taken.
    let taken = kni_api::pod_interface::name(&stranger.name, &stranger.uid, "net9");
    claim(cluster, &taken, ("ghost", &admin.uid)).await?;
    let interfaces: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    wait::until(
        "kni-controller removes the claims of another node",
        patience(),
        async || Ok(interfaces.get_opt("forged1").await?.is_none() && interfaces.get_opt(&taken).await?.is_none()),
    )
    .await?;
    wait::until("an event names the claim", patience(), async || {
        let events: Api<Event> = Api::namespaced(cluster.client.clone(), "plain");
        let events = events.list(&ListParams::default()).await?;
        let notes = events
            .into_iter()
            .filter(|event| event.reason.as_deref() == Some("FalseInterface"));
        let mut notes = notes.filter_map(|event| event.note);
        Ok(notes.any(|note| note.contains("plain/forged1") && note.contains("node3")))
    })
    .await
    .map(drop)
}

fn members(cluster: &Cluster) -> Api<NetworkMembers> {
    Api::all(cluster.client.clone())
}

fn object_name(node: &str, number: usize) -> String {
    network_members::name("default", node, number)
}

async fn relabel(cluster: &Cluster, pod: &Pod, role: &str) -> Result<()> {
    let api: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let labels = json!({ "metadata": { "labels": { "role": role } } });
    api.patch(&pod.name, &PatchParams::default(), &Patch::Merge(&labels))
        .await?;
    Ok(())
}

/// Whether the policies of node1 let a packet from an address reach pod `web`.
fn reaches(cluster: &Cluster, from: IpAddr) -> Result<bool> {
    let from = from.to_string();
    let text = cluster.nodes[0].knictl(&["explain", &from, "plain/web", "tcp/7000", "-o", "json"])?;
    let answer: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    answer["allowed"].as_bool().with_context(|| text.clone())
}

/// Writes a report that gives an address to a pod on a node, with the rights of an administrator.
async fn report(cluster: &Cluster, name: &str, (pod, uid, node): (&str, &str, &str), address: IpAddr) -> Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let node_uid = nodes.get(node).await?.metadata.uid;
    let network_uid = network_object(cluster, "default").await?.metadata.uid;
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "NetworkMembers",
        "metadata": { "name": name, "labels": { "kni.dev/network": "default" } },
        "spec": {
            "network": "default", "networkUID": network_uid, "nodeName": node, "nodeUID": node_uid,
            "members": [{
                "namespace": "plain", "podName": pod, "podUID": uid, "interface": "eth0",
                "addresses": [address.to_string()],
            }],
        },
    });
    cluster.apply(&[object]).await
}

/// Writes an interface of a node that does not exist, with the rights of an administrator.
async fn claim(cluster: &Cluster, name: &str, (pod, uid): (&str, &str)) -> Result<()> {
    let ifname: String = name.chars().take(15).collect();
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": { "name": name, "namespace": "plain" },
        "spec": {
            "podName": pod, "podUid": uid, "nodeName": "node3", "podNetworkName": "default", "interfaceName": ifname,
            "sandboxId": "0",
        },
    });
    cluster.apply(&[object]).await
}

/// The last addresses of an IPv4 block of a node in the default network, which are assigned last.
async fn free_addresses(cluster: &Cluster, node: &str) -> Result<Vec<IpAddr>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={node},spec.network=default"));
    let mut blocks = api.list(&own).await?.items.into_iter();
    let block = blocks.find_map(|block| block.spec.cidr.parse::<IpNet>().ok().filter(|net| net.addr().is_ipv4()));
    let block = block.with_context(|| format!("no block of {node}"))?;
    let mut hosts: Vec<IpAddr> = block.hosts().collect();
    hosts.reverse();
    Ok(hosts)
}
