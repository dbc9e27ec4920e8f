//! Tests that an agent believes no `PodInterface` whose claims other objects contradict, also if RBAC and admission let it pass.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use k8s_openapi::api::events::v1::Event;
use kni_api::PodInterface;
use kni_integration::{
    Cluster, Pod,
    cluster::{PATIENCE, objects},
    wait,
};
use kube::api::{Api, ListParams, Patch, PatchParams};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::super::scene::{address, network_object};

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
pub(super) async fn no_identity(cluster: &Cluster, [_web, admin, stranger, local]: [&Pod; 4]) -> Result<()> {
    let ingress = json!({
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "role": "admin" } } }] }],
    });
    cluster.apply(&[objects::policy("plain", "admins", &ingress)]).await?;
    let (known, other) = (address(admin, true), address(stranger, true));
    wait::until("admin is accepted, others are not", PATIENCE, async || {
        Ok(reaches(cluster, known)? && !reaches(cluster, other)?)
    })
    .await?;
    let _agent = Held::new(cluster.nodes[1].agent.pid())?;
    let controller = Held::new(cluster.controllers[0].pid())?;
    let free = free_addresses(cluster, "node2").await?;
    let nobodys: IpAddr = "10.244.255.77".parse()?;
    let local = address(local, true);
    let (uid, ghost) = (&admin.uid, "ghost".to_owned());
    let claims = [
        ("the pod is not on the node", &admin.name, uid, "node3", nobodys),
        ("the address is of a pod of node1", &admin.name, uid, "node2", local),
        ("the address is of no node", &admin.name, uid, "node2", nobodys),
        ("the pod has another UID", &admin.name, &stranger.uid, "node2", other),
        ("there is no such pod", &ghost, uid, "node2", other),
    ];
    for ((what, pod, uid, node, victim), number) in claims.into_iter().zip(1..) {
        let name = format!("forged{number}");
        claim(cluster, &name, (pod, uid, node), victim).await?;
        // A claim that is true arrives after the false one, by the same watch.
        let canary = *free.get(number).context("a free address of node2")?;
        claim(cluster, "true", (&admin.name, &admin.uid, "node2"), canary).await?;
        wait::until("the true claim gives an identity", PATIENCE, async || {
            reaches(cluster, canary)
        })
        .await?;
        ensure!(!reaches(cluster, victim)?, "{what}: {victim} has the identity of admin");
        println!("{what}: {victim} gets no identity; {canary} does by a true claim");
    }
    ensure!(reaches(cluster, known)?, "admin keeps its own");

    // The next interface of a pod of node2 has no object yet; its name is taken.
    let taken = kni_api::pod_interface::name(&stranger.name, &stranger.uid, "net9");
    claim(cluster, &taken, (&ghost, uid, "node3"), nobodys).await?;
    drop(controller);
    let interfaces: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    wait::until(
        "kni-controller removes the claims of another node",
        PATIENCE,
        async || Ok(interfaces.get_opt("forged1").await?.is_none() && interfaces.get_opt(&taken).await?.is_none()),
    )
    .await?;
    wait::until("an event names the claim", PATIENCE, async || {
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

/// Whether the policies of node1 let a packet from an address reach pod `web`.
fn reaches(cluster: &Cluster, from: IpAddr) -> Result<bool> {
    let from = from.to_string();
    let text = cluster.nodes[0].knictl(&["explain", &from, "plain/web", "tcp/7000", "-o", "json"])?;
    let answer: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    answer["allowed"].as_bool().with_context(|| text.clone())
}

/// Writes an object that gives an address to a pod on a node, with the rights of an administrator.
async fn claim(cluster: &Cluster, name: &str, (pod, uid, node): (&str, &str, &str), address: IpAddr) -> Result<()> {
    let ifname: String = name.chars().take(15).collect();
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "PodInterface",
        "metadata": { "name": name, "namespace": "plain" },
        "spec": {
            "podName": pod, "podUid": uid, "nodeName": node, "podNetworkName": "default", "interfaceName": ifname,
            "sandboxId": "0",
        },
    });
    cluster.apply(&[object]).await?;
    let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "plain");
    let status = json!({ "status": { "addresses": [{ "ip": address.to_string(), "family": "IPv4" }] } });
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    Ok(())
}

/// The last addresses of an IPv4 block of a node in the default network, which are assigned last.
async fn free_addresses(cluster: &Cluster, node: &str) -> Result<Vec<IpAddr>> {
    let status = network_object(cluster, "default").await?.status.context("status")?;
    let mut blocks = status.blocks.iter().filter(|block| block.node == node);
    let block = blocks.find_map(|block| block.cidr.parse::<IpNet>().ok().filter(|net| net.addr().is_ipv4()));
    let block = block.with_context(|| format!("no block of {node}"))?;
    let mut hosts: Vec<IpAddr> = block.hosts().collect();
    hosts.reverse();
    Ok(hosts)
}
