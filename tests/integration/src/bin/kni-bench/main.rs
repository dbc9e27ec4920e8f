//! Measures the packet path, the programs and the attachment of pods in comparison with alternatives, in one run.
//!
//! All work is done in separate namespaces, which end with the process in any case.

mod against;
mod attach;
mod bpf;
mod comparison;
mod cpu;
mod nodes;
mod options;
mod path;
mod paths;
mod program;
mod report;
mod statistics;
mod workload;
mod xdp;

use std::{path::Path, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use kni_integration::agent::agent_binary;
use nix::unistd::geteuid;
use serde_json::{Map, Value};

use crate::options::{Args, Part};

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
