//! The command line of kni-agent; every default has its reason beside it.
//! Layer: root.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use kni_common::layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES};
use kni_dataplane::{HookChoice, XdpChoice};

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
    /// Put the CNI plugin and its configuration in place, for container runtimes that look for files.
    InstallCni(CniInstallArgs),
    /// Remove what install-cni put there. Pods keep their interfaces, but no runtime can take them away any more.
    UninstallCni(CniInstallArgs),
    /// Remove what the agents wrote into the cluster: their objects, finalizers, annotations, taints and resources. The
    /// agents must be gone from the nodes; networks and policies, which are yours, stay.
    Uninstall(UninstallArgs),
    /// Do nothing until SIGTERM or SIGINT: the task of the agent's pod on a node that was cleaned up.
    #[command(hide = true)]
    Rest(RestArgs),
}

/// What is taken out of the cluster.
#[derive(Debug, Clone, Args)]
pub struct UninstallArgs {
    /// The cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Options from a file; see --help of the agent itself.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Seconds to wait until no node has an agent any more; what an agent that runs would write again is left otherwise.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub wait: u32,
    /// What to log, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Nothing to choose.
#[derive(Debug, Clone, Args)]
pub struct RestArgs {
    /// What to log, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Where things are.
#[derive(Debug, Clone, Args)]
pub struct PathArgs {
    /// Options from a file: a YAML mapping of their long names to values, lists for those that may be repeated, `true`
    /// for those without a value. Options on the command line take precedence.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// State of the agent. On tmpfs, so that a reboot, which ends all namespaces, clears it too.
    #[arg(long, value_name = "DIR", default_value = "/run/kni")]
    pub state_dir: PathBuf,
    /// Pins of programs and maps, on bpffs.
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/kni")]
    pub bpf_root: PathBuf,
    /// Where network namespaces are mounted; `ip netns` looks here.
    #[arg(long, value_name = "DIR", default_value = "/run/netns")]
    pub netns_dir: PathBuf,
    /// Socket to serve on; may be repeated. The second default is the fixed path of the KNI kubelet, which no
    /// configuration changes.
    #[arg(long = "socket", value_name = "PATH", default_values = ["/run/kni/kni.sock", "/tmp/kni.sock"])]
    pub sockets: Vec<PathBuf>,
    /// Socket for containerd's pod network service; may be repeated.
    #[arg(long = "pod-network-socket", value_name = "PATH", default_values = ["/run/kni/pod-network.sock"])]
    pub pod_network_sockets: Vec<PathBuf>,
    /// Where CNI plugins keep the deletes that the agent has still to do; their `stateDir`. Not on tmpfs.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni")]
    pub cni_state_dir: PathBuf,
    /// What to log, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Where runtimes look for CNI plugins.
const CNI_BIN_DIR: &str = "/opt/cni/bin";
/// Where runtimes look for CNI configurations.
const CNI_CONF_DIR: &str = "/etc/cni/net.d";
/// Before the names that other networks choose.
const CNI_CONF_NAME: &str = "10-kni.conflist";

/// What is installed for CNI runtimes, and where.
#[derive(Debug, Clone, Args)]
pub struct CniInstallArgs {
    /// Options from a file; see --help of the agent itself.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where the runtime looks for plugins.
    #[arg(long, alias = "install-cni-bin-dir", value_name = "DIR", default_value = CNI_BIN_DIR)]
    pub bin_dir: PathBuf,
    /// Where the runtime looks for configurations.
    #[arg(long, alias = "install-cni-conf-dir", value_name = "DIR", default_value = CNI_CONF_DIR)]
    pub conf_dir: PathBuf,
    /// Name of the configuration. Runtimes take the first one by name.
    #[arg(long, alias = "install-cni-conf-name", value_name = "NAME", default_value = CNI_CONF_NAME,
        value_parser = file_name)]
    pub conf_name: String,
    /// The plugin. Without it, the one beside this program.
    #[arg(long, value_name = "PATH")]
    pub shim: Option<PathBuf>,
    /// The agent's socket.
    #[arg(long, value_name = "PATH", default_value = "/run/kni/kni.sock")]
    pub socket: PathBuf,
    /// Name of the network as the runtime knows it.
    #[arg(long, value_name = "NAME", default_value = "kni")]
    pub network_name: String,
    /// Where the plugin keeps deletes while no agent runs; the agent's own --cni-state-dir.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni")]
    pub cni_state_dir: PathBuf,
    /// What to log, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// How to serve.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Work without a cluster: networks, policies and services come from the folder of --manifests.
    #[arg(long, requires = "manifests", conflicts_with = "kubeconfig")]
    pub standalone: bool,
    /// The cluster, where the agent is not standalone.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Folder of manifests (YAML or JSON): networks, policies, namespaces, services and their endpoints; watched.
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
    /// Flows.
    #[command(flatten)]
    pub flows: FlowArgs,
    /// Rows of policy sets, of port sets and of peers each. Pods that the same policies select share theirs; the default
    /// is enough for a thousand policies with as many different peers. A full table refuses new pods.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_POLICY_ROWS,
        value_parser = clap::value_parser!(u32).range(64..=4_194_304))]
    pub max_policy_rows: u32,
    /// Service ports by virtual address; four times as many endpoints of services fit.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_SERVICES,
        value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    pub max_services: u32,
    /// Name of this node, as endpoints of services name it. Without it, the host's name in small letters, as the
    /// kubelet does.
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Zone of this node, for services that prefer endpoints of their client's zone.
    #[arg(long, value_name = "ZONE")]
    pub zone: Option<String>,
    /// Egress of the node.
    #[command(flatten)]
    pub uplink: UplinkArgs,
    /// CNI plugins behind the agent.
    #[command(flatten)]
    pub plugins: PluginArgs,
    /// Our own CNI plugin in front of it.
    #[command(flatten)]
    pub install: ServeInstallArgs,
    /// Where the metrics page is served, or "none". The default is for the node alone.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9630")]
    pub metrics_address: MetricsAddress,
    /// Measure how often and how long the programs run, for the metrics page. Off, because it costs every BPF program of
    /// the node two readings of the clock per run.
    #[arg(long)]
    pub measure_programs: bool,
    /// How programs are attached.
    #[arg(long, value_enum, default_value_t = HookArg::Auto)]
    pub hook: HookArg,
}

