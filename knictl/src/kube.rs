//! Implements `kubectl kni`, the commands of knictl for a cluster. Lists come from the API server's objects; other
//! commands run `knictl` in the pod of the agent on the node concerned.

mod agent;
mod cli;
mod doctor;
mod explain;
mod find;
mod objects;

use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

pub(crate) use cli::Cli;
use cli::{Command, InterfacesArgs, OutputArgs};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::{commands::Outcome, error::Error, terminal::Terminal};

/// Names under which kubectl finds plugins; kubectl maps a dash in a plugin's name to an underscore.
const PLUGIN: &str = "kubectl-kni";
/// Option with the effect of that name.
const OPTION: &str = "--kube";

/// The command line for [`Cli`], if the program's name or the first word of `args` selects it.
pub(crate) fn asked_for(args: &[OsString]) -> Option<Vec<OsString>> {
    let program = args.first().and_then(|name| Path::new(name).file_name());
    if program == Some(OsStr::new(PLUGIN)) {
        return Some(args.to_vec());
    }
    let (program, rest) = args.split_first()?;
    let (first, rest) = rest.split_first()?;
    (first == OPTION).then(|| std::iter::once(program).chain(rest).cloned().collect())
}

/// Runs a command line.
pub(crate) async fn run(
    cli: Cli,
    terminal: &mut Terminal<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Outcome, Error> {
    if let Command::Agent(words) = &cli.command {
        // Help, and errors of the command line, need no cluster.
        cli::about(words)?;
    }
    let client = connect(&cli).await?;
    let node = cli.node.as_deref();
    let words = match cli.command {
        Command::Doctor(args) => {
            return doctor::run(&client, &cli.kni_namespace, node, &args, terminal).await;
        }
        Command::Status(args) if node.is_none() => return objects::status(&client, &args, terminal).await,
        Command::Networks(args) if node.is_none() => return objects::networks(&client, &args, terminal).await,
        Command::Interfaces(args) if node.is_none() => {
            return objects::interfaces(&client, args, terminal).await;
        }
        Command::Status(args) => listing("status", &args),
        Command::Networks(args) => listing("networks", &args),
        Command::Interfaces(args) => interfaces(&args),
        Command::Agent(words) => words,
    };
    if explain::is_asked(&words) {
        return explain::run(&client, &cli.kni_namespace, node, &words, terminal).await;
    }
    let about = cli::about(&words)?;
    let node = match node {
        Some(node) => node.to_owned(),
        None => find::node(&client, &cli.kni_namespace, &about).await?,
    };
    let pod = find::agent(&client, &cli.kni_namespace, &node).await?;
    agent::run(&client, &cli.kni_namespace, &pod, &words, terminal, stop).await
}

fn listing(command: &str, args: &OutputArgs) -> Vec<String> {
    vec![command.to_owned(), "-o".to_owned(), args.form()]
}

fn interfaces(args: &InterfacesArgs) -> Vec<String> {
    let mut words = listing("interfaces", &args.output);
    for (option, value) in [
        ("--namespace", &args.namespace),
        ("--pod", &args.pod),
        ("--network", &args.network),
    ] {
        if let Some(value) = value {
            words.extend([option.to_owned(), value.clone()]);
        }
    }
    words
}

async fn connect(cli: &Cli) -> Result<Client, Error> {
    let unreachable = |error: &dyn std::error::Error| Error::Cluster(error.to_string());
    let options = KubeConfigOptions {
        context: cli.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &cli.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| unreachable(&error))?;
            Config::from_custom_kubeconfig(file, &options).await
        }
        None => Config::from_kubeconfig(&options).await,
    };
    Client::try_from(config.map_err(|error| unreachable(&error))?).map_err(|error| unreachable(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_is_known_by_its_name_or_by_its_first_word() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        let asked = |line: &str| asked_for(&words(line));
        assert_eq!(
            asked("/usr/bin/kubectl-kni status"),
            Some(words("/usr/bin/kubectl-kni status"))
        );
        assert_eq!(
            asked("knictl --kube networks -o json"),
            Some(words("knictl networks -o json"))
        );
        assert_eq!(asked("knictl status"), None);
        assert_eq!(asked("knictl status --kube"), None);
        assert_eq!(asked("knictl"), None);
    }
}
