//! Tests what is lost between nodes while agents, the API server or a node fail, and when a node's addresses or MTU
//! change.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kni_integration::{
    cluster::{objects, patience},
    long, require,
    traffic::{assert_path_limit, is_too_big, whole_datagrams},
    wait,
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    super::scene::{PORT, address, ask, assert_reached, identity},
    bed::{Bed, NODES, TEAMS},
    losses::{Traffic, addresses_have_one_owner, control, one_sender_each},
};

/// How long a fault lasts, and how long traffic runs before and after it: hundreds of requests of each stream, and
/// longer than the agents' rounds of a second.
const FAULT: Duration = Duration::from_millis(1500);

/// How long the API server is away.
fn absence() -> Duration {
    if long() { Duration::from_mins(1) } else { FAULT }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_while_agents_and_the_api_server_are_away() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let mut bed = Bed::start("fabric-faults", &[], None).await?;
    bed.connected().await?;
    let pairs = [[1, 2]];
    control(&bed, &pairs, 2 * FAULT).await?;
    for (node, side) in [(0, "one side"), (1, "the other side")] {
        let traffic = Traffic::start(&bed, &pairs)?;
        bed.cluster.nodes[node].agent.kill9()?;
        tokio::time::sleep(FAULT).await;
        bed.cluster.nodes[node].agent.restart()?;
        tokio::time::sleep(FAULT).await;
        traffic.stop_whole(&format!("agent of {side} killed, and back after {FAULT:?}"))?;
    }
    let traffic = Traffic::start(&bed, &pairs)?;
    bed.cluster.kill_api_server()?;
    tokio::time::sleep(absence()).await;
    bed.cluster.start_api_server()?;
    tokio::time::sleep(FAULT).await;
    traffic.stop_whole(&format!("API server away for {:?}", absence()))?;
    bed.matrix().assert_expected();
    restored(&mut bed).await?;
    silent_and_back(&mut bed).await?;
    another_node_goes(&bed).await
}

/// Restores the data of the API server to a state before pods of each node were created.
async fn restored(bed: &mut Bed) -> Result<()> {
    bed.cluster.save_data()?;
    let late: Vec<Value> = TEAMS
        .iter()
        .flat_map(|team| (1..=NODES).map(|node| objects::pod(team, &format!("late{node}"), &format!("node{node}"))))
        .collect();
    bed.cluster.run(&late).await?;
    let traffic = Traffic::start(bed, &[[1, 2], [2, 3]])?;
    let newest = bed.cluster.resource_version().await?;
    bed.cluster.restore_data()?;
    tokio::time::sleep(2 * FAULT).await;
    traffic.stop_whole("etcd restored to its state before the last pods of each node")?;
    bed.cluster.pass_resource_version(newest).await?;
    // The API server does not know the last pods, which still run: no other pod gets their addresses, on any node.
    let more: Vec<Value> = TEAMS
        .iter()
        .flat_map(|team| (1..=NODES).map(|node| objects::pod(team, &format!("more{node}"), &format!("node{node}"))))
        .collect();
    bed.cluster.run(&more).await?;
    addresses_have_one_owner(bed).await?;
    one_sender_each(bed).await?;
    bed.connected().await
}

/// A node whose network and agent are gone for a time concerns only those who exchange packets with it.
async fn silent_and_back(bed: &mut Bed) -> Result<()> {
    let others = Traffic::start(bed, &[[1, 2]])?;
    let with_it = Traffic::start(bed, &[[1, 3]])?;
    let [_, v6] = bed.cluster.nodes[2].node.addresses().map(str::to_owned);
    let routes = bed.cluster.nodes[2]
        .node
        .run("ip", &["-6", "route", "show", "default"])?;
    bed.cluster.nodes[2].node.ip(&["link set uplink0 down"])?;
    bed.cluster.nodes[2].agent.kill9()?;
    tokio::time::sleep(FAULT).await;
    let node = &mut bed.cluster.nodes[2];
    node.node.ip(&["link set uplink0 up"])?;
    // The kernel removes the IPv6 addresses of an interface that is taken down.
    node.node.add_address("uplink0", &format!("{v6}/64"))?;
    let gateway = routes.split_whitespace().nth(2).unwrap_or_default();
    node.node.ip(&[&format!("route replace default via {gateway}")])?;
    node.agent.restart()?;
    let back = Instant::now();
    for team in TEAMS {
        let (from, to) = (bed.pod(team, 1), bed.pod(team, 3));
        wait::until("the node is reached again", patience(), async || {
            Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
        })
        .await
        .with_context(|| bed.state())?;
    }
    println!(
        "all networks reach the node {:.0?} after its agent was ready",
        back.elapsed()
    );
    if let Err(lost) = others.stop_whole("node3 without network and agent: pods of node1 and node2") {
        return Err(lost.context(bed.drops().await?));
    }
    let lost = with_it.stop("node3 without network and agent: pods of node1 and node3");
    ensure!(lost.longest_silence >= FAULT, "the fault was none: {lost:?}");
    ensure!(lost.broken == 0, "connections outlive it: {lost:?}");
    Ok(())
}

