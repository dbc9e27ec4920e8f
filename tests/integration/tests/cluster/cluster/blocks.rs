//! Tests address blocks: claimed by nodes on demand, never by two nodes, and released.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kni_api::{AddressBlock, ConditionStatus, NodeNetwork};
use kni_integration::{
    Cluster, Pod,
    cluster::{HELD, objects, patience},
    require, wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::scene::{entry, tenants, wait_for_condition, wait_for_truth};

const NODES: usize = 4;
const PODS: usize = 16;
/// Pods of the last node: they need two blocks.
const LATE: usize = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocks_of_nodes_never_overlap_and_are_given_back() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-blocks", NODES).await?;
    tenants(&cluster).await?;
    // Sixteen small blocks: all nodes claim two or three of them concurrently.
    let more = json!({
        "namespaceSelector": { "matchLabels": { "tenant": "crowd" } },
        "perNodePrefix": { "ipv4": 28, "ipv6": 124 },
    });
    cluster
        .apply(&[
            objects::network("crowd", &["10.20.0.0/24", "fd20::/120"], &more),
            objects::namespace("crowd", &json!({ "tenant": "crowd" })),
        ])
        .await?;
    wait_for_condition(&cluster, "crowd", "Programmed", true).await?;
    assert_eq!(blocks(&cluster).await?, [], "nobody needs one yet");

    let pods: Vec<Value> = (0..PODS)
        .flat_map(|number| (1..NODES).map(move |node| (number, node)))
        .map(|(number, node)| objects::pod("crowd", &format!("p{node}-{number}"), &format!("node{node}")))
        .collect();
    let running = cluster.run(&pods).await?;
    wait_for_truth(&cluster).await?;
    let taken = blocks(&cluster).await?;
    println!(
        "{} pods on {} nodes have {} blocks",
        running.len(),
        NODES - 1,
        taken.len()
    );
    let owners = owned(&taken, &running)?;
    ensure!(owners == 2 * running.len(), "both families");
    let idle = format!("node{NODES}");
    ensure!(
        taken.iter().all(|(_, node)| *node != idle),
        "{idle} needs none: {taken:?}"
    );

    an_address_of_another_node_is_refused(&cluster).await?;
    let late = restored(&mut cluster, &running).await?;
    compared_at_the_start(&mut cluster).await?;
    cluster
        .remove("crowd", &late.iter().map(String::as_str).collect::<Vec<_>>())
        .await?;
    let names: Vec<&str> = running.iter().map(|pod| pod.name.as_str()).collect();
    cluster.remove("crowd", &names).await?;
    wait::until_right("all blocks are given back", 2 * patience(), async || {
        Ok(blocks(&cluster)
            .await?
            .into_iter()
            .map(|block| format!("{block:?}"))
            .collect())
    })
    .await?;
    Ok(())
}

/// Checks that blocks do not overlap, and that each address is in a block of its pod's node; returns their number.
fn owned(taken: &[(IpNet, String)], running: &[Pod]) -> Result<usize> {
    for (index, (block, node)) in taken.iter().enumerate() {
        for (other, owner) in taken.iter().skip(index + 1) {
            let apart = !block.contains(other) && !other.contains(block);
            ensure!(apart, "{block} of {node} and {other} of {owner} overlap");
        }
    }
    let mut owners: BTreeMap<IpAddr, &str> = BTreeMap::new();
    for pod in running {
        let node = pod.name.split('-').next().unwrap_or_default().replace('p', "node");
        for ip in pod.ips() {
            let owned = taken.iter().any(|(block, owner)| block.contains(&ip) && *owner == node);
            ensure!(owned, "{ip} of {} is in no block of {node}: {taken:?}", pod.name);
            let before = owners.insert(ip, &pod.name);
            ensure!(before.is_none(), "{ip} belongs to {} and {before:?}", pod.name);
        }
    }
    Ok(owners.len())
}

/// Restores the data of the API server to a state before the last blocks were claimed: the node claims them again, and
/// no other node gets them. Returns the names of the pods in them.
async fn restored(cluster: &mut Cluster, running: &[Pod]) -> Result<Vec<String>> {
    let node = format!("node{NODES}");
    let kubelet = NODES - 1;
    cluster.nodes[kubelet].kubelet.hold();
    let held = json!({ "labels": { HELD: "yes" } });
    let names: Vec<String> = (0..LATE).map(|number| format!("p{NODES}-{number}")).collect();
    let pods: Vec<Value> = names
        .iter()
        .map(|name| objects::pod_with("crowd", name, &node, &held))
        .collect();
    // The agent claims blocks as soon as it knows of the pods.
    cluster.nodes[kubelet].agent.kill9()?;
    cluster.create_pods(&pods).await?;
    cluster.save_data()?;
    cluster.nodes[kubelet].agent.restart()?;
    cluster.nodes[kubelet].kubelet.release();
    let mut late = Vec::new();
    for name in &names {
        late.push(cluster.running("crowd", name).await?);
    }
    let before = claimed(cluster, &node).await?;
    ensure!(before.len() >= 4, "two of each family: {before:?}");
    // The agent's watches resume when the storage has passed their versions again, so they show nothing of the loss.
    let version = cluster.resource_version().await?;
    cluster.nodes[kubelet].agent.pause()?;
    cluster.restore_data()?;
    cluster.pass_resource_version(version).await?;
    cluster.nodes[kubelet].agent.resume()?;
    let start = Instant::now();
    let lost = wait::until_some("the API server has read its data", patience(), async || {
        Ok(claimed(cluster, &node).await.ok())
    })
    .await?;
    wait::until("the node has its blocks again", 2 * patience(), async || {
        Ok(claimed(cluster, &node).await?.is_superset(&before))
    })
    .await?;
    println!(
        "of {} blocks {} were lost; claimed again after {:?}",
        before.len(),
        before.len() - lost.len(),
        start.elapsed()
    );
    wait_for_truth(cluster).await?;
    late.extend(running.iter().cloned());
    owned(&blocks(cluster).await?, &late)?;
    Ok(names)
}

