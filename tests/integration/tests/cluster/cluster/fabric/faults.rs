//! Tests what is lost between nodes while agents, the API server or a node fail, and when a node's addresses or MTU change.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kni_integration::{
    cluster::PATIENCE,
    require,
    traffic::{Stream, assert_path_limit},
    wait,
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    super::scene::{PORT, address, ask, assert_reached, identity},
    bed::{Bed, TEAMS},
};

/// How long a fault lasts.
const FAULT: Duration = Duration::from_secs(3);

/// Traffic of all teams between two nodes, in both directions.
struct Traffic(Vec<(String, Stream)>);

impl Traffic {
    fn start(bed: &Bed, nodes: [usize; 2]) -> Result<Self> {
        let mut streams = Vec::new();
        for team in TEAMS {
            for ([from, to], v4) in [(nodes, true), ([nodes[1], nodes[0]], false)] {
                let (from, to) = (bed.pod(team, from), bed.pod(team, to));
                let there = SocketAddr::new(address(to, v4), PORT);
                streams.push((identity(to), Stream::udp(&from.inside, there)?));
                streams.push((identity(to), Stream::tcp(&from.inside, there)?));
            }
        }
        Ok(Self(streams))
    }

    fn assert_whole(self) {
        for (server, stream) in self.0 {
            stream.stop().assert_whole(&server);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_lost_while_agents_and_the_api_server_are_away() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let mut bed = Bed::start("fabric-faults", &[], None).await?;
    bed.connected().await?;
    for node in [0, 1] {
        let traffic = Traffic::start(&bed, [1, 2])?;
        bed.cluster.nodes[node].agent.kill9()?;
        tokio::time::sleep(FAULT).await;
        bed.cluster.nodes[node].agent.restart()?;
        tokio::time::sleep(FAULT).await;
        traffic.assert_whole();
    }
    let traffic = Traffic::start(&bed, [1, 2])?;
    bed.cluster.kill_api_server()?;
    tokio::time::sleep(FAULT).await;
    bed.cluster.start_api_server()?;
    tokio::time::sleep(FAULT).await;
    traffic.assert_whole();
    bed.matrix().assert_expected();
    another_node_goes(&bed).await
}

/// A node that leaves concerns its own pods only.
async fn another_node_goes(bed: &Bed) -> Result<()> {
    let traffic = Traffic::start(bed, [1, 2])?;
    let nodes: Api<Node> = Api::all(bed.cluster.client.clone());
    bed.cluster.nodes[2].node.ip(&["link set uplink0 down"])?;
    nodes.delete("node3", &DeleteParams::default()).await?;
    tokio::time::sleep(FAULT).await;
    traffic.assert_whole();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_with_other_addresses_is_found_again() -> Result<()> {
    require!(exclusive, root, netns, bpf, machine);
    let bed = Bed::start("fabric-renumber", &[], None).await?;
    bed.connected().await?;
    let others = Traffic::start(&bed, [1, 3])?;
    renumber(&bed).await?;
    let begun = Instant::now();
    for team in TEAMS {
        for (from, to) in [(1, 2), (2, 1), (3, 2)] {
            let (from, to) = (bed.pod(team, from), bed.pod(team, to));
            let what = format!("{} reaches {}", identity(from), identity(to));
            wait::until(&what, PATIENCE, async || {
                Ok(ask(from, to) == vec![Ok(identity(to)), Ok(identity(to))])
            })
            .await
            .with_context(|| bed.state())?;
        }
    }
    println!("reached {:?} after the change", begun.elapsed());
    others.assert_whole();
    narrow(&bed).await
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
        wait::until("the sender learns the smaller MTU", PATIENCE, async || {
            Ok(assert_path_limit(&from.inside, SocketAddr::new(there, PORT), length).is_ok())
        })
        .await?;
    }
    assert_reached(from, to);
    Ok(())
}