/// The cluster that the agent belongs to.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// How to reach the API server. Without it, the file that KUBECONFIG names, else the service account of the pod.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease by which the agents choose the one that writes what concerns no single node.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = "kni-system")]
    pub namespace: String,
    /// Services that pods of every network with egress reach by their virtual address, as NAMESPACE/NAME: those that
    /// all pods need. Their endpoints must not be pods.
    #[arg(long = "shared-service", value_name = "NAMESPACE/NAME", value_delimiter = ',',
        default_values = ["default/kubernetes", "kube-system/kube-dns"])]
    pub shared_services: Vec<String>,
}

/// Whether the agent puts its CNI plugin in place when it starts, and where.
#[derive(Debug, Clone, Args)]
pub struct ServeInstallArgs {
    /// Do what install-cni does, at the start; nothing is taken away at the end. Off, because a kubelet that speaks KNI
    /// needs no plugin.
    #[arg(long)]
    pub install_cni: bool,
    /// Where the runtime looks for plugins.
    #[arg(long, value_name = "DIR", default_value = CNI_BIN_DIR)]
    pub install_cni_bin_dir: PathBuf,
    /// Where the runtime looks for configurations.
    #[arg(long, value_name = "DIR", default_value = CNI_CONF_DIR)]
    pub install_cni_conf_dir: PathBuf,
    /// Name of the configuration. Runtimes take the first one by name.
    #[arg(long, value_name = "NAME", default_value = CNI_CONF_NAME, value_parser = file_name)]
    pub install_cni_conf_name: String,
}

/// CNI plugins behind the agent.
#[derive(Debug, Clone, Args)]
pub struct PluginArgs {
    /// Run CNI plugins for networks with provider CNI. Off, because plugins need capabilities that the agent itself gives
    /// up.
    #[arg(long)]
    pub cni_backend: bool,
    /// Folder of plugins; may be repeated, the first that has one wins.
    #[arg(long = "cni-bin-dir", value_name = "DIR", default_values = ["/opt/cni/bin"])]
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Folder of their configurations.
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Folder of what is needed to undo what they made. Durable, as is what plugins themselves keep: after a reboot their
    /// leases are there still.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni/cni/results")]
    pub cni_cache_dir: PathBuf,
}

/// Egress and ingress of the node.
#[derive(Debug, Clone, Args)]
pub struct UplinkArgs {
    /// Interface through which masqueraded packets leave the node. Without it, where the default route leads.
    #[arg(long, value_name = "INTERFACE")]
    pub uplink: Option<String>,
    /// Ports that masquerading may take. The default lies above what Linux gives to the node's own clients.
    #[arg(long, value_name = "FIRST-LAST", default_value = "61000-65535", value_parser = port_range)]
    pub masquerade_ports: RangeInclusive<u16>,
    /// Sources whose packets are dropped at the node's uplink, without an answer to the sender; may be repeated.
    #[arg(long, value_name = "CIDR")]
    pub deny_source: Vec<IpNet>,
    /// Drop packets at the uplink whose source address is in a pod network that does not route. Off, because hosts
    /// outside may use addresses of such a network.
    #[arg(long)]
    pub drop_bogons: bool,
    /// Whether the XDP program runs at the uplink, and where. Without it: auto where --deny-source or --drop-bogons need
    /// it, else off.
    #[arg(long, value_enum, value_name = "MODE")]
    pub uplink_xdp: Option<XdpArg>,
}

