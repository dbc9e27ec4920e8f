//! `knictl explain`: shows the verdict on a packet, and the policies behind it.

use kni_proto::runtime::{ExplainRequest, ExplainResponse, Flow};
use serde::Serialize;

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

/// The answer, its flow with a time.
#[derive(Serialize)]
struct Explanation {
    allowed: bool,
    flow: Timed<Flow>,
    steps: Vec<String>,
}

/// Sends the request and shows the answer. A packet that would be dropped is not an error.
pub(crate) async fn run(args: ExplainArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let request = ExplainRequest {
        source: args.source,
        destination: args.destination,
        protocol: args.target.protocol,
        port: args.target.port.into(),
        network: args.network.unwrap_or_default(),
    };
    let ExplainResponse { allowed, flow, steps } = answer("Explain", agent.explain(request)).await?;
    let flow = flow.unwrap_or_default().into();
    let explanation = Explanation { allowed, flow, steps };
    let text = match args.output.format {
        Format::Json => document::json(&explanation)?,
        Format::Yaml => document::yaml(&explanation)?,
        Format::Table | Format::Wide => people(&explanation),
    };
    terminal.text(&text)?;
    Ok(Outcome::Done)
}

fn people(explanation: &Explanation) -> String {
    let Explanation { allowed, flow, steps } = explanation;
    let flow = &flow.event;
    let word = if *allowed { "allowed" } else { "dropped" };
    sheet(&[
        ("Verdict", vec![format!("{word}: {}", flow.verdict)]),
        ("Explanation", vec![flow.explanation.clone()]),
        ("Network", vec![flow.network.clone()]),
        ("Packet", vec![flows::tuple(flow)]),
        ("Steps", steps.clone()),
        ("Decided by", decided(flow)),
    ])
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
