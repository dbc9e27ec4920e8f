//! Tests a node whose name is longer than a label may be.

use anyhow::Result;
use kni_integration::{
    Cluster,
    cluster::{MemberOptions, objects},
    require,
};

use super::scene::{assert_reached, serve, tenants, wait_for_condition, wait_for_truth};

/// The maximum length of a label's value.
const LABEL: usize = 63;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_with_a_long_name_reports_its_interfaces() -> Result<()> {
    require!(root, netns, bpf, machine);
    let mut cluster = Cluster::start("cluster-node-names", 1).await?;
    let long = format!("{}.compute.example", "n".repeat(LABEL));
    let options = MemberOptions {
        name: Some(long.clone()),
        ..MemberOptions::default()
    };
    cluster.add_node(options).await?;
    tenants(&cluster).await?;
    let pods = cluster
        .run(&[
            objects::pod("red-team", "a", "node1"),
            objects::pod("red-team", "b", &long),
        ])
        .await?;
    wait_for_truth(&cluster).await?;
    wait_for_condition(&cluster, "red", "Programmed", true).await?;
    let _server = serve(&pods[1])?;
    assert_reached(&pods[0], &pods[1]);
    Ok(())
}
