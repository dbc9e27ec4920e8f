//! Compares this agent with another one on one machine in one run. Each has nodes of its own, and values that are
//! compared are measured one after the other, in the opposite order in every other pair.

mod aims;
mod timed;

use std::path::{Path as FilePath, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Map, Value};

use self::timed::{CASES, Timed};
use crate::{
    Effort,
    comparison::{self, Values},
    cpu::Cpus,
    path::Path,
    paths::{baseline, ours::Ours, ours::Setup},
    workload::{Placement, Workload},
};

/// What is measured on the paths.
const WORKLOADS: [(&str, Workload); 4] = [
    ("tcp_rr", Workload::TcpTransactions),
    ("udp_rr", Workload::UdpTransactions),
    ("connections", Workload::Connections),
    ("connections_fin", Workload::ClosedConnections),
];

/// One value of a pair.
struct Cell<'a> {
    key: String,
    subject: Subject<'a>,
}

enum Subject<'a> {
    /// A packet of [`CASES`].
    Program(&'a Timed, usize),
    Path(&'a Path, Workload),
}

impl Cell<'_> {
    fn measure(&self, cpus: &Cpus, effort: Effort) -> Result<f64> {
        match self.subject {
            Subject::Program(timed, case) => timed.nanoseconds(case, if effort.quick { 50_000 } else { 500_000 }),
            Subject::Path(path, workload) => {
                let placement = Placement {
                    client: cpus.one,
                    server: cpus.one,
                };
                workload.run(path, placement, effort.each)
            }
        }
    }
}

/// The agent at a path: a binary, or a checkout in which the release was built.
pub(crate) fn agent_at(path: &FilePath) -> Result<PathBuf> {
    let path = path.canonicalize()?;
    if !path.is_dir() {
        return Ok(path);
    }
    let agent = path.join("target/release/kni-agent");
    ensure!(
        agent.exists(),
        "no {}: run `cargo xtask build-ebpf` and `cargo build --release --bin kni-agent` there",
        agent.display()
    );
    Ok(agent)
}

/// Measures pairs of both agents, and prints the table.
pub(crate) fn measure(
    cpus: &Cpus,
    effort: Effort,
    [new, old]: [&FilePath; 2],
    json: &mut Map<String, Value>,
) -> Result<()> {
    println!("new: {}\nold: {}", new.display(), old.display());
    let timed = [
        ("new", Timed::start(new, false, cpus.one)?),
        ("old", Timed::start(old, true, cpus.one)?),
    ];
    let old = Ours::start(old, true, &Setup::COMPARED)?;
    let nodes = [&Setup::COMPARED]
        .into_iter()
        .chain(Setup::ALL.iter().skip(1))
        .map(|setup| Ours::start(new, false, setup))
        .collect::<Result<Vec<_>>>()?;
    let mut paths: Vec<(&str, Path)> = Vec::new();
    for node in &nodes {
        paths.extend(node.paths()?.into_iter().map(|path| ("new", path)));
    }
    paths.extend(old.paths()?.into_iter().map(|path| ("old", path)));
    paths.extend(baseline::limits()?.into_iter().map(|path| ("bare", path)));
    for (_, timed) in &timed {
        timed.establish()?;
    }
    let mut all = Values::new();
    for round in 0..effort.rounds {
        eprintln!("pair {} of {}", round + 1, effort.rounds);
        for mut group in groups(&timed, &paths) {
            if round % 2 == 1 {
                group.reverse();
            }
            for cell in group {
                let value = cell.measure(cpus, effort)?;
                all.entry(cell.key).or_default().push(value);
            }
        }
    }
    let heading = "Pairs on one machine: medians, and of the ratios also the interval that covers 95 %";
    json.insert("pairs".into(), comparison::show(heading, &aims::comparisons(), &all));
    for node in nodes.iter().chain([&old]) {
        node.check()?;
    }
    Ok(())
}

/// What is measured side by side.
fn groups<'a>(timed: &'a [(&'static str, Timed); 2], paths: &'a [(&'static str, Path)]) -> Vec<Vec<Cell<'a>>> {
    let mut groups = Vec::new();
    for (case, (key, _)) in CASES.iter().enumerate() {
        let cell = |(who, timed): &'a (&'static str, Timed)| Cell {
            key: format!("{who} {key}"),
            subject: Subject::Program(timed, case),
        };
        groups.push(timed.iter().map(cell).collect());
    }
    let cell = |measure: &str, workload, wanted: &dyn Fn(&str) -> bool| {
        let wanted = paths.iter().filter(|(_, path)| wanted(path.key));
        wanted
            .map(|(who, path)| Cell {
                key: format!("{who} {} {measure}", path.key),
                subject: Subject::Path(path, workload),
            })
            .collect()
    };
    for (measure, workload) in WORKLOADS {
        groups.push(cell(measure, workload, &|key| {
            ["kni", "kni_policy", "redirect_peer"].contains(&key)
        }));
        groups.push(cell(measure, workload, &|key| {
            ["kni_v6", "kni_policy_v6", "redirect_peer_v6"].contains(&key)
        }));
    }
    let (measure, workload) = WORKLOADS[2];
    for start in ["kni_events", "kni_one_service kni_1000_services"] {
        groups.push(cell(measure, workload, &|key| {
            key.starts_with(start) || start.contains(' ') && start.split(' ').any(|name| name == key)
        }));
    }
    groups
}
