//! `cluster`: prepares the machine, builds the programs and the agent's image, and executes the program `kni-node` for
//! several nodes.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Result;

use crate::{goal::Build, image, node, progress::Progress, workspace::target};

/// Arguments of `cluster`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Build what is missing and start a control plane and nodes
    Up(Up),
    /// End the cluster and everything in it
    Down,
    /// Show processes, nodes and pods
    Status,
    /// Run kubectl as the administrator of the cluster
    Kubectl(Rest),
}

/// Arguments that another program reads.
#[derive(clap::Args)]
struct Rest {
    /// Passed on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(clap::Args)]
struct Up {
    /// How many nodes, besides the control plane
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=20))]
    nodes: u8,
    /// Let the kubelets make the networks of pods by KNI
    #[arg(long)]
    kni: bool,
}

/// Runs the command; returns only when it has failed or there is nothing to do.
pub(crate) fn command(args: &Args) -> Result<()> {
    let folder = target().join("cluster");
    match &args.action {
        Action::Up(up) => {
            node::require_root("cluster")?;
            node::start(&[Build::Image])?;
            let image = prepare()?;
            let mut program = node::kni_node(&folder);
            program.arg("up").args(["--nodes", &up.nodes.to_string()]);
            if up.kni {
                program.arg("--kni");
            }
            node::replace_by(program.arg("--image").arg(image))
        }
        Action::Down => node::end_or_show("cluster", &folder, "down"),
        Action::Status => node::end_or_show("cluster", &folder, "status"),
        Action::Kubectl(rest) => node::shortcut("cluster", &folder, "kubectl", &rest.arguments),
    }
}

/// Builds everything; returns the archive of the agent's image.
fn prepare() -> Result<PathBuf> {
    let mut progress = Progress::new(node::STEPS + image::STEPS);
    node::prepare(&mut progress)?;
    let archive = target().join("image/cluster.tar");
    image::build_for_tests(&archive, &mut progress)?;
    Ok(archive)
}
