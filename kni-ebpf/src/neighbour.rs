//! Replies to ARP requests and neighbour solicitations for the gateway in place; checks what pods of CNI plugins send
//! to each other about addresses.
//!
//! Pods have a permanent neighbour entry for the gateway and send no request; this serves workloads with a network
//! stack of their own (a virtual machine on a tap, arping, a bridge in the pod).

use aya_ebpf::programs::TcContext;
use kni_common::{GATEWAY_V4, GATEWAY_V6, Verdict, address::words, endpoint::EndpointRow};

use crate::{
    packet::{Packet, is_link_local},
    skb::{self, ETH_LEN, EthHeader},
};

/// The result for a packet of link control.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Rewritten into the reply.
    Ready,
    /// No reply.
    None,
}

/// ARP for IPv4 over Ethernet (RFC 826) as two-byte words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arp {
    kinds: [u16; 2],
    lengths: u16,
    operation: u16,
    sender_mac: [u16; 3],
    sender_ip: [u16; 2],
    target_mac: [u16; 3],
    target_ip: [u16; 2],
}

/// An Ethernet header and its payload. A tuple would have no defined layout.
#[repr(C)]
struct Framed<T> {
    eth: EthHeader,
    body: T,
}

#[inline(always)]
fn word(halves: [u16; 2]) -> u32 {
    let [[a, b], [c, d]] = halves.map(u16::to_ne_bytes);
    u32::from_ne_bytes([a, b, c, d])
}

/// A MAC address as the words of a header.
#[inline(always)]
pub fn mac_words(mac: &[u8; 6]) -> [u16; 3] {
    [
        u16::from_ne_bytes([mac[0], mac[1]]),
        u16::from_ne_bytes([mac[2], mac[3]]),
        u16::from_ne_bytes([mac[4], mac[5]]),
    ]
}

/// The ARP packet of a pod. The sender fields must satisfy the same rule as a packet's source.
#[inline(always)]
fn sent(ctx: &TcContext, row: &EndpointRow) -> Result<Arp, Verdict> {
    const ETHERNET_IPV4: [u16; 2] = [u16::from_be(1), u16::from_be(0x0800)];
    const LENGTHS: u16 = u16::from_ne_bytes([6, 4]);
    let arp: Arp = skb::read(ctx, ETH_LEN)?;
    if arp.kinds != ETHERNET_IPV4 || arp.lengths != LENGTHS {
        return Err(Verdict::Malformed);
    }
    let sender = word(arp.sender_ip);
    // An address probe (RFC 5227) has no sender address yet.
    if arp.sender_mac != mac_words(&row.from_pod.source) || (sender != 0 && sender != u32::from_ne_bytes(row.ipv4)) {
        return Err(Verdict::SourceAddress);
    }
    Ok(arp)
}

/// Checks ARP from a pod of a CNI plugin: others on its link believe the sender fields.
#[inline(always)]
pub fn check_arp(ctx: &TcContext, row: &EndpointRow) -> Result<(), Verdict> {
    sent(ctx, row).map(drop)
}

/// Checks link control from a pod of a CNI plugin, whose source has been checked: others on its link believe the target
/// of an advertisement, and give up an address that another one looks for without a source (RFC 4862 5.4.3). The pod is
/// no router (RFC 4861 4.2, 4.4, 4.5).
#[inline(always)]
pub fn check(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Result<(), Verdict> {
    const ROUTER_ADVERTISEMENT: u8 = 134;
    const SOLICITATION: u8 = 135;
    const ADVERTISEMENT: u8 = 136;
    const REDIRECT: u8 = 137;
    /// Of the target in the message.
    const TARGET: usize = 8;
    match packet.icmp_type {
        ROUTER_ADVERTISEMENT | REDIRECT => Err(Verdict::IcmpType),
        SOLICITATION if packet.source != [0; 4] => Ok(()),
        SOLICITATION | ADVERTISEMENT => {
            let target: [u32; 4] = skb::load(ctx, packet.transport() + TARGET)?;
            if target == words(row.ipv6) || is_link_local(target) {
                Ok(())
            } else {
                Err(Verdict::SourceAddress)
            }
        }
        _ => Ok(()),
    }
}

/// Handles ARP from a pod.
#[inline(always)]
pub fn arp(ctx: &TcContext, row: &EndpointRow) -> Result<Reply, Verdict> {
    const REQUEST: u16 = u16::from_be(1);
    const REPLY: u16 = u16::from_be(2);
    let arp = sent(ctx, row)?;
    if arp.operation != REQUEST || word(arp.target_ip) != u32::from_ne_bytes(GATEWAY_V4) {
        return Ok(Reply::None);
    }
    let Some(packet) = skb::at::<Framed<Arp>>(ctx, 0) else {
        return Ok(Reply::None);
    };
    // SAFETY: `at` proved that both headers lie in the packet.
    let Framed { eth, body: out } = unsafe { &mut *packet };
    let gateway_mac = mac_words(&row.from_pod.destination);
    out.operation = REPLY;
    out.target_mac = arp.sender_mac;
    out.target_ip = arp.sender_ip;
    out.sender_mac = gateway_mac;
    out.sender_ip = arp.target_ip;
    eth.destination = arp.sender_mac;
    eth.source = gateway_mac;
    Ok(Reply::Ready)
}

/// IPv6 header and neighbour solicitation or advertisement (RFC 4861 4.3, 4.4) as two-byte words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Neighbour {
    version_flow: [u16; 2],
    payload_length: u16,
    next_hop: [u8; 2],
    source: [u16; 8],
    destination: [u16; 8],
    kind_code: [u8; 2],
    checksum: u16,
    flags: [u16; 2],
    target: [u16; 8],
}

