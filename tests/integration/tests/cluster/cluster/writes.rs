//! Tests that objects are written when they change in a way that matters: pods and policies that come and go change
//! figures only, which many nodes would write and every node would read.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kni_api::{EgressPolicy, NodeNetwork, PodInterface, PodNetwork};
use kni_integration::{
    Cluster,
    cluster::{audit::Audit, objects, patience},
    require, wait,
};
use kube::{Api, ResourceExt as _, api::ListParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::scene::{entry, prompt, tenants, wait_for_truth};

/// Changes in a row.
const CHANGES: usize = 12;
/// The time between two policies: longer than that in which an agent gathers changes for one write.
const BETWEEN: Duration = Duration::from_millis(200);
/// Agents write figures of their node at most that often.
const FIGURES: Duration = Duration::from_secs(10);
/// kni-controller writes figures of a network at most that often.
const NETWORKS: Duration = Duration::from_secs(30);
/// Agents acknowledge policies at most that often.
const VERSIONS: Duration = Duration::from_secs(5);
/// What does not wait for any of them is written within this time after [`prompt`].
const AT_ONCE: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn figures_are_written_seldom_and_transitions_at_once() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-writes", 2).await?;
    tenants(&cluster).await?;
    a_network_is_in_use_at_once(&cluster).await?;
    pods_come(&cluster).await?;
    policies_change(&cluster).await?;
    egress_policies_do_not_wait(&cluster).await
}

/// The API server refuses to delete a network that has interfaces.
async fn a_network_is_in_use_at_once(cluster: &Cluster) -> Result<()> {
    cluster.run(&[objects::pod("blue-team", "first", "node1")]).await?;
    interfaces_within(cluster, "blue", 1).await?;
    cluster.remove("blue-team", &["first"]).await?;
    interfaces_within(cluster, "blue", 0).await
}

async fn interfaces_within(cluster: &Cluster, network: &str, count: i64) -> Result<()> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let took = wait::until(&format!("{network} has {count} interfaces"), patience(), async || {
        Ok(api.get(network).await?.status.context("no status")?.interfaces == count)
    })
    .await?;
    println!("{network} has {count} interfaces after {took:?}");
    let limit = AT_ONCE + prompt(cluster).await?;
    ensure!(took < limit, "{took:?}, not {limit:?}");
    Ok(())
}

async fn pods_come(cluster: &Cluster) -> Result<()> {
    cluster.run(&[objects::pod("red-team", "p", "node1")]).await?;
    wait_for_truth(cluster).await?;
    complete_interface(cluster, "p").await?;
    let (before, start) = (cluster.audit()?, Instant::now());
    let mut interfaces = Vec::new();
    for number in 0..CHANGES {
        cluster
            .run(&[objects::pod("red-team", &format!("p{number}"), "node1")])
            .await?;
        interfaces.push(complete_interface(cluster, &format!("p{number}")).await?);
    }
    wait_for_truth(cluster).await?;
    let (log, took) = (cluster.audit()?.since(&before)?, start.elapsed());
    let [node1, node2] = [0, 1].map(|index| cluster.nodes[index].user.clone());
    let count = |user: &str, what: &str| writes(&log, Some(user), what);
    let networks = writes(&log, None, "/podnetworks/red/status");
    println!(
        "{CHANGES} pods come to node1 in {took:?}: {networks} writes of the network, {} and {} of NodeNetworks, {} and {} \
         of PodInterfaces, {} of AddressBlocks",
        count(&node1, "/nodenetworks/"),
        count(&node2, "/nodenetworks/"),
        count(&node1, "/podinterfaces/"),
        count(&node2, "/podinterfaces/"),
        writes(&log, None, "/addressblocks"),
    );
    ensure!(
        networks <= most(took, NETWORKS),
        "{networks} writes of the network: {:#?}",
        log.summary()
    );
    ensure!(
        count(&node1, "/nodenetworks/") <= most(took, FIGURES),
        "{:#?}",
        log.summary()
    );
    ensure!(count(&node2, "/nodenetworks/") == 0, "{:#?}", log.summary());
    // One for the object and one for its status; one more when the programs at the interface were replaced later than
    // the agent waits for them, which only a busy machine does.
    let each: Vec<usize> = interfaces
        .iter()
        .map(|name| count(&node1, &format!("/podinterfaces/{name}")))
        .collect();
    ensure!(
        each.iter().all(|writes| (2..=3).contains(writes)) && each.contains(&2),
        "writes of each interface: {each:?}"
    );
    ensure!(
        count(&node1, "/podinterfaces/") == each.iter().sum::<usize>(),
        "{:#?}",
        log.summary()
    );
    ensure!(count(&node2, "/podinterfaces/") == 0, "{:#?}", log.summary());
    figures_become_right(cluster).await
}

