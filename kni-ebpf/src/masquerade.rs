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
    flow::{FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_REPLY, FLOW_TO, FlowValue, KIND_UPLINK, Ports, swapped},
    uplink::{EGRESS_REFUSED, Masquerade, OUTSIDE},
};

use crate::{
    config, flow,
    maps::MASQUERADE,
    packet::{Packet, SCTP, TCP, UDP},
    skb, time, translate,
    work::Work,
};

/// Ports to try before a flow is refused. With four of five ports in use, one flow in a thousand is refused.
const TRIES: u32 = 32;

/// Of those, tries that spare connections which have just been closed.
const SPARING_TRIES: u32 = 8;

/// Distance between two tries: odd and large, so that they do not meet the same cluster of used ports.
const STRIDE: u32 = 1237;

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

/// Whether the address that a flow of the endpoint left with is still the one that the endpoint leaves with. Another
/// node may have the former one by now.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn keeps_source(endpoint: u32, v4: bool, found: &FlowValue) -> Result<(), Verdict> {
    let source = source(entry(endpoint)?, v4)?;
    let recorded = words(found.address);
    let same = if found.flags & (FLOW_TO | FLOW_FROM) == FLOW_TO | FLOW_FROM {
        // Only IPv4 has both addresses in one row, the source first.
        let ([.., last], [first, ..]) = (source, recorded);
        last == first
    } else {
        source == recorded
    };
    if same { Ok(()) } else { Err(Verdict::EgressAddress) }
}

/// Two IPv4 addresses in one row, see `FlowValue::address`.
#[inline(always)]
const fn both(source: [u32; 4], destination: [u32; 4]) -> [u8; 16] {
    let ([.., source], [.., destination]) = (source, destination);
    bytes([source, destination, 0, 0])
}

/// Reuses the address and port of an unanswered flow whose first packet is retransmitted: the reply may be in flight.
/// Leaves the translated packet in `work.to`; false where no such flow exists.
#[inline(never)]
pub fn reuse(packet: &Packet, work: &mut Work) -> bool {
    let Some(own) = flow::lookup(work.event.network, packet) else {
        return false;
    };
    let is_unanswered = own.kind == KIND_UPLINK
        // A flow through a service chooses a backend again: the earlier one has not replied.
        && own.flags & (FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED | FLOW_FROM | FLOW_TO) == FLOW_FROM
        && !is_through_service(packet, work)
        && own.source_generation == work.event.generation
        && flow::is_live(own);
    // An egress address may have been added or removed since.
    let current = entry(work.event.endpoint).and_then(|out| source(out, packet.v4));
    if !is_unanswered || current != Ok(words(own.address)) {
        return false;
    }
    flow::translate(&mut work.to, own);
    match flow::find_reply(OUTSIDE, &work.to) {
        Some(reply)
            if reply.kind == KIND_UPLINK
                && reply.destination == work.event.endpoint
                && reply.ports.word() == swapped(packet.ports)
                && words(reply.address) == packet.source =>
        {
            if !config::is_dry_run() {
                reply.last_seen = time::jiffies();
            }
            true
        }
        _ => {
            work.to = *packet;
            false
        }
    }
}

/// Finds an address and a port for the packet, and leaves the translated packet in `work.to`. On success the row of the
/// reply exists: its owner owns the port.
#[inline(never)]
pub fn claim(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let out = entry(work.event.endpoint)?;
    work.to.source = source(out, packet.v4)?;
    describe_reply(packet, work);
    if config::is_dry_run() {
        return Ok(());
    }
    let first = u32::from(out.first);
    let range = u32::from(out.last).wrapping_sub(first).wrapping_add(1);
    // SAFETY: a helper without arguments.
    let mut offset = unsafe { bpf_get_prandom_u32() };
    // VERIFIER: a bounded loop.
    for number in 0..TRIES {
        offset = offset.wrapping_add(STRIDE);
        let port = first + offset.checked_rem(range).ok_or(Verdict::MasqueradeAddress)?;
        if take(ctx, packet, work, port, number < SPARING_TRIES) {
            return Ok(());
        }
    }
    Err(Verdict::MasqueradePorts)
}

/// Whether the packet can be masqueraded: a row has room for one IPv6 address.
///
/// VERIFIER: not inlined, to save stack.
#[inline(never)]
pub fn is_possible(packet: &Packet, work: &Work) -> bool {
    translate::has_ports(packet.protocol) && (packet.v4 || !is_through_service(packet, work))
}

/// Prepares the translation in the reply's row for [`take`].
///
/// VERIFIER: stored in memory that no packet of this kind needs otherwise, to save stack.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the three flags are below 256")]
fn describe_reply(packet: &Packet, work: &mut Work) {
    const ONE_END: u8 = (FLOW_REPLY | FLOW_TO) as u8;
    const BOTH_ENDS: u8 = (FLOW_REPLY | FLOW_TO | FLOW_FROM) as u8;
    if is_through_service(packet, work) {
        work.inner.source = words(both(packet.destination, packet.source));
        work.inner.tcp_flags = BOTH_ENDS;
    } else {
        work.inner.source = packet.source;
        work.inner.tcp_flags = ONE_END;
    }
}

/// Tries one port.
#[inline(never)]
fn take(ctx: &TcContext, packet: &Packet, work: &mut Work, port: u32, spare_closed: bool) -> bool {
    #[expect(clippy::cast_possible_truncation, reason = "at most the last port")]
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
    let reply = FlowValue {
        last_seen: time::jiffies(),
        source_generation: 0,
        destination_generation: work.event.generation,
        destination: work.event.endpoint,
        lifetime: flow::new_lifetime(packet),
        kind: KIND_UPLINK,
        flags: work.inner.tcp_flags.into(),
        ports: Ports::from_word(swapped(packet.ports)),
        address: bytes(work.inner.source),
    };
    flow::claim_reply(OUTSIDE, &work.to, &reply, spare_closed)
}

/// Writes the row of the pod's direction. Releases the port on failure.
#[inline(never)]
pub fn open(packet: &Packet, work: &Work) -> Result<(), Verdict> {
    if config::is_dry_run() {
        return Ok(());
    }
    let own = FlowValue {
        last_seen: time::jiffies(),
        source_generation: work.event.generation,
        destination_generation: 0,
        destination: 0,
        lifetime: flow::new_lifetime(packet),
        kind: KIND_UPLINK,
        flags: if is_through_service(packet, work) {
            FLOW_TO | FLOW_FROM
        } else {
            FLOW_FROM
        },
        ports: Ports::from_word(work.to.ports),
        address: if is_through_service(packet, work) {
            both(work.to.source, work.to.destination)
        } else {
            bytes(work.to.source)
        },
    };
    let written = flow::put(work.event.network, packet, &own);
    if written.is_err() {
        flow::release_reply(OUTSIDE, &work.to);
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
    if mtu(ctx) != 0 {
        return Err(Verdict::TooBig);
    }
    translate::hop(ctx, v4)
}

/// The uplink's MTU where the packet is larger, else 0.
#[inline(always)]
pub fn mtu(ctx: &TcContext) -> u32 {
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
