//! The command line: what operators may type.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Shows what the KNI agent of this node does: networks, pod interfaces, flows, drops, policy, services, maps.
#[derive(Debug, Parser)]
#[command(name = "knictl", version)]
pub(crate) struct Cli {
    /// Unix socket of the agent
    #[arg(
        long,
        global = true,
        env = "KNI_SOCKET",
        default_value = "/run/kni/kni.sock",
        value_name = "PATH"
    )]
    pub(crate) socket: PathBuf,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Whether the agent works, and with what; exit code 1 when it is not ready
    Status(OutputArgs),
    /// What is wrong on this node and what to do about it; exit code 1 when something does not work
    Doctor(OutputArgs),
    /// The node's networks, refused manifests included
    Networks(OutputArgs),
    /// The interfaces of all attached pods
    Interfaces(InterfacesArgs),
    /// Packets dropped, by interface, direction and reason
    Drops(DropsArgs),
    /// New flows and drops, with the policies and services that decided
    Flows(FlowsArgs),
    /// What would become of a packet, decided by the programs themselves; nothing is sent
    Explain(ExplainArgs),
    /// The policy rules enforced at a pod's interfaces, with the flows that each decided about
    Policy(PolicyArgs),
    /// The active services and their backends
    Services(OutputArgs),
    /// The pinned BPF maps
    Maps(OutputArgs),
}

impl Command {
    /// Whether it prints a table that may be cut to fit a screen.
    pub(crate) fn is_table(&self) -> bool {
        let format = match self {
            Self::Networks(args) | Self::Services(args) | Self::Maps(args) => args.format,
            Self::Interfaces(args) => args.output.format,
            Self::Policy(args) => args.output.format,
            Self::Drops(args) if !args.follow => args.format(),
            Self::Flows(args) if !args.follow => args.output.format,
            Self::Status(_) | Self::Doctor(_) | Self::Explain(_) | Self::Drops(_) | Self::Flows(_) => return false,
        };
        format == Format::Table
    }
}

/// How the answer is written.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputArgs {
    /// Form of the output
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORM")]
    pub(crate) format: Format,
}

#[derive(Debug, Args)]
pub(crate) struct InterfacesArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Only interfaces of pods in this namespace
    #[arg(short = 'n', long)]
    pub(crate) namespace: Option<String>,
    /// Only interfaces of pods with this name
    #[arg(long)]
    pub(crate) pod: Option<String>,
    /// Only interfaces in this network
    #[arg(long)]
    pub(crate) network: Option<String>,
    /// Only interfaces of the sandbox with this id
    #[arg(long, value_name = "ID")]
    pub(crate) sandbox: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DropsArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Print each drop as it happens, until interrupted
    #[arg(short = 'f', long)]
    pub(crate) follow: bool,
    /// Short for --output json; with --follow one object per line
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,
}

impl DropsArgs {
    /// The form of the output, by either option.
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { self.output.format }
    }
}

#[derive(Debug, Args)]
pub(crate) struct FlowsArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Print each flow as it begins and each drop as it happens, until interrupted; JSON is one object per line
    #[arg(short = 'f', long)]
    pub(crate) follow: bool,
    /// Only drops
    #[arg(long)]
    pub(crate) drops: bool,
    /// Only flows from or to this pod
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub(crate) pod: Option<PodName>,
    /// Only flows in this network
    #[arg(long)]
    pub(crate) network: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Who sends: NAMESPACE/POD, NAMESPACE/POD@INTERFACE or an address
    pub(crate) source: String,
    /// Who is to receive: likewise; the address may be a service's
    pub(crate) destination: String,
    /// tcp/PORT, udp/PORT, sctp/PORT, or icmp for an echo request
    #[arg(value_name = "PROTOCOL/PORT")]
    pub(crate) target: Target,
    /// Network, if a pod's first one is not meant
    #[arg(long)]
    pub(crate) network: Option<String>,
    /// Length of the IP packet, if the shortest one is not meant
    #[arg(long, value_name = "BYTES")]
    pub(crate) length: Option<u16>,
    /// What this node does with a packet that the node with this address sends through the tunnel: the ends are
    /// addresses then
    #[arg(long, value_name = "ADDRESS", requires = "number", conflicts_with = "network")]
    pub(crate) arrives_from: Option<IpAddr>,
    /// Number of the network of that packet
    #[arg(long, value_name = "NUMBER", requires = "arrives_from")]
    pub(crate) number: Option<u32>,
}

