//! Tests claims of address blocks at a real API server: never two owners, whatever requests and replies are lost, and
//! against clients that do not keep to the rules.

mod actors;
pub(super) mod clients;
mod hostile;

use std::{collections::BTreeSet, fmt::Display, time::Instant};

use anyhow::{Context as _, Result, ensure};
use ipnet::IpNet;
use kni_api::AddressBlock;
use kni_claims::{Claim, Claims, NetworkRef, NodeRef};
use kni_integration::{Cluster, cluster::objects, long, require};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::json;

use self::{
    actors::Leasing,
    clients::{losing, repeating, unreliable},
};

/// Requests of a release.
const RELEASE: i64 = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_block_has_one_owner_whatever_is_lost() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let mut cluster = Cluster::without_nodes("cluster-claims").await?;
    // The nodes of this test have no Node objects, so kni-controller would release their blocks.
    for controller in &mut cluster.controllers {
        controller.kill()?;
    }
    let network = network(
        &cluster,
        "red",
        &["10.20.0.0/24", "fd20::/120"],
        &json!({"ipv4": 28, "ipv6": 124}),
    )
    .await?;
    a_lost_reply_is_settled_by_reading(&cluster, &network).await?;
    two_owners_are_noticed(&cluster).await?;
    a_network_made_again_has_no_blocks_of_the_first(&cluster).await?;
    losses(&cluster, &network).await?;
    latency(&cluster).await?;
    hostile::claims(&cluster).await
}

/// A network of units with these prefix lengths.
async fn network(cluster: &Cluster, name: &str, subnets: &[&str], units: &serde_json::Value) -> Result<NetworkRef> {
    let object = objects::network(name, subnets, &json!({ "perNodePrefix": units }));
    let applied = cluster.apply_one(&object).await?;
    Ok(NetworkRef {
        name: name.parse()?,
        uid: applied.uid().context("no uid")?,
    })
}

fn node(name: &str) -> NodeRef {
    NodeRef {
        name: name.to_owned(),
        uid: format!("uid-of-{name}"),
    }
}

/// Repeats a step until it succeeds; returns the errors before.
async fn failures<T, E: Display>(mut step: impl AsyncFnMut() -> Result<T, E>) -> Result<Vec<String>> {
    let mut failures = Vec::new();
    while let Err(error) = step().await {
        failures.push(error.to_string());
        ensure!(failures.len() < 5, "it does not come to an end: {failures:?}");
    }
    Ok(failures)
}

async fn a_lost_reply_is_settled_by_reading(cluster: &Cluster, network: &NetworkRef) -> Result<()> {
    let unit: IpNet = "10.20.0.16/28".parse()?;
    let (client, faults) = losing(&cluster.client);
    let ours = Claims::new(client, node("a"));
    let theirs = Claims::new(repeating(&cluster.client), node("b"));
    // Each reply is lost once, of requests that had their effect: a claim has 2.
    for lost in 0..RELEASE {
        faults.lose_reply(lost);
        let failures = self::failures(async || ours.claim(network, &unit).await).await?;
        ensure!(failures.len() == usize::from(lost < 2), "reply {lost}: {failures:?}");
        let other = theirs.claim(network, &unit).await?;
        ensure!(matches!(&other, Claim::Taken(by) if by.contains("node a")), "{other:?}");
        // Replies to the release are lost in the same way; between failure and success nothing is free twice.
        faults.lose_reply(lost);
        let failures = self::failures(async || ours.release(&network.name, &unit).await).await?;
        ensure!(failures.len() == 1, "reply {lost}: {failures:?}");
        ensure!(
            ours.own().await?.context("the kind")?.is_empty(),
            "it has no block any more"
        );
        ensure!(theirs.claim(network, &unit).await? == Claim::Ours, "it is free");
        theirs.release(&network.name, &unit).await?;
    }
    ensure!(left(cluster, network).await?.is_empty(), "nothing is left");
    Ok(())
}

/// A node that leases again from a block whose release has failed, although the request had its effect. The test must
/// notice that.
async fn two_owners_are_noticed(cluster: &Cluster) -> Result<()> {
    let red = network(cluster, "lossy", &["10.30.0.0/24"], &json!({ "ipv4": 28 })).await?;
    let block: IpNet = "10.30.0.16/28".parse()?;
    let leasing = Leasing::default();
    let (client, faults) = losing(&cluster.client);
    let wrong = Claims::new(client, node("wrong"));
    ensure!(wrong.claim(&red, &block).await? == Claim::Ours);
    leasing.begin(block, "wrong")?;
    leasing.end(&block);
    // The last reply of a release.
    faults.lose_reply(RELEASE - 1);
    ensure!(
        wrong.release(&red.name, &block).await.is_err(),
        "the reply was to be lost"
    );
    leasing.begin(block, "wrong")?;
    let claims = Claims::new(repeating(&cluster.client), node("other"));
    ensure!(
        claims.claim(&red, &block).await? == Claim::Ours,
        "the release had its effect"
    );
    let noticed = leasing.begin(block, "other").err().context("nothing was noticed")?;
    println!("a wrong node: {noticed}");
    Ok(())
}

