//! Measures the paths alternately: every round runs every workload over every path once.

pub(crate) mod baseline;
mod manifests;
pub(crate) mod ours;
mod table;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Result, ensure};
use serde_json::{Map, Value};

use crate::{
    Effort,
    cpu::Cpus,
    workload::{Placement, Workload},
};

/// The key of KNI's path for IPv4, and the key of the limit it is compared with.
pub(crate) const OURS: &str = "kni";
/// See [`OURS`].
pub(crate) const LIMIT: &str = "redirect_peer";

/// A column of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Measure {
    pub(crate) key: &'static str,
    pub(crate) title: &'static str,
    workload: Workload,
    placement: Placement,
}

/// Values by path and measure, one per round.
pub(crate) type Values = BTreeMap<(&'static str, &'static str), Vec<f64>>;

fn measures(cpus: &Cpus) -> Vec<Measure> {
    let one = Placement {
        client: cpus.one,
        server: cpus.one,
    };
    let measure = |key, title, workload, placement| Measure {
        key,
        title,
        workload,
        placement,
    };
    let mut measures = vec![
        measure("tcp_rr", "TCP_RR/s", Workload::TcpTransactions, one),
        measure("udp_rr", "UDP_RR/s", Workload::UdpTransactions, one),
        measure("connections", "connect/s", Workload::Connections, one),
        measure("connections_fin", "by FIN/s", Workload::ClosedConnections, one),
        measure("stream_one_cpu", "1 stream Gb/s", Workload::Stream, one),
    ];
    if let Some(other) = cpus.other {
        let two = Placement {
            client: other,
            server: cpus.one,
        };
        measures.push(measure("stream_two_cpus", "on 2 CPUs", Workload::Stream, two));
    }
    measures
}

/// The selected keys; all if none is selected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Only<'a> {
    pub(crate) paths: &'a [String],
    pub(crate) measures: &'a [String],
}

/// Retains the selected items.
fn choose<T>(kind: &str, all: &mut Vec<T>, key: impl Fn(&T) -> &str, wanted: &[String]) -> Result<()> {
    for name in wanted {
        ensure!(all.iter().any(|one| key(one) == name), "there is no {kind} {name}");
    }
    all.retain(|one| wanted.is_empty() || wanted.iter().any(|name| key(one) == name));
    Ok(())
}

/// Measures the paths and prints the table.
pub(crate) fn measure(
    cpus: &Cpus,
    effort: Effort,
    agent: &Path,
    only: Only<'_>,
    json: &mut Map<String, Value>,
) -> Result<()> {
    let ours = ours::Setup::ALL
        .iter()
        .map(|setup| ours::Ours::start(agent, false, setup))
        .collect::<Result<Vec<_>>>()?;
    let mut paths = baseline::all()?;
    for node in &ours {
        paths.extend(node.paths()?);
    }
    choose("path", &mut paths, |path| path.key, only.paths)?;
    let mut measures = measures(cpus);
    choose("measure", &mut measures, |measure| measure.key, only.measures)?;
    let mut all = Values::new();
    for round in 0..effort.rounds as usize {
        eprintln!("paths: round {} of {}", round + 1, effort.rounds);
        for measure in &measures {
            for step in 0..paths.len() {
                // A different order in each round: no path always runs after the same one.
                let path = &paths[(step + round) % paths.len()];
                let value = measure.workload.run(path, measure.placement, effort.each)?;
                all.entry((path.key, measure.key)).or_default().push(value);
            }
        }
    }
    table::print(&paths, &measures, &all);
    json.insert("paths".into(), table::json(&all));
    // The expected packet numbers of a node are unknown if a part of the measurements is omitted.
    if only.paths.is_empty() && only.measures.is_empty() {
        for node in &ours {
            node.check()?;
        }
    }
    Ok(())
}
