//! Parses a frame, or returns the drop reason.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Verdict;

/// Length of an Ethernet header.
pub(super) const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const ICMP: u8 = 1;
/// Also a protocol number that identifies the payload.
pub(super) const ICMPV6: u8 = 58;
const MAX_OPTIONS: usize = 10;
const MAX_EXTENSIONS: usize = 6;

/// The content of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Ports; for an echo, the identifier in place of the port of the requested end, and 0 in place of the other one.
    Ports(u16, u16),
    /// A TCP segment that opens a connection.
    Open(u16, u16),
    /// An ICMP error; its quoted packet starts at this offset of the IP packet.
    Error(usize),
    /// IPv6 neighbour discovery or multicast listener report: the type.
    LinkControl(u8),
    /// Content without ports, and later fragments.
    Opaque,
}

impl Content {
    pub(super) fn ports(self) -> (u16, u16) {
        match self {
            Self::Ports(source, destination) | Self::Open(source, destination) => (source, destination),
            Self::Error(_) | Self::LinkControl(_) | Self::Opaque => (0, 0),
        }
    }
}

/// The position within a datagram, with its identification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragment {
    Whole,
    First(u32),
    Later(u32),
}

/// An IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: u8,
    pub(super) fragment: Fragment,
    pub(super) content: Content,
    /// Whether there were IPv6 extension headers.
    pub(super) extended: bool,
    /// Whether the transport header follows the fixed IP header directly.
    pub(super) plain: bool,
    /// Offset of the transport header in the IP packet.
    pub(super) transport: usize,
    /// TCP flags if the packet has them, else 0.
    pub(super) tcp_flags: u8,
    /// Length of the IP packet, which may be less than the payload of the frame.
    pub(super) length: usize,
}

impl Packet {
    /// Whether it is a fragment without the transport header.
    pub(super) fn is_later(&self) -> bool {
        matches!(self.fragment, Fragment::Later(_))
    }
}

/// Protocols whose flows are distinguished by ports or identifiers, in either family.
pub(super) fn names_flows_by_ports(protocol: u8) -> bool {
    [TCP, UDP, SCTP, ICMP, ICMPV6].contains(&protocol)
}

/// Whether an IPv6 header follows that has a next one.
pub(super) fn is_extension(protocol: u8) -> bool {
    [0, 43, 44, 60].contains(&protocol)
}

pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Verdict> {
    let part = bytes.get(at..at + N).ok_or(Verdict::Truncated)?;
    Ok(part.try_into().expect("a slice of N bytes"))
}

fn number(bytes: &[u8], at: usize) -> Result<u16, Verdict> {
    take(bytes, at).map(u16::from_be_bytes)
}

/// Parses an IPv4 packet from the payload of the frame. Order: length, version and header length, total length,
/// options, transport header.
pub(super) fn ipv4(carried: &[u8]) -> Result<Packet, Verdict> {
    let header: [u8; 20] = take(carried, 0)?;
    let header_length = usize::from(header[0] % 16) * 4;
    let total = usize::from(number(&header, 2)?);
    if header[0] / 16 != 4 || header_length < 20 || total < header_length {
        return Err(Verdict::Malformed);
    }
    let packet = carried.get(..total).ok_or(Verdict::Truncated)?;
    options(&packet[20..header_length], carried.len() > header_length)?;
    let (protocol, fragment) = (header[9], fragment_v4(&header)?);
    Ok(Packet {
        source: v4(&header, 12)?,
        destination: v4(&header, 16)?,
        protocol,
        fragment,
        content: content(packet, header_length, true, protocol, fragment)?,
        extended: false,
        plain: header_length == 20,
        transport: header_length,
        tcp_flags: tcp_flags(packet, header_length, protocol, fragment),
        length: total,
    })
}

fn v4(bytes: &[u8], at: usize) -> Result<IpAddr, Verdict> {
    Ok(Ipv4Addr::from(take::<4>(bytes, at)?).into())
}

fn v6(bytes: &[u8], at: usize) -> Result<IpAddr, Verdict> {
    Ok(Ipv6Addr::from(take::<16>(bytes, at)?).into())
}

