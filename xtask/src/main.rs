//! Dispatches `cargo xtask` to one module per sub-command.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool reports on its standard output")]

mod announce;
mod arch;
mod bench;
mod build_cni;
mod build_ebpf;
#[path = "../../local-node/src/cache.rs"]
mod cache;
mod cargo_output;
mod chart;
mod ci;
mod cluster;
mod cold;
mod command;
mod crds;
mod cross;
mod demo;
mod docs;
mod fresh;
mod goal;
#[path = "../../local-node/src/hidden.rs"]
mod hidden;
mod image;
mod libraries;
mod linker;
mod node;
mod packages;
mod place;
mod prepare;
mod programs;
mod progress;
mod setup;
mod simulate;
mod test;
mod toolchain;
mod vm;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, tests and demonstrates KNI.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check layers, dependencies and cycles of files, and look for retired words in code and pages
    Arch(arch::Args),
    /// Measure KNI beside other ways to connect pods
    Bench(bench::Args),
    /// Build the CNI plugin into target/x86_64-unknown-linux-gnu/release/kni-cni
    BuildCni,
    /// Build the eBPF programs into target/ebpf/kni-ebpf.o
    BuildEbpf(build_ebpf::Args),
    /// Write the templates of the Helm chart that come from deploy/base
    Chart(chart::Args),
    /// Run all checks of a change: format, lints, layers, tests
    Ci(ci::Args),
    /// Run a real Kubernetes cluster of several nodes with KNI as its network
    Cluster(cluster::Args),
    /// Write the definitions of our Kubernetes objects into deploy/crds
    Crds(crds::Args),
    /// Build the programs of a node for arm64
    Cross(cross::Args),
    /// Show two isolated networks on one node and, where Go is installed, on two nodes
    Demo(demo::Args),
    /// Check that what the pages name exists
    Docs(docs::Args),
    /// Run a command on a machine with nothing: a new Debian root, which is gone afterwards; needs root
    Fresh(fresh::Args),
    /// Show which tests needed a second try in the saved reports
    Flakes,
    /// Build the agent's container image as an OCI archive, without a container engine
    Image(image::Args),
    /// Run one real Kubernetes node with KNI as its network
    Node(node::Args),
    /// Install what the other commands need (Debian packages, bpf-linker)
    Setup(setup::Args),
    /// Simulate large clusters on a real API server; needs root
    Simulate(simulate::Args),
    /// Run all tests; needs root
    Test(test::Args),
    /// Run the checks of the dataplane on another kernel, in a virtual machine
    Vmtest(vm::Args),
}

fn main() -> ExitCode {
    match Cli::parse().task {
        Task::Arch(args) => report(arch::check(&args).and_then(|()| test::check_ledger())),
        Task::Bench(args) => report(bench::command(&args)),
        Task::BuildCni => report(build_cni::command()),
        Task::Chart(args) => report(chart::command(&args)),
        Task::BuildEbpf(args) => report(build_ebpf::command(&args)),
        Task::Ci(args) => ci::command(&args),
        Task::Cluster(args) => report(cluster::command(&args)),
        Task::Crds(args) => report(crds::command(&args)),
        Task::Cross(args) => report(cross::command(&args)),
        Task::Demo(args) => report(demo::command(&args)),
        Task::Docs(args) => report(docs::command(&args)),
        Task::Fresh(args) => report(fresh::command(&args)),
        Task::Flakes => report(test::flakes()),
        Task::Image(args) => report(image::command(&args)),
        Task::Node(args) => report(node::command(&args)),
        Task::Setup(args) => report(setup::command(&args)),
        Task::Simulate(args) => report(simulate::command(&args)),
        Task::Test(args) => test::command(&args),
        Task::Vmtest(args) => report(vm::command(&args)),
    }
}

fn report(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard output, like all other output: a log with only one of the two streams still ends with the
            // reason.
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn the_help_of_up_lists_its_options() {
        for (command, options) in [("node", ["--standalone", "--kni"]), ("cluster", ["--nodes", "--kni"])] {
            let help = super::Cli::command()
                .try_get_matches_from(["cargo xtask", command, "up", "--help"])
                .unwrap_err()
                .to_string();
            for option in options {
                assert!(help.contains(option), "{command} up has no {option}:\n{help}");
            }
        }
    }
}
