//! Finds, refreshes and re-evaluates the rows of the flow table.
//!
//! A flow has an *original* direction, which opened it, and a *reply* direction. An untranslated flow has one row. A
//! translated one has a row for each direction, keyed by the tuple of its packets; from either row the other one's key
//! follows ([`other`]).

mod create;
pub mod nat;
pub mod scratch;
mod share;
mod state;
mod tuple;

use kni_common::{
    Verdict,
    address::words,
    config::Config,
    flow::{END_OUTSIDE, FLOW_TRANSLATED, FlowEnd, FlowValue, WINDOW_SHIFT, swapped},
    uplink::OUTSIDE,
};

pub(crate) use self::state::flow_change_state;
use self::tuple::Tuple;
pub use self::{
    create::{NewFlow, create, create_outside, create_untranslated},
    share::{Account, take_share},
    state::{Step, advance, changes_state},
};
use crate::{
    config, endpoint,
    packet::{Packet, TCP},
    time,
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

/// Whether the packet's sender is the second end of its flow's key.
#[inline(always)]
pub fn is_second(packet: &Packet) -> bool {
    Tuple::of(packet).is_second()
}

/// [`is_second`] of the packet's replies.
#[inline(always)]
pub fn is_reply_second(packet: &Packet) -> bool {
    Tuple::of(packet).reversed().is_second()
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
    if row.flags & FLOW_TRANSLATED != 0 {
        to.source = words(row.source);
        to.destination = words(row.destination);
        to.ports = row.ports.word();
    }
}

/// [`translate`].
///
/// VERIFIER: not inlined: its callers have no stack left on Linux 6.1.
#[inline(never)]
pub fn translate_out_of_line(to: &mut Packet, row: &FlowValue) {
    translate(to, row);
}

/// The row of the opposite direction of a translated flow.
#[inline(never)]
pub fn other(network: u32, packet: &Packet, row: &FlowValue) -> Option<&'static mut FlowValue> {
    if row.flags & FLOW_TRANSLATED == 0 {
        return None;
    }
    let there = network_of_other(network, packet, row)?;
    let other = Tuple::of(packet).translated(row).reversed();
    let found = if there == OUTSIDE {
        nat::row(other, packet.v4)
    } else {
        other.find(there, packet.v4)
    }?;
    // Either row may have been replaced by another flow's.
    let across = there == OUTSIDE || network == OUTSIDE;
    let same = if across {
        is_pair(packet, row, found)
    } else {
        is_reverse(packet, found)
    };
    same.then_some(found)
}

/// Whether packets of `found` become packets in the opposite direction of `packet`.
#[inline(always)]
fn is_reverse(packet: &Packet, found: &FlowValue) -> bool {
    found.flags & FLOW_TRANSLATED != 0
        && found.ports.word() == swapped(packet.ports)
        && words(found.source) == packet.destination
        && words(found.destination) == packet.source
}

/// Whether `found`, the row at the key of the opposite direction, is of the same flow across the uplink as `row`, that
/// of `packet`.
#[inline(always)]
fn is_pair(packet: &Packet, row: &FlowValue, found: &FlowValue) -> bool {
    nat::local_end(found).id == nat::local_end(row).id
        && words(found.source) == packet.destination
        && words(found.destination) == packet.source
        && found.ports.word() == swapped(packet.ports)
}

/// Removes the row of the opposite direction of a translated flow within the network, which [`other`] has found.
#[inline(never)]
fn remove_other(network: u32, packet: &Packet, row: &FlowValue) -> i32 {
    Tuple::of(packet).translated(row).reversed().remove(network, packet.v4);
    0
}

/// The network of the other row: a flow across the uplink has one row in its pod's network and the other one outside.
#[inline(always)]
fn network_of_other(network: u32, packet: &Packet, row: &FlowValue) -> Option<u32> {
    if !is_across_uplink(row) {
        return Some(network);
    }
    if network == OUTSIDE {
        let (_, pod) = row.receiver(is_second(packet));
        endpoint::row(pod.id).map(|there| there.network)
    } else {
        Some(OUTSIDE)
    }
}

/// Whether the row has not expired.
#[inline(always)]
pub fn is_live(row: &FlowValue) -> bool {
    row.is_live(time::now())
}

