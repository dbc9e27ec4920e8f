//! `knictl drops`: lists counted drops, and follows drops as they happen.

use std::future::Future;

use kni_proto::runtime::{DropCount, DropEvent, ListDropsRequest, WatchDropsRequest};

use crate::{
    cli::{DropsArgs, Format},
    client::{Runtime, answer},
    commands::{List, Outcome, stream},
    document,
    error::Error,
    event::Timed,
    packet,
    table::{Column, cell},
    terminal::Terminal,
};

const COLUMNS: &[Column<DropCount>] = &[
    Column::new("NETWORK", |d| d.network.clone()),
    Column::new("NAMESPACE", |d| d.pod_namespace.clone()),
    Column::new("POD", |d| d.pod_name.clone()),
    Column::new("IFNAME", |d| d.ifname.clone()),
    Column::new("DIRECTION", |d| d.direction.clone()),
    Column::new("REASON", |d| d.reason.clone()),
    Column::new("PACKETS", |d| d.count.unwrap_or_default().packets.to_string()),
    Column::new("BYTES", |d| d.count.unwrap_or_default().bytes.to_string()),
    Column::new("EXPLANATION", |d| d.explanation.clone()),
];

/// Shows the drops so far.
pub(crate) async fn run(args: &DropsArgs, agent: &mut Runtime, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let document = answer("ListDrops", agent.list_drops(ListDropsRequest {})).await?;
    let list = List {
        document: &document,
        rows: &document.drops,
        columns: COLUMNS,
        noun: "drops",
    };
    list.show(args.format(), terminal)
}

/// Shows each drop when it happens, until `stop` or until the agent ends the stream.
pub(crate) async fn follow(
    args: &DropsArgs,
    agent: &mut Runtime,
    terminal: &mut Terminal<'_>,
    stop: impl Future<Output = ()>,
) -> Result<Outcome, Error> {
    let format = args.format();
    let text = |event: DropEvent| line(&event.into(), format);
    stream::follow(
        "WatchDrops",
        agent.watch_drops(WatchDropsRequest {}),
        text,
        terminal,
        stop,
    )
    .await
}

/// One event: a line, or with YAML a document.
fn line(timed: &Timed<DropEvent>, format: Format) -> Result<String, Error> {
    match format {
        Format::Json => document::json_line(timed),
        Format::Yaml => Ok(format!("---\n{}", document::yaml(timed)?)),
        Format::Table | Format::Wide => Ok(people(timed)),
    }
}

fn people(Timed { time, event }: &Timed<DropEvent>) -> String {
    let fields = [
        time.clone(),
        cell(&event.network),
        format!("{}/{}", cell(&event.pod_namespace), cell(&event.pod_name)),
        cell(&event.ifname),
        cell(&event.direction),
        cell(&event.reason),
        tuple(event),
        format!("len {}", event.length),
        cell(&event.explanation),
    ];
    let line = fields.join(" ");
    if event.lost == 0 {
        line + "\n"
    } else {
        format!("{line} ({} events lost before)\n", event.lost)
    }
}

/// The packet: `TCP 10.0.0.1:80 > 10.0.0.2:8080`, or the ethertype where no address was read.
fn tuple(event: &DropEvent) -> String {
    if event.source.is_empty() && event.destination.is_empty() {
        return format!("ethertype 0x{:04x}", event.ethertype);
    }
    let ports = (event.source_port, event.destination_port);
    let has_ports = packet::has_ports(&event.protocol, ports);
    let source = packet::socket(&event.source, has_ports.then_some(event.source_port));
    let destination = packet::socket(&event.destination, has_ports.then_some(event.destination_port));
    format!("{} {source} > {destination}", cell(&event.protocol))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> DropEvent {
        DropEvent {
            time_ns: 1_700_000_000_123_456_789,
            network: "blue".to_owned(),
            pod_namespace: "shop".to_owned(),
            pod_name: "web-0".to_owned(),
            ifname: "eth0".to_owned(),
            direction: "from_pod".to_owned(),
            reason: "source_address".to_owned(),
            source: "fd00::5".to_owned(),
            destination: "fd00::6".to_owned(),
            protocol: "UDP".to_owned(),
            source_port: 5353,
            destination_port: 53,
            length: 90,
            lost: 0,
            ethertype: 0x86dd,
            explanation: "spoofed".to_owned(),
        }
    }

    const WHERE: &str = "2023-11-14T22:13:20.123456Z blue shop/web-0 eth0 from_pod source_address";

    #[test]
    fn event_is_one_line() {
        let text = people(&event().into());
        assert_eq!(
            text,
            format!("{WHERE} UDP [fd00::5]:5353 > [fd00::6]:53 len 90 spoofed\n")
        );
    }

    #[test]
    fn packets_without_ports_have_none() {
        let icmp = DropEvent {
            protocol: "ICMPv6".to_owned(),
            ..event()
        };
        assert_eq!(
            people(&icmp.into()),
            format!("{WHERE} ICMPv6 fd00::5 > fd00::6 len 90 spoofed\n")
        );
        let fragment = DropEvent {
            source_port: 0,
            destination_port: 0,
            ..event()
        };
        assert_eq!(
            people(&fragment.into()),
            format!("{WHERE} UDP fd00::5 > fd00::6 len 90 spoofed\n")
        );
        let arp = DropEvent {
            source: String::new(),
            destination: String::new(),
            ethertype: 0x0806,
            lost: 7,
            ..event()
        };
        assert_eq!(
            people(&arp.into()),
            format!("{WHERE} ethertype 0x0806 len 90 spoofed (7 events lost before)\n")
        );
    }

    #[test]
    fn hostile_names_stay_on_the_line() {
        let hostile = DropEvent {
            pod_name: "a\nb\u{1b}[2J".to_owned(),
            network: String::new(),
            ..event()
        };
        let text = people(&hostile.into());
        assert!(text.contains(" <none> shop/a\\nb\\u{1b}[2J eth0 "), "{text:?}");
        assert_eq!(text.lines().count(), 1);
    }
}
