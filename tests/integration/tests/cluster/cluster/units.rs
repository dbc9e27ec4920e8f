//! Tests networks whose blocks have one address each: many nodes share a small subnet, bursts of pods claim many blocks
//! at once, and blocks are released, also those of the default network.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_claims::{Claim, ClaimError, Claims, NetworkRef, NodeRef};
use kni_integration::{
    Cluster,
    cluster::{MemberOptions, objects, patience},
    require, wait,
};
use kni_ipam::blocks::{Taken, next_unit};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};

use super::{
    claims::clients::counting,
    scene::{wait_for_condition, wait_for_truth},
};

/// Nodes without an agent: this test claims for them.
const OTHERS: usize = 200;
/// Pods of each of the two nodes with an agent.
const PODS: usize = 20;
/// Units of a /24 that can be used.
const UNITS: usize = 253;
/// The most tries of a node until it has a unit, on average: most units are free, and each failed try shows one that is
/// not.
const TRIES: usize = 6;
/// How much longer the requests of a burst take, so that those that are sent at once are on their way at once.
const DISTANCE: Duration = Duration::from_millis(50);
/// How long addresses rest and empty blocks are kept in this test, in seconds.
const REST: u64 = 2;
/// How often the agents look for empty blocks.
const ROUND: Duration = Duration::from_secs(1);
/// Claims of one batch, and how many requests it may cost beside one for each claim: one look confirms all of them, and
/// it is repeated when an object is not in it yet.
const BATCH: usize = 64;
const LOOKS: usize = 4;
/// At least so many requests of a batch are on their way at once.
const AT_ONCE: usize = 8;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_nodes_share_a_small_network() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-units").await?;
    for _node in 0..2 {
        let mut options = MemberOptions::default();
        options
            .args
            .extend(["--test-address-rest".to_owned(), REST.to_string()]);
        cluster.add_node(options).await?;
    }
    let tiny = json!({
        "namespaceSelector": { "matchLabels": { "tenant": "tiny" } },
        "perNodePrefix": { "ipv4": 32, "ipv6": 128 },
    });
    let mut default = objects::default_network();
    objects::merge(
        &mut default["spec"],
        &json!({ "perNodePrefix": { "ipv4": 28, "ipv6": 124 } }),
    );
    cluster
        .apply(&[
            default,
            objects::namespace("plain", &json!({})),
            objects::network("tiny", &["10.60.0.0/24", "fd60::/120"], &tiny),
            objects::namespace("tiny", &json!({ "tenant": "tiny" })),
        ])
        .await?;
    wait_for_condition(&cluster, "default", "Programmed", true).await?;
    wait_for_condition(&cluster, "tiny", "Programmed", true).await?;

    the_default_network_gives_blocks_back(&cluster).await?;
    let network = network(&cluster, "tiny").await?;
    let others = others(&cluster).await?;
    many_nodes_claim(&cluster, &network, &others).await?;
    all_nodes_claim_at_once(&cluster, &others).await?;
    pods_have_the_rest(&cluster).await?;
    a_burst_is_claimed_together(&cluster, &others[0]).await
}

/// Node objects, so that kni-controller leaves their blocks alone.
async fn others(cluster: &Cluster) -> Result<Vec<NodeRef>> {
    let create = |number: usize| async move {
        let name = format!("other{number}");
        let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        let uid = cluster.apply_one(&object).await?.uid().context("no uid")?;
        anyhow::Ok(NodeRef { name, uid })
    };
    let created: Vec<_> = (0..OTHERS).map(create).collect();
    stream::iter(created).buffer_unordered(16).try_collect().await
}

async fn network(cluster: &Cluster, name: &str) -> Result<NetworkRef> {
    let object = super::scene::network_object(cluster, name).await?;
    Ok(NetworkRef {
        name: name.parse()?,
        uid: object.uid().context("no uid")?,
    })
}

