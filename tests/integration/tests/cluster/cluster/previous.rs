//! Tests address blocks beside agents of the previous release, which also enter them into the status of networks, and
//! on the way there and back.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use ipnet::IpNet;
use kni_api::{AddressBlock, PodNetwork};
use kni_integration::{
    Cluster, Pod,
    agent::agent_binary,
    cluster::{MemberOptions, PATIENCE, objects},
    earlier::previous_agent,
    require, wait,
};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};

use super::scene::{tenants, wait_for_condition, wait_for_truth};

/// Pods of each node in a network of small blocks.
const PODS: usize = 12;

/// Networks, ranges and nodes.
type Blocks = BTreeSet<(String, IpNet, String)>;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_agent_of_the_previous_release_shares_the_blocks() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let Some(previous) = previous_agent()? else {
        println!("not tested with an agent of the previous release: no KNI_PREVIOUS_AGENT");
        return Ok(());
    };
    let mut cluster = Cluster::without_nodes("cluster-previous").await?;
    for _node in 0..2 {
        cluster.add_node(MemberOptions::of_release(&previous)).await?;
    }
    tenants(&cluster).await?;
    let small = json!({
        "namespaceSelector": { "matchLabels": { "tenant": "small" } },
        "perNodePrefix": { "ipv4": 30, "ipv6": 126 },
    });
    cluster
        .apply(&[
            objects::network("small", &["10.70.0.0/24", "fd70::/120"], &small),
            objects::namespace("small", &json!({ "tenant": "small" })),
        ])
        .await?;
    wait_for_condition(&cluster, "small", "Programmed", true).await?;
    let mut pods = start(&cluster, "a", PODS).await?;
    same(&cluster, "both agents are of the previous release", &["node1", "node2"]).await?;

    cluster.nodes[0].agent.kill9()?;
    cluster.nodes[0].agent.replace(&agent_binary()?)?;
    same(&cluster, "node1 is upgraded", &["node2"]).await?;
    pods.extend(start(&cluster, "b", PODS).await?);
    same(&cluster, "both have claimed more", &["node2"]).await?;
    owned(&cluster, &pods).await?;

    cluster.nodes[1].agent.kill9()?;
    cluster.nodes[1].agent.replace(&agent_binary()?)?;
    same(&cluster, "both are upgraded", &[]).await?;
    pods.extend(start(&cluster, "c", 4).await?);
    owned(&cluster, &pods).await?;

    cluster.nodes[0].agent.kill9()?;
    cluster.nodes[0].agent.replace_by_release(&previous)?;
    same(&cluster, "node1 has gone back", &["node1"]).await?;
    pods.extend(start(&cluster, "d", PODS).await?);
    same(&cluster, "both have claimed more", &["node1"]).await?;
    owned(&cluster, &pods).await?;

    cluster.nodes[0].agent.kill9()?;
    cluster.nodes[0].agent.replace(&agent_binary()?)?;
    same(&cluster, "node1 is upgraded again", &[]).await?;
    owned(&cluster, &pods).await?;
    wait_for_truth(&cluster).await?;
    Ok(())
}

/// Starts pods on both nodes at once.
async fn start(cluster: &Cluster, prefix: &str, count: usize) -> Result<Vec<Pod>> {
    let name = |node: usize, number: usize| format!("{prefix}{number}-node{node}");
    let pods: Vec<Value> = (0..count)
        .flat_map(|number| (1..=2).map(move |node| (node, number)))
        .map(|(node, number)| objects::pod("small", &name(node, number), &format!("node{node}")))
        .collect();
    cluster.run(&pods).await
}

/// Waits until the entries in the status of all networks are the objects of these nodes.
async fn same(cluster: &Cluster, what: &str, nodes: &[&str]) -> Result<()> {
    let took = wait::until_right(&format!("entries and objects: {what}"), PATIENCE, async || {
        let mut claimed = claimed(cluster).await?;
        claimed.retain(|(_, _, node)| nodes.contains(&node.as_str()));
        let entered = entered(cluster).await?;
        ensure!(nodes.is_empty() || !claimed.is_empty(), "no objects of {nodes:?}");
        let differences = claimed.symmetric_difference(&entered);
        Ok(differences.map(|block| format!("{block:?}")).collect())
    })
    .await?;
    println!("{what}: {} entries after {took:?}", entered(cluster).await?.len());
    Ok(())
}

async fn claimed(cluster: &Cluster) -> Result<Blocks> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let listed = api.list(&ListParams::default()).await?.items.into_iter();
    listed
        .map(|object| Ok((object.spec.network, object.spec.cidr.parse()?, object.spec.node_name)))
        .collect()
}

async fn entered(cluster: &Cluster) -> Result<Blocks> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let mut found = Blocks::new();
    for network in api.list(&ListParams::default()).await? {
        let name = network.name_any();
        for entry in network.status.into_iter().flat_map(|status| status.blocks) {
            found.insert((name.clone(), entry.cidr.parse()?, entry.node));
        }
    }
    Ok(found)
}

/// Checks that each address has one pod, on the node whose block it is in.
async fn owned(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    let claimed = claimed(cluster).await?;
    let mut owners = BTreeMap::new();
    for pod in pods {
        let node = pod.name.rsplit('-').next().unwrap_or_default();
        for ip in pod.ips() {
            let mut blocks = claimed
                .iter()
                .filter(|(network, range, _)| network == "small" && range.contains(&ip));
            let owned = blocks.next().is_some_and(|(_, _, owner)| owner == node);
            ensure!(owned, "{ip} of {} is in no block of {node}", pod.name);
            let before = owners.insert(ip, &pod.name);
            ensure!(before.is_none(), "{ip} is of {} and {before:?}", pod.name);
        }
    }
    println!("{} addresses have one owner each", owners.len());
    Ok(())
}
