//! The options of `kni-simulate`. `cargo xtask docs` contains this file too, so that it need not build the program:
//! it may use clap alone.

use std::path::PathBuf;

use clap::Parser;

/// Simulates clusters on a real API server and etcd, with agents whose nodes exist in memory only.
#[derive(Debug, Parser)]
#[command(name = "kni-simulate", about)]
pub(crate) struct Args {
    /// Nodes of the largest size
    #[arg(long, default_value_t = 200)]
    pub(crate) nodes: usize,
    /// Pods of the largest size that stay
    #[arg(long, default_value_t = 6000)]
    pub(crate) pods: usize,
    /// Networks of the largest size
    #[arg(long, default_value_t = 50)]
    pub(crate) networks: usize,
    /// Pods that start in a second
    #[arg(long, default_value_t = 5.0)]
    pub(crate) rate: f64,
    /// Pods that stay are created at this rate, in a second
    #[arg(long, default_value_t = 10.0)]
    pub(crate) fill: f64,
    /// Seconds for which pods start and end
    #[arg(long, default_value_t = 60)]
    pub(crate) duration: u64,
    /// Simulate this size alone, not also a quarter and a half of it
    #[arg(long)]
    pub(crate) single: bool,
    /// Write the figures into this file, too
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}
