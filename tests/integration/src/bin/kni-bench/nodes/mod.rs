//! Compares the paths between pods of two nodes in one run: through the tunnel and without, beside the kernel's own.
//! Paths are measured one after the other, in the opposite order in every other pair.

mod kernel;
mod ours;
mod programs;
mod wire;

use std::path::Path as FilePath;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

use self::ours::Ours;
use crate::{
    Effort,
    comparison::{self, Aim, Comparison, Values},
    cpu::Cpus,
    path::Path,
    report,
    statistics::{median, median_interval},
    workload::{Placement, Workload},
};

/// A column of the table.
struct Measure {
    key: &'static str,
    title: &'static str,
    workload: Workload,
    placement: Placement,
    /// From the unit of the workload to that of the column.
    factor: f64,
}

fn measures(cpus: &Cpus) -> Vec<Measure> {
    /// Gb/s to MB/s.
    const MEGABYTES: f64 = 125.0;
    let one = Placement {
        client: cpus.one,
        server: cpus.one,
    };
    let measure = |key, title, workload| Measure {
        key,
        title,
        workload,
        placement: one,
        factor: 1.0,
    };
    let mut measures = vec![
        measure("tcp_rr", "TCP_RR/s", Workload::TcpTransactions),
        measure("udp_rr", "UDP_RR/s", Workload::UdpTransactions),
        measure("connections", "connect/s", Workload::Connections),
        measure("connections_fin", "by FIN/s", Workload::ClosedConnections),
        Measure {
            factor: MEGABYTES,
            ..measure("stream", "1 stream MB/s", Workload::Stream)
        },
    ];
    if let Some(other) = cpus.other {
        measures.push(Measure {
            placement: Placement { client: other, ..one },
            factor: MEGABYTES,
            ..measure("stream_two_cpus", "on 2 CPUs", Workload::Stream)
        });
    }
    measures
}

/// The paths whose ratio has an aim, and those that only show where the time goes.
const COMPARED: [(&str, &str, Option<f64>); 5] = [
    ("overlay", "vxlan", Some(1.0)),
    ("overlay", "bridge_vxlan", None),
    ("native", "routed", Some(1.0)),
    ("overlay", "bare", None),
    ("native", "bare", None),
];

/// Measures all paths and the programs, and prints the tables.
pub(crate) fn measure(
    cpus: &Cpus,
    effort: Effort,
    object: Option<&FilePath>,
    json: &mut Map<String, Value>,
) -> Result<()> {
    let ours = vec![Ours::start(true, object)?, Ours::start(false, object)?];
    // Each of KNI's paths is next to the path that it is compared with.
    let mut paths = vec![kernel::bridge()?, kernel::vxlan()?];
    paths.extend(ours.iter().map(Ours::path));
    paths.extend([kernel::routed()?, kernel::bare()?]);
    let measures = measures(cpus);
    let mut all = Values::new();
    for round in 0..effort.rounds {
        eprintln!("nodes: pair {} of {}", round + 1, effort.rounds);
        for measure in &measures {
            let mut order: Vec<&Path> = paths.iter().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for path in order {
                let run = || measure.workload.run(path, measure.placement, effort.each);
                // A stream whose first packets are lost may not get going in so short a time.
                let value = run().or_else(|_lost| run());
                let value = value.with_context(|| ours.iter().map(Ours::drops).collect::<Vec<_>>().join("; "))?;
                let key = key(path.key, measure);
                all.entry(key).or_default().push(value * measure.factor);
            }
        }
    }
    for pair in &ours {
        pair.check()?;
    }
    show_medians(&paths, &measures, &all);
    let heading = "Between nodes: medians, and of the pairs' ratios also the interval that covers 95 %";
    let mut shown = comparison::show(heading, &comparisons(&measures), &all);
    shown["programs"] = programs::measure(cpus, effort, &ours)?;
    json.insert("nodes".into(), shown);
    Ok(())
}

fn key(path: &str, measure: &Measure) -> String {
    format!("{path} {}", measure.key)
}

fn comparisons(measures: &[Measure]) -> Vec<Comparison> {
    let compared = COMPARED.iter().flat_map(|(first, second, aim)| {
        measures.iter().map(move |measure| {
            let title = format!("{}: {first} / {second}", measure.key);
            let aim = aim.map(Aim::AtLeast);
            Comparison::new(title, key(first, measure), key(second, measure), aim)
        })
    });
    compared.collect()
}

fn show_medians(paths: &[Path], measures: &[Measure], all: &Values) {
    let mut header = vec!["path"];
    header.extend(measures.iter().map(|measure| measure.title));
    let rows = paths.iter().map(|path| {
        let cells = measures.iter().map(|measure| {
            let values = all.get(&key(path.key, measure)).map_or(&[][..], Vec::as_slice);
            let [low, high] = median_interval(values);
            format!("{:.0} ({low:.0} to {high:.0})", median(values))
        });
        [path.title.to_owned()].into_iter().chain(cells).collect()
    });
    report::heading("Pods of two nodes (medians, intervals that cover 95 %)");
    report::table(&header, &rows.collect::<Vec<Vec<String>>>());
}
