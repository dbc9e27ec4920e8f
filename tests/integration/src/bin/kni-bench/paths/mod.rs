//! Measures the paths beside each other: every round runs every workload over every path once.

mod baseline;
mod ours;
mod table;

use std::{any::Any, collections::BTreeMap, net::IpAddr, path::Path as FilePath};

use anyhow::Result;
use kni_integration::Namespaces;
use serde_json::{Map, Value};

use crate::{
    Effort,
    cpu::Cpus,
    workload::{Placement, Workload},
};

/// What packets take from one namespace to another.
pub(crate) struct Path {
    /// Its name in the JSON.
    pub(crate) key: &'static str,
    /// Its name in the table.
    pub(crate) title: &'static str,
    /// Where the client runs.
    pub(crate) client: Namespaces,
    /// Where the server runs.
    pub(crate) server: Namespaces,
    /// The server's address.
    pub(crate) address: IpAddr,
    /// What has to live as long.
    pub(crate) keep: Vec<Box<dyn Any + Send + Sync>>,
}

/// The key of our own path for IPv4, and of the limit it is compared with.
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

/// Measures all paths and prints the table.
pub(crate) fn measure(cpus: &Cpus, effort: Effort, agent: &FilePath, json: &mut Map<String, Value>) -> Result<()> {
    let ours = ours::Ours::start(agent)?;
    let mut paths = baseline::all()?;
    paths.extend(ours.paths()?);
    let measures = measures(cpus);
    let mut all = Values::new();
    for round in 0..effort.rounds as usize {
        eprintln!("paths: round {} of {}", round + 1, effort.rounds);
        for measure in &measures {
            for step in 0..paths.len() {
                // Another order in each round: nobody always runs after the same neighbour.
                let path = &paths[(step + round) % paths.len()];
                let value = measure.workload.run(path, measure.placement, effort.each)?;
                all.entry((path.key, measure.key)).or_default().push(value);
            }
        }
    }
    ours.check()?;
    table::print(&paths, &measures, &all);
    json.insert("paths".into(), table::json(&all));
    Ok(())
}
