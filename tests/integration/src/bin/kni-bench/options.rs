//! The options of `kni-bench`. `cargo xtask docs` contains this file too, so that it need not build the program:
//! it may use clap alone.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// What to measure, and how long.
#[derive(Debug, Parser)]
#[command(name = "kni-bench", about)]
pub(crate) struct Args {
    /// Rounds; in each one every path is measured once, in another order. By default 5, and 20 pairs with `--against`.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: Option<u32>,
    /// Seconds per path, workload and round. By default 1, and 0.5 with `--against`.
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
    /// Compare with another agent instead: its binary, or a checkout in which its release was built.
    /// With `--only attach`, compares how pods are attached, otherwise the packet path.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["paths", "measures"])]
    pub(crate) against: Option<PathBuf>,
    /// Two rounds of 0.2 s (6 pairs of 0.1 s) and few attachments: shows that everything works, not how fast it is.
    #[arg(long, conflicts_with_all = ["rounds", "seconds"])]
    pub(crate) quick: bool,
    /// Measure only this; may be repeated.
    #[arg(long = "only", value_enum)]
    pub(crate) parts: Vec<Part>,
    /// Of the paths, only the one with this key of the JSON output; may be repeated.
    #[arg(long = "path", value_name = "KEY")]
    pub(crate) paths: Vec<String>,
    /// Of what is measured on the paths, only the one with this key of the JSON output; may be repeated.
    #[arg(long = "measure", value_name = "KEY")]
    pub(crate) measures: Vec<String>,
    /// CPU to which both ends are pinned; the last one by default.
    #[arg(long)]
    pub(crate) cpu: Option<usize>,
    /// Measure how the server of KNI on this socket attaches pods, and nothing else. Any server can be measured: the
    /// calls are those of the kubelet. Its network namespaces must be visible here.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["against", "parts", "paths", "measures", "agent"])]
    pub(crate) kni_socket: Option<PathBuf>,
    /// The kni-agent binary; the one beside this program by default.
    #[arg(long)]
    pub(crate) agent: Option<PathBuf>,
    /// The static kni-cni binary; without it, pods are not attached by the plugin.
    #[arg(long)]
    pub(crate) cni: Option<PathBuf>,
    /// The eBPF object; the one embedded in this program by default.
    #[arg(long, env = "KNI_EBPF_OBJECT")]
    pub(crate) ebpf_object: Option<PathBuf>,
    /// Also writes everything that was measured as JSON to this file.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

/// A part of the benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
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