/// Pods of the first network may still run in its blocks, also where the second one has units of another size.
async fn a_network_made_again_has_no_blocks_of_the_first(cluster: &Cluster) -> Result<()> {
    let subnets = ["10.40.0.0/24"];
    let first = network(cluster, "twice", &subnets, &json!({ "ipv4": 28 })).await?;
    let [a, b] = ["a", "b"].map(|name| Claims::new(repeating(&cluster.client), node(name)));
    let small: IpNet = "10.40.0.16/28".parse()?;
    ensure!(a.claim(&first, &small).await? == Claim::Ours);
    cluster.delete(&objects::network("twice", &subnets, &json!({}))).await?;
    let second = network(cluster, "twice", &subnets, &json!({ "ipv4": 27 })).await?;
    ensure!(second.uid != first.uid);
    let large: IpNet = "10.40.0.0/27".parse()?;
    let refused = b.claim(&second, &large).await?;
    ensure!(
        matches!(&refused, Claim::Taken(by) if by.contains("node a")),
        "{refused:?}"
    );
    let again = network(cluster, "twice", &subnets, &json!({ "ipv4": 27 })).await?;
    ensure!(b.claim(&again, &"10.40.0.32/27".parse()?).await? == Claim::Ours);
    let object: AddressBlock = Api::all(cluster.client.clone()).get("twice.v4-10-40-0-16-28").await?;
    ensure!(!a.is_valid(&object, &second), "it is a block of the first network");
    a.release(&first.name, &small).await?;
    ensure!(b.claim(&second, &large).await? == Claim::Ours, "it is free now");
    Ok(())
}

/// How long claims take, in a network with many blocks.
async fn latency(cluster: &Cluster) -> Result<()> {
    let large = network(cluster, "large", &["10.128.0.0/10"], &json!({ "ipv4": 26 })).await?;
    let claims = Claims::new(repeating(&cluster.client), node("a"));
    let mut took = Vec::new();
    for number in 0..if long() { 2000_u32 } else { 40 } {
        let unit = IpNet::new((0x0a80_0000 + 64 * (number + 1)).to_be_bytes().into(), 26)?;
        let start = Instant::now();
        ensure!(claims.claim(&large, &unit).await? == Claim::Ours, "{unit}");
        took.push(start.elapsed());
    }
    let last = took.len() - 1;
    took.sort();
    println!(
        "{} claims: median {:?}, p99 {:?}",
        took.len(),
        took[last / 2],
        took[last * 99 / 100]
    );
    Ok(())
}

/// Random claims and releases of nodes that lose requests and replies, beside two that lose none.
async fn losses(cluster: &Cluster, network: &NetworkRef) -> Result<()> {
    let steps = if long() { 4000 } else { 60 };
    let leasing = Leasing::default();
    let start = Instant::now();
    let mut actors = tokio::task::JoinSet::new();
    for number in 0..5 {
        let claims = Claims::new(unreliable(&cluster.client), node(&format!("lossy{number}")));
        actors.spawn(actors::node(claims, network.clone(), leasing.clone(), steps, number));
    }
    for number in 0..2 {
        let claims = Claims::new(repeating(&cluster.client), node(&format!("whole{number}")));
        actors.spawn(actors::node(
            claims,
            network.clone(),
            leasing.clone(),
            steps,
            100 + number,
        ));
    }
    let mut done = Vec::new();
    while let Some(ended) = actors.join_next().await {
        done.push(ended??);
    }
    println!("{} actors in {:?}: {}", done.len(), start.elapsed(), done.join("; "));
    // Requests that arrive late have left something at most to the nodes themselves.
    tokio::time::sleep(clients::LATEST).await;
    for number in 0..5 {
        let claims = Claims::new(repeating(&cluster.client), node(&format!("lossy{number}")));
        for unit in left_of(cluster, network, &claims.node().name).await? {
            claims.release(&network.name, &unit).await?;
        }
    }
    let left = left(cluster, network).await?;
    ensure!(left.is_empty(), "left: {left:?}");
    ensure!(
        leasing.most() >= 8,
        "too few blocks were leased from at once: {}",
        leasing.most()
    );
    Ok(())
}

/// The ranges of a network that have an object, with their nodes.
async fn left(cluster: &Cluster, network: &NetworkRef) -> Result<BTreeSet<(IpNet, String)>> {
    let listed: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields(&format!("spec.network={}", network.name));
    let objects = listed.list(&own).await?.items.into_iter();
    let mut found = BTreeSet::new();
    for object in objects {
        found.insert((object.spec.cidr.parse()?, object.spec.node_name));
    }
    Ok(found)
}

async fn left_of(cluster: &Cluster, network: &NetworkRef, node: &str) -> Result<Vec<IpNet>> {
    let all = left(cluster, network).await?.into_iter();
    Ok(all.filter(|(_, owner)| owner == node).map(|(range, _)| range).collect())
}