/// A link-layer address option.
#[repr(C)]
#[derive(Clone, Copy)]
struct LinkAddress {
    kind_length: [u8; 2],
    mac: [u16; 3],
}

#[inline(always)]
fn halves(bytes: [u8; 16]) -> [u16; 8] {
    [
        u16::from_ne_bytes([bytes[0], bytes[1]]),
        u16::from_ne_bytes([bytes[2], bytes[3]]),
        u16::from_ne_bytes([bytes[4], bytes[5]]),
        u16::from_ne_bytes([bytes[6], bytes[7]]),
        u16::from_ne_bytes([bytes[8], bytes[9]]),
        u16::from_ne_bytes([bytes[10], bytes[11]]),
        u16::from_ne_bytes([bytes[12], bytes[13]]),
        u16::from_ne_bytes([bytes[14], bytes[15]]),
    ]
}

#[inline(always)]
fn sum(words: &[u16; 8]) -> u32 {
    let mut total = 0;
    for word in words {
        total += u32::from(*word);
    }
    total
}

/// Handles a neighbour solicitation from a pod: one for the gateway becomes the advertisement.
#[inline(never)]
pub fn solicitation(ctx: &TcContext, row: &EndpointRow, packet: &Packet) -> Reply {
    const SOLICITATION: u8 = 135;
    const PLAIN: usize = size_of::<Neighbour>();
    // RFC 4861 7.1.1: the hop limit proves that it comes from the link, and the code is 0. An unspecified source is
    // duplicate address detection, which asks about the sender's own address.
    if packet.icmp_type != SOLICITATION || packet.source == [0; 4] || packet.transport() != ETH_LEN + 40 {
        return Reply::None;
    }
    let Some(solicited) = skb::at::<Framed<Neighbour>>(ctx, 0) else {
        return Reply::None;
    };
    // SAFETY: `at` proved that both headers lie in the packet.
    let Framed { eth: _, body: ip } = unsafe { &mut *solicited };
    let gateway = halves(GATEWAY_V6);
    let [_, hop_limit] = ip.next_hop;
    if ip.target != gateway || hop_limit != 255 || ip.kind_code != [SOLICITATION, 0] {
        return Reply::None;
    }
    let gateway_mac = mac_words(&row.from_pod.destination);
    let mut total: u32 = 0;
    match u16::from_be(ip.payload_length) {
        24 => {}
        32 => {
            let Some(option) = skb::at::<LinkAddress>(ctx, ETH_LEN + PLAIN) else {
                return Reply::None;
            };
            let advertised = LinkAddress {
                kind_length: [2, 1],
                mac: gateway_mac,
            };
            // SAFETY: `at` proved that the option lies in the packet.
            unsafe { *option = advertised };
            let [a, b, c] = gateway_mac.map(u32::from);
            total += u32::from(u16::from_ne_bytes([2, 1])) + a + b + c;
        }
        _ => return Reply::None,
    }
    let Some(solicited) = skb::at::<Framed<Neighbour>>(ctx, 0) else {
        return Reply::None;
    };
    // SAFETY: as above; looked up again after the write through another pointer.
    let Framed { eth, body: ip } = unsafe { &mut *solicited };
    let asker = ip.source;
    ip.destination = asker;
    ip.source = gateway;
    ip.kind_code = [136, 0];
    // Router, solicited, override.
    ip.flags = [u16::from_be(0xe000), 0];
    total += sum(&asker) + sum(&gateway) + sum(&gateway);
    total += u32::from(ip.payload_length) + u32::from(u16::from_be(58));
    total += u32::from(u16::from_ne_bytes([136, 0])) + u32::from(u16::from_be(0xe000));
    total = (total & 0xffff) + (total >> 16);
    total = (total & 0xffff) + (total >> 16);
    ip.checksum = !low_half(total);
    eth.destination = mac_words(&row.from_pod.source);
    eth.source = gateway_mac;
    Reply::Ready
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "only the low half is needed")]
const fn low_half(total: u32) -> u16 {
    total as u16
}
