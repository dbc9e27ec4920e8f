//! Changes the state of flows: first reply, established, FIN, RST.

use kni_common::{
    config::Config,
    flow::{
        END_LOCAL, END_STACK, FLOW_AGED, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND,
        FLOW_FROM_SECOND, FLOW_REPLIED, FLOW_RESET, FLOW_TRANSLATED, FlowValue,
    },
};

use super::{new_lifetime, other, remove_other, share, tuple::Tuple};
use crate::{
    atomic, config,
    packet::{FIN, Packet, RST, SCTP, SYN, TCP, UDP},
};

const FINS: u16 = FLOW_FIN_FIRST | FLOW_FIN_SECOND;

/// What the state of a flow depends on in a packet.
///
/// VERIFIER: by reference, so that each use loads it again: of values in registers the verifier would keep what each
/// comparison shows, and the ways through the functions would multiply.
pub(crate) trait Headers {
    /// Transport protocol number.
    fn protocol(&self) -> u8;
    /// Flags of TCP, else 0.
    fn tcp_flags(&self) -> u8;
}

impl Headers for Packet {
    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.protocol
    }

    #[inline(always)]
    fn tcp_flags(&self) -> u8 {
        self.tcp_flags
    }
}

/// A packet that is not parsed further: the protocol and, in the next byte, the flags.
#[derive(Clone, Copy)]
pub struct Step(u32);

impl Step {
    /// Of this protocol, with these flags of TCP.
    #[inline(always)]
    #[must_use]
    pub const fn new(protocol: u8, tcp_flags: u8) -> Self {
        Self(protocol as u32 | (tcp_flags as u32) << 8)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "two bytes")]
impl Headers for Step {
    #[inline(always)]
    fn protocol(&self) -> u8 {
        self.0 as u8
    }

    #[inline(always)]
    fn tcp_flags(&self) -> u8 {
        (self.0 >> 8) as u8
    }
}

/// Whether the packet may change the state of its flow; `later`: it is in a later window than the one before.
#[inline(always)]
pub fn changes_state(packet: &Packet, row: &FlowValue, later: bool) -> bool {
    may_change(packet, row, later, || super::is_second(packet))
}

#[inline(always)]
fn may_change(packet: &impl Headers, row: &FlowValue, later: bool, is_second: impl FnOnce() -> bool) -> bool {
    if packet.tcp_flags() & (FIN | RST) != 0 || row.flags & (FINS | FLOW_CLOSED | FLOW_RESET) != 0 {
        return true;
    }
    if row.flags & FLOW_CONFIRMED != 0 {
        return false;
    }
    let replied = row.flags & FLOW_REPLIED != 0;
    if row.is_reply(is_second()) {
        !replied
    } else {
        replied && (packet.protocol() != UDP || later)
    }
}

/// Changes the state of an untranslated flow between this node and another one, if the packet does. Such a flow has one
/// row, which no packet removes, since what its other end makes of the packet is not known here. `second`: the packet's
/// sender is the second end.
#[inline(always)]
pub fn advance(row: &mut FlowValue, step: Step, second: bool, later: bool) {
    if may_change(&step, row, later, || second) {
        flow_advance(row, step.0, u32::from(second), u32::from(later));
    }
}

/// [`advance`], for a [`Step`].
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_advance(row: *mut FlowValue, step: u32, second: u32, later: u32) -> u32 {
    // SAFETY: a row that stays mapped; see `flow::find`.
    let (Some(row), Some(config)) = (unsafe { row.as_mut() }, config::get()) else {
        return 0;
    };
    let (step, second) = (Step(step), second != 0);
    let (from, _) = row.sender(second);
    if step.tcp_flags() & RST != 0 {
        set(row, reset_bit(from));
        row.lifetime = config.tcp_closing;
        return 0;
    }
    let bits = progress(row, &step, second, later != 0);
    let mut flags = set(row, bits) | bits;
    if flags & FLOW_RESET != 0 && from == END_LOCAL {
        clear(row, FLOW_RESET);
        flags &= !FLOW_RESET;
    }
    // Each end's FIN is set by an atomic operation: whichever comes last sees both.
    if flags & FINS == FINS && flags & FLOW_CLOSED == 0 {
        flags |= FLOW_CLOSED;
        set(row, FLOW_CLOSED);
    }
    row.lifetime = lifetime(config, &step, flags);
    0
}

