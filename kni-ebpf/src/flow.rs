//! The flow table: both directions' rows, found, kept alive and judged again.
//!
//! The direction that opened a flow is the *original* one, the other its *answer*. Each has a row, found by the key as it
//! stands in the packet; from either row the other one's key follows ([`other`]), translated or not.

mod create;
mod share;
mod tuple;
mod turn;

use aya_ebpf::helpers::bpf_jiffies64;
use kni_common::{
    Verdict,
    address::bytes,
    flow::{FLOW_REPLY, FLOW_CLOSED, FLOW_FIN, FlowValue, KIND_UPLINK, Ports, swapped},
    uplink::OUTSIDE,
};

use self::tuple::Tuple;
pub(crate) use self::turn::flow_turn;
pub use self::{
    create::{NewFlow, create},
    share::take_share,
    turn::is_turning,
};
use crate::{
    config, endpoint,
    packet::{Packet, TCP},
};

/// The row of the packet's own direction.
#[inline(always)]
pub fn find(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    Tuple::of(packet).find(network, packet.v4)
}

/// [`find`] with a stack of its own, for what is not on the path of most packets.
#[inline(never)]
pub fn lookup(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    find(network, packet)
}

/// The row of the opposite direction of an untranslated packet, or of one behind its translation.
#[inline(never)]
pub fn find_answer(network: u32, packet: &Packet) -> Option<&'static mut FlowValue> {
    Tuple::of(packet).reversed().find(network, packet.v4)
}

/// Turns a packet into one of the opposite direction.
#[inline(always)]
pub fn reverse(packet: &mut Packet) {
    (packet.source, packet.destination) = (packet.destination, packet.source);
    packet.ports = swapped(packet.ports);
}

/// Does to `to`, a copy of the row's packet, what the row's translation asks for.
#[inline(always)]
pub fn translate(to: &mut Packet, row: &FlowValue) {
    translate_if::<true>(to, row);
}

/// [`translate`].
///
/// VERIFIER: not inlined, for the stack of callers that have none left on Linux 6.1.
#[inline(never)]
pub fn translate_apart(to: &mut Packet, row: &FlowValue) {
    translate(to, row);
}

/// [`translate`], where `BOTH` is false of flows that are not translated at both ends.
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

/// A flow that passes the uplink has one row in its pod's network and the other one outside.
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

/// Whether the row has been used recently enough to mean anything.
#[inline(always)]
pub fn is_live(row: &FlowValue) -> bool {
    // Another CPU may have written a newer time than this one knows.
    now().saturating_sub(row.last_seen) <= u64::from(row.lifetime)
}

/// Writes the row of the answer to `packet` where nothing else that means anything has its tuple; false otherwise.
/// `patient`: also where both sides have ended their connection, but the other end may still remember it (`TIME_WAIT`).
#[inline(never)]
pub fn claim_answer(network: u32, packet: &Packet, value: &FlowValue, patient: bool) -> bool {
    let answer = Tuple::of(packet).reversed();
    if answer.claim(network, packet.v4, value) {
        return true;
    }
    let Some(found) = answer.find(network, packet.v4) else {
        return false;
    };
    // A connection that both sides have ended may be followed by another one at once (RFC 6191), where there is nothing
    // better; its last packets are given a moment.
    let settled = !patient && found.flags & FLOW_CLOSED != 0 && now() != found.last_seen;
    if is_live(found) && !settled {
        return false;
    }
    // Between the two another CPU may do the same for another flow: one of them wins the insert, the other tries on.
    answer.forget(network, packet.v4);
    answer.claim(network, packet.v4, value)
}

/// Takes back what [`claim_answer`] wrote.
#[inline(never)]
pub fn unclaim_answer(network: u32, packet: &Packet) -> i32 {
    Tuple::of(packet).reversed().forget(network, packet.v4);
    0
}

/// Writes the row of the packet's own direction.
#[inline(never)]
pub fn put(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).put(network, packet.v4, value)
}

/// jiffies that a flow lives without an answer.
#[inline(always)]
pub fn new_lifetime(packet: &Packet) -> u32 {
    match config::get() {
        Some(config) if packet.protocol == TCP => config.tcp_new,
        Some(config) => config.other_new,
        None => 0,
    }
}

/// Writes the row of the answer again, from the original one: either may be evicted without the other. Not for
/// translated flows, whose answers do not lead to the original.
#[inline(never)]
pub fn repair(
    network: u32,
    answer: &Packet,
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
            ports: Ports::from_word(answer.ports),
            address: bytes(answer.source),
        };
        put(network, answer, &value).ok()?;
    }
    find(network, answer)
}

/// Puts the generations of a flow that was judged again into both rows.
///
/// VERIFIER: returns a number for the reason of `count::dropped`.
#[inline(never)]
pub fn renew(network: u32, packet: &Packet, row: &mut FlowValue, source: u32, destination: u32) -> i32 {
    if config::is_dry_run() {
        return 0;
    }
    let last_seen = now();
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

/// Whether the row, or that of the other direction, is live: a flow that only one side uses lives on.
#[inline(always)]
pub fn lives(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    is_live(row) || other(network, packet, row).is_some_and(|opposite| is_live(opposite))
}

/// Remembers that the flow lives; writes at most once per jiffy, so that two CPUs rarely share the cache line. True once
/// in a while: it is time for [`refresh_other`].
#[inline(always)]
pub fn refresh(row: &mut FlowValue) -> bool {
    /// A power of two of jiffies, about a second.
    const WHILE_SHIFT: u32 = 8;
    let now = now();
    let before = row.last_seen;
    if before == now || config::is_dry_run() {
        return false;
    }
    row.last_seen = now;
    (before ^ now) >> WHILE_SHIFT != 0
}

/// Remembers in the row of the other direction that the flow lives: where only one side sends, nobody else would, and
/// the other row's tuple would go to somebody else.
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

/// jiffies: inlined by the kernel, 2 ns.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_jiffies64() }
}
