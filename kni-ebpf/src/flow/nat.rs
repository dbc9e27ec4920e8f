//! Keeps the rows of flows across the uplink, as packets from outside find them. Such a row owns its tuple: for a
//! masqueraded flow, a port of the node towards one server.
//!
//! A row that is not there is written by one CPU only (`BPF_NOEXIST`). A dead one is taken over by the CPU that changes
//! its time by a compare-and-exchange. The tables evict nothing, and no program removes a row: the agent does, when the
//! row has been dead for a while.

use aya_ebpf::bindings::{BPF_EXIST, BPF_NOEXIST};
use kni_common::{
    flow::{END_LOCAL, FLOW_CLOSED, FlowEnd, FlowValue},
    uplink::OUTSIDE,
};

use super::{scratch, tuple::Tuple};
use crate::{
    atomic, config,
    maps::{NAT4, NAT6},
    packet::Packet,
    time,
};

/// The lifetime of a row between its take-over and the write of the new flow. With the lifetime of the dead flow, or
/// its flag of a closed one, the row could be taken over again a tick later, before it is written: two flows would have
/// it.
const CLAIMED: u32 = u32::MAX;

/// The row of a packet from outside.
#[inline(always)]
pub fn find(packet: &Packet) -> Option<&'static mut FlowValue> {
    row(Tuple::of(packet), packet.v4)
}

/// [`find`] with a stack frame of its own, off the path of most packets.
#[inline(never)]
pub fn lookup(packet: &Packet) -> Option<&'static mut FlowValue> {
    find(packet)
}

/// The row of the replies to a packet to outside.
#[inline(never)]
pub fn find_reply(packet: &Packet) -> Option<&'static mut FlowValue> {
    row(Tuple::of(packet).reversed(), packet.v4)
}

/// The row of packets from outside with this tuple.
#[inline(always)]
pub(super) fn row(tuple: Tuple<'_>, v4: bool) -> Option<&'static mut FlowValue> {
    let value = if v4 {
        NAT4.get_ptr_mut(tuple.key4(OUTSIDE))
    } else {
        NAT6.get_ptr_mut(tuple.key6(OUTSIDE)?)
    };
    // SAFETY: the memory of a row of a preallocated table stays mapped. Another flow may take it over while the program
    // runs: callers copy what they need once and check the copy against the endpoint's row, and a lost refresh does no
    // harm.
    value.map(|row| unsafe { &mut *row })
}

/// Takes the tuple of the replies to `packet`, for the flow of the reply's row in scratch memory. `spare_closed` spares
/// a connection that both sides have closed, whose peer may still remember it (`TIME_WAIT`). False where another flow
/// has it, or the table is full.
#[inline(always)]
pub fn claim_reply(packet: &Packet, spare_closed: bool) -> bool {
    flow_claim_reply(packet, u32::from(spare_closed)) != 0
}

/// [`claim_reply`].
///
/// VERIFIER: a global function, see `global`: it is called in a loop.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn flow_claim_reply(packet: *const Packet, spare_closed: u32) -> u32 {
    // SAFETY: the caller's own memory; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    let (Some(packet), Some(rows)) = (packet, scratch::rows()) else {
        return 0;
    };
    let taken = claim(Tuple::of(packet).reversed(), packet.v4, &rows.reply, spare_closed != 0);
    u32::from(taken)
}

/// Takes the tuple of `packet`, which came from outside, for the flow of `value`, or renews the row of the same pod and
/// translation. False as [`claim_reply`].
#[inline(never)]
pub(super) fn claim_own(packet: &Packet, value: &FlowValue) -> bool {
    let tuple = Tuple::of(packet);
    if row(tuple, packet.v4).is_some_and(|found| is_same(found, value)) && put(tuple, packet.v4, value, BPF_EXIST) {
        return true;
    }
    claim(tuple, packet.v4, value, false)
}

/// Ends the flow whose row [`claim_reply`] wrote.
#[inline(never)]
pub fn release_reply(packet: &Packet) -> i32 {
    if let Some(found) = find_reply(packet) {
        found.lifetime = 0;
    }
    0
}

/// [`claim_reply`] for packets from outside with this tuple.
#[inline(always)]
pub(super) fn claim(tuple: Tuple<'_>, v4: bool, value: &FlowValue, spare_closed: bool) -> bool {
    if !config::is_dry_run() && put(tuple, v4, value, BPF_NOEXIST) {
        return true;
    }
    let Some(found) = row(tuple, v4) else {
        // A dry run writes nothing: the tuple is free.
        return config::is_dry_run();
    };
    let now = time::now();
    // SAFETY: an aligned word of a row that stays mapped: the time of the last packet, and the lifetime.
    let word: *mut u64 = (&raw mut *found).cast();
    // SAFETY: as above.
    let seen = unsafe { core::ptr::read_volatile(word) };
    let [last_seen, lifetime] = halves(seen);
    let age = now.wrapping_sub(last_seen);
    let is_new = age == 0 || age & (1 << 31) != 0;
    // A connection that both sides have closed may be followed by another one at once (RFC 6191) where no better port
    // is free; its last packets get a moment.
    let is_closed = found.flags & FLOW_CLOSED != 0 && !spare_closed;
    if is_new || lifetime == CLAIMED || (age <= lifetime && !is_closed) {
        return false;
    }
    if config::is_dry_run() {
        return true;
    }
    // Other CPUs may try the same for other flows: one of them finds the time that it has read. A row that was removed
    // and written again has a later one.
    // SAFETY: as above.
    if unsafe { atomic::compare_exchange(word, seen, whole([now, CLAIMED])) } != seen {
        return false;
    }
    put(tuple, v4, value, BPF_EXIST)
}

#[inline(always)]
fn put(tuple: Tuple<'_>, v4: bool, value: &FlowValue, how: u32) -> bool {
    if v4 {
        NAT4.insert(tuple.key4(OUTSIDE), value, how.into()).is_ok()
    } else {
        tuple
            .key6(OUTSIDE)
            .is_some_and(|key| NAT6.insert(key, value, how.into()).is_ok())
    }
}

/// Whether both rows are of the same pod and translation.
#[inline(always)]
fn is_same(one: &FlowValue, other: &FlowValue) -> bool {
    local_end(one).id == local_end(other).id
        && one.ports == other.ports
        && one.source == other.source
        && one.destination == other.destination
}

/// The pod's end of a flow across the uplink.
#[inline(always)]
pub(super) const fn local_end(row: &FlowValue) -> FlowEnd {
    if row.first_kind == END_LOCAL {
        row.first
    } else {
        row.second
    }
}

#[inline(always)]
const fn halves(word: u64) -> [u32; 2] {
    // SAFETY: both types have eight bytes, and every bit pattern is valid in both.
    unsafe { core::mem::transmute(word) }
}

/// The inverse of [`halves`].
#[inline(always)]
const fn whole(halves: [u32; 2]) -> u64 {
    // SAFETY: as in `halves`.
    unsafe { core::mem::transmute(halves) }
}

const _: () = {
    assert!(core::mem::offset_of!(FlowValue, last_seen) == 0);
    assert!(core::mem::offset_of!(FlowValue, lifetime) == 4);
};