/// [`XdpChoice`] on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum XdpArg {
    /// In the driver where it can, else in front of the stack.
    Auto,
    /// In the driver or nothing.
    Native,
    /// In front of the stack.
    Generic,
    /// Not at all.
    Off,
}

impl From<XdpArg> for XdpChoice {
    fn from(arg: XdpArg) -> Self {
        match arg {
            XdpArg::Auto => Self::Auto,
            XdpArg::Native => Self::Native,
            XdpArg::Generic => Self::Generic,
            XdpArg::Off => Self::Off,
        }
    }
}

/// How many flows there may be, for how long, and who hears of them.
#[derive(Debug, Clone, Args)]
pub struct FlowArgs {
    /// Rows of each flow table; a connection takes two. The oldest give way.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_FLOWS,
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    pub max_flows: u32,
    /// Flows that one pod interface may open and keep; 0 for no limit. Without it an eighth of --max-flows: a pod that
    /// opens flows without end then has a quarter of a table, and the flows of others stay.
    #[arg(long, value_name = "N")]
    pub max_flows_per_endpoint: Option<u32>,
    /// Reports of new flows per second, pod interface and CPU; 0 for none. Drops have a rate of their own.
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub flow_events_per_second: u32,
    /// Seconds that an established TCP connection lives without a packet. RFC 5382 asks for 2 h 4 min at least.
    #[arg(long, value_name = "SECONDS", default_value = "7440")]
    pub tcp_timeout: Seconds,
    /// Seconds that a UDP flow that was answered lives without a packet. RFC 4787 asks for 2 min at least and recommends
    /// 5.
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    pub udp_timeout: Seconds,
}

/// A time of at least one second, and at most thirty days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds: u64 = text.parse().map_err(|_not_one| "not a number of seconds".to_owned())?;
        if (1..=30 * 24 * 3600).contains(&seconds) {
            Ok(Self(Duration::from_secs(seconds)))
        } else {
            Err("not between 1 and 2592000".to_owned())
        }
    }
}

/// Address of the metrics page; none is served without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricsAddress(pub Option<SocketAddr>);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let address = text
            .parse()
            .map_err(|_not_one| "neither ADDRESS:PORT nor \"none\"".to_owned())?;
        Ok(Self(Some(address)))
    }
}

/// A name that leads into no other folder, and that runtimes take for a list of plugins.
fn file_name(text: &str) -> Result<String, String> {
    if text.contains('/') || text.starts_with('.') || !text.ends_with(".conflist") {
        return Err("not the name of a .conflist file".to_owned());
    }
    Ok(text.to_owned())
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').ok_or("not FIRST-LAST")?;
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port != 0);
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err("not two ports, the smaller one first".to_owned()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<ServeArgs, String> {
        let all = ["kni-agent", "--standalone", "--manifests", "/m"]
            .iter()
            .chain(arguments);
        Cli::try_parse_from(all)
            .map(|cli| cli.serve)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn definition_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn defaults_are_valid() {
        let args = parse(&[]).unwrap();
        assert_eq!(args.uplink.masquerade_ports, 61_000..=65_535);
        assert_eq!((args.uplink.uplink_xdp, args.uplink.drop_bogons), (None, false));
        assert_eq!(args.metrics_address.0.unwrap().port(), 9630);
        assert_eq!(
            (args.flows.flow_events_per_second, args.flows.max_flows_per_endpoint),
            (250, None)
        );
        assert_eq!(args.flows.tcp_timeout.0, Duration::from_mins(124));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for arguments in [
            ["--masquerade-ports", "61000"],
            ["--masquerade-ports", "0-10"],
            ["--masquerade-ports", "20-10"],
            ["--deny-source", "192.0.2.1/33"],
            ["--uplink-xdp", "maybe"],
            ["--metrics-address", "9630"],
            ["--udp-timeout", "0"],
            ["--tcp-timeout", "5m"],
            ["--max-policy-rows", "1"],
        ] {
            let error = parse(&arguments).unwrap_err();
            assert!(error.contains(arguments[0]), "{error}");
        }
        assert_eq!(parse(&["--metrics-address", "none"]).unwrap().metrics_address.0, None);
        assert_eq!(
            parse(&["--masquerade-ports", "7-7"]).unwrap().uplink.masquerade_ports,
            7..=7
        );
        let denied = parse(&["--deny-source", "192.0.2.0/24", "--deny-source", "2001:db8::/32"]).unwrap();
        assert_eq!(denied.uplink.deny_source.len(), 2);
    }
}
