//! Tests a node that runs out of something: addresses of a tenant's network, and rows of policies.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    core::v1::{Node, Pod},
    events::v1::Event,
};
use kni_integration::{
    Cluster,
    cluster::{objects, patience},
    require,
    traffic::Stream,
    wait,
};
use kni_local_node::Part;
use kni_proto::kni::QueryNodeNetworksRequest;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};
use tonic::Code;

use super::quota::a_tenant_above_its_quota_closes_its_own_pods;
use super::scene::{
    PORT, address, entry, identity, interface_names, prompt, serve, tenants, wait_for_condition, wait_for_truth,
};

/// How long an address is not free after its pod has gone.
const REST: Duration = Duration::from_secs(10);
/// How long the scheduler may take for a pod.
const SCHEDULED: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(
    clippy::too_many_lines,
    reason = "a shortage from its beginning to its end, in order"
)]
async fn used_up_addresses_keep_new_pods_away_and_nothing_else() -> Result<()> {
    require!(root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-exhaustion", 1).await?;
    cluster.control.local().start(Part::Scheduler)?;
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
    let capacity = wait::until_some("the node tells how many fit", patience(), async || {
        let entry = entry(&cluster, "node1", "small").await?.context("no entry yet")?;
        Ok((entry.used == 2 && entry.capacity > 2).then_some(entry.capacity))
    })
    .await?;
    ensure!((10..=16).contains(&capacity), "{capacity} of 16 addresses can be had");
    wait::until("the node offers as many", patience(), async || {
        Ok(resource(&cluster).await? == Some(capacity.to_string()))
    })
    .await?;
    // It also waits until the scheduler works.
    run_scheduled(&cluster, "plain", "before").await?;
    let readiness = readiness(&cluster).await?;

    let _server = serve(&first[1])?;
    let stream = Stream::udp(&first[0].inside, (address(&first[1], true), PORT).into())?;
    let fill: Vec<Value> = (2..capacity)
        .map(|n| objects::pod("small", &format!("fill-{n}"), "node1"))
        .collect();
    cluster.run(&fill).await?;
    let start = Instant::now();
    let told = wait_for_condition(&cluster, "small", "AddressesAvailable", false).await?;
    let conditioned = start.elapsed();
    println!("the last address was gone; condition after {conditioned:?}");
    let limit = prompt(&cluster).await?;
    ensure!(conditioned < limit, "condition {conditioned:?}, limit {limit:?}");
    ensure!(told.contains("node1"), "{told:?}");
    wait::until("an event of the network names the node", patience(), async || {
        let events: Api<Event> = Api::all(cluster.client.clone());
        let events = events.list(&ListParams::default()).await?.items;
        let mut events = events
            .iter()
            .filter(|event| event.reason.as_deref() == Some("AddressesExhausted"));
        Ok(events.any(|event| event.note.as_deref().is_some_and(|note| note.contains("node1"))))
    })
    .await?;
    let now = self::readiness(&cluster).await?;
    ensure!(
        now == readiness,
        "readiness is not lowered; it was\n{readiness}\nand is\n{now}"
    );

    // Another pod of the tenant is refused, with a reason.
    cluster
        .create_pods(&[scheduled("small", "late"), objects::pod("small", "later", "node1")])
        .await?;
    for pod in ["small/late", "small/later"] {
        wait::until(&format!("the attach of {pod} is refused"), patience(), async || {
            let refusals = cluster.nodes[0].kubelet.refusals();
            let mut refusals = refusals.iter().filter(|refusal| refusal.pod == pod);
            Ok(refusals.any(|refusal| refusal.code == Code::ResourceExhausted))
        })
        .await
        .with_context(|| cluster.refusals())?;
    }
    // Pods of others are scheduled, and start.
    let assigned = run_scheduled(&cluster, "plain", "other").await?;
    println!("a pod of another namespace was assigned after {assigned:?}");
    let limit = SCHEDULED + prompt(&cluster).await?;
    ensure!(assigned < limit, "assigned after {assigned:?}, limit {limit:?}");
    ensure!(interface_names(&first[0])? == ["eth0"], "running pods are as they were");

    // Addresses are released, and the waiting pods get them after their rest; the release of further ones ends the
    // shortage.
    cluster.remove("small", &["fill-2", "fill-3"]).await?;
    cluster.running("small", "late").await?;
    cluster.running("small", "later").await?;
    cluster.remove("small", &["fill-4", "fill-5"]).await?;
    let start = Instant::now();
    wait_for_condition(&cluster, "small", "AddressesAvailable", true).await?;
    let conditioned = start.elapsed();
    println!("addresses came back; condition after {conditioned:?}");
    let limit = REST + prompt(&cluster).await?;
    ensure!(conditioned < limit, "condition {conditioned:?}, limit {limit:?}");
    stream.stop().assert_whole(&identity(&first[1]));
    wait_for_truth(&cluster).await?;

    a_tenant_above_its_quota_closes_its_own_pods(&cluster).await?;

    // The resource is removed when it is no longer requested.
    let wish = json!({ "spec": { "extendedResource": false } });
    let mut network = objects::network("small", &["10.30.0.0/28"], &more);
    objects::merge(&mut network, &wish);
    cluster.apply(&[network]).await?;
    wait::until("the node offers none", patience(), async || {
        Ok(resource(&cluster).await?.is_none())
    })
    .await?;
    Ok(())
}

async fn node(cluster: &Cluster) -> Result<Node> {
    let api: Api<Node> = Api::all(cluster.client.clone());
    Ok(api.get("node1").await?)
}

/// A pod that the scheduler assigns to a node, and that tolerates no taint.
fn scheduled(namespace: &str, name: &str) -> Value {
    let mut pod = objects::pod(namespace, name, "");
    if let Some(spec) = pod["spec"].as_object_mut() {
        spec.remove("nodeName");
        spec.remove("tolerations");
    }
    pod
}

/// Runs such a pod on a node that must have no taint; returns the time until it had the node.
async fn run_scheduled(cluster: &Cluster, namespace: &str, name: &str) -> Result<Duration> {
    cluster.create_pods(&[scheduled(namespace, name)]).await?;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let start = Instant::now();
    wait::until(&format!("pod {namespace}/{name} has a node"), patience(), async || {
        let assigned = api.get(name).await?.spec.and_then(|spec| spec.node_name);
        Ok(assigned.is_some())
    })
    .await
    .with_context(|| cluster.control.kubectl(&["describe", "nodes"]).unwrap_or_default())?;
    let assigned = start.elapsed();
    cluster.running(namespace, name).await?;
    let taints = node(cluster).await?.spec.and_then(|spec| spec.taints);
    ensure!(taints.clone().unwrap_or_default().is_empty(), "{taints:?}");
    Ok(assigned)
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
