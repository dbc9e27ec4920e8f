//! Turns a packet into its rejection: TCP RST or an ICMP error.
//!
//! Only for packets whose transport header directly follows the IP header: all others are dropped silently, as is every
//! packet whose rejection fails.

use core::mem::size_of;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC},
    helpers::bpf_skb_change_tail,
    programs::TcContext,
};
use kni_common::{
    GATEWAY_V4, GATEWAY_V6, Verdict,
    address::{mapped, words},
};

use crate::{
    packet::{ACK, Class, FIN, ICMP, ICMPV6, Packet, RST, SCTP, SYN, TCP, UDP},
    skb::{self, ETH_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHeader},
    translate::Sum,
};

/// Hop limit of packets that the programs send themselves, the kernel's default.
const HOPS: u8 = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv4 {
    version_length_tos: [u8; 2],
    total_length: u16,
    identification_fragment: u32,
    ttl_protocol: [u8; 2],
    checksum: u16,
    source: u32,
    destination: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv6 {
    version_class_flow: u32,
    payload_length: u16,
    next_header_hops: [u8; 2],
    source: [u32; 4],
    destination: [u32; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Tcp {
    ports: u32,
    sequence: u32,
    acknowledgement: u32,
    offset_flags: [u8; 2],
    window: u16,
    checksum_urgent: [u16; 2],
}

/// ICMP and ICMPv6 error header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Icmp {
    kind_code: [u8; 2],
    checksum: u16,
    information: u32,
}

/// Bytes of the transport header that an error quotes at least (RFC 792; RFC 4443 asks for more).
const QUOTED: usize = 8;

/// Bytes of the transport header that an error quotes. The kernel cuts no packet before the end of a checksum that an
/// interface is to finish (`__bpf_skb_min_len` in `net/core/filter.c`): those of TCP and SCTP are behind the first
/// eight bytes.
#[inline(always)]
const fn quoted(packet: &Packet) -> usize {
    match packet.protocol {
        TCP => size_of::<Tcp>(),
        SCTP => 12,
        _ => QUOTED,
    }
}

/// An error to send.
#[derive(Clone, Copy)]
struct Error {
    /// Type and code.
    kind_code: [u8; 2],
    /// The word after the checksum, network byte order.
    information: u32,
    /// Sender of the error.
    source: [u32; 4],
}

/// Turns a packet that was dropped for `reason` into its rejection, if there is one: RST for TCP, port unreachable for
/// UDP and SCTP where no backend or port exists, and the errors that routers send. Returns 1 on success, 0 if the
/// packet is still to be dropped.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn reply_refusal(skb: *mut __sk_buff, packet: *const Packet, reason: u32) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let Some(packet) = (unsafe { packet.as_ref() }) else {
        return 0;
    };
    // The quote starts with the IP header that is in the packet, and ends shortly after it.
    if !packet.plain || packet.is_later() {
        return 0;
    }
    let ctx = TcContext::new(skb);
    let answered = if reason == Verdict::TooBig as u32 {
        too_big(&ctx, packet, skb::exceeded_mtu(&ctx))
    } else if reason == Verdict::TimeExceeded as u32 {
        time_exceeded(&ctx, packet, gateway(packet.v4))
    } else if !packet.is_whole() {
        return 0;
    } else {
        match packet.protocol {
            TCP => reset(&ctx, packet),
            UDP | SCTP => unreachable(&ctx, packet),
            _ => return 0,
        }
    };
    u32::from(answered.is_ok())
}

/// Turns a packet from outside whose time to live has expired into the error about it, in the name of the node's
/// address that it was sent to. Returns 1 on success.
///
/// VERIFIER: a global function, see `global`.
// SAFETY: nothing else defines the name.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn reply_expired(skb: *mut __sk_buff, packet: *const Packet) -> u32 {
    // SAFETY: the caller's own memory, which nothing else touches meanwhile.
    let Some(packet) = (unsafe { packet.as_ref() }) else {
        return 0;
    };
    // About an error there is no other error (RFC 1122 3.2.2, RFC 4443 2.4).
    if !packet.plain || packet.is_later() || packet.class == Class::IcmpError {
        return 0;
    }
    u32::from(time_exceeded(&TcContext::new(skb), packet, packet.destination).is_ok())
}

