//! The command line of kni-agent, with the reasons for the defaults.
//! Layer: root.

mod values;

use std::{ops::RangeInclusive, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use ipnet::IpNet;
use kni_common::layout::{DEFAULT_MAX_ENDPOINTS, DEFAULT_MAX_FLOWS, DEFAULT_MAX_POLICY_ROWS, DEFAULT_MAX_SERVICES};
pub use values::{FamilyArg, HookArg, MetricsAddress, Seconds, XdpArg};
use values::{file_name, port_range};

/// The network runtime of a Kubernetes node: serves KNI, owns pod interfaces, drives the eBPF dataplane.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// The command; without one the agent serves.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the agent.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Commands other than serving.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Remove everything that the agent created on this node. Pods lose their interfaces.
    Cleanup(PathArgs),
    /// Install the CNI plugin and its configuration, for container runtimes that use CNI.
    InstallCni(CniInstallArgs),
    /// Remove the files that install-cni wrote. Pods keep their interfaces, but the runtime can no longer delete them.
    UninstallCni(CniInstallArgs),
    /// Remove what the agents wrote to the API server: their objects, finalizers, annotations, taints and extended
    /// resources. No agent may run any more; networks and policies of users stay.
    Uninstall(UninstallArgs),
    /// Wait for SIGTERM or SIGINT: the task of the agent's pod on a node after the cleanup.
    #[command(hide = true)]
    Rest(RestArgs),
}

