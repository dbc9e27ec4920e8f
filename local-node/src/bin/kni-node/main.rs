//! Entry point of `kni-node`: builds the programs of a node, starts a node or a cluster of several nodes, and ends it.
//! `cargo xtask node` and `cargo xtask cluster` call it.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool reports on its standard output")]

mod advice;
mod cluster;
mod forward;
mod keep;
mod lifecycle;
mod shortcuts;
mod single;
mod state;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use kni_local_node::{Kni, Programs, StaticPrograms};

/// The folder `deploy` of this source.
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy");

/// Runs real Kubernetes nodes with KNI as their network.
#[derive(Parser)]
#[command(name = "kni-node")]
struct Cli {
    #[command(flatten)]
    folders: Folders,
    #[command(subcommand)]
    action: Action,
}

/// Absolute folders that all commands share.
#[derive(clap::Args)]
struct Folders {
    /// Folder of everything about what runs: kubeconfig, manifests, logs, shortcuts
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Folder of the programs of a node, which are built once
    #[arg(long, value_name = "DIR")]
    tools: PathBuf,
    /// Folder of our own programs: kni-agent, kni-cni, kni-controller, knictl
    #[arg(long, value_name = "DIR")]
    programs: PathBuf,
}

#[derive(Subcommand)]
enum Action {
    /// Build the programs of a node that are missing
    Build {
        /// Also build Helm, which the tests of the chart use
        #[arg(long)]
        helm: bool,
        /// Also build the kubelet and the containerd that speak KNI
        #[arg(long)]
        kni: bool,
        /// Also build upstream's end-to-end tests and the programs of their images
        #[arg(long)]
        e2e: bool,
    },
    /// Start a node, or a cluster of several nodes
    Up(Start),
    /// End everything that `up` started
    Down,
    /// Show the processes, nodes and pods
    Status,
    /// The process that owns the nodes and that `up` leaves running
    #[command(hide = true)]
    Keep(Start),
}

/// What to start.
#[derive(clap::Args)]
struct Start {
    /// Give the agent a folder of manifests in place of the API server
    #[arg(long, conflicts_with = "nodes")]
    standalone: bool,
    /// Start a control plane and this many nodes, with a router between them, in place of one node
    #[arg(long, value_name = "N", requires = "image")]
    nodes: Option<u8>,
    /// Let the kubelet make the networks of pods by KNI, with a kubelet and a containerd that can
    #[arg(long)]
    kni: bool,
    /// Archive of the agent's image: on several nodes the agent is a pod
    #[arg(long, value_name = "ARCHIVE", requires = "nodes")]
    image: Option<PathBuf>,
    /// Tag of the image in the archive
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    tag: String,
}

impl Start {
    /// The options of another process that starts the same.
    fn options(&self) -> Vec<OsString> {
        let mut options: Vec<OsString> = vec!["--tag".into(), (&self.tag).into()];
        if self.standalone {
            options.push("--standalone".into());
        }
        if self.kni {
            options.push("--kni".into());
        }
        if let Some(nodes) = self.nodes {
            options.extend(["--nodes".into(), nodes.to_string().into()]);
        }
        if let Some(image) = &self.image {
            options.extend(["--image".into(), image.into()]);
        }
        options
    }
}

impl Folders {
    /// The program `name` of ours.
    fn ours(&self, name: &str) -> Result<PathBuf> {
        let path = self.programs.join(name);
        if !path.is_file() {
            bail!("{} is missing", path.display());
        }
        Ok(path)
    }

    /// Builds the programs of a node that are missing, and passes lines about the progress to `report`.
    fn build(&self, report: &mut dyn FnMut(&str)) -> Result<(Programs, StaticPrograms)> {
        let programs = Programs::build(&self.tools, report)?;
        let statics = StaticPrograms::build(&self.statics())?;
        Ok((programs, statics))
    }

    /// The folder in which static programs are built.
    fn statics(&self) -> PathBuf {
        self.tools.join("static")
    }

    /// Builds the kubelet and the containerd that speak KNI, if they are missing.
    fn build_kni(&self, report: &mut dyn FnMut(&str)) -> Result<Kni> {
        Programs::build_kni(&self.tools.join("kni"), report).map(Kni::new)
    }

    /// [`Self::build`] with its progress on standard output, and more programs.
    fn build_all(&self, helm: bool, kni: bool, e2e: bool) -> Result<()> {
        let mut report = |line: &str| println!("    {line}");
        self.build(&mut report)?;
        if helm {
            Programs::build_helm(&self.tools, &mut report)?;
        }
        if kni {
            self.build_kni(&mut report)?;
        }
        if e2e {
            Programs::build_e2e(&self.tools, &mut report)?;
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let folders = &cli.folders;
    let result = match &cli.action {
        Action::Build { helm, kni, e2e } => folders.build_all(*helm, *kni, *e2e),
        Action::Up(start) => lifecycle::up(folders, start),
        Action::Down => lifecycle::down(folders),
        Action::Status => lifecycle::status(folders),
        Action::Keep(start) => keep::command(folders, start),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // On standard output like all other output: a log that captures one stream still ends with the reason.
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_gets_the_options_of_up() {
        let folders = ["kni-node", "--folder=/f", "--tools=/t", "--programs=/p"];
        for options in [
            &["--tag=0.1.0", "--standalone"][..],
            &["--kni"],
            &["--nodes=3", "--image=/i.tar", "--tag=one"],
        ] {
            let parse = |words: Vec<OsString>| {
                let Action::Up(start) = Cli::try_parse_from(words).unwrap().action else {
                    panic!("another command");
                };
                start
            };
            let words = |options: Vec<OsString>| -> Vec<OsString> {
                folders
                    .iter()
                    .map(OsString::from)
                    .chain(["up".into()])
                    .chain(options)
                    .collect()
            };
            let first = parse(words(options.iter().map(OsString::from).collect()));
            let second = parse(words(first.options()));
            assert_eq!(first.options(), second.options());
            assert_eq!(
                (first.standalone, first.kni, first.nodes, &first.image),
                (second.standalone, second.kni, second.nodes, &second.image)
            );
        }
    }
}
