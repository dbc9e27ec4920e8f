//! Converts rows of the flow tables to views for operators.

use std::{net::IpAddr, time::Duration};

use kni_common::{
    address::to_ip,
    flow::{END_LOCAL, FlowEnd, FlowValue},
};
use kni_model::EndpointId;

use super::{
    clock::Ticks,
    tuple::{Tuple, sends_second, translated},
};

/// Addresses and ports of one direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowTuple {
    /// The sender.
    pub source: IpAddr,
    /// The receiver.
    pub destination: IpAddr,
    /// Port of the sender, host byte order; the identifier of an ICMP echo.
    pub source_port: u16,
    /// Port of the receiver, in the same form.
    pub destination_port: u16,
    /// Transport protocol number.
    pub protocol: u8,
}

/// One row of a flow table: a flow, or one direction of a translated flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowRecordView {
    /// Number of the network.
    pub network: u32,
    /// The tuple of incoming packets, of a flow without translation in its original direction.
    pub tuple: FlowTuple,
    /// Their tuple after translation, where they are translated.
    pub translated: Option<FlowTuple>,
    /// Kind of the sender, one of `kni_common::flow::END_*`.
    pub from: u8,
    /// Kind of the receiver.
    pub to: u8,
    /// Bits `kni_common::flow::FLOW_*`.
    pub flags: u16,
    /// Time since the last packet.
    pub age: Duration,
    /// Age at which the row expires.
    pub lifetime: Duration,
    /// The sending endpoint.
    pub source: Option<EndpointId>,
    /// The receiving endpoint.
    pub destination: Option<EndpointId>,
}

fn shown(tuple: &Tuple) -> FlowTuple {
    FlowTuple {
        source: to_ip(tuple.source),
        destination: to_ip(tuple.destination),
        source_port: u16::from_be_bytes(tuple.ports.source),
        destination_port: u16::from_be_bytes(tuple.ports.destination),
        protocol: tuple.protocol,
    }
}

/// The endpoint of an end.
fn endpoint((kind, end): (u8, FlowEnd)) -> Option<EndpointId> {
    (kind == END_LOCAL).then_some(EndpointId(end.id))
}

/// A row at `now` (jiffies, low 32 bits).
pub(super) fn view(tuple: &Tuple, value: &FlowValue, now: u32, ticks: Ticks) -> FlowRecordView {
    let second = sends_second(value);
    let (sender, receiver) = (value.sender(second), value.receiver(second));
    FlowRecordView {
        network: tuple.network,
        tuple: shown(tuple),
        translated: translated(tuple, value).as_ref().map(shown),
        from: sender.0,
        to: receiver.0,
        flags: value.flags,
        age: ticks.duration(value.age(now).into()),
        lifetime: ticks.duration(value.lifetime.into()),
        source: endpoint(sender),
        destination: endpoint(receiver),
    }
}
