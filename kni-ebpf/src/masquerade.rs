//! Masquerades flows that leave the node: allocates a node address and a port for each.

use core::mem::size_of;

use aya_ebpf::{
    bindings::{BPF_F_CURRENT_NETNS, bpf_sock, bpf_sock_tuple},
    helpers::{bpf_check_mtu, bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    config::Config,
    flow::{
        END_LOCAL, END_OUTSIDE, FLOW_CLOSED, FLOW_FROM_SECOND, FLOW_OPENED_BY_SECOND, FLOW_REPLIED, FLOW_SERVICE,
        FLOW_TRANSLATED, FlowEnd, FlowValue, Ports, swapped,
    },
    uplink::{EGRESS_REFUSED, Masquerade},
};

use crate::{
    config,
    flow::{self, nat, scratch},
    maps::MASQUERADE,
    packet::{Packet, SCTP, TCP, UDP},
    shares, skb, time, translate,
    work::Work,
};

/// Ports to try before a flow is refused. With four of five ports in use, one flow in a thousand is refused.
const TRIES: u32 = 32;

/// Of those, tries that spare connections which have just been closed.
const SPARING_TRIES: u32 = 8;

/// The endpoint's masquerade row, if it is masqueraded.
#[inline(always)]
fn entry(endpoint: u32) -> Result<&'static Masquerade, Verdict> {
    match MASQUERADE.get(endpoint) {
        Some(out) if out.last != 0 => Ok(out),
        Some(out) if out.first == EGRESS_REFUSED => Err(Verdict::EgressAddress),
        _ => Err(Verdict::MasqueradeAddress),
    }
}

/// The source address outside the node.
#[inline(always)]
fn source(out: &Masquerade, v4: bool) -> Result<[u32; 4], Verdict> {
    let source = if v4 {
        mapped(u32::from_ne_bytes(out.ipv4))
    } else {
        words(out.ipv6)
    };
    if source == [0; 4] || source == mapped(0) {
        return Err(Verdict::MasqueradeAddress);
    }
    Ok(source)
}

/// Whether the packet goes to a service with an external backend: its flow is translated at both ends.
#[inline(always)]
fn is_through_service(packet: &Packet, work: &Work) -> bool {
    packet.destination != work.to.destination
}

/// Whether the address and port that a flow of the endpoint left with are still among those that the endpoint leaves
/// with. Another node may have the former ones by now. An error where nothing leaves. `ports`: those of a packet after
/// translation.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn keeps_source(endpoint: u32, v4: bool, left_with: &[u32; 4], ports: u32) -> Result<bool, Verdict> {
    let [high, low, ..] = ports.to_ne_bytes();
    let port = u16::from_be_bytes([high, low]);
    Ok(source(entry(endpoint)?, v4)? == *left_with && shares::has_port(endpoint, v4, left_with, port)?)
}

/// Reuses the address and port of an unanswered flow whose first packet is retransmitted: the reply may be in flight.
/// Leaves the translated packet in `work.to`; false where no such flow exists.
#[inline(never)]
pub fn reuse(packet: &Packet, work: &mut Work) -> bool {
    let Some(own) = flow::lookup(work.event.network, packet) else {
        return false;
    };
    let second = flow::is_second(packet);
    let ((from, sender), (to, _)) = (own.sender(second), own.receiver(second));
    let is_unanswered = from == END_LOCAL
        && to == END_OUTSIDE
        // A flow through a service chooses a backend again: the earlier one has not replied.
        && own.flags & (FLOW_REPLIED | FLOW_CLOSED | FLOW_TRANSLATED | FLOW_SERVICE) == FLOW_TRANSLATED
        && !own.is_reply(second)
        && !is_through_service(packet, work)
        && sender.generation == work.event.generation
        && flow::is_live(own);
    // An egress address may have been added or removed since.
    let current = || {
        let left_with = words(own.source);
        keeps_source(work.event.endpoint, packet.v4, &left_with, own.ports.word())
    };
    if !is_unanswered || current() != Ok(true) {
        return false;
    }
    flow::translate(&mut work.to, own);
    let reply_second = flow::is_reply_second(&work.to);
    match nat::find_reply(&work.to) {
        Some(reply)
            if is_owner(reply, reply_second, work.event.endpoint)
                && reply.ports.word() == swapped(packet.ports)
                && words(reply.destination) == packet.source =>
        {
            if !config::is_dry_run() {
                reply.last_seen = time::now();
            }
            true
        }
        _ => {
            work.to = *packet;
            false
        }
    }
}

