//! Deletes, registers, reboots, drains and changes the third node.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kni_api::NodeEndpoint;
use kni_integration::{
    cluster::{objects, patience},
    wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;

use super::{
    super::{
        super::scene::identity,
        bed::{Bed, TEAM},
        streams::Opener,
    },
    AWAY, Own,
};

/// Who is back first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    AgentStays,
    NodeFirst,
    AgentFirst,
}

/// Another program takes the tunnel device down; the agent finds it.
pub(super) async fn tunnel_down(bed: &mut Bed) -> Result<()> {
    bed.third().node.ip(&["link set kni-overlay down"])?;
    bed.is_right().await.map(drop)
}

/// The `Node` is deleted, away for a while, and created under its name.
pub(super) async fn registered(bed: &mut Bed, order: Order) -> Result<()> {
    let client = bed.cluster.client.clone();
    let nodes: Api<Node> = Api::all(client.clone());
    let third = bed.third();
    if order != Order::AgentStays {
        third.agent.kill9()?;
    }
    let former = nodes.get(&third.name).await?.uid();
    nodes.delete(&third.name, &DeleteParams::default()).await?;
    if order == Order::AgentFirst {
        third.agent.restart()?;
    }
    tokio::time::sleep(AWAY).await;
    third.register(&client).await?;
    if order == Order::NodeFirst {
        third.agent.restart()?;
    }
    ensure!(nodes.get(&third.name).await?.uid() != former, "another object");
    bed.is_right().await.map(drop)
}

/// The node loses its power, and starts again. Its kubelet starts its pods again.
pub(super) async fn rebooted(bed: &mut Bed) -> Result<()> {
    let client = bed.cluster.client.clone();
    let former = bed.pod("third").ips();
    let sandbox = bed.pod("third").id.clone();
    bed.third().power_off()?;
    bed.ends("third");
    tokio::time::sleep(AWAY).await;
    bed.third().power_on(client)?;
    bed.runs_again("third").await?;
    let third = bed.pod("third");
    ensure!(third.id != sandbox, "another sandbox");
    ensure!(third.ips() == former, "its addresses are used again: {:?}", third.ips());
    bed.is_right().await.map(drop)
}

/// `kubectl drain`: a pod of a Service moves to another node, its endpoint leaves the Service before and comes after.
pub(super) async fn drained(bed: &mut Bed) -> Result<Own> {
    const MOVED: &str = "moved";
    let third = bed.third().name.clone();
    let labels = json!({ "labels": { "app": "server" } });
    bed.cluster
        .run(&[objects::pod_with(TEAM, MOVED, &third, &labels)])
        .await?;
    bed.runs_again(MOVED).await?;
    let mut openers = Vec::new();
    for v4 in [true, false] {
        let name = service_of_drain(v4);
        let front = bed.serve_at(name, &["remote", MOVED], v4).await?;
        let opener = Opener::start(bed.pod("dialer"), front);
        opener.answered_by(&identity(bed.pod(MOVED)))?;
        openers.push(opener);
    }
    unschedulable(bed, &third, true).await?;
    backends(bed, &["remote"]).await?;
    // A pod that ends serves until its endpoint has left, by its grace period.
    for opener in &openers {
        opener.avoids(&identity(bed.pod(MOVED)))?;
    }
    bed.ends(MOVED);
    bed.cluster.remove(TEAM, &[MOVED]).await?;
    bed.cluster
        .run(&[objects::pod_with(TEAM, MOVED, "node1", &labels)])
        .await?;
    bed.runs_again(MOVED).await?;
    let mut own = Own::new();
    for opener in &openers {
        opener.clear();
    }
    backends(bed, &["remote", MOVED]).await?;
    for opener in openers {
        opener.answered_by(&identity(bed.pod(MOVED)))?;
        own.push((
            "connections to the Service of the drained pod".to_owned(),
            opener.stop(),
        ));
    }
    unschedulable(bed, &third, false).await?;
    for v4 in [true, false] {
        for object in bed.service(service_of_drain(v4), super::super::bed::FRONT, &["remote"], v4) {
            bed.cluster.delete(&object).await?;
        }
    }
    bed.ends(MOVED);
    bed.cluster.remove(TEAM, &[MOVED]).await?;
    Ok(own)
}

const fn service_of_drain(v4: bool) -> &'static str {
    if v4 { "pair4" } else { "pair6" }
}

/// Changes the endpoints.
async fn backends(bed: &Bed, backends: &[&str]) -> Result<()> {
    for v4 in [true, false] {
        bed.serve_at(service_of_drain(v4), backends, v4).await?;
    }
    Ok(())
}

async fn unschedulable(bed: &Bed, node: &str, is_so: bool) -> Result<()> {
    let nodes: Api<Node> = Api::all(bed.cluster.client.clone());
    let patch = Patch::Merge(json!({ "spec": { "unschedulable": is_so.then_some(true) } }));
    nodes.patch(node, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// The uplink of the node has a smaller MTU for a while.
pub(super) async fn narrowed(bed: &mut Bed) -> Result<()> {
    for mtu in [1400, 1500] {
        bed.third().node.ip(&[&format!("link set uplink0 mtu {mtu}")])?;
        let name = bed.third().name.clone();
        let endpoints: Api<NodeEndpoint> = Api::all(bed.cluster.client.clone());
        wait::until(&format!("the node reports MTU {mtu}"), patience(), async || {
            let all = endpoints.list(&ListParams::default()).await?;
            let own = all.iter().find(|endpoint| endpoint.spec.node_name == name);
            Ok(own.context("no report")?.spec.mtu == mtu)
        })
        .await?;
    }
    bed.is_right().await.map(drop)
}
