//! Tests address blocks: claimed by nodes on demand, never by two nodes, and released.

use std::{collections::BTreeMap, net::IpAddr};

use anyhow::{Result, ensure};
use ipnet::IpNet;
use kni_integration::{
    Cluster,
    cluster::{PATIENCE, objects},
    require, wait,
};
use serde_json::{Value, json};

use super::scene::{network_object, tenants, wait_for_condition, wait_for_truth};

const NODES: usize = 4;
const PODS: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "blocks from none to none, in order")]
async fn blocks_of_nodes_never_overlap_and_are_given_back() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-blocks", NODES).await?;
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
    for (index, (block, node)) in taken.iter().enumerate() {
        for (other, owner) in taken.iter().skip(index + 1) {
            let apart = !block.contains(other) && !other.contains(block);
            ensure!(apart, "{block} of {node} and {other} of {owner} overlap");
        }
    }
    let mut owners: BTreeMap<IpAddr, &str> = BTreeMap::new();
    for pod in &running {
        let node = pod.name.split('-').next().unwrap_or_default().replace('p', "node");
        for ip in pod.ips() {
            let owned = taken.iter().any(|(block, owner)| block.contains(&ip) && *owner == node);
            ensure!(owned, "{ip} of {} is in no block of {node}: {taken:?}", pod.name);
            let before = owners.insert(ip, &pod.name);
            ensure!(before.is_none(), "{ip} belongs to {} and {before:?}", pod.name);
        }
    }
    ensure!(owners.len() == 2 * running.len(), "both families");
    let idle = format!("node{NODES}");
    ensure!(
        taken.iter().all(|(_, node)| *node != idle),
        "{idle} needs none: {taken:?}"
    );

    let names: Vec<&str> = running.iter().map(|pod| pod.name.as_str()).collect();
    cluster.remove("crowd", &names).await?;
    wait::until_right("all blocks are given back", 2 * PATIENCE, async || {
        Ok(blocks(&cluster)
            .await?
            .into_iter()
            .map(|block| format!("{block:?}"))
            .collect())
    })
    .await?;
    Ok(())
}

async fn blocks(cluster: &Cluster) -> Result<Vec<(IpNet, String)>> {
    let status = network_object(cluster, "crowd").await?.status.unwrap_or_default();
    let parsed = status
        .blocks
        .into_iter()
        .map(|block| Ok((block.cidr.parse()?, block.node)));
    parsed.collect()
}
