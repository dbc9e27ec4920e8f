//! Tests the test bed itself, with standalone agents.

use std::{net::IpAddr, time::Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Pod;
use kni_integration::{
    Cluster, Manifest,
    cluster::{HELD, MemberOptions, objects, patience},
    require,
    traffic::{Servers, tcp_get},
    wait,
};
use kube::Api;
use serde_json::json;

const PORT: u16 = 7000;
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[expect(clippy::too_many_lines, reason = "the life of a few pods, in order")]
async fn pods_of_the_api_run_on_their_nodes_also_across_its_absence() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let start = Instant::now();
    let mut cluster = Cluster::without_nodes("cluster-bed").await?;
    for _node in 0..2 {
        let options = MemberOptions {
            standalone: Some(Manifest::overlapping()),
            ..MemberOptions::default()
        };
        cluster.add_node(options).await?;
    }
    println!("two nodes after {:?}", start.elapsed());
    cluster.apply(&[objects::namespace("team", &json!({}))]).await?;

    // Nodes reach each other over the fabric, in both families.
    let servers = Servers::start(&cluster.nodes[1].node, "node2", PORT)?;
    for address in cluster.nodes[1].node.addresses() {
        let answer = tcp_get(&cluster.nodes[0].node, address.parse()?, PORT, ANSWER)?;
        assert_eq!(answer.identity, servers.identity());
    }

    let before = cluster.audit()?;
    let pods = [
        objects::pod("team", "one", "node1"),
        objects::pod("team", "two", "node2"),
    ];
    let running = cluster.run(&pods).await?;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), "team");
    for (pod, node) in running.iter().zip(&cluster.nodes) {
        let status = api.get(&pod.name).await?.status.context("status")?;
        assert_eq!(status.phase.as_deref(), Some("Running"));
        let told: Result<Vec<IpAddr>, _> = status.pod_ips.iter().flatten().map(|ip| ip.ip.parse()).collect();
        assert_eq!(told?, pod.ips(), "both families");
        assert_eq!(status.host_ip.as_deref(), Some(node.node.addresses()[0]));
        assert!(
            node.kubelet.pod("team", &pod.name).is_some(),
            "it is where it was assigned to"
        );
    }
    let asked = cluster.audit()?.since(&before)?;
    let told = asked
        .of("test")
        .iter()
        .filter(|r| r.what.starts_with("patch") && r.what.contains("/status"))
        .count();
    assert_eq!(told, 2, "{:#?}", asked.summary());

    // Pods run on without the API server; pending requests complete afterwards.
    cluster.nodes[0].kubelet.hold();
    let held = json!({ "labels": { HELD: "yes" } });
    cluster
        .create_pods(&[objects::pod_with("team", "three", "node1", &held)])
        .await?;
    wait::until("node1 knows pod three", patience(), async || {
        Ok(cluster.nodes[0].kubelet.knows("team", "three"))
    })
    .await?;
    cluster.kill_api_server()?;
    assert!(api.get("one").await.is_err(), "there is no API server");
    cluster.nodes[0].kubelet.release();
    let three = wait::until_some("pod three runs", patience(), async || {
        Ok(cluster.nodes[0].kubelet.pod("team", "three"))
    })
    .await?;
    assert!(cluster.nodes[0].kubelet.reported("team", "three").is_none());
    cluster.start_api_server()?;
    cluster.running("team", "three").await?;
    let told = api.get("three").await?.status.context("status")?.pod_ip;
    assert_eq!(told, three.ip(true).map(|ip| ip.to_string()));

    let before = cluster
        .nodes
        .iter()
        .map(|node| node.kubelet.running().len())
        .sum::<usize>();
    assert_eq!(before, 3);
    cluster.remove("team", &["one", "two", "three"]).await?;
    assert!(cluster.all_running().is_empty());
    println!("the whole took {:?}", start.elapsed());
    Ok(())
}
