//! Measures the programs between nodes in nanoseconds per packet by the kernel's run-time statistics while real packets
//! pass: `from_overlay` needs the metadata of a tunnel, which `BPF_PROG_TEST_RUN` does not provide.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use kni_integration::Namespaces;
use nix::net::if_::if_nametoindex;
use serde_json::{Value, json};

use super::ours::Ours;
use crate::{
    Effort,
    bpf::{Attached, Program},
    cpu::Cpus,
    path::Path,
    report,
    statistics::{median, median_interval},
    workload::{Placement, Workload},
};

/// Runs and nanoseconds since the program was loaded.
type Runs = (u64, u64);

/// A program that does nothing, at the ingress of a link between two namespaces: the cost of the statistics themselves.
struct Empty {
    path: Path,
    program: Program,
    _attached: Attached,
}

impl Empty {
    fn start() -> Result<Self> {
        let (client, server) = (
            Namespaces::fresh_net("empty-client")?,
            Namespaces::fresh_net("empty-server")?,
        );
        client.veth("eth0", &server, "eth0")?;
        client.add_address("eth0", "10.88.0.1/24")?;
        server.add_address("eth0", "10.88.0.2/24")?;
        let program = Program::empty()?;
        let attached = server.enter(|| program.attach_ingress(if_nametoindex("eth0")?))??;
        let path = Path {
            key: "empty",
            title: "an empty program",
            client,
            server,
            address: "10.88.0.2".parse()?,
            services: None,
            keep: Vec::new(),
        };
        Ok(Self {
            path,
            program,
            _attached: attached,
        })
    }
}

/// Nanoseconds per run by program, while the workload runs over the path.
fn sample(
    path: &Path,
    workload: Workload,
    placement: Placement,
    time: Duration,
    read: &dyn Fn() -> Result<BTreeMap<String, Runs>>,
) -> Result<BTreeMap<String, f64>> {
    const FEW: u64 = 500;
    let before = read()?;
    workload.run(path, placement, time)?;
    let mut per_run = BTreeMap::new();
    for (name, (runs, nanoseconds)) in read()? {
        let (runs_before, nanoseconds_before) = before.get(&name).copied().unwrap_or_default();
        let (runs, nanoseconds) = (runs - runs_before, nanoseconds - nanoseconds_before);
        if runs >= FEW {
            #[expect(clippy::cast_precision_loss, reason = "of some seconds")]
            per_run.insert(name, nanoseconds as f64 / runs as f64);
        }
    }
    Ok(per_run)
}

/// Measures and prints the table.
pub(super) fn measure(cpus: &Cpus, effort: Effort, ours: &[Ours]) -> Result<Value> {
    let counting = ours.first().context("no nodes")?.count_runs()?;
    let empty = Empty::start()?;
    let placement = Placement {
        client: cpus.one,
        server: cpus.one,
    };
    let workloads = [
        ("TCP_RR", Workload::TcpTransactions),
        ("UDP_RR", Workload::UdpTransactions),
        ("stream", Workload::Stream),
        ("connections", Workload::Connections),
    ];
    let mut all: BTreeMap<(&str, String, &str), Vec<f64>> = BTreeMap::new();
    for round in 0..effort.rounds {
        eprintln!("programs between nodes: round {} of {}", round + 1, effort.rounds);
        for (title, workload) in workloads {
            let base = sample(&empty.path, workload, placement, effort.each, &|| {
                Ok([(String::new(), empty.program.statistics()?)].into())
            })?;
            let base = *base.get("").context("the empty program did not run")?;
            for one in ours {
                let path = one.path();
                for (program, cost) in sample(&path, workload, placement, effort.each, &|| one.statistics())? {
                    all.entry((path.key, program, title)).or_default().push(cost - base);
                }
            }
        }
    }
    drop(counting);
    show(&all, &workloads.map(|(title, _)| title));
    let values = all.iter().map(|((path, program, workload), values)| {
        let key = format!("{path} {program} {workload}");
        (key, json!({ "median_ns": median(values), "rounds_ns": values }))
    });
    Ok(Value::Object(values.collect()))
}

fn show(all: &BTreeMap<(&str, String, &str), Vec<f64>>, workloads: &[&str]) {
    let mut header = vec!["program"];
    header.extend(workloads);
    let mut programs: Vec<(&str, &String)> = all.keys().map(|(path, program, _)| (*path, program)).collect();
    programs.dedup();
    let rows = programs.into_iter().map(|(path, program)| {
        let cells = workloads.iter().map(|workload| {
            let Some(values) = all.get(&(path, program.clone(), *workload)) else {
                return String::new();
            };
            let [low, high] = median_interval(values);
            format!("{:.0} ({low:.0} to {high:.0})", median(values))
        });
        [format!("{path}: {program}")].into_iter().chain(cells).collect()
    });
    report::heading(
        "Nanoseconds per packet in the programs of both nodes, by the kernel's run-time statistics, net of an empty program",
    );
    report::table(&header, &rows.collect::<Vec<Vec<String>>>());
}