fn fragment_v4(header: &[u8]) -> Result<Fragment, Verdict> {
    let field = number(header, 6)?;
    // A 16-bit number, in the upper half as in the header.
    let identification = u32::from(number(header, 4)?) << 16;
    let (more, offset) = (field & 0x2000 != 0, field & 0x1fff);
    Ok(which(more, offset, identification))
}

fn which(more: bool, offset: u16, identification: u32) -> Fragment {
    match (more, offset) {
        (false, 0) => Fragment::Whole,
        (true, 0) => Fragment::First(identification),
        _ => Fragment::Later(identification),
    }
}

/// An option without a length is truncated if nothing follows the header, else it is malformed.
fn options(mut rest: &[u8], followed: bool) -> Result<(), Verdict> {
    for _ in 0..MAX_OPTIONS {
        rest = match rest {
            [] | [0, ..] => return Ok(()),
            [1, behind @ ..] => behind,
            [131 | 137, ..] => return Err(Verdict::SourceRoute),
            [_] if !followed => return Err(Verdict::Truncated),
            [_, length, ..] if *length >= 2 => rest.get(usize::from(*length)..).ok_or(Verdict::Malformed)?,
            _ => return Err(Verdict::Malformed),
        };
    }
    if rest.is_empty() {
        Ok(())
    } else {
        Err(Verdict::ExtensionHeaders)
    }
}

/// Parses an IPv6 packet from the payload of the frame, in the same order.
pub(super) fn ipv6(carried: &[u8]) -> Result<Packet, Verdict> {
    let header: [u8; 40] = take(carried, 0)?;
    let (source, destination) = (v6(&header, 8)?, v6(&header, 24)?);
    let is_v4 = |address: IpAddr| matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    if header[0] / 16 != 6 || is_v4(source) || is_v4(destination) {
        return Err(Verdict::Malformed);
    }
    let length = 40 + usize::from(number(&header, 4)?);
    let packet = carried.get(..length).ok_or(Verdict::Truncated)?;
    let (mut at, mut protocol, mut fragment) = (40, header[6], Fragment::Whole);
    let mut headers = 0;
    while is_extension(protocol) && !matches!(fragment, Fragment::Later(_)) {
        if headers == MAX_EXTENSIONS {
            return Err(Verdict::ExtensionHeaders);
        }
        let extension: [u8; 8] = take(packet, at)?;
        match protocol {
            0 if headers > 0 => return Err(Verdict::Malformed),
            // Type 0, or another node behind this one.
            43 if extension[2] == 0 || extension[3] != 0 => return Err(Verdict::SourceRoute),
            44 => fragment = fragment_v6(extension).unwrap_or(fragment),
            _ => {}
        }
        at += if protocol == 44 {
            8
        } else {
            8 + 8 * usize::from(extension[1])
        };
        protocol = extension[0];
        headers += 1;
        if at > packet.len() {
            return Err(Verdict::Truncated);
        }
    }
    Ok(Packet {
        source,
        destination,
        protocol,
        fragment,
        content: content(packet, at, false, protocol, fragment)?,
        extended: headers > 0,
        plain: headers == 0,
        transport: at,
        tcp_flags: tcp_flags(packet, at, protocol, fragment),
        length,
    })
}

/// `None` for an atomic fragment, which is a whole packet (RFC 6946).
fn fragment_v6(header: [u8; 8]) -> Option<Fragment> {
    let [_, _, high, low, id @ ..] = header;
    let field = u16::from_be_bytes([high, low]);
    let fragment = which(field & 1 == 1, field >> 3, u32::from_be_bytes(id));
    (fragment != Fragment::Whole).then_some(fragment)
}