/// What waited is written.
async fn figures_become_right(cluster: &Cluster) -> Result<()> {
    let used = i64::try_from(CHANGES)? + 1;
    wait::until("the node's figures are right", patience(), async || {
        Ok(entry(cluster, "node1", "red")
            .await?
            .is_some_and(|entry| entry.used == used))
    })
    .await?;
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let right = wait::until("the network's figures are right", patience(), async || {
        let status = api.get("red").await?.status.context("no status")?;
        Ok(status.interfaces == used && status.addresses.used == 2 * used)
    })
    .await?;
    println!("all figures are right {right:?} later");
    Ok(())
}

/// Waits until the interface of a pod in `red-team` is written with its final programs; returns the object's name.
async fn complete_interface(cluster: &Cluster, pod: &str) -> Result<String> {
    let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "red-team");
    wait::until_some(&format!("the interface of {pod} is complete"), patience(), async || {
        let listed = api.list(&ListParams::default()).await?;
        let found = listed.items.into_iter().find(|object| object.spec.pod_name == pod);
        let complete = found.filter(|object| {
            let programs = object.status.iter().flat_map(|status| &status.programs);
            let mut links = programs.map(|program| program.link_id).peekable();
            links.peek().is_some() && links.all(|id| id != 0)
        });
        Ok(complete.map(|object| object.name_any()))
    })
    .await
}

async fn policies_change(cluster: &Cluster) -> Result<()> {
    let (before, start) = (cluster.audit()?, Instant::now());
    for number in 0..CHANGES {
        let spec = json!({ "podSelector": { "matchLabels": { "app": format!("a{number}") } } });
        cluster
            .apply(&[objects::policy("red-team", &format!("policy{number}"), &spec)])
            .await?;
        sleep(BETWEEN).await;
    }
    let took = start.elapsed();
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    wait::until("both nodes know all policies", patience(), async || {
        let mut known = Vec::new();
        for node in ["node1", "node2"] {
            known.push(api.get(node).await?.status.context("no status")?.policies.known);
        }
        let all = i64::try_from(CHANGES)?;
        Ok(known == [all, all])
    })
    .await?;
    let log = cluster.audit()?.since(&before)?;
    for member in &cluster.nodes {
        let count = |what: &str| writes(&log, Some(&member.user), what);
        let (nodes, interfaces) = (count("/nodenetworks/"), count("/podinterfaces/"));
        println!(
            "{CHANGES} policies change in {took:?}: {} writes its NodeNetwork {nodes} times",
            member.name
        );
        ensure!(nodes <= most(start.elapsed(), VERSIONS), "{:#?}", log.summary());
        ensure!(interfaces == 0, "{:#?}", log.summary());
    }
    Ok(())
}

/// An egress policy is active when every node has acknowledged it, also right after another acknowledgement.
async fn egress_policies_do_not_wait(cluster: &Cluster) -> Result<()> {
    for name in ["first", "second"] {
        let policy = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy",
            "metadata": { "namespace": "red-team", "name": name },
            "spec": { "podSelector": {}, "defaultAction": "Allow" },
        });
        cluster.apply(&[policy]).await?;
        let api: Api<EgressPolicy> = Api::namespaced(cluster.client.clone(), "red-team");
        let took = wait::until("the egress policy is applied on every node", patience(), async || {
            let status = serde_json::to_value(api.get(name).await?.status)?;
            let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
            let is_it = |condition: &Value| condition["type"] == "Programmed" && condition["status"] == "True";
            Ok(conditions.iter().any(is_it))
        })
        .await?;
        println!("egress policy {name} is applied on every node after {took:?}");
        let limit = AT_ONCE + prompt(cluster).await?;
        ensure!(took < limit, "{took:?}, not {limit:?}");
    }
    Ok(())
}

/// The number of writes whose path contains `what`.
fn writes(log: &Audit, user: Option<&str>, what: &str) -> usize {
    let is_write = |verb: &str| {
        ["create ", "update ", "patch ", "delete "]
            .iter()
            .any(|write| verb.starts_with(write))
    };
    let all = log.requests().iter();
    all.filter(|request| user.is_none_or(|user| request.user == user))
        .filter(|request| is_write(&request.what) && request.what.contains(what))
        .count()
}

/// The most writes in a time if there is a pause between them, and one more for a condition.
fn most(time: Duration, pause: Duration) -> usize {
    usize::try_from(time.as_millis() / pause.as_millis()).unwrap_or(usize::MAX) + 2
}
