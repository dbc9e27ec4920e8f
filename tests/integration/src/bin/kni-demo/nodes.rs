//! Shows two nodes of a cluster: two tenants with the same addresses, whose pods reach those of their network on both
//! nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster, Pod,
    cluster::{
        MemberOptions, objects,
        wire::{Wire, ip_packet, tunnelled},
    },
    traffic::{Matrix, Probe, Servers},
};
use serde_json::json;

use crate::{
    progress::{part, print_line},
    stage::PORT,
};

/// Name, tenant, node. Each network has a block of addresses on each node, so the pods of blue have addresses that pods
/// of red have too, though not always those with the same number: blocks and addresses go to who asks first. Only red
/// has a third pod.
const PODS: [(&str, &str, &str); 5] = [
    ("blue-1", "blue", "node1"),
    ("blue-2", "blue", "node2"),
    ("red-1", "red", "node1"),
    ("red-2", "red", "node2"),
    ("red-3", "red", "node2"),
];
const SILENCE: Duration = Duration::from_millis(700);
/// Until each node knows the pods of the other.
const PATIENCE: Duration = Duration::from_secs(30);
const UDP: u8 = 17;

/// Starts the cluster, shows it, and removes it.
pub(crate) async fn show() -> Result<()> {
    part("Two nodes of a cluster, each with an agent, in namespaces of their own");
    let began = Instant::now();
    let mut cluster = Cluster::without_nodes("demo").await?;
    for _node in 0..2 {
        cluster.add_node(MemberOptions::default()).await?;
    }
    print_line(format!(
        "etcd, kube-apiserver, kni-controller and two agents run after {:.0?}",
        began.elapsed()
    ));
    let pods = tenants(&cluster).await?;
    print_line(cluster.nodes[0].knictl(&["networks", "-o", "wide"])?);
    for ((name, tenant, node), pod) in PODS.iter().zip(&pods) {
        let ips: Vec<String> = pod.ips().iter().map(ToString::to_string).collect();
        print_line(format!("{name:7} network {tenant:5} {node} {}", ips.join(",")));
    }
    let same = pods[..2]
        .iter()
        .flat_map(Pod::ips)
        .filter(|ip| pods[2..].iter().any(|pod| pod.ips().contains(ip)));
    ensure!(same.count() == 4, "blue and red are meant to have the same addresses");

    let servers = PODS.iter().zip(&pods);
    let servers: Vec<Servers> = servers
        .map(|((name, ..), pod)| Servers::start(&pod.inside, name, PORT))
        .collect::<Result<_>>()?;
    let servers: Vec<&Servers> = servers.iter().collect();
    let wire = Wire::open(&cluster)?;
    let matrix = connectivity(&pods, &servers).await?;
    part("Who answers whom, over both nodes");
    print_line(&matrix);
    print_line(format!("all {} answers are as expected", matrix.rows.len()));
    on_the_wire(&cluster, &wire).await
}

async fn tenants(cluster: &Cluster) -> Result<Vec<Pod>> {
    let mut all = vec![objects::default_network()];
    for name in ["blue", "red"] {
        let more = json!({
            "namespaceSelector": { "matchLabels": { "tenant": name } },
            // Two blocks.
            "perNodePrefix": { "ipv4": 25, "ipv6": 121 },
        });
        all.push(objects::network(name, &["10.10.0.0/24", "fd10::/120"], &more));
        all.push(objects::namespace(&format!("{name}-team"), &json!({ "tenant": name })));
    }
    cluster.apply(&all).await?;
    let wanted: Vec<_> = PODS
        .iter()
        .map(|(name, tenant, node)| objects::pod(&format!("{tenant}-team"), name, node))
        .collect();
    cluster.run(&wanted).await
}

/// Asks until all answers are as expected.
async fn connectivity(pods: &[Pod], servers: &[&Servers]) -> Result<Matrix> {
    let mut probes = Vec::new();
    for ((from, tenant, _), pod) in PODS.iter().zip(pods) {
        let addresses: BTreeSet<IpAddr> = pods.iter().flat_map(Pod::ips).collect();
        for to in addresses.into_iter().filter(|ip| !pod.ips().contains(ip)) {
            let own = PODS.iter().zip(pods).filter(|((_, of, _), _)| of == tenant);
            let mut owner = own.filter(|(_, pod)| pod.ips().contains(&to));
            let expected = owner.next().map(|((name, ..), _)| *name);
            ensure!(expected != Some(from), "{from} asks itself");
            probes.push(Probe {
                from: &pod.inside,
                to,
                expected,
            });
        }
    }
    ensure!(
        probes.iter().any(|probe| probe.expected.is_none()),
        "nothing is to be silent: the matrix proves nothing"
    );
    let deadline = Instant::now() + PATIENCE;
    loop {
        let matrix = Matrix::run(&probes, servers, PORT, SILENCE);
        let failures = matrix.failures().len();
        if failures == 0 {
            return Ok(matrix);
        }
        ensure!(
            Instant::now() < deadline,
            "{failures} of {} answers are not as expected:\n{matrix}",
            matrix.rows.len()
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// What passed between the nodes: no packet of a pod but in a tunnel with the number of its network.
async fn on_the_wire(cluster: &Cluster, wire: &Wire) -> Result<()> {
    part("What was on the wire between the nodes");
    let numbers = cluster.numbers().await?;
    let mut counted: BTreeMap<u32, usize> = BTreeMap::new();
    for (_, _, protocol, datagram) in wire.frames()?.iter().filter_map(|frame| ip_packet(frame)) {
        if let Some((number, _)) = tunnelled(datagram).filter(|_| protocol == UDP) {
            *counted.entry(number).or_default() += 1;
        }
    }
    for (number, packets) in &counted {
        let network = numbers
            .get(number)
            .with_context(|| format!("{number} is of no network"))?;
        print_line(format!("VXLAN {number:8} (network {network}): {packets} packets"));
    }
    ensure!(counted.len() == 2, "the tunnels of two networks: {counted:?}");
    Ok(())
}
