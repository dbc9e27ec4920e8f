//! Measures the effect of `spec.xdp`: the same pods in networks with and without it, in the same rounds.

mod live;
mod one_way;

use std::{collections::BTreeMap, path::Path as FilePath};

use anyhow::{Context as _, Result, ensure};
use kni_integration::{Agent, AgentOptions, Kubelet, Manifest, Node, Pod, agent::SOCKET};
use kni_proto::runtime::{Interface, ListInterfacesRequest};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use crate::{
    Effort,
    cpu::Cpus,
    path::Path,
    report,
    statistics::{median, paired_ratio},
    workload::{Placement, Workload},
};

/// Networks without and with XDP.
const NETWORKS: [&str; 2] = ["without", "with"];

/// The measured workloads.
#[derive(Debug, Clone, Copy)]
enum Measure {
    /// A workload of the other paths.
    Usual(Workload),
    /// Small datagrams one way, received per second.
    OneWay,
    /// The same as frames that XDP of the sender generates and XDP of the receiver drops: no socket and no `sk_buff` at
    /// all.
    Frames,
}

struct Row {
    key: &'static str,
    title: &'static str,
    measure: Measure,
    placement: Placement,
}

/// A node with both networks, and a client and a server in each.
struct World {
    // Dropped in this order: the agent must not outlive its node.
    runtime: Runtime,
    kubelet: Kubelet,
    pods: [[Pod; 2]; 2],
    _agent: Agent,
    _node: Node,
}

impl World {
    fn start(agent: &FilePath) -> Result<Self> {
        let node = Node::new("xdp")?;
        let options = AgentOptions {
            manifests: vec![
                Manifest::default_network(NETWORKS[0], &["10.244.0.0/16", "fd00:244::/64"]),
                Manifest::network(NETWORKS[1], &["10.10.0.0/16", "fd10::/64"]).spec("xdp: true"),
            ],
            binary: Some(agent.to_owned()),
            ..AgentOptions::default()
        };
        let agent = Agent::start(&node, options)?;
        let runtime = Runtime::new()?;
        let (kubelet, pods) = runtime.block_on(async {
            let kubelet = Kubelet::connect(&node, SOCKET).await?;
            let pair = async |network| -> Result<[Pod; 2]> {
                let wish = [("kni.dev/network", network)];
                Ok([
                    kubelet.run_pod(network, "client", &wish).await?,
                    kubelet.run_pod(network, "server", &wish).await?,
                ])
            };
            let pods = [pair(NETWORKS[0]).await?, pair(NETWORKS[1]).await?];
            anyhow::Ok((kubelet, pods))
        })?;
        Ok(Self {
            runtime,
            kubelet,
            pods,
            _agent: agent,
            _node: node,
        })
    }

    fn path(&self, network: usize) -> Result<Path> {
        let [client, server] = &self.pods[network];
        Ok(Path {
            key: NETWORKS[network],
            title: NETWORKS[network],
            client: client.inside.clone(),
            server: server.inside.clone(),
            address: server.ip(true).context("no IPv4 address")?,
            services: None,
            keep: Vec::new(),
        })
    }

    fn interface(&self, pod: &Pod) -> Result<Interface> {
        let mut client = self.kubelet.runtime();
        let request = ListInterfacesRequest {
            sandbox_id: pod.id.clone(),
            ..Default::default()
        };
        let listed = self.runtime.block_on(client.list_interfaces(request))?;
        let first = listed.into_inner().interfaces.into_iter().next();
        first.with_context(|| format!("no interface of {}", pod.name))
    }

    fn measure(&self, row: &Row, network: usize, effort: Effort) -> Result<f64> {
        let path = self.path(network)?;
        match row.measure {
            Measure::Usual(workload) => workload.run(&path, row.placement, effort.each),
            Measure::OneWay => one_way::run(&path, row.placement, effort.each),
            Measure::Frames => {
                let interface = self.interface(&self.pods[network][0])?;
                live::run(&path, &interface, row.placement, effort.each)
            }
        }
    }

    /// Checks that the frames took the measured path.
    fn check(&self) -> Result<()> {
        for (network, pods) in self.pods.iter().enumerate() {
            for pod in pods {
                let interface = self.interface(pod)?;
                let runs = interface.programs.iter().any(|program| program.name == "xdp_pod");
                ensure!(interface.healthy && runs == (network == 1), "{interface:?}");
            }
        }
        Ok(())
    }
}

fn rows(cpus: &Cpus) -> Vec<Row> {
    let one = Placement {
        client: cpus.one,
        server: cpus.one,
    };
    let row = |key, title, measure, placement| Row {
        key,
        title,
        measure,
        placement,
    };
    let mut rows = vec![
        row("udp_rr", "UDP_RR/s", Measure::Usual(Workload::UdpTransactions), one),
        row("one_way", "datagrams/s", Measure::OneWay, one),
        row("tcp_rr", "TCP_RR/s", Measure::Usual(Workload::TcpTransactions), one),
        row("connections", "connect/s", Measure::Usual(Workload::Connections), one),
        row(
            "stream_one_cpu",
            "TCP stream Gb/s",
            Measure::Usual(Workload::Stream),
            one,
        ),
        row("frames", "frames/s, XDP in both pods", Measure::Frames, one),
    ];
    if let Some(other) = cpus.other {
        let two = Placement {
            client: other,
            server: cpus.one,
        };
        rows.push(row("one_way_two_cpus", "datagrams/s, 2 CPUs", Measure::OneWay, two));
        let stream = Measure::Usual(Workload::Stream);
        rows.push(row("stream_two_cpus", "TCP stream Gb/s, 2 CPUs", stream, two));
    }
    rows
}

/// Measures both networks and prints the table.
pub(crate) fn measure(cpus: &Cpus, effort: Effort, agent: &FilePath, json: &mut Map<String, Value>) -> Result<()> {
    let world = World::start(agent)?;
    world.check()?;
    let rows = rows(cpus);
    let mut all: BTreeMap<(&str, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..effort.rounds as usize {
        eprintln!("xdp: round {} of {}", round + 1, effort.rounds);
        for row in &rows {
            for step in 0..NETWORKS.len() {
                let network = (step + round) % NETWORKS.len();
                let value = world.measure(row, network, effort)?;
                all.entry((row.key, network)).or_default().push(value);
            }
        }
    }
    world.check()?;
    let mut shown = Vec::new();
    let mut values = Map::new();
    for row in &rows {
        let [without, with] = [0, 1].map(|network| all[&(row.key, network)].as_slice());
        let ratio = paired_ratio(with, without);
        shown.push(vec![
            row.title.to_owned(),
            number(median(without)),
            number(median(with)),
            if median(without) > 0.0 {
                format!("{ratio:.2}")
            } else {
                "-".to_owned()
            },
        ]);
        values.insert(row.key.to_owned(), json!({ "without": without, "with": with }));
    }
    report::heading("Pod to pod, network without and with spec.xdp (medians; ratios: median of the rounds' ratios)");
    report::table(&["", "without", "with", "with / without"], &shown);
    json.insert("xdp".into(), Value::Object(values));
    Ok(())
}

fn number(value: f64) -> String {
    if value >= 1000.0 {
        format!("{:.1} k", value / 1000.0)
    } else {
        format!("{value:.1}")
    }
}
