//! Measures the packet path, the programs and the attachment of pods in comparison with alternatives, in one run.
//!
//! All work is done in separate namespaces, which end with the process in any case.

mod against;
mod attach;
mod bpf;
mod comparison;
mod cpu;
mod nodes;
mod path;
mod paths;
mod program;
mod report;
mod statistics;
mod workload;
mod xdp;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use kni_integration::agent::agent_binary;
use nix::unistd::geteuid;
use serde_json::{Map, Value};

/// What to measure, and how long.
#[derive(Debug, Parser)]
#[command(name = "kni-bench", about)]
struct Args {
    /// Rounds; in each one every path is measured once, in another order. By default 5, and 20 pairs with `--against`.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Seconds per path, workload and round. By default 1, and 0.5 with `--against`.
    #[arg(long)]
    seconds: Option<f64>,
    /// Compare with another agent instead: its binary, or a checkout in which its release was built.
    /// With `--only attach`, compares how pods are attached, otherwise the packet path.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["paths", "measures"])]
    against: Option<PathBuf>,
    /// Two rounds of 0.2 s (6 pairs of 0.1 s) and few attachments: shows that everything works, not how fast it is.
    #[arg(long, conflicts_with_all = ["rounds", "seconds"])]
    quick: bool,
    /// Measure only this; may be repeated.
    #[arg(long = "only", value_enum)]
    parts: Vec<Part>,
    /// Of the paths, only the one with this key of the JSON output; may be repeated.
    #[arg(long = "path", value_name = "KEY")]
    paths: Vec<String>,
    /// Of what is measured on the paths, only the one with this key of the JSON output; may be repeated.
    #[arg(long = "measure", value_name = "KEY")]
    measures: Vec<String>,
    /// CPU to which both ends are pinned; the last one by default.
    #[arg(long)]
    cpu: Option<usize>,
    /// Measure how the server of KNI on this socket attaches pods, and nothing else. Any server can be measured: the
    /// calls are those of the kubelet. Its network namespaces must be visible here.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["against", "parts", "paths", "measures", "agent"])]
    kni_socket: Option<PathBuf>,
    /// The kni-agent binary; the one beside this program by default.
    #[arg(long)]
    agent: Option<PathBuf>,
    /// The static kni-cni binary; without it, pods are not attached by the plugin.
    #[arg(long)]
    cni: Option<PathBuf>,
    /// The eBPF object; the one embedded in this program by default.
    #[arg(long, env = "KNI_EBPF_OBJECT")]
    ebpf_object: Option<PathBuf>,
    /// Also writes everything that was measured as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A part of the benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Transactions, connections and throughput between two pods.
    Paths,
    /// Nanoseconds per packet in the programs.
    Programs,
    /// Attaching and detaching pods.
    Attach,
    /// Pods of a network with `spec.xdp` beside pods of one without.
    Xdp,
    /// Pods of two nodes, through the tunnel and without, beside the kernel's own ways.
    Nodes,
}

/// The amount of measurements.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: u32,
    each: Duration,
    quick: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kni-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        geteuid().is_root(),
        "must run as root: it makes namespaces and loads eBPF programs"
    );
    let effort = effort(args)?;
    let cpus = cpu::Cpus::choose(args.cpu)?;
    let mut json = Map::new();
    report::machine(&cpus, effort, &mut json)?;
    if let Some(other) = &args.against {
        let new = args.agent.clone().map_or_else(agent_binary, Ok)?;
        let old = against::agent_at(other).with_context(|| other.display().to_string())?;
        if args.parts == [Part::Attach] {
            attach::measure_pairs(effort, [&new, &old], args.cni.as_deref(), &mut json)?;
            return write(args.json.as_deref(), json);
        }
        ensure!(
            args.parts.is_empty(),
            "--against: of the parts, only attach can be compared alone"
        );
        against::measure(&cpus, effort, [&new, &old], &mut json)?;
        return write(args.json.as_deref(), json);
    }
    if let Some(socket) = &args.kni_socket {
        attach::measure_server(effort, socket, &mut json)?;
        return write(args.json.as_deref(), json);
    }
    let wanted = |part| args.parts.is_empty() || args.parts.contains(&part);
    if wanted(Part::Programs) {
        program::measure(&cpus, effort, args.ebpf_object.as_deref(), &mut json)?;
    }
    if wanted(Part::Paths) || wanted(Part::Attach) || wanted(Part::Xdp) {
        let agent = args.agent.clone().map_or_else(agent_binary, Ok)?;
        if wanted(Part::Paths) {
            let only = paths::Only {
                paths: &args.paths,
                measures: &args.measures,
            };
            paths::measure(&cpus, effort, &agent, only, &mut json)?;
        }
        if wanted(Part::Attach) {
            let programs = attach::Programs {
                agent: &agent,
                cni: args.cni.as_deref(),
            };
            attach::measure(effort, &programs, &mut json)?;
        }
        if wanted(Part::Xdp) {
            xdp::measure(&cpus, effort, &agent, &mut json)?;
        }
    }
    if wanted(Part::Nodes) {
        nodes::measure(&cpus, effort, args.ebpf_object.as_deref(), &mut json)?;
    }
    write(args.json.as_deref(), json)
}

fn effort(args: &Args) -> Result<Effort> {
    let pairs = args.against.is_some();
    if args.quick {
        return Ok(Effort {
            rounds: if pairs { 6 } else { 2 },
            each: Duration::from_millis(if pairs { 100 } else { 200 }),
            quick: true,
        });
    }
    let seconds = args.seconds.unwrap_or(if pairs { 0.5 } else { 1.0 });
    let each = Duration::try_from_secs_f64(seconds).context("--seconds")?;
    ensure!(each >= Duration::from_millis(50), "--seconds: at least 0.05");
    Ok(Effort {
        rounds: args.rounds.unwrap_or(if pairs { 20 } else { 5 }),
        each,
        quick: false,
    })
}

fn write(path: Option<&Path>, json: Map<String, Value>) -> Result<()> {
    if let Some(path) = path {
        let text = serde_json::to_string_pretty(&Value::Object(json))?;
        std::fs::write(path, text + "\n").with_context(|| path.display().to_string())?;
    }
    Ok(())
}
