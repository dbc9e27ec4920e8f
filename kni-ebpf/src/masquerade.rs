//! Gives flows that leave the node an address and a port of its own.

use core::mem::size_of;

use aya_ebpf::{
    bindings::{BPF_F_CURRENT_NETNS, bpf_sock, bpf_sock_tuple},
    helpers::{bpf_check_mtu, bpf_get_prandom_u32, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
    programs::TcContext,
};
use kni_common::{
    Verdict,
    address::{bytes, mapped, words},
    flow::{FLOW_REPLY, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FROM, FLOW_TO, FlowValue, KIND_UPLINK, Ports, swapped},
    uplink::{Masquerade, OUTSIDE},
};

use crate::{
    config, flow,
    maps::MASQUERADE,
    packet::{Packet, SCTP, TCP, UDP},
    skb,
    story::Work,
    translate,
};

/// Ports that are tried before a flow is refused. With four of five ports taken, one flow in a thousand is.
const TRIES: u32 = 32;

/// Of those, tries that leave alone what has just been closed.
const PATIENT_TRIES: u32 = 8;

/// Distance between two tries: odd and large, so that they do not meet the same crowd.
const STRIDE: u32 = 1237;

/// The entry for the endpoint, if it may leave the node this way.
#[inline(always)]
fn way_out(endpoint: u32) -> Result<&'static Masquerade, Verdict> {
    match MASQUERADE.get(endpoint) {
        Some(out) if out.last != 0 => Ok(out),
        _ => Err(Verdict::MasqueradeAddress),
    }
}

/// The address that what leaves gets.
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

/// Whether the packet goes to a service whose backend is outside the node: its flow is translated at both ends.
#[inline(always)]
fn is_through_service(packet: &Packet, work: &Work) -> bool {
    packet.destination != work.to.destination
}

/// Two IPv4 addresses in one row, as `FlowValue::address` says.
#[inline(always)]
const fn both(source: [u32; 4], destination: [u32; 4]) -> [u8; 16] {
    let ([.., source], [.., destination]) = (source, destination);
    bytes([source, destination, 0, 0])
}

/// A first packet that is sent again, because nobody answered, keeps its address and port: the answer may be on its way.
/// Leaves the packet as it goes out in `work.to`; false where there is nothing to keep.
#[inline(never)]
pub fn keep(packet: &Packet, work: &mut Work) -> bool {
    let Some(own) = flow::lookup(work.story.network, packet) else {
        return false;
    };
    let is_unanswered = own.kind == KIND_UPLINK
        // One through a service chooses again: its answer has not come either.
        && own.flags & (FLOW_REPLY | FLOW_CONFIRMED | FLOW_CLOSED | FLOW_FROM | FLOW_TO) == FLOW_FROM
        && !is_through_service(packet, work)
        && own.source_generation == work.story.generation
        && flow::is_live(own);
    // An egress address may have come or gone since.
    let still = way_out(work.story.endpoint).and_then(|out| source(out, packet.v4));
    if !is_unanswered || still != Ok(words(own.address)) {
        return false;
    }
    flow::translate(&mut work.to, own);
    match flow::find_answer(OUTSIDE, &work.to) {
        Some(answer)
            if answer.kind == KIND_UPLINK
                && answer.destination == work.story.endpoint
                && answer.ports.word() == swapped(packet.ports)
                && words(answer.address) == packet.source =>
        {
            if !config::is_dry_run() {
                answer.last_seen = flow::now();
            }
            true
        }
        _ => {
            work.to = *packet;
            false
        }
    }
}

/// Finds an address and a port for the packet, and leaves the packet as it goes out in `work.to`. The row of the answer
/// is written by then: whoever has it has the port.
#[inline(never)]
pub fn claim(ctx: &TcContext, packet: &Packet, work: &mut Work) -> Result<(), Verdict> {
    let out = way_out(work.story.endpoint)?;
    work.to.source = source(out, packet.v4)?;
    describe_answer(packet, work);
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
        if take(ctx, packet, work, port, number < PATIENT_TRIES) {
            return Ok(());
        }
    }
    Err(Verdict::MasqueradePorts)
}

/// Whether the packet can leave with another source: a row has room for one IPv6 address.
///
/// VERIFIER: not inlined, for the stack's sake.
#[inline(never)]
pub fn is_possible(packet: &Packet, work: &Work) -> bool {
    translate::has_ports(packet.protocol) && (packet.v4 || !is_through_service(packet, work))
}

/// What the answer's row says of the translation, for [`take`].
///
/// VERIFIER: kept in memory that no packet of this kind needs otherwise, for the stack's sake.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the three flags are below 256")]
fn describe_answer(packet: &Packet, work: &mut Work) {
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
fn take(ctx: &TcContext, packet: &Packet, work: &mut Work, port: u32, patient: bool) -> bool {
    #[expect(clippy::cast_possible_truncation, reason = "at most the last port")]
    let [high, low] = (port as u16).to_be_bytes();
    // A service's backend has a port of its own.
    let [_, _, c, d] = work.to.ports.to_ne_bytes();
    work.to.ports = match packet.protocol {
        TCP | UDP | SCTP => u32::from_ne_bytes([high, low, c, d]),
        // An echo's identifier, in the place of the source port.
        _ => u32::from_ne_bytes([high, low, 0, 0]),
    };
    if has_socket(ctx, &work.to) {
        return false;
    }
    let answer = FlowValue {
        last_seen: flow::now(),
        source_generation: 0,
        destination_generation: work.story.generation,
        destination: work.story.endpoint,
        lifetime: flow::new_lifetime(packet),
        kind: KIND_UPLINK,
        flags: work.inner.tcp_flags.into(),
        ports: Ports::from_word(swapped(packet.ports)),
        address: bytes(work.inner.source),
    };
    flow::claim_answer(OUTSIDE, &work.to, &answer, patient)
}

/// Writes the row of the pod's direction. The port goes back when that fails.
#[inline(never)]
pub fn open(packet: &Packet, work: &Work) -> Result<(), Verdict> {
    if config::is_dry_run() {
        return Ok(());
    }
    let own = FlowValue {
        last_seen: flow::now(),
        source_generation: work.story.generation,
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
    let written = flow::put(work.story.network, packet, &own);
    if written.is_err() {
        flow::unclaim_answer(OUTSIDE, &work.to);
    }
    written
}

/// An address and a port of each end as the kernel's socket lookup takes them, from the peer's point of view.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ends<T> {
    source: T,
    destination: T,
    ports: u32,
}

/// Whether a socket of the node would take the answer.
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
    // SAFETY: a reference that the lookup gave, given back once.
    unsafe { bpf_sk_release(found.cast()) };
    true
}

/// Whether the way out takes a packet of this size, or each of those that it stands for; and one hop less to live.
#[inline(never)]
pub fn depart(ctx: &TcContext, v4: bool) -> Result<(), Verdict> {
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
    // Above zero: too big. Below: there is no such interface, which the redirect will find out too.
    if result > 0 { mtu } else { 0 }
}
