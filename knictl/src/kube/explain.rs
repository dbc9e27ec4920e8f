//! `kubectl kni explain`: asks the agent of the node where a packet begins, and the agent of the node that it goes to.

use std::future::pending;

use clap::Parser as _;
use kube::Client;

use super::{agent, cli, find};
use crate::{
    cli::{self as commands, ExplainArgs, Format},
    commands::{
        Outcome,
        explain::{Explanation, Half, named, to_receiver, without_tunnel},
    },
    error::Error,
    terminal::Terminal,
};

/// Whether the words are of this command.
pub(super) fn is_asked(words: &[String]) -> bool {
    words.first().is_some_and(|word| word == "explain")
}

/// Shows what the nodes do with the packet. Without `node` the one of the sender's pod, or else of the receiver's, is
/// asked first.
pub(super) async fn run(
    client: &Client,
    kni_namespace: &str,
    node: Option<&str>,
    words: &[String],
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let about = cli::about(words)?;
    let line = std::iter::once("kubectl kni").chain(words.iter().map(String::as_str));
    let parsed = commands::Cli::try_parse_from(line)?;
    let commands::Command::Explain(args) = parsed.command else {
        return Err(Error::Node(format!("{} is not explain", words.join(" "))));
    };
    let node = match node {
        Some(node) => node.to_owned(),
        None => find::node(client, kni_namespace, &about).await?,
    };
    let sender = half(client, kni_namespace, &node, &args).await?;
    let explanation = match sender.onward.clone() {
        None => Explanation::joined(sender, None, Vec::new()),
        Some(onward) => match (to_receiver(&args, &onward), onward.node.as_str()) {
            (None, _) => Explanation::joined(sender, None, vec![without_tunnel(&onward)]),
            (Some(_), "") => {
                let reason = format!(
                    "{} decides the rest; its name is not known on node {node}",
                    named(&onward)
                );
                Explanation::joined(sender, None, vec![reason])
            }
            (Some(question), there) => match half(client, kni_namespace, there, &question).await {
                Ok(receiver) => Explanation::joined(sender, Some(receiver), Vec::new()),
                Err(error) => {
                    let reason = format!("node {there} decides the rest, and did not answer: {error}");
                    Explanation::joined(sender, None, vec![reason])
                }
            },
        },
    };
    explanation.show(args.output.format, terminal)?;
    Ok(Outcome::Done)
}

/// The answer of a node's agent, by knictl in its pod.
async fn half(client: &Client, kni_namespace: &str, node: &str, args: &ExplainArgs) -> Result<Half, Error> {
    let pod = find::agent(client, kni_namespace, node).await?;
    let mut words = args.words();
    words.extend(["-o".to_owned(), Format::Json.word()]);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    {
        let mut terminal = Terminal::new(&mut out, &mut err);
        agent::run(client, kni_namespace, &pod, &words, &mut terminal, pending()).await?;
    }
    match serde_json::from_slice::<Half>(&out) {
        Ok(half) => Ok(half.on(node)),
        Err(_) if !err.is_empty() => Err(Error::Node(agent::remarks(&err))),
        Err(error) => Err(Error::Node(format!("the answer of pod {kni_namespace}/{pod}: {error}"))),
    }
}
