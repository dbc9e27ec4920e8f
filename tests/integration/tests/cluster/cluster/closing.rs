//! Tests the deletion of a network while pods join it: by an agent that has not seen the deletion, and by one whose
//! reports of interfaces do not arrive. No pod remains in a network without an object.

use anyhow::{Context as _, Result, ensure};
use kni_api::PodNetwork;
use kni_integration::{
    Cluster,
    cluster::{Fault, Faults, MemberOptions, Rule, objects, patience},
    require, wait,
};
use kube::{Api, api::DeleteParams};
use serde_json::json;

use super::scene::{assert_reached, serve, tenants, wait_for_condition, wait_for_truth};

/// Two nodes, of which the second is behind a proxy.
async fn start() -> Result<Cluster> {
    let mut cluster = Cluster::start("cluster-closing", 1).await?;
    cluster.add_node(MemberOptions::with_faults()).await?;
    tenants(&cluster).await?;
    for name in ["late", "mute"] {
        let network = objects::network(
            name,
            &["10.62.0.0/24", "fd00:62::/64"],
            &json!({ "namespaceSelector": { "matchLabels": { "tenant": name } } }),
        );
        let namespace = objects::namespace(name, &json!({ "tenant": name }));
        cluster.apply(&[network, namespace]).await?;
        wait_for_condition(&cluster, name, "Programmed", true).await?;
    }
    Ok(cluster)
}

fn faults(cluster: &Cluster) -> &Faults {
    let proxy = cluster.nodes[1].proxy.as_ref();
    &proxy.expect("the options demand a proxy").faults
}

/// Deletes the network, and waits until it is known that a node has not closed it.
async fn delete(cluster: &Cluster, network: &str) -> Result<()> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    api.delete(network, &DeleteParams::default()).await?;
    condition_names(cluster, network, "once these nodes have closed it", "node2").await
}

async fn condition_names(cluster: &Cluster, network: &str, reason: &str, name: &str) -> Result<()> {
    wait::until(&format!("the condition names {name}"), patience(), async || {
        let told = wait_for_condition(cluster, network, "InUse", true).await?;
        ensure!(told.contains(reason) && told.contains(name), "{told}");
        Ok(true)
    })
    .await
    .map(drop)
}

/// The pods work, and the network goes with the last of them.
async fn goes_with(cluster: &Cluster, network: &str, pods: &[&str]) -> Result<()> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    ensure!(
        api.get_opt(network).await?.is_some(),
        "{network} went while it had pods"
    );
    cluster.remove(network, pods).await?;
    wait::until("the network is gone", patience(), async || {
        Ok(api.get_opt(network).await?.is_none())
    })
    .await
    .map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_pod_joins_a_network_that_goes() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = start().await?;

    // The agent of node2 learns of no change of networks.
    faults(&cluster).set(vec![Rule::any("/podnetworks?", Fault::Answer(503))]);
    faults(&cluster).cut();
    wait::until("the watch has ended", patience(), async || {
        Ok(!faults(&cluster).failed().is_empty())
    })
    .await?;
    delete(&cluster, "late").await?;
    let pods = [objects::pod("late", "a", "node2"), objects::pod("late", "b", "node2")];
    let pods = cluster.run(&pods).await?;
    condition_names(&cluster, "late", "works on for them", "late/a").await?;
    faults(&cluster).clear();
    let [a, b] = &pods[..] else {
        unreachable!("as many as were asked for");
    };
    let _servers = [serve(a)?, serve(b)?];
    assert_reached(a, b);
    goes_with(&cluster, "late", &["a", "b"]).await?;

    // Its pods are attached, and no object shows their interfaces.
    faults(&cluster).set(vec![Rule::any("/podinterfaces/", Fault::Answer(503))]);
    let pods = cluster.run(&[objects::pod("mute", "a", "node2")]).await?;
    wait::until("the interface was to be written", patience(), async || {
        Ok(!faults(&cluster).failed().is_empty())
    })
    .await?;
    delete(&cluster, "mute").await?;
    faults(&cluster).clear();
    condition_names(&cluster, "mute", "works on for them", "mute/a").await?;
    let [pod] = &pods[..] else {
        unreachable!("one pod");
    };
    ensure!(pod.ip(true).is_some(), "it keeps its address");
    goes_with(&cluster, "mute", &["a"]).await?;
    wait_for_truth(&cluster).await.context("afterwards").map(drop)
}
