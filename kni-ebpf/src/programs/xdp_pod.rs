//! Forwards packets of current UDP flows from pod to pod without an `sk_buff`, in networks with `spec.xdp`.
//!
//! - Hook: XDP of the host interface, before `from_pod`. Minimum kernel 5.18 (frames of more than one buffer).
//! - Reads `ENDPOINTS`; reads and refreshes `FLOWS4`, `FLOWS6`; counts.
//! - Order: endpoint, MAC addresses, headers, source and destination address, flow, receiver.
//! - Falls through to: `from_pod`, which handles every other packet and reports drops. So this program drops nothing,
//!   writes no flow and sends no event; `from_pod` would forward whatever it forwards.

use core::mem::size_of;

use aya_ebpf::{bindings::xdp_action::XDP_PASS, helpers::bpf_redirect, programs::XdpContext};
use kni_common::{
    Direction, IFINDEX_BASE, Verdict,
    address::{mapped, words},
    endpoint::{EndpointRow, FLAG_XDP},
    flow::{END_LOCAL, FLOW_TRANSLATED, FlowValue},
};

use crate::{
    count, endpoint, flow,
    neighbour::mac_words,
    packet::{Packet, UDP},
    skb::{ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    xdp,
};

/// An IPv4 header without options, and the UDP header after it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Udp4 {
    version_length: u8,
    tos: u8,
    total_length: u16,
    identification: u16,
    fragment: u16,
    ttl: u8,
    protocol: u8,
    checksum: u16,
    source: u32,
    destination: u32,
    ports: u32,
    length_checksum: u32,
}

/// An IPv6 header without extensions, and the UDP header after it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Udp6 {
    version_class_flow: u32,
    payload_length: u16,
    next_header: u8,
    hop_limit: u8,
    source: [u32; 4],
    destination: [u32; 4],
    ports: u32,
    length_checksum: u32,
}

/// Mask of the fragment word without "don't fragment": more fragments, and the offset.
const FRAGMENT: u16 = u16::from_be(0x3fff);

/// Version 4, five words.
const NO_OPTIONS: u8 = 0x45;

/// Bytes of an IPv6 header.
const IPV6_LEN: usize = 40;

/// Forwards a packet of a current flow, and leaves any other to `from_pod`.
#[inline(always)]
pub fn run(ctx: &XdpContext) -> u32 {
    try_redirect(ctx).unwrap_or(XDP_PASS)
}

#[inline(always)]
fn try_redirect(ctx: &XdpContext) -> Option<u32> {
    let sender = xdp::ifindex(ctx).wrapping_sub(IFINDEX_BASE);
    let row = endpoint::row(sender)?;
    let generation = endpoint::generation(row);
    if !endpoint::is_ready(row) {
        return None;
    }
    let eth = xdp::read::<EthHeader>(ctx, 0)?;
    if eth.source != mac_words(&row.from_pod.source) || eth.destination != mac_words(&row.from_pod.destination) {
        return None;
    }
    let length = xdp::length(ctx);
    let packet = match eth.ethertype {
        ETHERTYPE_IPV4 => ipv4(ctx, row, length)?,
        ETHERTYPE_IPV6 => ipv6(ctx, row, length)?,
        _ => return None,
    };
    if packet.is_multicast() || packet.to_loopback() || packet.to_link_local() {
        return None;
    }
    let found = flow::find(row.network, &packet)?;
    let (destination, there) = receiver(row, generation, &packet, found)?;
    flow::refresh(found);
    write_macs(ctx, there)?;
    count::forwarded(sender, Direction::FromPod, Verdict::Redirected, length);
    count::forwarded(destination, Direction::ToPod, Verdict::Redirected, length);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the helper returns an XDP action"
    )]
    // SAFETY: a helper with plain arguments.
    let action = unsafe { bpf_redirect(endpoint::ifindex(destination), 0) as u32 };
    Some(action)
}

/// A whole UDP packet of the endpoint's own.
#[inline(always)]
fn ipv4(ctx: &XdpContext, row: &EndpointRow, length: u32) -> Option<Packet> {
    let ip = xdp::read::<Udp4>(ctx, ETH_LEN)?;
    let total = usize::from(u16::from_be(ip.total_length));
    let fits = total >= size_of::<Udp4>() && ETH_LEN + total <= length as usize;
    let whole = ip.version_length == NO_OPTIONS && ip.fragment & FRAGMENT == 0 && ip.protocol == UDP;
    if !fits || !whole || ip.source != u32::from_ne_bytes(row.ipv4) || ip.source == 0 {
        return None;
    }
    Some(Packet {
        source: mapped(ip.source),
        destination: mapped(ip.destination),
        ports: ip.ports,
        protocol: UDP,
        v4: true,
        ..Packet::unknown()
    })
}

/// As [`ipv4`].
#[inline(always)]
fn ipv6(ctx: &XdpContext, row: &EndpointRow, length: u32) -> Option<Packet> {
    let ip = xdp::read::<Udp6>(ctx, ETH_LEN)?;
    let total = IPV6_LEN + usize::from(u16::from_be(ip.payload_length));
    let fits = total >= size_of::<Udp6>() && ETH_LEN + total <= length as usize;
    let whole = u32::from_be(ip.version_class_flow) >> 28 == 6 && ip.next_header == UDP;
    if !fits || !whole || ip.source != words(row.ipv6) || ip.source == [0; 4] {
        return None;
    }
    Some(Packet {
        source: ip.source,
        destination: ip.destination,
        ports: ip.ports,
        protocol: UDP,
        v4: false,
        ..Packet::unknown()
    })
}

/// The receiver of the flow's packets, if the state that it was evaluated on is unchanged, no translation is due and
/// the receiver accepts XDP frames.
#[inline(always)]
fn receiver(
    row: &EndpointRow,
    generation: u32,
    packet: &Packet,
    found: &FlowValue,
) -> Option<(u32, &'static EndpointRow)> {
    let second = flow::is_second(packet);
    // Copied once: another flow may take over the row at any moment.
    let ((from, sender), (to, receiver)) = (found.sender(second), found.receiver(second));
    let plain = from == END_LOCAL && to == END_LOCAL && found.flags & FLOW_TRANSLATED == 0;
    if !plain
        || sender.generation != generation
        || !flow::is_live(found)
        || flow::changes_state(packet, found, flow::is_later(found))
    {
        return None;
    }
    let destination = receiver.id;
    let there = endpoint::row(destination)?;
    let takes = there.generation == receiver.generation
        && there.network == row.network
        && endpoint::is_ready(there)
        && there.flags & FLAG_XDP != 0;
    takes.then_some((destination, there))
}

/// Writes the MAC addresses that the receiver expects.
#[inline(always)]
fn write_macs(ctx: &XdpContext, there: &EndpointRow) -> Option<()> {
    let eth = xdp::at::<EthHeader>(ctx, 0)?;
    // SAFETY: `at` proved that the header lies in the packet, and nothing else refers to it.
    let eth = unsafe { &mut *eth };
    eth.destination = mac_words(&there.to_pod.destination);
    eth.source = mac_words(&there.to_pod.source);
    Some(())
}