/// Every node has one pod with an IPv4 address; a unit that another node had first is tried again elsewhere.
async fn many_nodes_claim(cluster: &Cluster, network: &NetworkRef, others: &[NodeRef]) -> Result<()> {
    let claim = |number: usize, node: NodeRef| async move {
        let claims = Claims::new(cluster.client.clone(), node);
        let begun = Instant::now();
        let mut last = number + 2;
        let mut tries = 0;
        loop {
            tries += 1;
            let unit: IpNet = format!("10.60.0.{last}/32").parse()?;
            match claims.claim(network, &unit).await {
                Ok(Claim::Ours) => return anyhow::Ok((unit, begun.elapsed(), tries)),
                Ok(Claim::Taken(_)) => {}
                // As an agent does.
                Err(ClaimError::Unknown { .. } | ClaimError::Unsettled { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            // Half of the nodes begin where another one has claimed.
            last = 2 + (last - 2 + 101) % UNITS;
        }
    };
    let all = others.iter().enumerate();
    claim_concurrently(16, all.map(|(number, node)| claim(number / 2, node.clone()))).await
}

/// The first block of each node in a large network, as when it is made: nodes choose units as agents do.
async fn all_nodes_claim_at_once(cluster: &Cluster, others: &[NodeRef]) -> Result<()> {
    let subnet: IpNet = "10.64.0.0/14".parse()?;
    cluster
        .apply(&[objects::network("wide", &["10.64.0.0/14"], &json!({}))])
        .await?;
    let network = &network(cluster, "wide").await?;
    for at_once in [16, OTHERS] {
        let claim = |number: usize, node: NodeRef| async move {
            let claims = Claims::new(cluster.client.clone(), node);
            let begun = Instant::now();
            let mut taken = Taken::default();
            let mut tries = 0;
            loop {
                tries += 1;
                let seed = u64::try_from(number * 1000 + tries)?;
                let unit = next_unit(&[subnet], &taken, true, None, seed).context("no unit is left")?;
                match claims.claim(network, &unit).await? {
                    Claim::Ours => return anyhow::Ok((unit, begun.elapsed(), tries)),
                    Claim::Taken(_) => taken.insert(&unit),
                }
            }
        };
        let all = others.iter().enumerate();
        claim_concurrently(at_once, all.map(|(number, node)| claim(number + at_once, node.clone()))).await?;
    }
    Ok(())
}

/// Carries out one claim of each node, and checks that each one gets a unit of its own after few tries.
async fn claim_concurrently<F>(at_once: usize, claims: impl Iterator<Item = F>) -> Result<()>
where
    F: Future<Output = Result<(IpNet, Duration, usize)>>,
{
    let all: Vec<F> = claims.collect();
    let start = Instant::now();
    let done: Vec<_> = stream::iter(all).buffer_unordered(at_once).try_collect().await?;
    let took = start.elapsed();
    let units: BTreeSet<IpNet> = done.iter().map(|(unit, ..)| *unit).collect();
    ensure!(units.len() == OTHERS, "{} units of {OTHERS} nodes", units.len());
    let mut times: Vec<Duration> = done.iter().map(|(_, time, _)| *time).collect();
    times.sort();
    let tries: usize = done.iter().map(|(.., tries)| tries).sum();
    let p99 = times[OTHERS * 99 / 100];
    println!(
        "{OTHERS} nodes claim, {at_once} at once: {took:?}, {:.0} claims/s, median {:?}, p99 {p99:?}, {tries} tries",
        per_second(OTHERS, took),
        times[OTHERS / 2],
    );
    ensure!(tries <= TRIES * OTHERS, "{OTHERS} nodes needed {tries} tries");
    Ok(())
}

/// The pods of nodes with an agent have the units that are left, each another one; the nodes hold none for later.
async fn pods_have_the_rest(cluster: &Cluster) -> Result<()> {
    let pods: Vec<Value> = (0..PODS)
        .flat_map(|number| {
            (1..=2).map(move |node| objects::pod("tiny", &format!("p{node}-{number}"), &format!("node{node}")))
        })
        .collect();
    let start = Instant::now();
    let running = cluster.run(&pods).await?;
    println!(
        "{} pods with units of their own run after {:?}",
        running.len(),
        start.elapsed()
    );
    let mut owners = BTreeSet::new();
    for pod in &running {
        let node = pod.name.split('-').next().unwrap_or_default().replace('p', "node");
        let own = units(cluster, &node).await?;
        for ip in pod.ips() {
            ensure!(
                own.contains(&IpNet::from(ip)),
                "{ip} of {} is no unit of {node}",
                pod.name
            );
            ensure!(owners.insert(ip), "{ip} has two pods");
        }
    }
    let v4 = |all: &BTreeSet<IpNet>| all.iter().filter(|unit| unit.addr().is_ipv4()).count();
    wait::until("nodes hold no scarce unit for later", 2 * patience(), async || {
        let held = [v4(&units(cluster, "node1").await?), v4(&units(cluster, "node2").await?)];
        Ok(held == [PODS, PODS])
    })
    .await?;
    wait_for_truth(cluster).await?;
    let names: Vec<&str> = running.iter().map(|pod| pod.name.as_str()).collect();
    cluster.remove("tiny", &names).await?;
    let start = Instant::now();
    wait::until("all units are released", 2 * patience(), async || {
        Ok(units(cluster, "node1").await?.is_empty() && units(cluster, "node2").await?.is_empty())
    })
    .await?;
    println!(
        "{} units of each family are released after {:?}",
        running.len(),
        start.elapsed()
    );
    Ok(())
}

/// One node claims many units together: with one request for each and one for all of them, many at once. One claim
/// alone costs two.
async fn a_burst_is_claimed_together(cluster: &Cluster, node: &NodeRef) -> Result<()> {
    let more = json!({ "perNodePrefix": { "ipv4": 32 } });
    cluster
        .apply(&[objects::network("burst", &["10.62.0.0/16"], &more)])
        .await?;
    let network = network(cluster, "burst").await?;
    let (client, counts) = counting(&cluster.client, DISTANCE);
    let claims = Claims::new(client, node.clone());
    let unit = |number: u32| IpNet::from(IpAddr::from((0x0a3e_0000 + number).to_be_bytes()));
    for number in 256..272 {
        ensure!(claims.claim(&network, &unit(number)).await? == Claim::Ours);
    }
    let (single, most) = counts.take();
    ensure!(
        single >= 32 && most == 1,
        "{single} requests for 16 claims, {most} at once"
    );
    let many: Vec<IpNet> = (512..640).map(unit).collect();
    for batch in many.chunks(BATCH) {
        let (claimed, done) = claims.claim_all(&network, batch).await;
        done?;
        ensure!(claimed.values().all(|claim| *claim == Claim::Ours) && claimed.len() == batch.len());
        let (requests, most) = counts.take();
        println!("{BATCH} claims: {requests} requests, {most} at once");
        ensure!(
            requests <= BATCH + LOOKS && most >= AT_ONCE,
            "{requests} requests for {BATCH} claims, {most} at once"
        );
    }
    for batch in many.chunks(BATCH) {
        claims.release_all(&network.name, batch).await?;
        let (requests, most) = counts.take();
        println!("{BATCH} releases: {requests} requests, {most} at once");
        ensure!(
            most >= AT_ONCE,
            "{requests} requests for {BATCH} releases, {most} at once"
        );
    }
    Ok(())
}

async fn the_default_network_gives_blocks_back(cluster: &Cluster) -> Result<()> {
    let pods: Vec<Value> = (0..PODS)
        .map(|number| objects::pod("plain", &format!("d{number}"), "node1"))
        .collect();
    let running = cluster.run(&pods).await?;
    let held = blocks(cluster, "default", "node1").await?;
    ensure!(held.len() >= 4, "two blocks of each family at least: {held:?}");
    let names: Vec<&str> = running.iter().map(|pod| pod.name.as_str()).collect();
    cluster.remove("plain", &names).await?;
    let start = Instant::now();
    wait::until("one block of each family is left", patience(), async || {
        Ok(blocks(cluster, "default", "node1").await?.len() == 2)
    })
    .await?;
    println!(
        "{} blocks of the default network became 2 after {:?}",
        held.len(),
        start.elapsed()
    );
    // They stay: for longer than the time after which empty blocks are released, and some rounds.
    tokio::time::sleep(2 * Duration::from_secs(REST) + 3 * ROUND).await;
    let left = blocks(cluster, "default", "node1").await?;
    ensure!(left.len() == 2 && left.is_subset(&held), "{left:?}");
    let v4 = left.iter().filter(|block| block.addr().is_ipv4()).count();
    ensure!(v4 == 1, "{left:?}");
    Ok(())
}

async fn units(cluster: &Cluster, node: &str) -> Result<BTreeSet<IpNet>> {
    blocks(cluster, "tiny", node).await
}

async fn blocks(cluster: &Cluster, network: &str, node: &str) -> Result<BTreeSet<IpNet>> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={node},spec.network={network}"));
    let listed = api.list(&own).await?.items.into_iter();
    listed.map(|object| Ok(object.spec.cidr.parse()?)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn per_second(count: usize, took: Duration) -> f64 {
    count as f64 / took.as_secs_f64()
}