/// Port unreachable, in the name of the destination address.
#[inline(always)]
fn unreachable(ctx: &TcContext, packet: &Packet) -> Result<(), Verdict> {
    let unreachable = Error {
        kind_code: if packet.v4 { [3, 3] } else { [1, 4] },
        information: 0,
        source: packet.destination,
    };
    error(ctx, packet, &unreachable)
}

/// The packet exceeds `mtu` (RFC 1191, RFC 4443 3.2).
#[inline(always)]
fn too_big(ctx: &TcContext, packet: &Packet, mtu: u32) -> Result<(), Verdict> {
    let too_big = Error {
        kind_code: if packet.v4 { [3, 4] } else { [2, 0] },
        information: mtu.to_be(),
        source: gateway(packet.v4),
    };
    error(ctx, packet, &too_big)
}

/// The time to live has expired (RFC 792, RFC 4443 3.3).
#[inline(always)]
fn time_exceeded(ctx: &TcContext, packet: &Packet, source: [u32; 4]) -> Result<(), Verdict> {
    let exceeded = Error {
        kind_code: if packet.v4 { [11, 0] } else { [3, 0] },
        information: 0,
        source,
    };
    error(ctx, packet, &exceeded)
}

/// The pod's gateway.
#[inline(always)]
const fn gateway(v4: bool) -> [u32; 4] {
    if v4 {
        mapped(u32::from_ne_bytes(GATEWAY_V4))
    } else {
        words(GATEWAY_V6)
    }
}

/// The reply of a closed port (RFC 9293, 3.10.7.1).
#[inline(never)]
fn reset(ctx: &TcContext, packet: &Packet) -> Result<(), Verdict> {
    if packet.tcp_flags & RST != 0 {
        return Err(Verdict::NoServicePort);
    }
    let ip = ip_length(packet.v4);
    let transport = ETH_LEN + ip;
    let received: Tcp = skb::load(ctx, transport)?;
    let [offset, _] = received.offset_flags;
    let header = usize::from(offset >> 4) * 4;
    #[expect(clippy::cast_possible_truncation, reason = "shorter than 64 KiB")]
    let payload = packet.end().saturating_sub(transport + header) as u32;
    let controls = (packet.tcp_flags & (SYN | FIN)).count_ones();
    let (sequence, acknowledgement, flags) = if packet.tcp_flags & ACK == 0 {
        let next = u32::from_be(received.sequence)
            .wrapping_add(payload)
            .wrapping_add(controls);
        (0, next.to_be(), RST | ACK)
    } else {
        (received.acknowledgement, 0, RST)
    };
    let mut answer = Tcp {
        ports: packet.ports.rotate_left(16),
        sequence,
        acknowledgement,
        offset_flags: [5 << 4, flags],
        window: 0,
        checksum_urgent: [0, 0],
    };
    let sum = pseudo(packet.destination, packet.source, packet.v4, TCP, size_of::<Tcp>())
        .plus(answer.ports)
        .plus(answer.sequence)
        .plus(answer.acknowledgement)
        .plus(u32::from(u16::from_ne_bytes(answer.offset_flags)));
    answer.checksum_urgent = [sum.checksum(), 0];
    resize(ctx, transport + size_of::<Tcp>())?;
    head(ctx, packet, packet.destination, TCP, size_of::<Tcp>())?;
    skb::store_bytes(ctx, transport, &answer)
}

/// Turns the packet into an ICMP error about itself.
#[inline(never)]
fn error(ctx: &TcContext, packet: &Packet, error: &Error) -> Result<(), Verdict> {
    let ip = ip_length(packet.v4);
    let quoted = ip + quoted(packet);
    let grown = ip + size_of::<Icmp>();
    resize(ctx, ETH_LEN + quoted)?;
    #[expect(clippy::cast_possible_wrap, clippy::cast_possible_truncation, reason = "48 at most")]
    ctx.adjust_room(grown as i32, BPF_ADJ_ROOM_MAC, 0)
        .map_err(|_errno| Verdict::NoServicePort)?;
    let protocol = if packet.v4 { ICMP } else { ICMPV6 };
    let length = size_of::<Icmp>() + quoted;
    let mut sum = if packet.v4 {
        Sum::ZERO
    } else {
        pseudo(error.source, packet.source, false, ICMPV6, length)
    };
    let start = ETH_LEN + grown;
    if packet.v4 {
        sum = add::<{ size_of::<Ipv4>() + QUOTED }>(ctx, start, sum)?;
    } else {
        sum = add::<{ size_of::<Ipv6>() + QUOTED }>(ctx, start, sum)?;
    }
    let more = start + ip + QUOTED;
    sum = match packet.protocol {
        TCP => add::<12>(ctx, more, sum)?,
        SCTP => add::<4>(ctx, more, sum)?,
        _ => sum,
    };
    let mut header = Icmp {
        kind_code: error.kind_code,
        checksum: 0,
        information: error.information,
    };
    header.checksum = sum
        .plus(u32::from(u16::from_ne_bytes(header.kind_code)))
        .plus(header.information)
        .checksum();
    head(ctx, packet, error.source, protocol, length)?;
    skb::store_bytes(ctx, ETH_LEN + ip, &header)
}

