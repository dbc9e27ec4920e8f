//! Converts rows of the flow tables to views for operators.

use std::{net::IpAddr, time::Duration};

use kni_common::{address::to_ip, flow::FlowValue};
use kni_model::EndpointId;

use super::{
    clock::Ticks,
    tuple::{Tuple, translated},
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

/// One row of a flow table: one direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowRecordView {
    /// Number of the network.
    pub network: u32,
    /// The tuple of incoming packets.
    pub tuple: FlowTuple,
    /// Their tuple after translation, where they are translated.
    pub translated: Option<FlowTuple>,
    /// One of `kni_common::flow::KIND_*`.
    pub kind: u16,
    /// Bits `kni_common::flow::FLOW_*`.
    pub flags: u16,
    /// Time since the last packet.
    pub age: Duration,
    /// Age at which the row expires.
    pub lifetime: Duration,
    /// The current endpoint of the source address.
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
        protocol: u8::try_from(tuple.protocol).unwrap_or(u8::MAX),
    }
}

/// A row at `now` (jiffies).
pub(super) fn view(
    tuple: &Tuple,
    value: &FlowValue,
    now: u64,
    ticks: Ticks,
    source: Option<EndpointId>,
) -> FlowRecordView {
    FlowRecordView {
        network: tuple.network,
        tuple: shown(tuple),
        translated: translated(tuple, value).as_ref().map(shown),
        kind: value.kind,
        flags: value.flags,
        age: ticks.duration(now.saturating_sub(value.last_seen)),
        lifetime: ticks.duration(value.lifetime.into()),
        source,
        destination: (value.destination != 0).then_some(EndpointId(value.destination)),
    }
}
