//! Translates a packet to a backend of the Service that it is for.

use kni_common::{
    Verdict,
    address::words,
    endpoint::{EndpointRow, is_older},
    flow::{FLOW_CLOSED, FLOW_REPLIED, FLOW_SERVICE, FlowValue},
};

use crate::{
    flow,
    packet::{Class, Packet},
    service,
    work::Work,
};

/// Rewrites the destination in `work.to`.
#[inline(always)]
pub(super) fn translate(row: &EndpointRow, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    if packet.class == Class::Open
        && let Some(found) = flow::lookup(row.network, packet)
        && keeps_backend(row, packet, found)
    {
        work.event.service = service::id(row.network, packet, work);
        work.to.destination = words(found.destination);
        work.to.ports = found.ports.word();
        return Ok(());
    }
    service::choose(row.network, packet, work)
}

/// A retransmitted SYN stays with the first one's backend: the reply may be in flight.
#[inline(always)]
fn keeps_backend(row: &EndpointRow, packet: &Packet, found: &FlowValue) -> bool {
    let second = flow::is_second(packet);
    let (_, sender) = found.sender(second);
    found.flags & (FLOW_SERVICE | FLOW_REPLIED | FLOW_CLOSED) == FLOW_SERVICE
        && !found.is_reply(second)
        && !is_older(sender.generation, row.incarnation)
        && flow::is_live(found)
}