#[inline(always)]
const fn ip_length(v4: bool) -> usize {
    if v4 { size_of::<Ipv4>() } else { size_of::<Ipv6>() }
}

/// The Ethernet and IP header of a reply with `length` bytes after the latter.
#[inline(always)]
fn head(ctx: &TcContext, packet: &Packet, source: [u32; 4], protocol: u8, length: usize) -> Result<(), Verdict> {
    let eth: EthHeader = skb::load(ctx, 0)?;
    let answer = EthHeader {
        destination: eth.source,
        source: eth.destination,
        ethertype: if packet.v4 { ETHERTYPE_IPV4 } else { ETHERTYPE_IPV6 },
    };
    skb::store_bytes(ctx, 0, &answer)?;
    #[expect(clippy::cast_possible_truncation, reason = "below 100")]
    let length = length as u16;
    if packet.v4 {
        let ([.., from], [.., to]) = (source, packet.source);
        let mut ip = Ipv4 {
            version_length_tos: [0x45, 0],
            total_length: (length + 20).to_be(),
            identification_fragment: 0,
            ttl_protocol: [HOPS, protocol],
            checksum: 0,
            source: from,
            destination: to,
        };
        ip.checksum = Sum::ZERO
            .plus(u32::from(u16::from_ne_bytes(ip.version_length_tos)))
            .plus(u32::from(ip.total_length))
            .plus(u32::from(u16::from_ne_bytes(ip.ttl_protocol)))
            .plus(from)
            .plus(to)
            .checksum();
        skb::store_bytes(ctx, ETH_LEN, &ip)
    } else {
        let ip = Ipv6 {
            version_class_flow: 0x6000_0000_u32.to_be(),
            payload_length: length.to_be(),
            next_header_hops: [protocol, HOPS],
            source,
            destination: packet.source,
        };
        skb::store_bytes(ctx, ETH_LEN, &ip)
    }
}

/// The sum over the pseudo header (RFC 9293, RFC 8200 8.1).
#[inline(always)]
fn pseudo(source: [u32; 4], destination: [u32; 4], v4: bool, protocol: u8, length: usize) -> Sum {
    #[expect(clippy::cast_possible_truncation, reason = "below 100")]
    let length = (length as u32).to_be();
    let sum = Sum::ZERO.plus(length).plus(u32::from(protocol).to_be());
    let ([.., from], [.., to]) = (source, destination);
    if v4 {
        sum.plus(from).plus(to)
    } else {
        sum.address(source).address(destination)
    }
}

/// The sum over `N` bytes, a multiple of four.
#[inline(always)]
fn add<const N: usize>(ctx: &TcContext, start: usize, mut sum: Sum) -> Result<Sum, Verdict> {
    let mut offset = 0;
    // VERIFIER: a bounded loop.
    while offset < N {
        sum = sum.plus(skb::load(ctx, start + offset)?);
        offset += 4;
    }
    Ok(sum)
}

#[inline(always)]
fn resize(ctx: &TcContext, length: usize) -> Result<(), Verdict> {
    #[expect(clippy::cast_possible_truncation, reason = "below 200")]
    let length = length as u32;
    // SAFETY: the context pointer that the kernel hands to the program, and plain arguments.
    match unsafe { bpf_skb_change_tail(ctx.skb.skb, length, 0) } {
        0 => Ok(()),
        _ => Err(Verdict::NoServicePort),
    }
}
