//! Tests a node that is deleted and registered again under its name, with another UID, while its pods run.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kni_api::{AddressBlock, ConditionStatus, NodeNetwork};
use kni_integration::{
    cluster::{objects, patience},
    long, require, wait,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    super::{claims::clients::agent_of, scene::wait_for_truth},
    bed::Bed,
    losses::{Traffic, addresses_have_one_owner, control},
};

/// The node, and its place in the bed.
const NAME: &str = "node2";
const INDEX: usize = 1;
/// How long traffic runs before and after, and how long the node is away.
const PHASE: Duration = Duration::from_millis(1500);

/// Who is back first.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// The agent runs all the time.
    AgentStays,
    /// The node is registered while its agent does not run.
    NodeFirst,
    /// The agent starts while its node is not registered.
    AgentFirst,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_that_is_registered_again_has_its_blocks_and_its_traffic_back() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut bed = Bed::start("fabric-registered", &[], None).await?;
    // What reaches the pods of red needs the identity of its sender.
    let same = json!({ "ingress": [{ "from": [{ "podSelector": {} }] }] });
    bed.cluster.apply(&[objects::policy("red-team", "same", &same)]).await?;
    bed.connected().await?;
    control(&bed, &[[1, 2], [1, 3]], PHASE).await?;
    for order in [Order::AgentStays, Order::NodeFirst, Order::AgentFirst] {
        registered_again(&mut bed, order)
            .await
            .with_context(|| format!("{order:?}"))?;
    }
    only_the_present_uid_is_written(&bed).await?;
    if long() {
        // Longer than a node has to be missing to count as gone.
        tokio::time::sleep(2 * patience()).await;
        bed.connected().await?;
    }
    wait_for_truth(&bed.cluster).await.map(drop)
}

async fn registered_again(bed: &mut Bed, order: Order) -> Result<()> {
    let client = bed.cluster.client.clone();
    let nodes: Api<Node> = Api::all(client.clone());
    let (before, old) = (blocks(&client).await?, uid(&nodes).await?);
    ensure!(before.values().any(|(node, _)| node == NAME), "{NAME} has no block");
    ensure!(
        before.values().all(|(node, uid)| node != NAME || *uid == old),
        "they are its own: {before:?}"
    );
    let others = Traffic::start(bed, &[[1, 3]])?;
    let with_it = Traffic::start(bed, &[[1, 2]])?;
    if !matches!(order, Order::AgentStays) {
        bed.cluster.nodes[INDEX].agent.kill9()?;
    }
    nodes.delete(NAME, &DeleteParams::default()).await?;
    if matches!(order, Order::AgentFirst) {
        bed.cluster.nodes[INDEX].agent.restart()?;
    }
    tokio::time::sleep(PHASE).await;
    bed.cluster.nodes[INDEX].register(&client).await?;
    let begun = Instant::now();
    if matches!(order, Order::NodeFirst) {
        tokio::time::sleep(PHASE).await;
        bed.cluster.nodes[INDEX].agent.restart()?;
    }
    let new = uid(&nodes).await?;
    ensure!(new != old, "another object");
    bed.reached(&[(1, 2), (2, 1)]).await?;
    println!(
        "{order:?}: reached again {:.1?} after it was registered",
        begun.elapsed()
    );
    tokio::time::sleep(PHASE).await;
    with_it.stop(&format!("{order:?}: pods of node1 and of the node itself"));
    others.stop_whole(&format!("{order:?}: pods of node1 and node3"))?;
    wait::until("each block has the UID of its node", patience(), async || {
        let now = blocks(&client).await?;
        let expected: BTreeMap<_, _> = before
            .iter()
            .map(|(key, (node, uid))| {
                let uid = if node == NAME { &new } else { uid };
                (key.clone(), (node.clone(), uid.clone()))
            })
            .collect();
        ensure!(now == expected, "{now:?}, not {expected:?}");
        Ok(true)
    })
    .await?;
    no_one_is_accused(&client).await?;
    addresses_have_one_owner(bed).await?;
    // New pods there, too.
    let (name, team) = (format!("{order:?}").to_lowercase(), "red-team");
    bed.cluster.run(&[objects::pod(team, &name, NAME)]).await?;
    bed.cluster.remove(team, &[&name]).await
}

async fn no_one_is_accused(client: &Client) -> Result<()> {
    let reports: Api<NodeNetwork> = Api::all(client.clone());
    wait::until("no node reports a conflict", patience(), async || {
        for report in reports.list(&ListParams::default()).await? {
            let conditions = report.status.clone().context("no status")?.conditions;
            let conflict = conditions.iter().find(|condition| condition.type_ == "AddressConflict");
            let conflict = conflict.context("no such condition")?;
            ensure!(
                conflict.status == ConditionStatus::False,
                "{}: {}",
                report.name_any(),
                conflict.message
            );
        }
        Ok(true)
    })
    .await
    .map(drop)
}

/// The agent of the node writes no other UID, and the agent of another node none at all.
async fn only_the_present_uid_is_written(bed: &Bed) -> Result<()> {
    let client = &bed.cluster.client;
    let all = blocks(client).await?;
    let (name, _) = all.iter().find(|(_, (node, _))| node == NAME).context("no block")?;
    let nodes: Api<Node> = Api::all(client.clone());
    let present = uid(&nodes).await?;
    let other = nodes.get("node3").await?.uid().context("no uid")?;
    for (what, agent, change, words) in [
        (
            "a UID that no node has",
            NAME,
            json!({ "nodeUID": "none" }),
            "spec.nodeUID is not the UID of node node2",
        ),
        (
            "the UID of another node",
            NAME,
            json!({ "nodeUID": other }),
            "spec.nodeUID is not the UID of node node2",
        ),
        (
            "the agent of another node",
            "node3",
            json!({ "nodeUID": present }),
            "cannot change address blocks of node node2",
        ),
        (
            "another node",
            "node3",
            json!({ "nodeName": "node3", "nodeUID": other }),
            "an address block cannot be changed",
        ),
    ] {
        let api: Api<AddressBlock> = Api::all(agent_of(client, agent));
        let patch: Patch<Value> = Patch::Merge(json!({ "spec": change }));
        let refused = api.patch(&name.0, &PatchParams::default(), &patch).await.err();
        let refused = refused.with_context(|| format!("{what} is accepted"))?.to_string();
        ensure!(refused.contains(words), "{what}: {refused}");
    }
    ensure!(blocks(client).await? == all, "nothing has changed");
    Ok(())
}

async fn uid(nodes: &Api<Node>) -> Result<String> {
    nodes.get(NAME).await?.uid().context("no uid")
}

/// Name and UID of all blocks, with name and UID of their nodes.
async fn blocks(client: &Client) -> Result<BTreeMap<(String, String), (String, String)>> {
    let api: Api<AddressBlock> = Api::all(client.clone());
    let listed = api.list(&ListParams::default()).await?.items;
    let listed = listed
        .into_iter()
        .filter(|block| block.metadata.deletion_timestamp.is_none());
    Ok(listed
        .map(|block| {
            let key = (block.name_any(), block.uid().unwrap_or_default());
            (key, (block.spec.node_name, block.spec.node_uid))
        })
        .collect())
}
