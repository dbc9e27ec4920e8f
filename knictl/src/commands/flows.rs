//! `knictl flows`: lists recent flows and drops, and follows new ones.

use std::future::Future;

use kni_proto::runtime::{Flow, FlowFilter, ListFlowsRequest, Peer, SocketAddress, WatchFlowsRequest};
use serde::Serialize;

use crate::{
    cli::{FlowsArgs, Format},
    client::{Runtime, answer},
    commands::{List, Outcome, stream},
    decision, document,
    error::Error,
    event::Timed,
    packet,
    table::{Column, cell},
    terminal::Terminal,
};

/// The flows, with their times.
#[derive(Serialize)]
struct Flows {
    flows: Vec<Timed<Flow>>,
}

const COLUMNS: &[Column<Timed<Flow>>] = &[
    Column::new("TIME", |f| f.time.clone()),
    Column::new("VERDICT", |f| f.event.verdict.clone()),
    Column::new("NETWORK", |f| f.event.network.clone()),
    Column::new("PROTOCOL", |f| f.event.protocol.clone()),
    Column::new("SOURCE", |f| peer(&f.event, f.event.source.as_ref())),
    Column::new("DESTINATION", |f| peer(&f.event, f.event.destination.as_ref())),
    Column::new("SERVICE", |f| f.event.service.clone()),
    Column::wide("DIRECTION", |f| f.event.direction.clone()),
    Column::wide("POD", |f| name(&f.event.pod_namespace, &f.event.pod_name)),
    Column::wide("IFNAME", |f| f.event.ifname.clone()),
    Column::wide("LENGTH", |f| f.event.length.to_string()),
    Column::wide("TRANSLATED-SOURCE", |f| {
        translated(&f.event, f.event.translated_source.as_ref())
    }),
    Column::wide("TRANSLATED-DESTINATION", |f| {
        translated(&f.event, f.event.translated_destination.as_ref())
    }),
    Column::wide("EGRESS", |f| decision::text(f.event.egress.as_ref())),
    Column::wide("INGRESS", |f| decision::text(f.event.ingress.as_ref())),
    Column::wide("BEYOND", |f| decision::text(f.event.beyond.as_ref())),
    Column::new("EXPLANATION", |f| f.event.explanation.clone()),
];

/// Shows the agent's history.
pub(crate) async fn run(args: FlowsArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let format = args.output.format;
    let request = ListFlowsRequest {
        filter: Some(filter(args)),
    };
    let answer = answer("ListFlows", agent.list_flows(request)).await?;
    let flows = answer.flows.into_iter().map(Timed::from).collect();
    let document = Flows { flows };
    List {
        document: &document,
        rows: &document.flows,
        columns: COLUMNS,
        noun: "flows",
    }
    .show(format, terminal)
}

/// Shows each flow when it begins and each drop when it happens, until `stop` or until the agent ends the stream.
pub(crate) async fn follow(
    args: FlowsArgs,
    agent: &mut Runtime,
    terminal: &mut Terminal<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Outcome, Error> {
    let format = args.output.format;
    let request = WatchFlowsRequest {
        filter: Some(filter(args)),
    };
    let text = |flow: Flow| line(&flow.into(), format);
    stream::follow("WatchFlows", agent.watch_flows(request), text, terminal, stop).await
}

fn filter(args: FlowsArgs) -> FlowFilter {
    let (pod_namespace, pod_name) = args.pod.map(|pod| (pod.namespace, pod.name)).unwrap_or_default();
    FlowFilter {
        pod_namespace,
        pod_name,
        network: args.network.unwrap_or_default(),
        drops_only: args.drops,
    }
}

/// One flow: a line, or with YAML a document.
fn line(timed: &Timed<Flow>, format: Format) -> Result<String, Error> {
    match format {
        Format::Json => document::json_line(timed),
        Format::Yaml => Ok(format!("---\n{}", document::yaml(timed)?)),
        Format::Table => Ok(people(timed, false)),
        Format::Wide => Ok(people(timed, true)),
    }
}

fn people(Timed { time, event: flow }: &Timed<Flow>, wide: bool) -> String {
    let mut line = format!(
        "{time} {} {} {} {}",
        cell(&flow.network),
        cell(&flow.verdict),
        cell(&flow.direction),
        tuple(flow)
    );
    if wide {
        for (end, said) in [
            ("egress", &flow.egress),
            ("ingress", &flow.ingress),
            ("beyond", &flow.beyond),
        ] {
            if said.is_some() {
                line = format!("{line} [{end} {}]", cell(&decision::text(said.as_ref())));
            }
        }
    }
    line = format!("{line} {}", cell(&flow.explanation));
    if flow.lost > 0 {
        line = format!("{line} ({} events lost before)", flow.lost);
    }
    line + "\n"
}

/// The packet: `TCP 10.0.0.1:4000 (x/a) > 10.96.0.1:80 (x/web:http) > 10.0.0.2:8080 len 74`, or the ethertype where no
/// address was read.
pub(crate) fn tuple(flow: &Flow) -> String {
    let (source, destination) = (peer(flow, flow.source.as_ref()), peer(flow, flow.destination.as_ref()));
    let packet = if source.is_empty() && destination.is_empty() {
        format!("ethertype 0x{:04x}", flow.ethertype)
    } else {
        format!(
            "{} {}{} > {}",
            cell(&flow.protocol),
            cell(&source),
            via(flow, flow.translated_source.as_ref()),
            target(flow, &destination)
        )
    };
    format!("{packet} len {}", flow.length)
}

fn target(flow: &Flow, destination: &str) -> String {
    let mut text = cell(destination);
    if !flow.service.is_empty() {
        text = format!("{text} ({})", cell(&flow.service));
    }
    text + &via(flow, flow.translated_destination.as_ref())
}

fn via(flow: &Flow, translated_to: Option<&SocketAddress>) -> String {
    match translated_to {
        Some(_) => format!(" as {}", translated(flow, translated_to)),
        None => String::new(),
    }
}

/// Address, port and pod or node, as far as they are known: `10.0.0.1:4000 (shop/web-0 on n2)`, `192.0.2.2 (node/n2)`.
/// Not escaped.
fn peer(flow: &Flow, peer: Option<&Peer>) -> String {
    let Some(peer) = peer.filter(|peer| !peer.ip.is_empty()) else {
        return String::new();
    };
    let socket = packet::socket(&peer.ip, port(flow, peer.port));
    match (name(&peer.pod_namespace, &peer.pod_name), peer.node.as_str()) {
        (pod, "") if pod.is_empty() => socket,
        (pod, node) if pod.is_empty() => format!("{socket} (node/{node})"),
        (pod, "") => format!("{socket} ({pod})"),
        (pod, node) => format!("{socket} ({pod} on {node})"),
    }
}

fn translated(flow: &Flow, address: Option<&SocketAddress>) -> String {
    address
        .map(|address| packet::socket(&address.ip, port(flow, address.port)))
        .unwrap_or_default()
}

fn port(flow: &Flow, port: u32) -> Option<u32> {
    let port_of = |peer: &Option<Peer>| peer.as_ref().map_or(0, |peer| peer.port);
    let ports = (port_of(&flow.source), port_of(&flow.destination));
    packet::has_ports(&flow.protocol, ports).then_some(port)
}

fn name(namespace: &str, name: &str) -> String {
    match (namespace, name) {
        ("", name) => name.to_owned(),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}
