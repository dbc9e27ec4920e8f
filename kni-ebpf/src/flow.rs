//! Finds, refreshes and re-evaluates the rows of the flow table.
//!
//! A flow has an *original* direction, which opened it, and a *reply* direction. Each has a row, keyed by the tuple of
//! its packets; from either row the other one's key follows ([`other`]), translated or not.

mod create;
mod share;
mod state;
mod tuple;

use kni_common::{
    Verdict,
    address::bytes,
    flow::{FLOW_CLOSED, FLOW_FIN, FLOW_REPLY, FlowValue, KIND_UPLINK, Ports, swapped},
    uplink::OUTSIDE,
};

pub(crate) use self::state::flow_change_state;
use self::tuple::Tuple;
pub use self::{
    create::{NewFlow, create},
    share::take_share,
    state::changes_state,
};
use crate::{
    config, endpoint,
    packet::{Packet, TCP},
    time::jiffies,
};

/// The row of the packet's own direction.
#[inline(always)]
pub fn find(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    Tuple::of(packet).find(network, packet.v4)
}

/// [`find`] with a stack frame of its own, off the path of most packets.
#[inline(never)]
pub fn lookup(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    find(network, packet)
}

/// The row of the opposite direction of an untranslated packet, or of a packet after translation.
#[inline(never)]
pub fn find_reply(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    Tuple::of(packet).reversed().find(network, packet.v4)
}

/// Turns a packet into one of the opposite direction.
#[inline(always)]
pub fn reverse(packet: &mut Packet) {
    (packet.source, packet.destination) = (packet.destination, packet.source);
    packet.ports = swapped(packet.ports);
}

/// Applies the row's translation to `to`, a copy of the row's packet.
#[inline(always)]
pub fn translate(to: &mut Packet, row: &FlowValue) {
    translate_if::<true>(to, row);
}

/// [`translate`].
///
/// VERIFIER: not inlined: its callers have no stack left on Linux 6.1.
#[inline(never)]
pub fn translate_out_of_line(to: &mut Packet, row: &FlowValue) {
    translate(to, row);
}

/// [`translate`], where `BOTH` is false for flows that are not translated at both ends.
#[inline(always)]
pub fn translate_if<const BOTH: bool>(to: &mut Packet, row: &FlowValue) {
    let translated = Tuple::of(to).translated_if::<BOTH>(row);
    to.source = translated.source;
    to.destination = translated.destination;
    to.ports = translated.ports;
}

/// The row of the opposite direction, translated or not.
#[inline(never)]
pub fn other(network: u32, packet: &Packet, row: &FlowValue) -> Option<&'static mut FlowValue> {
    let network = network_of_other(network, row)?;
    Tuple::of(packet).translated(row).reversed().find(network, packet.v4)
}

/// The network of the other row: a flow across the uplink has one row in its pod's network and the other one outside.
#[inline(always)]
fn network_of_other(network: u32, row: &FlowValue) -> Option<u32> {
    if row.kind != KIND_UPLINK {
        return Some(network);
    }
    if network == OUTSIDE {
        endpoint::row(row.destination).map(|there| there.network)
    } else {
        Some(OUTSIDE)
    }
}

/// Whether the row has not expired.
#[inline(always)]
pub fn is_live(row: &FlowValue) -> bool {
    // Another CPU may have written a newer time than this one knows.
    jiffies().saturating_sub(row.last_seen) <= u64::from(row.lifetime)
}

/// Writes the row of the reply to `packet` unless a live flow has its tuple; false in that case. `spare_closed` also
/// spares a connection that both sides have closed, whose peer may still remember it (`TIME_WAIT`).
#[inline(never)]
pub fn claim_reply(network: u32, packet: &Packet, value: &FlowValue, spare_closed: bool) -> bool {
    let reply = Tuple::of(packet).reversed();
    if reply.claim(network, packet.v4, value) {
        return true;
    }
    let Some(found) = reply.find(network, packet.v4) else {
        return false;
    };
    // A connection that both sides have closed may be followed by another one at once (RFC 6191) where no better port
    // is free; its last packets get a moment.
    let is_replaceable = !spare_closed && found.flags & FLOW_CLOSED != 0 && jiffies() != found.last_seen;
    if is_live(found) && !is_replaceable {
        return false;
    }
    // Between the two calls another CPU may do the same for another flow: one of them wins the insert, the other
    // continues.
    reply.remove(network, packet.v4);
    reply.claim(network, packet.v4, value)
}

