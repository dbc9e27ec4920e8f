//! Parses transport headers: ports, TCP flags, and the ICMP types that pods may exchange.

use aya_ebpf::programs::TcContext;
use kni_common::Verdict;

use super::{ACK, Class, Fragment, ICMP, ICMPV6, Packet, SCTP, SYN, TCP, UDP, inside};
use crate::skb;

/// A TCP header without options. A first fragment contains all of it: a translation changes the checksum.
#[repr(C)]
#[derive(Clone, Copy)]
struct TcpHeader {
    ports: u32,
    sequence: [u32; 2],
    offset_flags: [u8; 2],
    window: u16,
    checksum: u16,
    urgent: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UdpHeader {
    ports: u32,
    length_checksum: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SctpHeader {
    ports: u32,
    tag_checksum: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IcmpHeader {
    kind: u8,
    code: u8,
    checksum: u16,
    identifier: u16,
    sequence: u16,
}

/// Reads at a constant offset through a pointer, at a variable one through the helper.
#[inline(always)]
fn fetch<const FIXED: bool, T: Copy>(ctx: &TcContext, offset: usize, end: usize) -> Result<T, Verdict> {
    if !FIXED {
        return inside(ctx, offset, end);
    }
    if offset + size_of::<T>() > end {
        return Err(Verdict::Truncated);
    }
    skb::read(ctx, offset)
}

#[inline(always)]
pub(super) fn transport<const FIXED: bool>(ctx: &TcContext, offset: usize, packet: &mut Packet) -> Result<(), Verdict> {
    let end = packet.end();
    packet.set_transport(offset);
    packet.plain = FIXED;
    if matches!(packet.fragment, Fragment::Later) {
        return Ok(());
    }
    match packet.protocol {
        TCP => {
            let tcp: TcpHeader = fetch::<FIXED, _>(ctx, offset, end)?;
            packet.ports = tcp.ports;
            let [_, flags] = tcp.offset_flags;
            packet.tcp_flags = flags;
            if flags & (SYN | ACK) == SYN {
                packet.class = Class::Open;
            }
        }
        UDP => packet.ports = fetch::<FIXED, UdpHeader>(ctx, offset, end)?.ports,
        SCTP => packet.ports = fetch::<FIXED, SctpHeader>(ctx, offset, end)?.ports,
        ICMP if packet.v4 => icmp(&fetch::<FIXED, _>(ctx, offset, end)?, packet)?,
        ICMPV6 if !packet.v4 => icmpv6(&fetch::<FIXED, _>(ctx, offset, end)?, packet)?,
        _ => {}
    }
    Ok(())
}

/// An echo's identifier in place of the requester's port: a request's source port, a reply's destination port. So a
/// reply has the key of its request reversed, and a request never that of a reply.
#[inline(always)]
fn echo(identifier: u16, is_request: bool) -> u32 {
    let [a, b] = identifier.to_ne_bytes();
    u32::from_ne_bytes(if is_request { [a, b, 0, 0] } else { [0, 0, a, b] })
}

#[inline(always)]
const fn is_request(kind: u8, v4: bool) -> bool {
    if v4 { matches!(kind, 8 | 13) } else { kind == 128 }
}

#[inline(always)]
fn icmp(header: &IcmpHeader, packet: &mut Packet) -> Result<(), Verdict> {
    packet.icmp_type = header.kind;
    match header.kind {
        // Echo and timestamp, request and reply (RFC 792).
        0 | 8 | 13 | 14 => packet.ports = echo(header.identifier, is_request(header.kind, true)),
        // Destination unreachable, time exceeded, parameter problem.
        3 | 11 | 12 => packet.class = Class::IcmpError,
        _ => return Err(Verdict::IcmpType),
    }
    Ok(())
}

#[inline(always)]
fn icmpv6(header: &IcmpHeader, packet: &mut Packet) -> Result<(), Verdict> {
    packet.icmp_type = header.kind;
    match header.kind {
        // Unreachable, too big, time exceeded, parameter problem (RFC 4443).
        1..=4 => packet.class = Class::IcmpError,
        // Echo request and reply.
        128 | 129 => packet.ports = echo(header.identifier, is_request(header.kind, false)),
        // MLD (RFC 2710, 3810) and neighbour discovery (RFC 4861).
        130..=137 | 143 => packet.class = Class::LinkControl,
        _ => return Err(Verdict::IcmpType),
    }
    Ok(())
}

#[inline(always)]
pub(super) fn quoted_echo(header: IcmpHeader, v4: bool) -> u32 {
    echo(header.identifier, is_request(header.kind, v4))
}
