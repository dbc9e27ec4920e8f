//! Runs many pods on two nodes while their agents and the API server are killed.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kni_api::{AddressBlock, PodInterface};
use kni_integration::{
    Cluster, NodeSnapshot,
    cluster::{Member, objects, patience},
    require, wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams},
};
use serde_json::Value;

use super::scene::{at_rest, names, tenants, wait_for_truth};

/// Approximate number of concurrent pods.
const CROWD: usize = 80;
/// Number of pods between two kills.
const CALM: usize = 50;

/// More than twice the pods that run at a time; 500 in long tests.
fn pods() -> usize {
    if kni_integration::long() { 500 } else { 200 }
}
/// Timeout for removals to complete.
const SETTLED: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "from nothing to nothing, in order")]
async fn hundreds_of_pods_survive_kills_and_leave_nothing() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-churn", 2).await?;
    tenants(&cluster).await?;
    // Creates the state that remains after a first pod.
    cluster
        .run(&[
            objects::pod("red-team", "first", "node1"),
            objects::pod("blue-team", "first", "node2"),
            objects::pod("blue-team", "second", "node1"),
            objects::pod("red-team", "second", "node2"),
        ])
        .await?;
    cluster.remove("red-team", &["first", "second"]).await?;
    cluster.remove("blue-team", &["first", "second"]).await?;
    wait_for_nothing(&cluster).await?;
    let before = [at_rest(&cluster.nodes[0]).await?, at_rest(&cluster.nodes[1]).await?];

    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let start = Instant::now();
    let (mut kills, mut outages) = (0, 0);
    let mut there: Vec<(String, String)> = Vec::new();
    let count = pods();
    for number in 0..count {
        let namespace = *random.choice(&["red-team", "blue-team"]).context("one of two")?;
        let node = format!("node{}", random.u8(1..=2));
        let name = format!("p-{number}");
        create(&cluster, &objects::pod(namespace, &name, &node)).await?;
        there.push((namespace.into(), name));
        while there.len() > CROWD {
            let (namespace, name) = there.swap_remove(random.usize(..there.len()));
            delete(&cluster, &namespace, &name).await?;
        }
        assert_no_duplicates(&cluster)?;
        if number % CALM == CALM / 2 {
            if random.u8(..3) == 0 {
                cluster.kill_api_server()?;
                tokio::time::sleep(Duration::from_millis(random.u64(100..1500))).await;
                cluster.start_api_server()?;
                outages += 1;
            } else {
                let victim = random.usize(..2);
                let agent = &mut cluster.nodes[victim].agent;
                agent.kill9()?;
                tokio::time::sleep(Duration::from_millis(random.u64(..500))).await;
                agent.restart()?;
                kills += 1;
            }
        }
    }
    println!(
        "{count} pods, {kills} agents and {outages} API servers killed in {:?}",
        start.elapsed()
    );
    for (namespace, name) in &there {
        cluster.running(namespace, name).await?;
    }
    assert_no_duplicates(&cluster)?;
    let took = wait_for_truth(&cluster).await?;
    println!("{} pods run; objects equal the kernel after {took:?}", there.len());

    for (namespace, name) in &there {
        delete(&cluster, namespace, name).await?;
    }
    let start = Instant::now();
    wait_for_nothing(&cluster).await?;
    for (before, member) in before.iter().zip(&cluster.nodes) {
        let left = left_on(before, member)?;
        ensure!(left.is_empty(), "{} is not as before: {left:#?}", member.name);
    }
    println!("nothing was left after {:?}", start.elapsed());
    Ok(())
}

/// Additions to a node since `before`. A namespace whose path was being returned to the kubelet when the agent was
/// killed has no owner: the agent removes it after a quarter of an hour, because the kubelet might still use it. It has
/// no interface.
fn left_on(before: &NodeSnapshot, member: &Member) -> Result<Vec<String>> {
    let all = before.differences_within(&member.node, SETTLED)?;
    let is_lost = |line: &String| line.starts_with("+ ") && line.contains(" /run/netns/kni-");
    let (lost, left): (Vec<String>, Vec<String>) = all.into_iter().partition(is_lost);
    // A file and a mount each; a kubelet sends a few requests concurrently.
    ensure!(lost.len() <= 2 * CALM, "more than kills explain: {lost:#?}");
    Ok(left)
}

/// Creates an object; the API server may be unavailable.
async fn create(cluster: &Cluster, pod: &Value) -> Result<()> {
    wait::until_some("a pod is created", patience(), async || {
        match cluster.create_pods(std::slice::from_ref(pod)).await {
            Ok(_created) => Ok(Some(())),
            // The answer to an earlier attempt was lost.
            Err(error) if format!("{error:#}").contains("AlreadyExists") => Ok(Some(())),
            Err(error) => Err(error),
        }
    })
    .await
}

async fn delete(cluster: &Cluster, namespace: &str, name: &str) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    wait::until_some("a pod is deleted", patience(), async || {
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_deleted) => Ok(Some(())),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(Some(())),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Checks that no address belongs to two running pods of a network.
fn assert_no_duplicates(cluster: &Cluster) -> Result<()> {
    let mut owners = BTreeMap::new();
    for ((namespace, name), pod) in cluster.all_running() {
        for ip in pod.ips() {
            // Each namespace has its own network.
            let other = owners.insert((namespace.clone(), ip), name.clone());
            ensure!(other.is_none(), "{ip} of {namespace} is with {name} and {other:?}");
        }
    }
    Ok(())
}

/// Waits until there are no pods, objects, blocks or taints.
async fn wait_for_nothing(cluster: &Cluster) -> Result<()> {
    wait::until_right("nothing is left", 2 * patience(), async || {
        let pods: Api<Pod> = Api::all(cluster.client.clone());
        // Those of the agents stay.
        let pods = pods.list(&ListParams::default()).await?.items.into_iter();
        let mut left: Vec<String> = pods
            .filter(|pod| pod.namespace().as_deref() != Some("kni-system"))
            .map(|pod| pod.name_any())
            .collect();
        left.extend(names::<PodInterface>(cluster).await?);
        for network in ["red", "blue"] {
            let api: Api<AddressBlock> = Api::all(cluster.client.clone());
            let of_network = ListParams::default().fields(&format!("spec.network={network}"));
            let blocks = api.list(&of_network).await?.items.into_iter();
            left.extend(blocks.map(|block| format!("{} of {}", block.spec.cidr, block.spec.node_name)));
        }
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        for node in nodes.list(&ListParams::default()).await? {
            let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
            let ours = taints.into_iter().filter(|taint| taint.key.starts_with(kni_api::GROUP));
            left.extend(ours.map(|taint| format!("taint {}", taint.key)));
        }
        Ok(left)
    })
    .await
    .map(drop)
}
