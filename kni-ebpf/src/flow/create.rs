//! Writes the two rows of a new flow.

use kni_common::{
    Verdict,
    address::{bytes, words},
    flow::{FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_HAIRPIN, FLOW_REPLY, FLOW_TO, FlowValue, Ports, swapped},
};

use super::{find_reply, is_live, new_lifetime, put, share::take_share, tuple::Tuple};
use crate::{
    config,
    packet::{Packet, TCP},
    time::jiffies,
};

/// The content of a new flow's rows, from the point of view of its first packet.
pub struct NewFlow {
    /// Kind of the packet's own direction.
    pub kind: u16,
    /// Kind of the reply direction.
    pub reply_kind: u16,
    /// Bits `FLOW_*` of both rows that do not depend on the direction.
    pub flags: u16,
    /// The sender, 0 for none.
    pub source: u32,
    /// Its generation.
    pub source_generation: u32,
    /// The receiver, 0 for none.
    pub destination: u32,
    /// Its generation.
    pub destination_generation: u32,
    /// Network of the reply's row.
    pub reply_network: u32,
    /// Whether to refuse the flow if another live connection has the reply's row ([`Verdict::TupleInUse`]).
    pub refuse_taken: bool,
}

/// Takes one flow of the opener's share and writes both rows, replacing those of an earlier flow with the same tuple.
/// `to` is the packet after translation, or the packet itself.
#[inline(never)]
pub fn create(network: u32, packet: &Packet, to: &Packet, new: &NewFlow) -> Result<(), Verdict> {
    if new.refuse_taken && is_taken(network, packet, to) {
        return Err(Verdict::TupleInUse);
    }
    // Only now: a refused flow takes no share. It is returned to the same endpoint, see `share::owner`.
    let opener = if new.source == 0 { new.destination } else { new.source };
    take_share(opener)?;
    if config::is_dry_run() {
        return Ok(());
    }
    let last_seen = jiffies();
    let lifetime = new_lifetime(packet);
    let mut flags = new.flags;
    let mut reply_flags = new.flags | FLOW_REPLY;
    if packet.destination != to.destination || packet.ports != to.ports {
        flags |= FLOW_TO;
        reply_flags |= FLOW_FROM;
    }
    let mut reply_address = packet.destination;
    if packet.source != to.source {
        flags |= FLOW_FROM;
        reply_flags |= FLOW_TO;
        reply_address = packet.source;
    }
    // The reply's row first: a reply can only follow the packet that the other row lets through.
    let mut value = FlowValue {
        last_seen,
        source_generation: new.destination_generation,
        destination_generation: new.source_generation,
        destination: new.source,
        lifetime,
        kind: new.reply_kind,
        flags: reply_flags,
        ports: Ports::from_word(swapped(packet.ports)),
        address: bytes(reply_address),
    };
    put_reply(new.reply_network, to, &value)?;
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
fn put_reply(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).reversed().put(network, packet.v4, value)
}

/// Whether the replies to `to`, the translation of `packet`, belong to another live connection: the same ports of the
/// pod towards the same backend, once through a service and once directly, have the same replies.
#[inline(always)]
fn is_taken(network: u32, packet: &Packet, to: &Packet) -> bool {
    let Some(reply) = find_reply(network, to) else {
        return false;
    };
    let alive = packet.protocol == TCP
        && reply.flags & (FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED) == FLOW_REPLY | FLOW_CONFIRMED
        && is_live(reply);
    // The reply's address after translation: its source as the pod knows it, or its destination where the pod reaches
    // itself.
    let expected = if reply.flags & FLOW_HAIRPIN == 0 {
        packet.destination
    } else {
        packet.source
    };
    let same = words(reply.address) == expected && reply.ports.word() == swapped(packet.ports);
    alive && !same
}