/// Whether packets of the row are for the endpoint. `second`: their sender is the second end.
#[inline(always)]
fn is_owner(row: &FlowValue, second: bool, endpoint: u32) -> bool {
    let (kind, receiver) = row.receiver(second);
    kind == END_LOCAL && receiver.id == endpoint
}

/// Finds an address and a port for the packet, and leaves the translated packet in `work.to`. On success the row of the
/// reply exists: its owner owns the port.
#[inline(never)]
pub fn claim(ctx: &TcContext, config: &Config, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let out = entry(work.event.endpoint)?;
    work.to.source = source(out, packet.v4)?;
    let [first, last] = match shares::ports(work.event.endpoint, packet.v4, &work.to.source)? {
        0 => [u32::from(out.first), u32::from(out.last)],
        ports => [ports & 0xffff, ports >> 16],
    };
    let range = last.wrapping_sub(first).wrapping_add(1);
    // SAFETY: a helper without arguments.
    let mut offset = unsafe { bpf_get_prandom_u32() };
    // Distance between two tries, odd and another one for each flow: with one distance for all, used ports would form
    // clusters that later flows meet, and a unit of ports would be refused when two thirds of it are in use.
    let stride = (offset >> 16) | 1;
    // VERIFIER: a bounded loop.
    for number in 0..TRIES {
        offset = offset.wrapping_add(stride);
        let port = first + offset.checked_rem(range).ok_or(Verdict::MasqueradeAddress)?;
        if take(
            ctx,
            config,
            packet,
            work,
            port | u32::from(number < SPARING_TRIES) << 16,
        ) {
            return Ok(());
        }
    }
    Err(Verdict::MasqueradePorts)
}

/// Tries one port, in the lower half of `port`; the upper half: whether to spare connections that have just been
/// closed.
///
/// VERIFIER: one word, because a function has five arguments.
#[inline(never)]
fn take(ctx: &TcContext, config: &Config, packet: &Packet, work: &mut Work, port: u32) -> bool {
    let spare_closed = port >> 16 != 0;
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    let [high, low] = (port as u16).to_be_bytes();
    // A service's backend has its own port.
    let [_, _, c, d] = work.to.ports.to_ne_bytes();
    work.to.ports = match packet.protocol {
        TCP | UDP | SCTP => u32::from_ne_bytes([high, low, c, d]),
        // An echo's identifier, in place of the source port.
        _ => u32::from_ne_bytes([high, low, 0, 0]),
    };
    if has_socket(ctx, &work.to) {
        return false;
    }
    let Some(rows) = scratch::rows() else {
        return false;
    };
    let reply = &mut rows.reply;
    write(reply, config, packet, work);
    let second = flow::is_reply_second(&work.to);
    if second {
        // The pod, which opened the flow, is the first end, the peer the second one.
        reply.flags |= FLOW_FROM_SECOND;
    } else {
        swap(reply);
    }
    reply.ports = Ports::from_word(swapped(packet.ports));
    reply.source = bytes(packet.destination);
    reply.destination = bytes(packet.source);
    nat::claim_reply(&work.to, spare_closed)
}

/// Writes the part of both rows of a flow in which they are equal, with the pod as the first end.
///
/// VERIFIER: field by field; a struct literal would be assembled on the stack first.
#[inline(always)]
fn write(row: &mut FlowValue, config: &Config, packet: &Packet, work: &Work) {
    row.last_seen = time::now();
    row.lifetime = flow::new_lifetime(config, packet.protocol);
    row.first_kind = END_LOCAL;
    row.second_kind = END_OUTSIDE;
    row.flags = FLOW_TRANSLATED;
    if is_through_service(packet, work) {
        row.flags |= FLOW_SERVICE;
    }
    row.first = FlowEnd {
        id: work.event.endpoint,
        generation: work.event.generation,
    };
    row.second = flow::far_end(config.uplink, work.epoch);
}