/// Changes the flow's state; `later`: the packet is in a later window than the one before. Not on the path of most
/// packets.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn flow_change_state(
    network: u32,
    packet: *const Packet,
    row: *mut FlowValue,
    later: u32,
) -> u32 {
    // SAFETY: the caller's own memory, or a row that stays mapped; nothing else touches it meanwhile.
    let packet = unsafe { packet.as_ref() };
    // SAFETY: as above.
    let row = unsafe { row.as_mut() };
    let (Some(packet), Some(row)) = (packet, row) else {
        return 0;
    };
    let (Some(config), false) = (config::get(), config::is_dry_run()) else {
        return 0;
    };
    let second = Tuple::of(packet).is_second();
    let opposite = other(network, packet, row);
    if packet.tcp_flags & RST != 0 {
        return reset(config, network, packet, row, opposite, second);
    }
    let bits = progress(row, packet, second, later != 0);
    let before = set(row, bits);
    let mut flags = before | bits;
    if before & FLOW_CLOSED != 0 && packet.tcp_flags & (FIN | SYN) == 0 && ends_at_once(row) {
        return remove(network, packet, row, opposite.is_some(), second);
    }
    let (kind, _) = row.sender(second);
    if flags & FLOW_RESET != 0 && kind == END_LOCAL {
        clear(row, FLOW_RESET);
        flags &= !FLOW_RESET;
    }
    if let Some(opposite) = &opposite {
        // Each direction's FIN is set in both rows by atomic operations: whichever comes last sees both. Whether an RST
        // still counts depends on this row alone.
        flags |= set(opposite, mirrored(bits, row, opposite)) & !(FINS | FLOW_RESET);
        if flags & FLOW_RESET == 0 {
            clear(opposite, FLOW_RESET);
        }
    }
    let both = flags & FINS == FINS
        || opposite
            .as_ref()
            .is_some_and(|opposite| flags_of(opposite) & FINS == FINS);
    if both {
        flags |= FLOW_CLOSED;
        set(row, FLOW_CLOSED);
    }
    row.lifetime = lifetime(config, packet, flags);
    if let Some(opposite) = opposite {
        if both {
            set(opposite, FLOW_CLOSED);
        }
        opposite.lifetime = row.lifetime;
    }
    0
}

/// The flags that the packet adds.
#[inline(always)]
fn progress(row: &FlowValue, packet: &impl Headers, second: bool, later: bool) -> u16 {
    let flags = row.flags;
    let mut bits = 0;
    if row.is_reply(second) {
        bits |= FLOW_REPLIED;
        if !matches!(packet.protocol(), TCP | UDP | SCTP) {
            bits |= FLOW_CONFIRMED;
        }
    } else if flags & FLOW_REPLIED != 0 {
        // The opener continues after the reply.
        let confirms = match packet.protocol() {
            TCP => packet.tcp_flags() & SYN == 0,
            UDP => later && flags & FLOW_AGED != 0,
            _ => true,
        };
        if confirms {
            bits |= FLOW_CONFIRMED;
        }
        if later && packet.protocol() == UDP {
            bits |= FLOW_AGED;
        }
    }
    if packet.tcp_flags() & FIN != 0 {
        bits |= if second { FLOW_FIN_SECOND } else { FLOW_FIN_FIRST };
    }
    bits
}

/// The bits for the row of the opposite direction, whose ends may be sorted the other way.
#[inline(always)]
fn mirrored(bits: u16, row: &FlowValue, opposite: &FlowValue) -> u16 {
    // In both rows the sender of the row's own packets: the same way round where the second end sends in one of them
    // and the first end in the other.
    if (row.flags ^ opposite.flags) & FLOW_FROM_SECOND != 0 || bits & FINS == 0 {
        bits
    } else {
        bits ^ FINS
    }
}

#[inline(always)]
fn lifetime(config: &Config, packet: &impl Headers, flags: u16) -> u32 {
    if flags & (FLOW_CLOSED | FLOW_RESET) != 0 {
        return config.tcp_closing;
    }
    match packet.protocol() {
        TCP if flags & FLOW_CONFIRMED != 0 => config.tcp_established,
        SCTP if flags & FLOW_CONFIRMED != 0 => config.sctp_established,
        UDP if flags & FLOW_CONFIRMED != 0 => config.udp_established,
        UDP if flags & FLOW_REPLIED != 0 => config.udp_replied,
        TCP | UDP | SCTP => new_lifetime(config, packet.protocol()),
        _ if flags & FLOW_REPLIED != 0 => config.other_established,
        _ => config.other_new,
    }
}

/// Whether nothing outside of the node, and no other part of it, remembers the connection.
#[inline(always)]
const fn ends_at_once(row: &FlowValue) -> bool {
    row.first_kind == END_LOCAL && row.second_kind == END_LOCAL
}