/// Options of `uninstall`.
#[derive(Debug, Clone, Args)]
pub struct UninstallArgs {
    /// The cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// File with options; see `kni-agent --help`.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Seconds to wait until no node runs an agent. Afterwards, objects that a running agent would write again stay.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub wait: u32,
    /// Log filter, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Options of `rest`.
#[derive(Debug, Clone, Args)]
pub struct RestArgs {
    /// Log filter, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Paths of the agent.
#[derive(Debug, Clone, Args)]
pub struct PathArgs {
    /// File with options: a YAML mapping from long names to values, lists for options that may be repeated, `true` for
    /// options without a value. Options on the command line take precedence.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of the agent's state. On tmpfs, so that a reboot, which removes all namespaces, clears it too.
    #[arg(long, value_name = "DIR", default_value = "/run/kni")]
    pub state_dir: PathBuf,
    /// Directory of pinned programs and maps, on bpffs.
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/bpf/kni")]
    pub bpf_root: PathBuf,
    /// Directory where network namespaces are mounted; the default is that of `ip netns`.
    #[arg(long, value_name = "DIR", default_value = "/run/netns")]
    pub netns_dir: PathBuf,
    /// Socket to serve on; may be repeated. A kubelet with the feature gate KNI uses the first default; the second one
    /// is the path of the KNI kubelet of 2024, which cannot be configured.
    #[arg(long = "socket", value_name = "PATH", default_values = ["/run/kni/kni.sock", "/tmp/kni.sock"])]
    pub sockets: Vec<PathBuf>,
    /// Socket for containerd's pod network service; may be repeated.
    #[arg(long = "pod-network-socket", value_name = "PATH", default_values = ["/run/kni/pod-network.sock"])]
    pub pod_network_sockets: Vec<PathBuf>,
    /// Directory of pending deletes that the CNI plugin recorded while no agent ran; its `stateDir`. Not on tmpfs.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni")]
    pub cni_state_dir: PathBuf,
    /// Log filter, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Directory where runtimes search for CNI plugins.
const CNI_BIN_DIR: &str = "/opt/cni/bin";
/// Directory where runtimes search for CNI configurations.
const CNI_CONF_DIR: &str = "/etc/cni/net.d";
/// Sorts before the usual names of other networks.
const CNI_CONF_NAME: &str = "10-kni.conflist";

/// Options of `install-cni` and `uninstall-cni`.
#[derive(Debug, Clone, Args)]
pub struct CniInstallArgs {
    /// File with options; see `kni-agent --help`.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory where the runtime searches for plugins.
    #[arg(long, alias = "install-cni-bin-dir", value_name = "DIR", default_value = CNI_BIN_DIR)]
    pub bin_dir: PathBuf,
    /// Directory where the runtime searches for configurations.
    #[arg(long, alias = "install-cni-conf-dir", value_name = "DIR", default_value = CNI_CONF_DIR)]
    pub conf_dir: PathBuf,
    /// File name of the configuration. Runtimes use the first one by name.
    #[arg(long, alias = "install-cni-conf-name", value_name = "NAME", default_value = CNI_CONF_NAME,
        value_parser = file_name)]
    pub conf_name: String,
    /// Path of the plugin. Default: the one in the directory of this program.
    #[arg(long, value_name = "PATH")]
    pub shim: Option<PathBuf>,
    /// The agent's socket.
    #[arg(long, value_name = "PATH", default_value = "/run/kni/kni.sock")]
    pub socket: PathBuf,
    /// Name of the network in the CNI configuration.
    #[arg(long, value_name = "NAME", default_value = "kni")]
    pub network_name: String,
    /// Directory where the plugin records deletes while no agent runs; the same as --cni-state-dir of the agent.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni")]
    pub cni_state_dir: PathBuf,
    /// Log filter, in the syntax of tracing's `EnvFilter`.
    #[arg(long, value_name = "FILTER", env = "KNI_LOG", default_value = "info")]
    pub log: String,
}

/// Options of the agent.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Run without a cluster: networks, policies and services come from the directory --manifests.
    #[arg(long, requires = "manifests", conflicts_with = "kubeconfig")]
    pub standalone: bool,
    /// Options of the cluster; unused with --standalone.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Directory of manifests (YAML or JSON): networks, policies, namespaces, services and their endpoints. Changes of
    /// files are applied.
    #[arg(long, value_name = "DIR")]
    pub manifests: Option<PathBuf>,
    /// Paths of the agent.
    #[command(flatten)]
    pub paths: PathArgs,
    /// eBPF object to load instead of the embedded one.
    #[arg(long, value_name = "PATH", env = "KNI_EBPF_OBJECT")]
    pub ebpf_object: Option<PathBuf>,
    /// Number of sandboxes created in advance, so that a pod does not wait for the kernel's slow paths. By default as
    /// many as were requested at once within the last ten minutes, 8 to 128; each uses about 30 kB of kernel memory.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=256))]
    pub warm_sandboxes: Option<u32>,
    /// Maximum number of pod interfaces on the node. The kubelet runs at most 110 pods by default.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_ENDPOINTS,
        value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub max_endpoints: u32,
    /// Flows.
    #[command(flatten)]
    pub flows: FlowArgs,
    /// Size of each policy table: policy sets, port sets and peers. Pods that the same policies select share rows; the
    /// default suffices for a thousand policies with as many different peers.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_POLICY_ROWS,
        value_parser = clap::value_parser!(u32).range(64..=4_194_304))]
    pub max_policy_rows: u32,
    /// Rows of each policy table that the policies of one namespace may need; by default an eighth of the table. The
    /// policies of a namespace that needs more allow nothing to the pods that they select; other namespaces are not
    /// affected.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(8..=4_194_304))]
    pub max_policy_rows_per_namespace: Option<u32>,
    /// Maximum number of service ports, by virtual address; twice as many endpoints fit, each counted for each port.
    /// Where Services need more, each namespace gets a fair share.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_SERVICES,
        value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    pub max_services: u32,
    /// Name of this node, as in EndpointSlices. Default: the hostname in lower case, as for the kubelet.
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// Zone of this node, for services that prefer endpoints in the zone of the client.
    #[arg(long, value_name = "ZONE")]
    pub zone: Option<String>,
    /// Egress of the node.
    #[command(flatten)]
    pub uplink: UplinkArgs,
    /// Packets between nodes.
    #[command(flatten)]
    pub fabric: FabricArgs,
    /// CNI plugins that the agent runs.
    #[command(flatten)]
    pub plugins: PluginArgs,
    /// For tests.
    #[command(flatten)]
    pub test: TestArgs,
    /// Installation of KNI's own CNI plugin.
    #[command(flatten)]
    pub install: ServeInstallArgs,
    /// Remove interfaces and other objects that are in no record, however many. Without it, the agent removes a few
    /// leftovers at its start, and takes more for the interfaces of running pods whose records were lost. Pods whose
    /// interfaces are removed lose their network.
    #[arg(long)]
    pub force_sweep: bool,
    /// Address of the metrics page, or "none". The default is reachable from the node only.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9630")]
    pub metrics_address: MetricsAddress,
    /// Measure number and duration of program runs, for the metrics page. Off by default, because it adds two clock
    /// reads to each run of every BPF program on the node.
    #[arg(long)]
    pub measure_programs: bool,
    /// Type of hook that programs are attached to.
    #[arg(long, value_enum, default_value_t = HookArg::Auto)]
    pub hook: HookArg,
}

/// Options of the cluster.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// Kubeconfig for the API server. Default: the file in KUBECONFIG, else the service account of the pod.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the agents and of kni-controller, for `uninstall`.
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE", default_value = "kni-system")]
    pub namespace: String,
    /// Services that pods of every network with egress reach by their virtual address, as NAMESPACE/NAME. Their
    /// endpoints must not be pods.
    #[arg(long = "shared-service", value_name = "NAMESPACE/NAME", value_delimiter = ',',
        default_values = ["default/kubernetes", "kube-system/kube-dns"])]
    pub shared_services: Vec<String>,
}

/// Options for tests; nothing uses them in operation.
#[derive(Debug, Clone, Args)]
pub struct TestArgs {
    /// File with requests for faults of background tasks.
    #[arg(long = "test-task-faults", value_name = "FILE", hide = true)]
    pub task_faults: Option<PathBuf>,
    /// Seconds that a background task may work without progress.
    #[arg(long = "test-task-limit", value_name = "SECONDS", hide = true)]
    pub task_limit: Option<u64>,
    /// Seconds that a request to the API server may take; a watch may be silent for twenty times as long.
    #[arg(long = "test-api-limit", value_name = "SECONDS", hide = true)]
    pub api_limit: Option<u64>,
    /// Seconds that an address rests after its pod, and that a block stays after its last address.
    #[arg(long = "test-address-rest", value_name = "SECONDS", hide = true)]
    pub address_rest: Option<u64>,
}

