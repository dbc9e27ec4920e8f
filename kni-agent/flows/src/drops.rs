//! Converts drops to drop events, for subscribers to drops alone.

use kni_dataplane::FlowRecord;
use kni_model::{flow_view::FlowView, view::DropEventView};

/// Ports are as the program read them: for an ICMP echo, the identifier.
pub(super) fn event(flow: &FlowView, record: &FlowRecord) -> DropEventView {
    DropEventView {
        time_ns: flow.time_ns,
        network: flow.network.parse().ok(),
        pod: flow.pod.clone(),
        ifname: flow.ifname.clone(),
        direction: flow.direction,
        reason: flow.verdict,
        source: flow.source.ip,
        destination: flow.destination.ip,
        protocol: flow.protocol,
        source_port: u16::from_be_bytes(record.event.ports.source),
        destination_port: u16::from_be_bytes(record.event.ports.destination),
        length: flow.length,
        ethertype: flow.ethertype,
    }
}
