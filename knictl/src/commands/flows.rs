//! `knictl flows`: lists recent flows and drops, and follows new ones.

use std::future::Future;

use kni_proto::runtime::{FlowFilter, ListFlowsRequest, WatchFlowsRequest};

use crate::{
    cli::{FlowsArgs, Format},
    client::{Runtime, answer},
    commands::{List, Outcome, stream},
    decision, document,
    error::Error,
    packet,
    table::{Column, cell},
    terminal::Terminal,
    view::flow::{Flow, Flows, Peer, SocketAddress, TimedFlow},
};

const COLUMNS: &[Column<TimedFlow>] = &[
    Column::new("TIME", |f| f.time.clone()),
    Column::new("VERDICT", |f| f.flow.verdict.clone()),
    Column::new("NETWORK", |f| f.flow.network.clone()),
    Column::new("PROTOCOL", |f| f.flow.protocol.clone()),
    Column::new("SOURCE", |f| peer(&f.flow, &f.flow.source)),
    Column::new("DESTINATION", |f| peer(&f.flow, &f.flow.destination)),
    Column::new("SERVICE", |f| f.flow.service.clone()),
    Column::wide("DIRECTION", |f| f.flow.direction.clone()),
    Column::wide("POD", |f| name(&f.flow.pod_namespace, &f.flow.pod_name)),
    Column::wide("IFNAME", |f| f.flow.ifname.clone()),
    Column::wide("LENGTH", |f| f.flow.length.to_string()),
    Column::wide("TRANSLATED-SOURCE", |f| {
        translated(&f.flow, f.flow.translated_source.as_ref())
    }),
    Column::wide("TRANSLATED-DESTINATION", |f| {
        translated(&f.flow, f.flow.translated_destination.as_ref())
    }),
    Column::wide("EGRESS", |f| decision::text(f.flow.egress.as_ref())),
    Column::wide("INGRESS", |f| decision::text(f.flow.ingress.as_ref())),
    Column::wide("BEYOND", |f| decision::text(f.flow.beyond.as_ref())),
    Column::new("EXPLANATION", |f| f.flow.explanation.clone()),
];

/// Shows the agent's history.
pub(crate) async fn run(args: FlowsArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let format = args.output.format;
    let request = ListFlowsRequest {
        filter: Some(filter(args)),
    };
    let document: Flows = answer("ListFlows", agent.list_flows(request)).await?.into();
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
    let text = |flow: kni_proto::runtime::Flow| line(&flow.into(), format);
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
fn line(timed: &TimedFlow, format: Format) -> Result<String, Error> {
    match format {
        Format::Json => document::json_line(timed),
        Format::Yaml => Ok(format!("---\n{}", document::yaml(timed)?)),
        Format::Table => Ok(people(timed, false)),
        Format::Wide => Ok(people(timed, true)),
    }
}

fn people(TimedFlow { time, flow }: &TimedFlow, wide: bool) -> String {
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
    let packet = if flow.source.ip.is_empty() && flow.destination.ip.is_empty() {
        format!("ethertype 0x{:04x}", flow.ethertype)
    } else {
        let source = cell(&peer(flow, &flow.source));
        format!(
            "{} {source}{} > {}",
            cell(&flow.protocol),
            via(flow, flow.translated_source.as_ref()),
            target(flow)
        )
    };
    format!("{packet} len {}", flow.length)
}

fn target(flow: &Flow) -> String {
    let mut text = cell(&peer(flow, &flow.destination));
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

/// Address, port and pod, as far as they are known: `10.0.0.1:4000 (shop/web-0)`. Not escaped.
fn peer(flow: &Flow, peer: &Peer) -> String {
    if peer.ip.is_empty() {
        return String::new();
    }
    let socket = packet::socket(&peer.ip, port(flow, peer.port));
    match name(&peer.pod_namespace, &peer.pod_name) {
        pod if pod.is_empty() => socket,
        pod => format!("{socket} ({pod})"),
    }
}

fn translated(flow: &Flow, address: Option<&SocketAddress>) -> String {
    address
        .map(|address| packet::socket(&address.ip, port(flow, address.port)))
        .unwrap_or_default()
}

fn port(flow: &Flow, port: u32) -> Option<u32> {
    packet::has_ports(&flow.protocol, (flow.source.port, flow.destination.port)).then_some(port)
}

fn name(namespace: &str, name: &str) -> String {
    match (namespace, name) {
        ("", name) => name.to_owned(),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}
