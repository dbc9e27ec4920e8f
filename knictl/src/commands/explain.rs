//! `knictl explain`: shows the verdict on a packet, and the policies behind it.

use kni_proto::runtime::{Arrival, ExplainRequest, ExplainResponse, Flow, Onward};
use serde::{Deserialize, Serialize};

use crate::{
    cli::{ExplainArgs, Format},
    client::{Runtime, answer},
    commands::{Outcome, flows},
    decision, document,
    error::Error,
    event::Timed,
    table::sheet,
    terminal::Terminal,
};

/// What one node does with the packet; its flow with a time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Half {
    /// Whether the packet passes.
    allowed: bool,
    flow: Timed<Flow>,
    steps: Vec<String>,
    /// The node; empty where it has no name.
    #[serde(default)]
    node: String,
    /// Where the packet goes next, if another node decides the rest.
    #[serde(default)]
    pub(crate) onward: Option<Onward>,
}

/// What all nodes that see the packet do with it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Explanation {
    /// The first node's part. Its `allowed` is that of the verdict.
    #[serde(flatten)]
    sender: Half,
    /// The part of the node that the packet goes to.
    #[serde(skip_serializing_if = "Option::is_none")]
    receiver: Option<Half>,
    /// Why that part is missing, and how to ask for it.
    #[serde(rename = "notAsked", skip_serializing_if = "Vec::is_empty")]
    not_asked: Vec<String>,
    verdict: Verdict,
}

/// The verdict on the packet.
#[derive(Clone, Debug, Serialize)]
struct Verdict {
    /// Whether it passes all nodes that were asked.
    allowed: bool,
    /// Whether every node that decides about it was asked.
    complete: bool,
    /// The node that decided; empty where it has no name.
    node: String,
    /// The program there.
    program: String,
    reason: String,
    explanation: String,
}

impl Half {
    fn of(response: ExplainResponse) -> Self {
        let ExplainResponse {
            allowed,
            flow,
            steps,
            node,
            onward,
        } = response;
        Self {
            allowed,
            flow: flow.unwrap_or_default().into(),
            steps,
            node,
            onward,
        }
    }

    /// Names its node, where the agent of an earlier release did not.
    pub(crate) fn on(self, node: &str) -> Self {
        Self {
            node: node.to_owned(),
            ..self
        }
    }
}

impl Explanation {
    /// The answer of the sender's node, and that of the receiver's, or why there is none.
    pub(crate) fn joined(sender: Half, receiver: Option<Half>, not_asked: Vec<String>) -> Self {
        let last = receiver.as_ref().unwrap_or(&sender);
        let flow = &last.flow.event;
        let verdict = Verdict {
            allowed: last.allowed,
            complete: !last.allowed || last.onward.is_none(),
            node: last.node.clone(),
            program: flow.direction.clone(),
            reason: flow.verdict.clone(),
            explanation: flow.explanation.clone(),
        };
        let sender = Half {
            allowed: verdict.allowed,
            ..sender
        };
        Self {
            sender,
            receiver,
            not_asked,
            verdict,
        }
    }

    /// Writes it in that form.
    pub(crate) fn show(&self, format: Format, terminal: &mut Terminal<'_>) -> Result<(), Error> {
        let text = match format {
            Format::Json => document::json(self)?,
            Format::Yaml => document::yaml(self)?,
            Format::Table | Format::Wide => people(self),
        };
        terminal.text(&text)
    }
}

/// The question to the agent that gets the packet; `None` where the packet comes without a tunnel.
pub(crate) fn to_receiver(args: &ExplainArgs, onward: &Onward) -> Option<ExplainArgs> {
    let tunnel = onward.tunnel.as_ref()?;
    let mut target = args.target.clone();
    target.port = u16::try_from(onward.port).ok()?;
    Some(ExplainArgs {
        output: args.output,
        source: onward.source.clone(),
        destination: onward.destination.clone(),
        target,
        network: None,
        length: args.length,
        arrives_from: Some(tunnel.sender.parse().ok()?),
        number: Some(tunnel.number),
    })
}

