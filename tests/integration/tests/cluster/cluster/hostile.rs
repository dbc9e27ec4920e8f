//! Tests that a node whose token claims and reports without limit delays no other node, and is reported.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1::Node, events::v1::Event};
use kni_api::{AddressBlock, NETWORK_LABEL, NetworkMembers, network_members};
use kni_claims::{NetworkRef, NodeRef, address_block};
use kni_integration::{
    Cluster,
    cluster::{objects, patience},
    long, require, wait,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    claims::clients::agent_of,
    scene::{network_object, tenants, wait_for_condition},
};

/// The node without an agent whose token is misused.
const ROGUE: &str = "rogue";
/// How many reports it makes.
const MANY: usize = 300;
/// How many of them may stay.
const MOST: usize = 16;
/// Blocks of no network are deleted after a minute, and taken away after another one.
const TAKEN_AWAY: Duration = Duration::from_mins(4);
const AT_ONCE: usize = 16;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_that_claims_and_reports_without_limit_delays_no_other() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-hostile", 1).await?;
    tenants(&cluster).await?;
    let object = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": ROGUE } });
    let node = NodeRef {
        name: ROGUE.to_owned(),
        uid: cluster.apply_one(&object).await?.uid().context("no uid")?,
    };
    let red = NetworkRef {
        name: "red".parse()?,
        uid: network_object(&cluster, "red").await?.uid().context("no uid")?,
    };
    let ghost = NetworkRef {
        name: "ghost".parse()?,
        uid: "none".to_owned(),
    };
    let client = agent_of(&cluster.client, ROGUE);
    let blocks: Api<AddressBlock> = Api::all(client.clone());
    for (network, count) in [(&red, 8), (&ghost, 2)] {
        for number in 0..count {
            let unit: IpNet = format!("10.10.{}.0/26", 200 + number).parse()?;
            let block = address_block(&node, network, &unit);
            blocks.create(&PostParams::default(), &block).await?;
        }
    }
    reports_delay_no_other(&cluster, &client, (&node, &red)).await?;
    event(&cluster, "TooManyReports").await?;

    let message = wait_for_long(&cluster, "BlocksExceeded").await?;
    ensure!(message.contains(ROGUE) && !message.contains("node1"), "{message}");
    wait::until("blocks of no network are taken away", TAKEN_AWAY, async || {
        Ok(blocks_of(&cluster, "ghost").await? == 0)
    })
    .await?;
    event(&cluster, "StrayBlock").await?;
    ensure!(blocks_of(&cluster, "red").await? == 8, "those of a network stay");
    if long() {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        nodes.delete(ROGUE, &DeleteParams::default()).await?;
        wait::until("its blocks are released", TAKEN_AWAY, async || {
            Ok(blocks_of(&cluster, "red").await? == 0)
        })
        .await?;
        wait_for_condition(&cluster, "red", "BlocksExceeded", false).await?;
    }
    Ok(())
}

/// While a node makes many reports, the first pod of another one is confirmed; the surplus goes.
async fn reports_delay_no_other(cluster: &Cluster, client: &Client, of: (&NodeRef, &NetworkRef)) -> Result<()> {
    let api: Api<NetworkMembers> = Api::all(client.clone());
    let reports = (0..MANY).map(|number| {
        let (api, object) = (api.clone(), report(of, number));
        async move {
            api.create(&PostParams::default(), &object?)
                .await
                .map_err(anyhow::Error::from)
        }
    });
    let flood = stream::iter(reports).buffer_unordered(AT_ONCE).try_collect::<Vec<_>>();
    let confirmed = async {
        let begun = Instant::now();
        cluster.run(&[objects::pod("red-team", "a", "node1")]).await?;
        let api: Api<NetworkMembers> = Api::all(cluster.client.clone());
        let name = network_members::name("red", "node1", 0);
        wait::until("the pod of node1 is confirmed", patience(), async || {
            let status = api.get_opt(&name).await?.and_then(|object| object.status);
            Ok(status.is_some_and(|status| status.summary == "1/1"))
        })
        .await?;
        anyhow::Ok(begun.elapsed())
    };
    let (made, took) = futures::future::join(flood, confirmed).await;
    println!(
        "beside {} reports of {ROGUE}, a pod of node1 runs and is confirmed after {:.1?}",
        made?.len(),
        took?
    );
    let of_rogue = ListParams::default().fields(&format!("spec.nodeName={ROGUE}"));
    let all: Api<NetworkMembers> = Api::all(cluster.client.clone());
    wait::until("the surplus is removed", patience(), async || {
        let left = all.list(&of_rogue).await?.items;
        Ok(left.len() == MOST && left.iter().all(|object| object.status.is_some()))
    })
    .await?;
    Ok(())
}

/// A report about a pod that does not exist.
fn report((node, network): (&NodeRef, &NetworkRef), number: usize) -> Result<NetworkMembers> {
    let name = network_members::name(network.name.as_str(), &node.name, number);
    let member = json!({
        "namespace": "red-team", "podName": format!("none-{number}"), "podUID": "none", "interface": "eth0",
        "addresses": [format!("10.10.200.{}", 1 + number % 60)],
    });
    let object: Value = json!({
        "apiVersion": "kni.dev/v1alpha1",
        "kind": "NetworkMembers",
        "metadata": { "name": name, "labels": { NETWORK_LABEL: network.name.as_str() } },
        "spec": {
            "network": network.name.as_str(), "networkUID": network.uid,
            "nodeName": node.name, "nodeUID": node.uid, "members": [member],
        },
    });
    Ok(serde_json::from_value(object)?)
}

async fn blocks_of(cluster: &Cluster, network: &str) -> Result<usize> {
    let api: Api<AddressBlock> = Api::all(cluster.client.clone());
    let own = ListParams::default().fields(&format!("spec.nodeName={ROGUE},spec.network={network}"));
    Ok(api.list(&own).await?.items.len())
}

/// The message of a condition of network red that takes more than a minute.
async fn wait_for_long(cluster: &Cluster, kind: &str) -> Result<String> {
    wait::until_some(&format!("{kind} holds"), 3 * patience(), async || {
        let status = network_object(cluster, "red").await?.status.unwrap_or_default();
        let mut conditions = status.conditions.into_iter();
        let found = conditions.find(|condition| condition.type_ == kind);
        let found = found.filter(|found| found.status == kni_api::ConditionStatus::True);
        Ok(found.map(|found| found.message))
    })
    .await
}

/// Waits for an event about the node.
async fn event(cluster: &Cluster, reason: &str) -> Result<()> {
    let api: Api<Event> = Api::all(cluster.client.clone());
    wait::until(&format!("event {reason}"), patience(), async || {
        let events = api.list(&ListParams::default()).await?.items;
        let mut of_node = events
            .iter()
            .filter(|event| event.reason.as_deref() == Some(reason))
            .filter(|event| event.regarding.as_ref().and_then(|about| about.name.as_deref()) == Some(ROGUE));
        Ok(of_node.next().is_some())
    })
    .await?;
    Ok(())
}