/// Makes the pod, which opened the flow, the second end.
#[inline(always)]
const fn swap(row: &mut FlowValue) {
    (row.first_kind, row.second_kind) = (row.second_kind, row.first_kind);
    (row.first, row.second) = (row.second, row.first);
    row.flags |= FLOW_OPENED_BY_SECOND;
}

/// Writes the row of the pod's direction. Releases the port on failure.
#[inline(never)]
pub fn open(config: &Config, packet: &Packet, work: &Work) -> Result<(), Verdict> {
    if config::is_dry_run() {
        return Ok(());
    }
    let Some(rows) = scratch::rows() else {
        return Err(Verdict::FlowTableFull);
    };
    let own = &mut rows.own;
    write(own, config, packet, work);
    if flow::is_second(packet) {
        swap(own);
        own.flags |= FLOW_FROM_SECOND;
    }
    own.ports = Ports::from_word(work.to.ports);
    own.source = bytes(work.to.source);
    own.destination = bytes(work.to.destination);
    let written = flow::put(work.event.network, packet, own);
    if written.is_err() {
        nat::release_reply(&work.to);
    }
    written
}

/// An address and a port of each end in the form of the kernel's socket lookup, from the peer's point of view.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ends<T> {
    source: T,
    destination: T,
    ports: u32,
}

/// Whether a socket of the node would receive the reply.
#[inline(never)]
fn has_socket(ctx: &TcContext, to: &Packet) -> bool {
    if !matches!(to.protocol, TCP | UDP) {
        return false;
    }
    let ports = swapped(to.ports);
    if to.v4 {
        let ([.., source], [.., destination]) = (to.destination, to.source);
        let mut ends = Ends {
            source,
            destination,
            ports,
        };
        look_up(ctx, &raw mut ends, to.protocol)
    } else {
        let mut ends = Ends {
            source: to.destination,
            destination: to.source,
            ports,
        };
        look_up(ctx, &raw mut ends, to.protocol)
    }
}

#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes and a flag of the kernel's interface"
)]
fn look_up<T>(ctx: &TcContext, ends: *mut Ends<T>, protocol: u8) -> bool {
    let tuple: *mut bpf_sock_tuple = ends.cast();
    let size = size_of::<Ends<T>>() as u32;
    let here = BPF_F_CURRENT_NETNS as u64;
    let context = ctx.skb.skb.cast();
    let found: *mut bpf_sock = if protocol == TCP {
        // SAFETY: the tuple has the size of one of the kernel's two forms and outlives the call.
        unsafe { bpf_skc_lookup_tcp(context, tuple, size, here, 0) }
    } else {
        // SAFETY: as above.
        unsafe { bpf_sk_lookup_udp(context, tuple, size, here, 0) }
    };
    if found.is_null() {
        return false;
    }
    // SAFETY: a reference that the lookup returned, released once.
    unsafe { bpf_sk_release(found.cast()) };
    true
}

/// Checks the packet, or each segment that it stands for, against the uplink's MTU, and decrements the hop limit.
#[inline(never)]
pub fn prepare_egress(ctx: &TcContext, v4: bool) -> Result<(), Verdict> {
    let exceeded = exceeded_mtu(ctx);
    if exceeded != 0 {
        skb::set_exceeded_mtu(ctx, exceeded);
        return Err(Verdict::TooBig);
    }
    translate::hop(ctx, v4)
}

/// The uplink's MTU where the packet is larger, else 0.
#[inline(always)]
fn exceeded_mtu(ctx: &TcContext) -> u32 {
    const SEGMENTS: u64 = 1;
    let Some(config) = config::get() else {
        return 0;
    };
    let segments = if skb::is_gso(ctx) { SEGMENTS } else { 0 };
    let mut mtu = 0;
    // SAFETY: the context pointer that the kernel hands to the program, and a word that outlives the call.
    let result = unsafe { bpf_check_mtu(ctx.skb.skb.cast(), config.uplink, &raw mut mtu, 0, segments) };
    // Positive: too big. Negative: there is no such interface, which the redirect will find as well.
    if result > 0 { mtu } else { 0 }
}