/// Writes the row of the packet's own direction.
#[inline(never)]
pub fn put(network: u32, packet: &Packet, value: &FlowValue) -> Result<(), Verdict> {
    Tuple::of(packet).put(network, packet.v4, value)
}

/// Lifetime of a flow without a reply, in jiffies.
#[inline(always)]
pub const fn new_lifetime(config: &Config, protocol: u8) -> u32 {
    if protocol == TCP {
        config.tcp_new
    } else {
        config.other_new
    }
}

/// Writes the generations of a re-evaluated flow into its rows.
///
/// VERIFIER: returns a number for the same reason as `count::dropped`.
#[inline(never)]
pub fn renew(network: u32, packet: &Packet, row: &mut FlowValue, sender: u32, receiver: u32) -> i32 {
    if config::is_dry_run() {
        return 0;
    }
    let last_seen = time::now();
    let second = is_second(packet);
    if let Some(opposite) = other(network, packet, row) {
        // Its packets go the other way.
        let from_second = opposite.flags & kni_common::flow::FLOW_FROM_SECOND != 0;
        set_generations(opposite, from_second, receiver, sender);
        opposite.last_seen = last_seen;
    }
    set_generations(row, second, sender, receiver);
    row.last_seen = last_seen;
    0
}

#[inline(always)]
const fn set_generations(row: &mut FlowValue, second: bool, sender: u32, receiver: u32) {
    (row.first.generation, row.second.generation) = if second { (receiver, sender) } else { (sender, receiver) };
}

/// Whether the row or the other direction's is live: a flow that only one side uses stays live.
#[inline(always)]
pub fn lives(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    is_live(row) || other(network, packet, row).is_some_and(|opposite| is_live(opposite))
}

/// Refreshes the row; writes at most once per jiffy, so that two CPUs rarely share the cache line. True where the
/// packet is in a later window of 2^[`WINDOW_SHIFT`] jiffies than the one before: [`refresh_other`] is due.
#[inline(always)]
pub fn refresh(row: &mut FlowValue) -> bool {
    let now = time::now();
    let before = row.last_seen;
    if before == now || config::is_dry_run() {
        return false;
    }
    row.last_seen = now;
    (before ^ now) >> WINDOW_SHIFT != 0
}

/// Whether a packet now is in a later window than the one before, as [`refresh`] returns it.
#[inline(always)]
pub fn is_later(row: &FlowValue) -> bool {
    (row.last_seen ^ time::now()) >> WINDOW_SHIFT != 0
}

/// Refreshes the row of the other direction of a translated flow: where only one side sends, nothing else would, and
/// its tuple would be reused. Writes the row again where it was evicted. False where a flow across the uplink has lost
/// its tuple outside to another one: then it is over, and its row is removed.
#[inline(always)]
pub fn refresh_other(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    row.flags & FLOW_TRANSLATED == 0 || flow_refresh_other(network, packet, row) != 0
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
    let (Some(packet), Some(row)) = (packet, row) else {
        return 0;
    };
    if let Some(opposite) = other(network, packet, row) {
        if !config::is_dry_run() {
            opposite.last_seen = row.last_seen;
        }
        return 1;
    }
    if restore(network, packet, row) {
        return 1;
    }
    if network == OUTSIDE || !is_across_uplink(row) {
        return 1;
    }
    if !config::is_dry_run() {
        remove(network, packet);
    }
    0
}

/// VERIFIER: not inlined, to save stack.
#[inline(never)]
fn restore(network: u32, packet: &Packet, row: &FlowValue) -> bool {
    create::restore(network, packet, row)
}

/// Removes the row of the packet's own direction within its network.
#[inline(never)]
pub fn remove(network: u32, packet: &Packet) -> i32 {
    Tuple::of(packet).remove(network, packet.v4);
    0
}

/// Whether one end is an external host behind the uplink.
#[inline(always)]
const fn is_across_uplink(row: &FlowValue) -> bool {
    row.first_kind == END_OUTSIDE || row.second_kind == END_OUTSIDE
}

/// An end that is no endpoint of this node.
#[inline(always)]
pub const fn far_end(id: u32, epoch: u32) -> FlowEnd {
    FlowEnd { id, generation: epoch }
}
