//! The options of `kni-demo`. `cargo xtask docs` contains this file too, so that it need not build the program:
//! it may use clap alone.

use std::path::PathBuf;

use clap::Parser;

/// What to run, and what to leave.
#[derive(Debug, Parser)]
#[command(name = "kni-demo", about)]
pub(crate) struct Args {
    /// The kni-agent binary.
    #[arg(long)]
    pub(crate) agent: PathBuf,
    /// The knictl binary.
    #[arg(long)]
    pub(crate) knictl: PathBuf,
    /// Show two nodes of a cluster as well, which needs the Kubernetes programs.
    #[arg(long)]
    pub(crate) nodes: bool,
    /// Leave the two nodes out for this reason, which is no failure.
    #[arg(long, value_name = "REASON", conflicts_with = "nodes")]
    pub(crate) leave_out_nodes: Option<String>,
    /// Report the two nodes as failed for this reason: their programs could not be built.
    #[arg(long, value_name = "REASON", conflicts_with_all = ["nodes", "leave_out_nodes"])]
    pub(crate) failed_nodes: Option<String>,
    /// Leave the agent and the pods running, and print what to try.
    #[arg(long)]
    pub(crate) keep: bool,
}