impl ExplainArgs {
    /// The words of the same question, without a form of the output.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = vec![
            "explain".to_owned(),
            self.source.clone(),
            self.destination.clone(),
            self.target.to_string(),
        ];
        for (option, value) in [
            ("--network", self.network.clone()),
            ("--length", self.length.map(|length| length.to_string())),
            ("--arrives-from", self.arrives_from.map(|address| address.to_string())),
            ("--number", self.number.map(|number| number.to_string())),
        ] {
            words.extend(value.into_iter().flat_map(|value| [option.to_owned(), value]));
        }
        words
    }
}

#[derive(Debug, Args)]
pub(crate) struct PolicyArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// The pod
    #[arg(value_name = "NAMESPACE/NAME")]
    pub(crate) pod: PodName,
}

/// A pod as it is typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl FromStr for PodName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => Ok(Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err("a pod is named NAMESPACE/NAME"),
        }
    }
}

/// A transport and, if it has ports, the destination port. Which transports there are is the agent's to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) protocol: String,
    /// 0 for none.
    pub(crate) port: u16,
}

impl FromStr for Target {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (protocol, port) = match text.split_once('/') {
            None => (text, 0),
            Some((protocol, port)) => {
                let port = port.parse().ok().filter(|port| *port != 0);
                (protocol, port.ok_or("a port is a number from 1 to 65535")?)
            }
        };
        if protocol.is_empty() {
            return Err("write tcp/PORT, udp/PORT, sctp/PORT or icmp");
        }
        Ok(Self {
            protocol: protocol.to_owned(),
            port,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            0 => f.write_str(&self.protocol),
            port => write!(f, "{}/{port}", self.protocol),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns for people
    Table,
    /// Aligned columns, with all there is to know; never cut at the width of the terminal
    Wide,
    /// JSON with stable field names
    Json,
    /// YAML with the same field names
    Yaml,
}

impl Format {
    /// As it is typed.
    pub(crate) fn word(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(|| "table".to_owned(), |value| value.get_name().to_owned())
    }

    /// Whether remarks may stand beside it.
    pub(crate) fn is_for_people(self) -> bool {
        matches!(self, Self::Table | Self::Wide)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_takes_every_output_form() {
        let explain = ["explain", "x/a", "10.0.0.1", "tcp/80"];
        let bare = ["status", "networks", "interfaces", "drops", "flows", "services", "maps"];
        let bare = bare.iter().map(std::slice::from_ref);
        for command in bare.chain([&explain[..], &["policy", "x/a"]]) {
            let parse = |form| {
                let line = ["knictl"].iter().chain(command).copied().chain(["-o", form]);
                Cli::try_parse_from(line.collect::<Vec<_>>())
            };
            for form in ["table", "wide", "json", "yaml"] {
                parse(form).unwrap();
            }
            parse("xml").unwrap_err();
        }
    }

    #[test]
    fn only_tables_of_lists_may_be_cut() {
        let is_table = |line: &str| {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            cli.command.is_table()
        };
        for list in ["services", "policy x/a", "drops", "flows --drops", "interfaces -n x"] {
            assert!(is_table(&format!("knictl {list}")), "{list}");
            assert!(!is_table(&format!("knictl {list} -o wide")), "{list}");
            assert!(!is_table(&format!("knictl {list} -o json")), "{list}");
        }
        for other in [
            "status",
            "doctor",
            "drops -f",
            "flows -f",
            "drops --json",
            "explain x/a x/b tcp/80",
        ] {
            assert!(!is_table(&format!("knictl {other}")), "{other}");
        }
    }

    #[test]
    fn pods_and_targets_are_read() {
        let pod = |text: &str| text.parse::<PodName>().map(|pod| (pod.namespace, pod.name));
        assert_eq!(pod("x/a"), Ok(("x".to_owned(), "a".to_owned())));
        for bad in ["", "a", "/a", "x/", "x/a/b"] {
            pod(bad).unwrap_err();
        }
        let target = |text: &str| text.parse::<Target>().map(|target| (target.protocol, target.port));
        assert_eq!(target("tcp/80"), Ok(("tcp".to_owned(), 80)));
        assert_eq!(target("icmp"), Ok(("icmp".to_owned(), 0)));
        for bad in ["", "/80", "tcp/", "tcp/0", "tcp/65536", "tcp/x"] {
            target(bad).unwrap_err();
        }
    }

    #[test]
    fn json_shorthand_excludes_another_form() {
        Cli::try_parse_from(["knictl", "drops", "--json", "-o", "yaml"]).unwrap_err();
        let cli = Cli::try_parse_from(["knictl", "drops", "--json"]).unwrap();
        let Command::Drops(args) = cli.command else {
            panic!("not drops")
        };
        assert_eq!(args.format(), Format::Json);
    }

    #[test]
    fn socket_may_follow_the_command() {
        let cli = Cli::try_parse_from(["knictl", "maps", "--socket", "/x.sock"]).unwrap();
        assert_eq!(cli.socket, PathBuf::from("/x.sock"));
    }
}