/// Removes the row that [`claim_reply`] wrote.
#[inline(never)]
pub fn release_reply(network: u32, packet: &Packet) -> i32 {
    Tuple::of(packet).reversed().remove(network, packet.v4);
    0
}

/// Writes the row of the packet's own direction.
#[inline(never)]
pub fn put(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).put(network, packet.v4, value)
}

/// Lifetime of a flow without a reply, in jiffies.
#[inline(always)]
pub fn new_lifetime(packet: &Packet) -> u32 {
    match config::get() {
        Some(config) if packet.protocol == TCP => config.tcp_new,
        Some(config) => config.other_new,
        None => 0,
    }
}

/// Recreates the row of the reply direction from the original one: either may be evicted without the other. Not for
/// translated flows, whose replies do not lead to the original row.
#[inline(never)]
pub fn repair(
    network: u32,
    reply: &Packet,
    original: &FlowValue,
    kind: u16,
    destination: u32,
) -> Option<&'static mut FlowValue> {
    if !config::is_dry_run() {
        let value = FlowValue {
            last_seen: original.last_seen,
            source_generation: original.destination_generation,
            destination_generation: original.source_generation,
            destination,
            lifetime: original.lifetime,
            kind,
            flags: original.flags & !FLOW_FIN | FLOW_REPLY,
            ports: Ports::from_word(reply.ports),
            address: bytes(reply.source),
        };
        put(network, reply, &value).ok()?;
    }
    find(network, reply)
}

/// Writes the generations of a re-evaluated flow into both rows.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn renew(network: u32, packet: &Packet, row: &mut FlowValue, source: u32, destination: u32) -> i32 {
    if config::is_dry_run() {
        return 0;
    }
    let last_seen = jiffies();
    if let Some(opposite) = other(network, packet, row) {
        opposite.source_generation = destination;
        opposite.destination_generation = source;
        opposite.last_seen = last_seen;
    }
    row.source_generation = source;
    row.destination_generation = destination;
    row.last_seen = last_seen;
    0
}

/// Whether the row or the other direction's is live: a flow that only one side uses stays live.
#[inline(always)]
pub fn lives(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    is_live(row) || other(network, packet, row).is_some_and(|opposite| is_live(opposite))
}

/// Refreshes the row; writes at most once per jiffy, so that two CPUs rarely share the cache line. True about once a
/// second, when [`refresh_other`] is due.
#[inline(always)]
pub fn refresh(row: &mut FlowValue) -> bool {
    /// A power of two of jiffies, about a second.
    const WHILE_SHIFT: u32 = 8;
    let now = jiffies();
    let before = row.last_seen;
    if before == now || config::is_dry_run() {
        return false;
    }
    row.last_seen = now;
    (before ^ now) >> WHILE_SHIFT != 0
}

/// Refreshes the row of the other direction: where only one side sends, nothing else would, and its tuple would be
/// reused.
#[inline(always)]
pub fn refresh_other(network: u32, packet: &Packet, row: &FlowValue) {
    let _always_zero = flow_refresh_other(network, packet, row);
}

/// [`refresh_other`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_refresh_other(network: u32, packet: *const Packet, row: *const FlowValue) -> u32 {
    // SAFETY: the caller's own memory, or a row that stays mapped; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let row = unsafe { row.as_ref() };
    if let (Some(packet), Some(row)) = (packet, row)
        && let Some(opposite) = other(network, packet, row)
    {
        opposite.last_seen = row.last_seen;
    }
    0
}
