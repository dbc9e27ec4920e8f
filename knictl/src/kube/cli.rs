//! The command line of `kubectl kni`.

use std::path::PathBuf;

use clap::{
    Args, CommandFactory as _, Parser, Subcommand,
    error::{ContextKind, ContextValue},
};

use crate::{
    cli::{self as agent, Format, PodName},
    error::Error,
};

/// Shows what KNI does in the cluster. Beside the commands below, those of knictl: flows, drops, explain, policy,
/// services and maps, asked of the agent of the pod's node or of --node.
#[derive(Debug, Parser)]
#[command(name = "kubectl kni", version, allow_external_subcommands = true)]
pub(crate) struct Cli {
    /// How to reach the cluster; without it the file that KUBECONFIG names, or ~/.kube/config
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Context of that file, if not its current one
    #[arg(long, value_name = "NAME")]
    pub(super) context: Option<String>,
    /// Namespace of the agents
    #[arg(long, value_name = "NAME", default_value = "kni-system")]
    pub(super) kni_namespace: String,
    /// Ask the agent of this node
    #[arg(long, value_name = "NAME")]
    pub(super) node: Option<String>,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// The nodes' agents; exit code 1 when one is not ready
    Status(OutputArgs),
    /// What is wrong in the cluster and on its nodes, and what to do about it; exit code 1 when something does not work
    Doctor(DoctorArgs),
    /// The networks, with what the nodes make of them
    Networks(OutputArgs),
    /// The interfaces of pods
    Interfaces(InterfacesArgs),
    /// A command of knictl, with its arguments
    #[command(external_subcommand)]
    Agent(Vec<String>),
}

/// Which checks run.
#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// How the answer is written.
#[derive(Debug, Args)]
pub(super) struct OutputArgs {
    /// Form of the output
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Format::Table, value_name = "FORM")]
    pub(super) format: Format,
}

impl OutputArgs {
    /// As it is typed.
    pub(super) fn form(&self) -> String {
        self.format.word()
    }
}

#[derive(Debug, Args)]
pub(super) struct InterfacesArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
    /// Only interfaces of the pod with this name
    #[arg(value_name = "POD")]
    pub(super) pod: Option<String>,
    /// Only interfaces of pods in this namespace
    #[arg(short = 'n', long)]
    pub(super) namespace: Option<String>,
    /// Only interfaces in this network
    #[arg(long)]
    pub(super) network: Option<String>,
}

/// What a command of knictl is about, which leads to the node to ask.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum About {
    /// A pod.
    Pod(PodName),
    /// An address of a pod.
    Address(String),
    /// The node itself.
    Node,
}

/// Reads a command of knictl as knictl itself will.
pub(super) fn about(words: &[String]) -> Result<About, Error> {
    let line = std::iter::once("kubectl kni").chain(words.iter().map(String::as_str));
    let cli = agent::Cli::try_parse_from(line).map_err(with_place)?;
    Ok(match cli.command {
        agent::Command::Policy(args) => About::Pod(args.pod),
        agent::Command::Flows(args) => args.pod.map_or(About::Node, About::Pod),
        agent::Command::Explain(args) => ends(&args.source, &args.destination),
        agent::Command::Status(_)
        | agent::Command::Doctor(_)
        | agent::Command::Networks(_)
        | agent::Command::Interfaces(_)
        | agent::Command::Drops(_)
        | agent::Command::Services(_)
        | agent::Command::Maps(_) => About::Node,
    })
}

/// The error, with the place of options that `kubectl kni` has and the command does not.
fn with_place(mut error: clap::Error) -> clap::Error {
    let own = |word: &str| {
        let options = Cli::command();
        options
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .any(|option| word.strip_prefix("--") == Some(option))
    };
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && own(word)
    {
        let tip = format!("{word} goes before the command: kubectl kni {word} ... COMMAND");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// The pod that sends, or else the one that receives; addresses where neither is named.
fn ends(source: &str, destination: &str) -> About {
    let pod = |text: &str| text.split('@').next().and_then(|name| name.parse().ok());
    match pod(source).or_else(|| pod(destination)) {
        Some(pod) => About::Pod(pod),
        None => About::Address(source.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about_line(line: &str) -> Result<About, String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        about(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_of_knictl_pass_with_their_arguments() {
        let cli = Cli::try_parse_from(["kubectl-kni", "--node", "n", "flows", "-f", "--network", "red"]).unwrap();
        let Command::Agent(words) = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(
            (words.join(" "), cli.node),
            ("flows -f --network red".into(), Some("n".into()))
        );
        let cli = Cli::try_parse_from(["kubectl-kni", "interfaces", "web", "-n", "shop", "-o", "wide"]).unwrap();
        let Command::Interfaces(args) = cli.command else {
            panic!("not interfaces")
        };
        assert_eq!((args.pod.as_deref(), args.output.form()), (Some("web"), "wide".into()));
    }

    #[test]
    fn a_command_leads_to_the_pod_that_it_is_about() {
        let pod = |namespace: &str, name: &str| {
            About::Pod(PodName {
                namespace: namespace.into(),
                name: name.into(),
            })
        };
        assert_eq!(about_line("policy shop/web"), Ok(pod("shop", "web")));
        assert_eq!(about_line("flows -f --pod shop/web"), Ok(pod("shop", "web")));
        assert_eq!(
            about_line("explain shop/web@net1 10.0.0.1 tcp/80"),
            Ok(pod("shop", "web"))
        );
        assert_eq!(about_line("explain 10.0.0.1 shop/db tcp/80"), Ok(pod("shop", "db")));
        assert_eq!(
            about_line("explain 10.0.0.1 10.0.0.2 icmp"),
            Ok(About::Address("10.0.0.1".into()))
        );
        assert_eq!(about_line("drops -o json"), Ok(About::Node));
        assert!(about_line("flows --nonsense").unwrap_err().contains("--nonsense"));
        assert!(about_line("nonsense").unwrap_err().contains("nonsense"));
    }
}