/// RST. Between endpoints of the node nothing follows: the rows are removed at once, so that a pod with many short
/// connections evicts no other pod's. One from outside of the node may be forged, which the pod's TCP detects by its
/// sequence number (RFC 5961): the flow keeps its rows, for the time of a closed connection.
#[inline(always)]
fn reset(
    config: &Config,
    network: u32,
    packet: &Packet,
    row: &mut FlowValue,
    opposite: Option<&mut FlowValue>,
    second: bool,
) -> u32 {
    let ((from, _), (to, _)) = (row.sender(second), row.receiver(second));
    if from == END_LOCAL && matches!(to, END_LOCAL | END_STACK) {
        return remove(network, packet, row, opposite.is_some(), second);
    }
    let bit = reset_bit(from);
    set(row, bit);
    row.lifetime = config.tcp_closing;
    if let Some(opposite) = opposite {
        set(opposite, bit);
        opposite.lifetime = config.tcp_closing;
    }
    0
}

/// What an RST from an end of this kind leaves of a flow that keeps its rows.
#[inline(always)]
const fn reset_bit(from: u8) -> u16 {
    if from == END_LOCAL { FLOW_CLOSED } else { FLOW_RESET }
}

/// Removes the rows of a flow that has ended, and returns its share. `has_opposite`: the row of the opposite direction
/// is of the same flow.
#[inline(always)]
fn remove(network: u32, packet: &Packet, row: &FlowValue, has_opposite: bool, second: bool) -> u32 {
    share::release(share::of_row(row, second, packet.protocol));
    if has_opposite {
        remove_other(network, packet, row);
    }
    Tuple::of(packet).remove(network, packet.v4);
    0
}

/// The word of the row that holds the kinds, the flags and the ports: programs on several CPUs change the flags. It is
/// aligned, as rows of maps are aligned to eight bytes, and every other access to it while a packet is processed is a
/// read.
#[inline(always)]
fn word(row: &FlowValue) -> *mut u64 {
    const { assert!(core::mem::offset_of!(FlowValue, first_kind) == 8) };
    (&raw const row.first_kind).cast_mut().cast()
}

/// Gives the row of an untranslated flow the state of `new`, a flow with the same ends and generations: a repeated SYN,
/// or a client's port that is in use again. Cheaper than another row. False where the row is of another flow, or was
/// changed meanwhile.
#[inline(always)]
pub(super) fn reopen(row: &mut FlowValue, new: &FlowValue) -> bool {
    // Without the ports, which only a translated flow has.
    const HALF: u64 = in_word(u16::MAX) | u64::from_ne_bytes([0xff, 0xff, 0, 0, 0, 0, 0, 0]);
    const KINDS: u64 = HALF & !in_word(u16::MAX);
    // SAFETY: an aligned word of a row that stays mapped; see `word`.
    let before = unsafe { core::ptr::read_volatile(word(row)) };
    // SAFETY: as above: `new` is in a row of a map as well.
    let after = unsafe { core::ptr::read_volatile(word(new)) } & HALF;
    let same = before & (KINDS | in_word(FLOW_TRANSLATED)) == after & KINDS
        && row.first.id == new.first.id
        && row.first.generation == new.first.generation
        && row.second.id == new.second.id
        && row.second.generation == new.second.generation;
    // SAFETY: as above.
    if !same || unsafe { atomic::compare_exchange(word(row), before, after) } != before {
        return false;
    }
    row.last_seen = new.last_seen;
    row.lifetime = new.lifetime;
    true
}

/// The flags as they are now.
#[inline(always)]
fn flags_of(row: &FlowValue) -> u16 {
    // SAFETY: an aligned field of a row that stays mapped.
    unsafe { core::ptr::read_volatile(&raw const row.flags) }
}

/// Flags at their place in the word.
#[inline(always)]
const fn in_word(bits: u16) -> u64 {
    let [a, b] = bits.to_ne_bytes();
    u64::from_ne_bytes([0, 0, a, b, 0, 0, 0, 0])
}

/// The inverse of [`in_word`].
#[inline(always)]
const fn flags_in(word: u64) -> u16 {
    let [_, _, a, b, ..] = word.to_ne_bytes();
    u16::from_ne_bytes([a, b])
}

/// Sets bits and returns the flags before.
#[inline(always)]
fn set(row: &FlowValue, bits: u16) -> u16 {
    // SAFETY: an aligned word of a row that stays mapped.
    flags_in(unsafe { atomic::fetch_or(word(row), in_word(bits)) })
}

#[inline(always)]
fn clear(row: &FlowValue, bits: u16) {
    // SAFETY: an aligned word of a row that stays mapped.
    unsafe { atomic::fetch_and(word(row), !in_word(bits)) };
}
