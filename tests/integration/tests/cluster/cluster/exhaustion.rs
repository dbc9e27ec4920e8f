//! Tests a node that runs out of something: addresses, with its report to the scheduler, and rows of policies.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kni_integration::{
    Cluster,
    cluster::{PATIENCE, objects},
    require,
    traffic::Stream,
    wait,
};
use kni_proto::kni::QueryNodeNetworksRequest;
use kube::Api;
use serde_json::{Value, json};
use tonic::Code;

use super::quota::a_tenant_above_its_quota_closes_its_own_pods;
use super::scene::{
    PORT, PROMPT, address, entry, identity, interface_names, serve, tenants, wait_for_condition, wait_for_truth,
};

/// How long an address is not free after its pod has gone.
const REST: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(
    clippy::too_many_lines,
    reason = "a shortage from its beginning to its end, in order"
)]
async fn used_up_addresses_keep_new_pods_away_and_nothing_else() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-exhaustion", 1).await?;
    tenants(&cluster).await?;
    let more = json!({
        "namespaceSelector": { "matchLabels": { "tenant": "small" } },
        "perNodePrefix": { "ipv4": 28 },
        "extendedResource": true,
    });
    cluster
        .apply(&[
            objects::network("small", &["10.30.0.0/28"], &more),
            objects::namespace("small", &json!({ "tenant": "small" })),
        ])
        .await?;
    wait_for_condition(&cluster, "small", "Programmed", true).await?;
    let first = cluster
        .run(&[objects::pod("small", "a", "node1"), objects::pod("small", "b", "node1")])
        .await?;
    let capacity = wait::until_some("the node tells how many fit", PATIENCE, async || {
        let entry = entry(&cluster, "node1", "small").await?.context("no entry yet")?;
        Ok((entry.used == 2 && entry.capacity > 2).then_some(entry.capacity))
    })
    .await?;
    ensure!((10..=16).contains(&capacity), "{capacity} of 16 addresses can be had");
    wait::until("the node offers as many", PATIENCE, async || {
        Ok(resource(&cluster).await? == Some(capacity.to_string()))
    })
    .await?;
    ensure!(taint(&cluster).await?.is_none(), "there are addresses");
    let readiness = readiness(&cluster).await?;

    let _server = serve(&first[1])?;
    let stream = Stream::udp(&first[0].inside, (address(&first[1], true), PORT).into())?;
    let fill: Vec<Value> = (2..capacity)
        .map(|n| objects::pod("small", &format!("fill-{n}"), "node1"))
        .collect();
    cluster.run(&fill).await?;
    let start = Instant::now();
    wait::until("the node has the taint", PATIENCE, async || {
        Ok(taint(&cluster).await?.is_some())
    })
    .await?;
    let tainted = start.elapsed();
    let told = wait_for_condition(&cluster, "small", "AddressesAvailable", false).await?;
    let conditioned = start.elapsed();
    println!("the last address was gone; taint after {tainted:?}, condition after {conditioned:?}");
    ensure!(
        tainted < PROMPT && conditioned < PROMPT,
        "taint {tainted:?}, condition {conditioned:?}"
    );
    ensure!(told.contains("node1"), "{told:?}");
    ensure!(taint(&cluster).await? == Some("NoSchedule".into()));
    let now = self::readiness(&cluster).await?;
    ensure!(
        now == readiness,
        "readiness is not lowered; it was\n{readiness}\nand is\n{now}"
    );

    // Another pod is refused, with a reason.
    cluster.create_pods(&[objects::pod("small", "late", "node1")]).await?;
    wait::until("the attach is refused", PATIENCE, async || {
        let refusals = cluster.nodes[0].kubelet.refusals();
        let late = refusals.iter().filter(|refusal| refusal.pod == "small/late");
        Ok(late.clone().any(|refusal| refusal.code == Code::ResourceExhausted))
    })
    .await
    .with_context(|| cluster.refusals())?;
    // Pods of other networks still start.
    cluster.run(&[objects::pod("plain", "other", "node1")]).await?;
    ensure!(interface_names(&first[0])? == ["eth0"], "running pods are as they were");

    // One address is released, and the waiting pod gets it after its rest; the release of a second one ends the
    // shortage.
    cluster.remove("small", &["fill-2"]).await?;
    cluster.running("small", "late").await?;
    cluster.remove("small", &["fill-3", "fill-4"]).await?;
    let start = Instant::now();
    wait::until("the node has no taint", PATIENCE, async || {
        Ok(taint(&cluster).await?.is_none())
    })
    .await?;
    let free = start.elapsed();
    wait_for_condition(&cluster, "small", "AddressesAvailable", true).await?;
    let conditioned = start.elapsed();
    println!("addresses came back; taint gone after {free:?}, condition after {conditioned:?}");
    ensure!(
        free < REST + PROMPT && conditioned < REST + PROMPT,
        "taint {free:?}, condition {conditioned:?}"
    );
    stream.stop().assert_whole(&identity(&first[1]));
    wait_for_truth(&cluster).await?;

    a_tenant_above_its_quota_closes_its_own_pods(&cluster).await?;

    // The resource is removed when it is no longer requested.
    let wish = json!({ "spec": { "extendedResource": false } });
    let mut network = objects::network("small", &["10.30.0.0/28"], &more);
    objects::merge(&mut network, &wish);
    cluster.apply(&[network]).await?;
    wait::until("the node offers none", PATIENCE, async || {
        Ok(resource(&cluster).await?.is_none())
    })
    .await?;
    Ok(())
}

async fn node(cluster: &Cluster) -> Result<Node> {
    let api: Api<Node> = Api::all(cluster.client.clone());
    Ok(api.get("node1").await?)
}

/// The effect of the taint.
async fn taint(cluster: &Cluster) -> Result<Option<String>> {
    let taints = node(cluster)
        .await?
        .spec
        .and_then(|spec| spec.taints)
        .unwrap_or_default();
    let found = taints.into_iter().find(|taint| taint.key == kni_api::EXHAUSTED_TAINT);
    Ok(found.map(|taint| taint.effect))
}

async fn resource(cluster: &Cluster) -> Result<Option<String>> {
    let status = node(cluster).await?.status.context("status")?;
    let name = format!("{}small", kni_api::RESOURCE_PREFIX);
    let [capacity, allocatable] =
        [status.capacity, status.allocatable].map(|all| all.unwrap_or_default().remove(&name));
    ensure!(capacity == allocatable, "{capacity:?} of which {allocatable:?}");
    Ok(capacity.map(|quantity| quantity.0))
}

/// The readiness of the node's networks in the kubelet's view.
async fn readiness(cluster: &Cluster) -> Result<String> {
    let mut kni = cluster.nodes[0].kubelet.kni().kni();
    let told = kni
        .query_node_networks(QueryNodeNetworksRequest::default())
        .await?
        .into_inner();
    let mut networks = told.networks;
    networks.sort_by(|one, other| one.name.cmp(&other.name));
    // The number of free addresses is reported and updated, too.
    let told = networks
        .iter()
        .map(|network| format!("{}: {}", network.name, network.ready));
    Ok(told.collect::<Vec<_>>().join(", "))
}