/// Sends the request and shows the answer. A packet that would be dropped is not an error.
pub(crate) async fn run(args: ExplainArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let request = ExplainRequest {
        source: args.source.clone(),
        destination: args.destination.clone(),
        protocol: args.target.protocol.clone(),
        port: args.target.port.into(),
        network: args.network.clone().unwrap_or_default(),
        length: args.length.unwrap_or(0).into(),
        arrival: args.arrives_from.map(|sender| Arrival {
            sender: sender.to_string(),
            number: args.number.unwrap_or(0),
        }),
    };
    let half = Half::of(answer("Explain", agent.explain(request)).await?);
    let not_asked = half.onward.as_ref().map(|onward| hint(&args, onward));
    Explanation::joined(half, None, not_asked.unwrap_or_default()).show(args.output.format, terminal)?;
    Ok(Outcome::Done)
}

/// How to ask the other node, which an agent cannot do: it has no credentials for that.
fn hint(args: &ExplainArgs, onward: &Onward) -> Vec<String> {
    let node = named(onward);
    let asked = format!("{node} decides the rest, and was not asked: knictl asks the agent of one node only");
    let both = format!("both nodes, with a kubeconfig: kubectl kni {}", args.words().join(" "));
    match to_receiver(args, onward) {
        Some(question) => vec![
            asked,
            both,
            format!("{node} alone, there: knictl {}", question.words().join(" ")),
        ],
        None => vec![asked, without_tunnel(onward)],
    }
}

/// Why the receiver's part is not explained.
pub(crate) fn without_tunnel(onward: &Onward) -> String {
    format!(
        "{} gets the packet without a tunnel; what it does with such packets is not explained: see `knictl drops` and \
         `knictl flows` there",
        named(onward)
    )
}

/// The node that the packet goes to.
pub(crate) fn named(onward: &Onward) -> String {
    match onward.node.as_str() {
        "" => format!("the node at {}", onward.underlay),
        node => format!("node {node}"),
    }
}

fn people(explanation: &Explanation) -> String {
    let Explanation {
        sender,
        receiver,
        not_asked,
        verdict,
    } = explanation;
    let flow = &sender.flow.event;
    let word = match (verdict.allowed, verdict.complete) {
        (false, _) => "dropped",
        (true, true) => "allowed",
        (true, false) => "allowed here, the rest is not decided",
    };
    let of_one_node = receiver.is_none() && not_asked.is_empty();
    let ends = [&flow.source, &flow.destination].into_iter().flatten();
    let is_between_nodes = !of_one_node || ends.into_iter().any(|end| !end.node.is_empty());
    let place = if is_between_nodes && !verdict.node.is_empty() {
        format!(" ({} on node {})", verdict.program, verdict.node)
    } else {
        String::new()
    };
    let mut rows = vec![
        ("Verdict", vec![format!("{word}: {}{place}", verdict.reason)]),
        ("Explanation", vec![verdict.explanation.clone()]),
        ("Network", vec![flow.network.clone()]),
        ("Packet", vec![flows::tuple(flow)]),
    ];
    if of_one_node {
        rows.extend([("Steps", sender.steps.clone()), ("Decided by", decided(flow))]);
        return sheet(&rows);
    }
    let titled = |half: &Half| {
        let title = format!("node {}, {}", half.node, half.flow.event.direction);
        std::iter::once(title).chain(half.steps.iter().cloned()).collect()
    };
    rows.push(("Sender", titled(sender)));
    rows.push(("Receiver", receiver.as_ref().map_or_else(|| not_asked.clone(), titled)));
    let halves = std::iter::once(sender).chain(receiver);
    rows.push((
        "Decided by",
        halves.flat_map(|half| decided(&half.flow.event)).collect(),
    ));
    sheet(&rows)
}

/// The decision of each consulted policy.
fn decided(flow: &Flow) -> Vec<String> {
    let said = [
        ("egress", flow.egress.as_ref()),
        ("ingress", flow.ingress.as_ref()),
        ("beyond", flow.beyond.as_ref()),
    ];
    let said = said.into_iter().filter(|(_, said)| said.is_some());
    said.map(|(end, said)| format!("{end}: {}", decision::text(said)))
        .collect()
}