/// A node that leaves concerns its own pods only.
async fn another_node_goes(bed: &Bed) -> Result<()> {
    let traffic = Traffic::start(bed, &[[1, 2]])?;
    let nodes: Api<Node> = Api::all(bed.cluster.client.clone());
    bed.cluster.nodes[2].node.ip(&["link set uplink0 down"])?;
    nodes.delete("node3", &DeleteParams::default()).await?;
    tokio::time::sleep(FAULT).await;
    traffic.stop_whole("node3 deleted: pods of node1 and node2")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_with_other_addresses_is_found_again() -> Result<()> {
    require!(steady, root, netns, bpf, machine);
    let bed = Bed::start("fabric-renumber", &[], None).await?;
    bed.connected().await?;
    control(&bed, &[[1, 3]], FAULT).await?;
    others_remove_the_device(&bed).await?;
    let others = Traffic::start(&bed, &[[1, 3]])?;
    renumber(&bed).await?;
    let begun = Instant::now();
    bed.reached(&[(1, 2), (2, 1), (3, 2)]).await?;
    println!("reached {:?} after the change", begun.elapsed());
    others.stop_whole("node2 with other addresses: pods of node1 and node3")?;
    addresses_have_one_owner(&bed).await?;
    narrow(&bed).await
}

/// Another program of the node removes the tunnel device. No object changes.
async fn others_remove_the_device(bed: &Bed) -> Result<()> {
    let node = &bed.cluster.nodes[0].node;
    for command in ["link set kni-overlay down", "link delete kni-overlay"] {
        node.ip(&[command])?;
        let begun = Instant::now();
        let (from, to) = (bed.pod("red-team", 1), bed.pod("red-team", 2));
        wait::until("the tunnel is back", patience(), async || {
            Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
        })
        .await
        .with_context(|| bed.state())?;
        println!("{command}: reached again after {:.1?}", begun.elapsed());
    }
    bed.matrix().assert_expected();
    Ok(())
}

/// Gives the second node other addresses, as its kubelet reports them.
async fn renumber(bed: &Bed) -> Result<()> {
    let member = &bed.cluster.nodes[1];
    let [v4, v6] = member.node.addresses();
    // The kernel removes an IPv4 address with the first one of its subnet.
    member.node.ip(&[
        &format!("address del {v4}/24 dev uplink0"),
        &format!("address del {v6}/64 dev uplink0"),
    ])?;
    member.node.add_address("uplink0", "198.51.100.77/24")?;
    member.node.add_address("uplink0", "2001:db8:100::77/64")?;
    member.node.ip(&[
        "route replace default via 198.51.100.1",
        "route replace default via 2001:db8:100::1",
    ])?;
    let addresses = ["198.51.100.77", "2001:db8:100::77"].map(|ip| json!({ "type": "InternalIP", "address": ip }));
    let status: Value = json!({ "status": { "addresses": addresses } });
    let nodes: Api<Node> = Api::all(bed.cluster.client.clone());
    nodes
        .patch_status("node2", &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    Ok(())
}

/// A node behind a smaller MTU: pods that were attached before learn it, and streams pass.
async fn narrow(bed: &Bed) -> Result<()> {
    let (from, to) = (bed.pod("red-team", 1), bed.pod("red-team", 2));
    let shown: Value = serde_json::from_str(&from.inside.run("ip", &["-j", "link", "show", "eth0"])?)?;
    ensure!(shown[0]["mtu"] == 1450, "what fits the tunnel: {}", shown[0]["mtu"]);
    bed.cluster.nodes[1].node.ip(&["link set uplink0 mtu 1400"])?;
    for v4 in [true, false] {
        let there: IpAddr = address(to, v4);
        // 1400 less the outer headers is 1350.
        let length = if v4 { 1351 - 28 } else { 1351 - 48 };
        wait::until("the sender learns the smaller MTU", patience(), async || {
            Ok(assert_path_limit(&from.inside, SocketAddr::new(there, PORT), length).is_ok())
        })
        .await?;
    }
    assert_reached(from, to);
    narrow_for_the_stack(bed).await
}

/// What the node itself sends through the tunnel fits the way, too.
async fn narrow_for_the_stack(bed: &Bed) -> Result<()> {
    let (member, to) = (&bed.cluster.nodes[0], bed.pod("plain", 2));
    for v4 in [true, false] {
        let there: IpAddr = address(to, v4);
        let fits = if v4 { 1350 - 28 } else { 1350 - 48 };
        wait::until("the node's stack knows the smaller MTU", patience(), async || {
            let socket = whole_datagrams(&member.node, SocketAddr::new(there, PORT))?;
            socket.send(&vec![0; fits])?;
            let sent = socket.send(&vec![0; fits + 1]);
            ensure!(is_too_big(&sent), "{} bytes to {there}: {sent:?}", fits + 1);
            Ok(true)
        })
        .await
        .with_context(|| bed.state())?;
    }
    Ok(())
}