fn content(packet: &[u8], at: usize, is_v4: bool, protocol: u8, fragment: Fragment) -> Result<Content, Verdict> {
    if matches!(fragment, Fragment::Later(_)) {
        return Ok(Content::Opaque);
    }
    let ports = || Ok((number(packet, at)?, number(packet, at + 2)?));
    match protocol {
        TCP => {
            // All of the header, whose flags identify the opener of the connection, and whose checksum a translation
            // changes.
            let [.., flags, _, _, _, _, _, _] = take::<20>(packet, at)?;
            let (source, destination) = ports()?;
            let opens = flags & 0x02 != 0 && flags & 0x10 == 0;
            Ok(if opens {
                Content::Open(source, destination)
            } else {
                Content::Ports(source, destination)
            })
        }
        UDP | SCTP => {
            take::<8>(packet, at)?;
            if protocol == SCTP {
                take::<12>(packet, at)?;
            }
            ports().map(|(source, destination)| Content::Ports(source, destination))
        }
        ICMP if is_v4 => icmp(take(packet, at)?, at, &[0, 8, 13, 14], &[3, 11, 12], &[]),
        ICMPV6 if !is_v4 => {
            let link: Vec<u8> = (130..=137).chain([143]).collect();
            icmp(take(packet, at)?, at, &[128, 129], &[1, 2, 3, 4], &link)
        }
        _ => Ok(Content::Opaque),
    }
}

/// The type implies the family: no number is a request in both families.
fn echo(kind: u8, identifier: u16) -> (u16, u16) {
    if [8, 13, 128].contains(&kind) {
        (identifier, 0)
    } else {
        (0, identifier)
    }
}

fn tcp_flags(packet: &[u8], at: usize, protocol: u8, fragment: Fragment) -> u8 {
    let segment = protocol == TCP && !matches!(fragment, Fragment::Later(_));
    packet.get(at + 13).copied().filter(|_| segment).unwrap_or(0)
}

fn icmp(header: [u8; 8], at: usize, queries: &[u8], errors: &[u8], link: &[u8]) -> Result<Content, Verdict> {
    let [kind, _, _, _, high, low, ..] = header;
    if queries.contains(&kind) {
        let (source, destination) = echo(kind, u16::from_be_bytes([high, low]));
        Ok(Content::Ports(source, destination))
    } else if errors.contains(&kind) {
        Ok(Content::Error(at + 8))
    } else if link.contains(&kind) {
        Ok(Content::LinkControl(kind))
    } else {
        Err(Verdict::IcmpType)
    }
}

/// The quoted packet of an ICMP error: protocol, source and destination with ports.
pub(super) struct Quote {
    pub(super) protocol: u8,
    pub(super) source: (IpAddr, u16),
    pub(super) destination: (IpAddr, u16),
    /// Whether it is a whole datagram: the owner of a later fragment is unknown.
    pub(super) whole: bool,
    /// Offset of its transport header from its beginning.
    pub(super) transport: usize,
}

/// Parses the start of the quoted packet. Does not support IPv6 extension headers.
pub(super) fn quote(quoted: &[u8], is_v4: bool) -> Result<Quote, Verdict> {
    let mut whole = true;
    let (at, protocol, source, destination) = if is_v4 {
        let header: [u8; 20] = take(quoted, 0)?;
        let length = usize::from(header[0] % 16) * 4;
        if header[0] / 16 != 4 || length < 20 {
            return Err(Verdict::Malformed);
        }
        match fragment_v4(&header)? {
            Fragment::Later(_) => return Err(Verdict::IcmpUnrelated),
            fragment => whole = fragment == Fragment::Whole,
        }
        (length, header[9], v4(&header, 12)?, v4(&header, 16)?)
    } else {
        let header: [u8; 40] = take(quoted, 0)?;
        if header[0] / 16 != 6 {
            return Err(Verdict::Malformed);
        }
        (40, header[6], v6(&header, 8)?, v6(&header, 24)?)
    };
    let (from, to) = match protocol {
        TCP | UDP | SCTP => (number(quoted, at)?, number(quoted, at + 2)?),
        ICMP | ICMPV6 if (protocol == ICMP) == is_v4 => {
            let header: [u8; 8] = take(quoted, at)?;
            echo(header[0], number(&header, 4)?)
        }
        _ => (0, 0),
    };
    Ok(Quote {
        protocol,
        source: (source, from),
        destination: (destination, to),
        whole,
        transport: at,
    })
}
