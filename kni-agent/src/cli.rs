//! The command line of kni-agent; every default has its reason beside it.
//! Layer: root.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kni_common::layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS};

use crate::dataplane::HookChoice;

/// The network runtime of a Kubernetes node: serves KNI, owns pod interfaces, drives the eBPF dataplane.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; without it the agent serves.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// How to serve.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Other things than serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Remove everything the agent ever made on this node. Pods lose their interfaces.
    Cleanup(PathArgs),
}

/// Where things are.
#[derive(Debug, Clone, Args)]
pub struct PathArgs {
    /// State of the agent. On tmpfs, so that a reboot, which ends all namespaces, clears it too.
    #[arg(long, value_name = "DIR", default_value = "/run/kni")]
    pub state_dir: PathBuf,
    /// Pins of programs and maps, on bpffs.
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/kni")]
    pub bpf_root: PathBuf,
    /// Where network namespaces are mounted; `ip netns` looks here.
    #[arg(long, value_name = "DIR", default_value = "/run/netns")]
    pub netns_dir: PathBuf,
    /// Socket to serve on; may be repeated. The second default is there because the KNI kubelet looks for that file
    /// whatever its configuration says.
    #[arg(long = "socket", value_name = "PATH", default_values = ["/run/kni/kni.sock", "/tmp/kni.sock"])]
    pub sockets: Vec<PathBuf>,
    /// What to log, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// How to serve.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Work without a cluster: networks come from the folder of --manifests.
    #[arg(long, requires = "manifests")]
    pub standalone: bool,
    /// Folder of PodNetwork manifests (YAML or JSON); watched.
    #[arg(long, value_name = "DIR")]
    pub manifests: Option<PathBuf>,
    /// Where things are.
    #[command(flatten)]
    pub paths: PathArgs,
    /// eBPF object to load instead of the embedded one.
    #[arg(long, value_name = "PATH", env = "KNI_EBPF_OBJECT")]
    pub ebpf_object: Option<PathBuf>,
    /// Sandboxes kept ready, so that a pod does not wait for the kernel's slow paths. 8 absorbs the burst of a
    /// deployment; each costs about 30 kB of kernel memory.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=256))]
    pub warm_sandboxes: u32,
    /// Interfaces that fit on the node. The kubelet runs 110 pods by default.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_ENDPOINTS,
        value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub max_endpoints: u32,
    /// Rows of each flow table; a connection takes two. The oldest give way.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_FLOWS,
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    pub max_flows: u32,
    /// How programs are attached.
    #[arg(long, value_enum, default_value_t = HookArg::Auto)]
    pub hook: HookArg,
}

/// [`HookChoice`] on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum HookArg {
    /// TCX from Linux 6.6 on, clsact below.
    Auto,
    /// TCX or nothing.
    Tcx,
    /// clsact.
    Clsact,
}

impl From<HookArg> for HookChoice {
    fn from(arg: HookArg) -> Self {
        match arg {
            HookArg::Auto => Self::Auto,
            HookArg::Tcx => Self::Tcx,
            HookArg::Clsact => Self::Clsact,
        }
    }
}
