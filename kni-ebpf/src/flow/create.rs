//! Writes the two rows of a new flow.

use kni_common::{
    Verdict,
    address::{bytes, words},
    flow::{FLOW_REPLY, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_HAIRPIN, FLOW_TO, FlowValue, Ports, swapped},
};

use super::{Tuple, find_answer, is_live, new_lifetime, now, put, take_share};
use crate::{
    config,
    packet::{Packet, TCP},
};

/// What is written for a new flow, in the terms of its first packet.
pub struct NewFlow {
    /// Kind of the packet's own direction.
    pub kind: u16,
    /// Kind of the answer's direction.
    pub answer_kind: u16,
    /// Bits `FLOW_*` of both rows that are not told by the direction.
    pub flags: u16,
    /// The sender, 0 for none.
    pub source: u32,
    /// Its generation.
    pub source_generation: u32,
    /// The receiver, 0 for none.
    pub destination: u32,
    /// Its generation.
    pub destination_generation: u32,
    /// Network of the answer's row.
    pub answer_network: u32,
    /// Whether a connection that lives and is not this one keeps the answer's row ([`Verdict::TupleInUse`]).
    pub careful: bool,
}

/// Takes one flow of the opener's share and writes both rows, replacing what an earlier flow with the same tuple left. `to` is the packet behind its translation,
/// or the packet itself.
#[inline(never)]
pub fn create(network: u32, packet: &Packet, to: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    if new.careful && is_taken(network, packet, to) {
        return Err(Verdict::TupleInUse);
    }
    // Only now: what is refused takes nothing. The same endpoint gets it back, see `share::owner`.
    let opener = if new.source == 0 { new.destination } else { new.source };
    take_share(opener)?;
    if config::is_dry_run() {
        return Ok(());
    }
    let last_seen = now();
    let lifetime = new_lifetime(packet);
    let mut flags = new.flags;
    let mut answer_flags = new.flags | FLOW_REPLY;
    if packet.destination != to.destination || packet.ports != to.ports {
        flags |= FLOW_TO;
        answer_flags |= FLOW_FROM;
    }
    let mut answer_address = packet.destination;
    if packet.source != to.source {
        flags |= FLOW_FROM;
        answer_flags |= FLOW_TO;
        answer_address = packet.source;
    }
    // The answer's row first: an answer can only follow the packet that the other row lets through.
    let mut value = FlowValue {
        last_seen,
        source_generation: new.destination_generation,
        destination_generation: new.source_generation,
        destination: new.source,
        lifetime,
        kind: new.answer_kind,
        flags: answer_flags,
        ports: Ports::from_word(swapped(packet.ports)),
        address: bytes(answer_address),
    };
    put_answer(new.answer_network, to, &value)?;
    value.source_generation = new.source_generation;
    value.destination_generation = new.destination_generation;
    value.destination = new.destination;
    value.kind = new.kind;
    value.flags = flags;
    value.ports = Ports::from_word(to.ports);
    value.address = bytes(to.destination);
    put(network, packet, &value)
}

#[inline(never)]
fn put_answer(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).reversed().put(network, packet.v4, value)
}

/// Whether the answers to `to`, which `packet` becomes, are those of a connection that lives and is not this one: the
/// same ports of the pod towards the same backend, once through a service and once past it, have the same answers.
#[inline(always)]
fn is_taken(network: u32, packet: &Packet, to: &Packet) -> bool {
    let Some(answer) = find_answer(network, to) else {
        return false;
    };
    let alive = packet.protocol == TCP
        && answer.flags & (FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED) == FLOW_REPLY | FLOW_CONFIRMED
        && is_live(answer);
    // What the answer becomes: its source as it was asked for, or, where the pod asked itself, its destination.
    let asked = if answer.flags & FLOW_HAIRPIN == 0 {
        packet.destination
    } else {
        packet.source
    };
    let same = words(answer.address) == asked && answer.ports.word() == swapped(packet.ports);
    alive && !same
}