/// An agent that finds a block at another node names it, and assigns nothing of it.
async fn compared_at_the_start(cluster: &mut Cluster) -> Result<()> {
    let lost = claimed(cluster, "node2").await?;
    let lost = lost
        .into_iter()
        .find(|cidr| cidr.contains('.'))
        .context("no IPv4 block")?;
    cluster.nodes[1].agent.kill9()?;
    let mut object = take_away(cluster, &lost).await?;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    "node3".clone_into(&mut object.spec.node_name);
    object.spec.node_uid = nodes.get("node3").await?.uid().context("no uid")?;
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    api.create(&PostParams::default(), &object).await?;
    cluster.nodes[1].agent.restart()?;
    let reports: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let told = wait::until_some("the node reports the conflict", patience(), async || {
        let status = reports.get("node2").await?.status.context("no status yet")?;
        let found = status
            .conditions
            .into_iter()
            .find(|condition| condition.type_ == "AddressConflict");
        Ok(found
            .filter(|condition| condition.status == ConditionStatus::True)
            .map(|condition| condition.message))
    })
    .await?;
    println!("{told}");
    ensure!(
        told.contains("of pod crowd/p2-") && told.contains(&object.name_any()) && told.contains("node3"),
        "{told}"
    );
    let entry = entry(cluster, "node2", "crowd").await?.context("no entry")?;
    ensure!(
        !entry.blocks.contains(&lost),
        "the node assigns nothing of {lost}: {:?}",
        entry.blocks
    );
    // The block goes back with the object, and the pods keep their addresses.
    api.delete(&object.name_any(), &DeleteParams::default()).await?;
    Ok(())
}

/// Removes the object of a block while its agent does not run.
async fn take_away(cluster: &Cluster, cidr: &str) -> Result<AddressBlock> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let network = "crowd".parse()?;
    let name = kni_ipam::blocks::object_name(&network, &cidr.parse()?);
    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    let object = api.patch(&name, &PatchParams::default(), &patch).await?;
    api.delete(&name, &DeleteParams::default()).await?;
    let mut bare = AddressBlock::new(&name, object.spec);
    bare.metadata.labels = object.metadata.labels;
    Ok(bare)
}

/// The ranges of a node's objects.
async fn claimed(cluster: &Cluster, node: &str) -> Result<BTreeSet<String>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={node},spec.network=crowd"));
    Ok(api
        .list(&own)
        .await?
        .items
        .into_iter()
        .map(|object| object.spec.cidr)
        .collect())
}

async fn blocks(cluster: &Cluster) -> Result<Vec<(IpNet, String)>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let listed = api.list(&ListParams::default().fields("spec.network=crowd")).await?;
    let parsed = listed.items.into_iter();
    parsed
        .map(|object| Ok((object.spec.cidr.parse()?, object.spec.node_name)))
        .collect()
}

/// A pod on node3 asks for a free address of a block of node1. Control: a pod on node1 gets it.
async fn an_address_of_another_node_is_refused(cluster: &Cluster) -> Result<()> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let all = api.list(&ListParams::default()).await?;
    let mut own = all.items.into_iter().filter(|block| {
        block.spec.network == "crowd" && block.spec.node_name == "node1" && !block.spec.cidr.contains(':')
    });
    let pods = cluster.all_running();
    let is_used = |address: &IpAddr| pods.values().any(|pod| pod.ip(true) == Some(*address));
    let free = own.find_map(|block| {
        let range: IpNet = block.spec.cidr.parse().ok()?;
        // The first one may be the gateway.
        let address = range.hosts().skip(1).find(|address| !is_used(address))?;
        Some((block.name_any(), address))
    });
    let (block, address) = free.context("node1 has no free address")?;
    let asking = json!({ "annotations": { "kni.dev/ips": address.to_string() } });
    cluster
        .create_pods(&[objects::pod_with("crowd", "elsewhere", "node3", &asking)])
        .await?;
    wait::until(
        "the error names the node that has the address",
        patience(),
        async || {
            let refusals = cluster.nodes[2].kubelet.refusals();
            let named = format!(
                "kni.dev/ips: address {address} is in no address block of this node: node node1 has it by \
                             AddressBlock {block};"
            );
            let mut ours = refusals.iter().filter(|refusal| refusal.pod == "crowd/elsewhere");
            Ok(ours.any(|refusal| refusal.message.contains(&named)))
        },
    )
    .await
    .with_context(|| cluster.refusals())?;
    cluster.remove("crowd", &["elsewhere"]).await?;
    let here = objects::pod_with("crowd", "here", "node1", &asking);
    let here = cluster.run(&[here]).await?;
    ensure!(here[0].ip(true) == Some(address), "{:?}", here[0].ip(true));
    cluster.remove("crowd", &["here"]).await
}
