//! Tests a cluster that is upgraded node by node from the previous release, whose agents know no fabric, and its way
//! back.

use std::time::Duration;

use anyhow::{Result, ensure};
use kni_integration::{
    Pod,
    agent::agent_binary,
    cluster::{MemberOptions, PATIENCE, objects},
    earlier::previous_agent,
    require, wait,
};
use serde_json::Value;

use super::{
    super::scene::{ask, assert_reached, assert_silent, identity, serve},
    bed::{Bed, NODES, Setting, TEAMS},
    losses::{Traffic, addresses_have_one_owner},
};

/// The longest silence that an agent of the previous release may cause.
const SWITCH: Duration = Duration::from_millis(500);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cluster_is_upgraded_node_by_node_and_goes_back() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let Some(previous) = previous_agent()? else {
        println!("not tested with agents of the previous release: only in long tests, or with KNI_PREVIOUS_AGENT");
        return Ok(());
    };
    let setting = Setting {
        options: MemberOptions::of_release(&previous),
        ..Setting::default()
    };
    let mut bed = Bed::start_with("fabric-mixed", &setting).await?;
    let local: Vec<Value> = TEAMS
        .iter()
        .flat_map(|team| (1..=NODES).map(|node| objects::pod(team, &format!("q{node}"), &format!("node{node}"))))
        .collect();
    let local = bed.cluster.run(&local).await?;
    let _servers = local.iter().map(serve).collect::<Result<Vec<_>>>()?;
    for team in TEAMS {
        assert_silent(bed.pod(team, 1), bed.pod(team, 2));
    }

    let traffic = on_each_node(&bed, &local)?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    traffic.stop_whole("control run, all agents of the previous release: pods of the same node")?;
    for node in 1..=NODES {
        let traffic = on_each_node(&bed, &local)?;
        // Those of nodes that are upgraded already reach each other.
        let between = (node == NODES).then(|| Traffic::start(&bed, &[[1, 2]])).transpose()?;
        bed.cluster.nodes[node - 1].agent.kill9()?;
        bed.cluster.nodes[node - 1].agent.replace(&agent_binary()?)?;
        if node > 1 {
            reached(&bed, node).await?;
        }
        traffic.stop_whole(&format!("node{node} is upgraded: pods of the same node"))?;
        if let Some(between) = between {
            between.stop_whole(&format!("node{node} is upgraded: pods of node1 and node2"))?;
        }
        addresses_have_one_owner(&bed).await?;
    }
    bed.connected().await?;

    for node in (1..=NODES).rev() {
        let traffic = on_each_node(&bed, &local)?;
        let between = (node == NODES).then(|| Traffic::start(&bed, &[[1, 2]])).transpose()?;
        bed.cluster.nodes[node - 1].agent.kill9()?;
        bed.cluster.nodes[node - 1].agent.replace_by_release(&previous)?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        // The agent of the previous release takes a table of routes of its own size.
        let lost = traffic.stop(&format!("node{node} goes back: pods of the same node"));
        ensure!(lost.broken == 0 && lost.longest_silence < SWITCH, "{lost:?}");
        if let Some(between) = between {
            between.stop_whole(&format!("node{node} goes back: pods of node1 and node2"))?;
        }
        addresses_have_one_owner(&bed).await?;
        let more: Vec<Value> = TEAMS
            .iter()
            .map(|team| objects::pod(team, &format!("back{node}"), &format!("node{node}")))
            .collect();
        for pod in bed.cluster.run(&more).await? {
            let here = bed.pod(&pod.namespace, node);
            assert_reached(&pod, here);
        }
    }
    ensure!(bed.cluster.nodes.len() == NODES, "all are there");
    Ok(())
}

/// Between the two pods that each team has on each node.
fn on_each_node(bed: &Bed, local: &[Pod]) -> Result<Traffic> {
    let pairs: Vec<[&Pod; 2]> = bed.pods.iter().zip(local).map(|(one, other)| [one, other]).collect();
    Traffic::between(&pairs)
}

/// Waits until the pods of all nodes up to this one reach each other.
async fn reached(bed: &Bed, last: usize) -> Result<()> {
    for team in TEAMS {
        for node in 1..last {
            let (from, to) = (bed.pod(team, last), bed.pod(team, node));
            wait::until("upgraded nodes reach each other", PATIENCE, async || {
                Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
            })
            .await?;
        }
    }
    Ok(())
}
