//! Parses the packet that an ICMP error quotes.

use aya_ebpf::programs::TcContext;
use kni_common::{Verdict, address};

use super::{
    Fragment, ICMP, ICMPV6, Packet, SCTP, TCP, UDP, inside,
    ipv4::{IPV4_LEN, Ipv4Header, fragment_v4},
    ipv6::{IPV6_LEN, Ipv6Header},
    transport::quoted_echo,
};

/// Parses the quoted packet: its addresses, protocol and ports, in its own direction.
#[inline(never)]
pub fn quoted(ctx: &TcContext, outer: &Packet, inner: &mut Packet) -> Result<(), Verdict> {
    const ICMP_LEN: usize = 8;
    let start = outer.transport() + ICMP_LEN;
    inner.v4 = outer.v4;
    let offset = if outer.v4 {
        let ip: Ipv4Header = inside(ctx, start, outer.end())?;
        let header_length = usize::from(ip.version_ihl & 0xf) * 4;
        if ip.version_ihl >> 4 != 4 || header_length < IPV4_LEN {
            return Err(Verdict::Malformed);
        }
        inner.source = address::mapped(ip.source);
        inner.destination = address::mapped(ip.destination);
        inner.protocol = ip.protocol;
        fragment_v4(&ip, inner);
        start + header_length
    } else {
        let ip: Ipv6Header = inside(ctx, start, outer.end())?;
        if u32::from_be(ip.version_class_flow) >> 28 != 6 {
            return Err(Verdict::Malformed);
        }
        inner.source = ip.source;
        inner.destination = ip.destination;
        inner.protocol = ip.next_header;
        start + IPV6_LEN
    };
    inner.set_transport(offset);
    if matches!(inner.fragment, Fragment::Later) {
        return Err(Verdict::IcmpUnrelated);
    }
    inner.ports = match inner.protocol {
        TCP | UDP | SCTP => inside(ctx, offset, outer.end())?,
        ICMP if outer.v4 => quoted_echo(inside(ctx, offset, outer.end())?, true),
        ICMPV6 if !outer.v4 => quoted_echo(inside(ctx, offset, outer.end())?, false),
        _ => 0,
    };
    Ok(())
}
