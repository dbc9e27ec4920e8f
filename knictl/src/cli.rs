//! The command line: what operators may type.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Shows what the KNI agent of this node does: networks, pod interfaces, dropped packets, maps.
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
    /// The node's networks, refused manifests included
    Networks(OutputArgs),
    /// The interfaces of all attached pods
    Interfaces(InterfacesArgs),
    /// Packets dropped, by interface, direction and reason
    Drops(DropsArgs),
    /// The pinned BPF maps
    Maps(OutputArgs),
}

/// How the answer is written.
#[derive(Debug, Args)]
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
    /// The form of the output, whichever way it was asked for.
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { self.output.format }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns for people
    Table,
    /// Aligned columns, with all there is to know
    Wide,
    /// JSON with stable field names
    Json,
    /// YAML with the same field names
    Yaml,
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
        for command in ["status", "networks", "interfaces", "drops", "maps"] {
            for form in ["table", "wide", "json", "yaml"] {
                Cli::try_parse_from(["knictl", command, "-o", form]).unwrap();
            }
            Cli::try_parse_from(["knictl", command, "-o", "xml"]).unwrap_err();
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