/// Installation of the CNI plugin at the start of the agent.
#[derive(Debug, Clone, Args)]
pub struct ServeInstallArgs {
    /// Run install-cni at the start; nothing is uninstalled at the end. Off by default, because a kubelet with KNI
    /// support needs no plugin.
    #[arg(long)]
    pub install_cni: bool,
    /// Directory where the runtime searches for plugins.
    #[arg(long, value_name = "DIR", default_value = CNI_BIN_DIR)]
    pub install_cni_bin_dir: PathBuf,
    /// Directory where the runtime searches for configurations.
    #[arg(long, value_name = "DIR", default_value = CNI_CONF_DIR)]
    pub install_cni_conf_dir: PathBuf,
    /// File name of the configuration. Runtimes use the first one by name.
    #[arg(long, value_name = "NAME", default_value = CNI_CONF_NAME, value_parser = file_name)]
    pub install_cni_conf_name: String,
}

/// CNI plugins that the agent runs.
#[derive(Debug, Clone, Args)]
pub struct PluginArgs {
    /// Run CNI plugins for networks with provider CNI. Off by default, because plugins need capabilities that the agent
    /// otherwise drops.
    #[arg(long)]
    pub cni_backend: bool,
    /// Directory of plugins; may be repeated, the first directory that contains the plugin is used.
    #[arg(long = "cni-bin-dir", value_name = "DIR", default_values = ["/opt/cni/bin"])]
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Directory of their configurations.
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub cni_conf_dir: PathBuf,
    /// Directory of results that are needed to delete interfaces. Persistent, like the state of the plugins: their
    /// leases outlive a reboot.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kni/cni/results")]
    pub cni_cache_dir: PathBuf,
}

/// Egress and ingress of the node.
#[derive(Debug, Clone, Args)]
pub struct UplinkArgs {
    /// Interface for masqueraded packets that leave the node. Default: the interface of the default route.
    #[arg(long, value_name = "INTERFACE")]
    pub uplink: Option<String>,
    /// Source ports for masquerading. The default is above the ephemeral ports of Linux.
    #[arg(long, value_name = "FIRST-LAST", default_value = "61000-65535", value_parser = port_range)]
    pub masquerade_ports: RangeInclusive<u16>,
    /// Sources whose packets are dropped at the node's uplink, without a reply to the sender; may be repeated.
    #[arg(long, value_name = "CIDR")]
    pub deny_source: Vec<IpNet>,
    /// Drop packets at the uplink whose source address is in a pod network with a tunnel between the nodes, or in one
    /// that is not routed. Off by default, because external hosts may use addresses of such a network.
    #[arg(long)]
    pub drop_bogons: bool,
    /// Mode of the XDP program at the uplink. Default: auto if --deny-source or --drop-bogons need it, else off.
    #[arg(long, value_enum, value_name = "MODE")]
    pub uplink_xdp: Option<XdpArg>,
}

/// Packets between the nodes of a cluster; without effect with --standalone.
#[derive(Debug, Clone, Args)]
pub struct FabricArgs {
    /// Family of the addresses that the node prefers for packets to other nodes. Default: IPv4 if it has such an
    /// address.
    #[arg(long, value_enum, value_name = "FAMILY")]
    pub underlay_family: Option<FamilyArg>,
    /// UDP port at which other nodes send packets for pods of this node. The default is that of VXLAN.
    #[arg(long, value_name = "PORT", default_value_t = kni_api::node_endpoint::DEFAULT_PORT,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub overlay_port: u16,
}

/// Number, lifetimes and events of flows.
#[derive(Debug, Clone, Args)]
pub struct FlowArgs {
    /// Size of each flow table; a connection uses one row, a translated one two. The least recently used flows are
    /// evicted.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_FLOWS,
        value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    pub max_flows: u32,
    /// Maximum number of connections that one pod interface opens, and of flows that are opened to it from outside of
    /// the node; twice as many flows of UDP and other protocols; 0 for no limit. Default: an eighth of --max-flows, so
    /// that one pod uses at most half of a table and does not evict the flows of others.
    #[arg(long, value_name = "N")]
    pub max_flows_per_endpoint: Option<u32>,
    /// Maximum number of events about new flows per second, pod interface and CPU; 0 for none. Drops have a separate
    /// limit.
    #[arg(long, value_name = "N", default_value_t = 250, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub flow_events_per_second: u32,
    /// Idle timeout of established TCP connections in seconds. RFC 5382 requires at least 2 h 4 min.
    #[arg(long, value_name = "SECONDS", default_value = "7440")]
    pub tcp_timeout: Seconds,
    /// Idle timeout of UDP streams in seconds; a question with its answer lives 10 s. RFC 4787 requires at least 2 min
    /// and recommends 5.
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    pub udp_timeout: Seconds,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
