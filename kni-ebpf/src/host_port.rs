//! Finds the pods that ports of the node lead to, for packets from outside and from pods of any node.

use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    endpoint::EndpointRow,
    uplink::{HostPortKey, HostPortValue},
};

use crate::{
    endpoint,
    maps::HOST_PORTS,
    packet::{Packet, SCTP, TCP, UDP},
};

/// The pod and port that the packet's destination leads to.
#[inline(always)]
pub fn find(packet: &Packet) -> Option<HostPortValue> {
    if !matches!(packet.protocol, TCP | UDP | SCTP) {
        return None;
    }
    let [_, _, high, low] = packet.ports.to_ne_bytes();
    let row = HOST_PORTS.get_ptr(HostPortKey {
        address: bytes(packet.destination),
        port: [high, low],
        protocol: u16::from(packet.protocol),
    })?;
    // SAFETY: memory of the table, copied once: the kernel may reuse a removed row for another key at once. The caller
    // compares the incarnation with the endpoint's.
    Some(unsafe { row.read_volatile() })
}

/// The same for a packet of a pod, where the destination leads to a pod of its own network, with that pod's row. Ports
/// that lead to other networks are for hosts outside only: a flow between pods has one network.
#[inline(always)]
pub fn find_within(network: u32, packet: &Packet) -> Result<Option<(HostPortValue, &'static EndpointRow)>, Verdict> {
    let Some(mapping) = find(packet) else {
        return Ok(None);
    };
    let Some(there) = endpoint::row(mapping.endpoint) else {
        return Ok(None);
    };
    if there.network != network {
        return Ok(None);
    }
    if there.incarnation != mapping.incarnation || !endpoint::is_ready(there) {
        return Err(Verdict::DestinationNotReady);
    }
    Ok(Some((mapping, there)))
}

/// Sets the destination of `to` to the pod and its port, in network byte order. False when it has no address of the
/// family.
#[inline(always)]
pub fn translate(packet: &Packet, there: &EndpointRow, port: [u8; 2], to: &mut Packet) -> bool {
    let [a, b, ..] = packet.ports.to_ne_bytes();
    let [c, d] = port;
    to.ports = u32::from_ne_bytes([a, b, c, d]);
    to.destination = if packet.v4 {
        mapped(u32::from_ne_bytes(there.ipv4))
    } else {
        words(there.ipv6)
    };
    to.destination != [0; 4] && to.destination != mapped(0)
}
