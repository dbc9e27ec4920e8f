//! Translates the bytes of a packet: addresses, ports, and every checksum that covers them.
//!
//! Checksums are updated incrementally (RFC 1624), not recomputed: a wrong checksum stays wrong, so that the receiver
//! detects it.

use std::{net::IpAddr, ops::Range};

use super::{
    Flow, Verdict,
    packet::{ETHERNET, ICMPV6, Packet},
};
use crate::frames::crc32c;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const IPV4_CHECKSUM: usize = 10;

/// RFC 1624, equation 3; the parts have even lengths.
pub(super) fn renewed(sum: u16, old: &[u8], new: &[u8]) -> u16 {
    let words = |bytes: &[u8]| -> Vec<u64> {
        let words = bytes.chunks(2);
        words
            .map(|word| u64::from(u16::from_be_bytes([word[0], word[1]])))
            .collect()
    };
    let taken: u64 = words(old).iter().map(|word| 0xffff - word).sum();
    let given: u64 = words(new).iter().sum();
    let mut total = 0xffff - u64::from(sum) + taken + given;
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    0xffff - u16::try_from(total).expect("folded to 16 bits")
}

fn number(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// The range of both addresses in an IP header.
fn addresses(v4: bool) -> Range<usize> {
    if v4 { 12..20 } else { 8..40 }
}

fn address_bytes(flow: &Flow) -> Vec<u8> {
    let octets = |address| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    [octets(flow.source.0), octets(flow.destination.0)].concat()
}

fn port_bytes(flow: &Flow) -> [u8; 4] {
    let ([a, b], [c, d]) = (flow.source.1.to_be_bytes(), flow.destination.1.to_be_bytes());
    [a, b, c, d]
}

fn has_ports(protocol: u8) -> bool {
    [TCP, UDP, SCTP].contains(&protocol)
}

/// Replaces the addresses of an IP header, and updates its checksum.
fn put_addresses(header: &mut [u8], to: &Flow) {
    let (v4, new) = (to.source.0.is_ipv4(), address_bytes(to));
    let place = addresses(v4);
    if v4 {
        let sum = renewed(number(header, IPV4_CHECKSUM), &header[place.clone()], &new);
        put(header, IPV4_CHECKSUM, sum);
    }
    header[place].copy_from_slice(&new);
}

/// `CRC32c` is linear: a change has the same effect on a correct and on a wrong checksum.
fn put_sctp_ports(packet: &mut [u8], ports: [u8; 4]) {
    let checksum: [u8; 4] = packet[8..12].try_into().expect("four bytes");
    packet[8..12].fill(0);
    let before = crc32c(packet);
    packet[..4].copy_from_slice(&ports);
    let changed = u32::from_le_bytes(checksum) ^ before ^ crc32c(packet);
    packet[8..12].copy_from_slice(&changed.to_le_bytes());
}

/// Translates the packet of a frame from `flow` to `to`.
pub(super) fn apply(frame: &mut [u8], packet: &Packet, flow: &Flow, to: &Flow) -> Result<(), Verdict> {
    let ip = &mut frame[ETHERNET..];
    put_addresses(ip, to);
    if packet.is_later() {
        return Ok(());
    }
    let length = packet.length - packet.transport;
    let transport = &mut ip[packet.transport..];
    let ports = has_ports(packet.protocol) && port_bytes(flow) != port_bytes(to);
    if ports && packet.protocol == SCTP {
        put_sctp_ports(&mut transport[..length], port_bytes(to));
        return Ok(());
    }
    if ports {
        transport[..4].copy_from_slice(&port_bytes(to));
    }
    let field = match packet.protocol {
        TCP => 16,
        UDP => 6,
        ICMPV6 => 2,
        _ => return Ok(()),
    };
    if transport.len() < field + 2 {
        return Err(Verdict::Truncated);
    }
    let old = number(transport, field);
    // Without a checksum (RFC 768) nothing is updated; a result of 0, which means "none", is replaced.
    if packet.protocol == UDP && old == 0 {
        return Ok(());
    }
    let mut new = renewed(old, &address_bytes(flow), &address_bytes(to));
    if ports {
        new = renewed(new, &port_bytes(flow), &port_bytes(to));
    }
    if packet.protocol == UDP && new == 0 {
        new = u16::MAX;
    }
    put(transport, field, new);
    Ok(())
}

/// The quoted packet of an ICMP error: its offset in the frame, the offset of its transport header, and its ends.
pub(super) struct Quoted {
    pub(super) at: usize,
    pub(super) transport: usize,
    pub(super) flow: Flow,
}

/// Translates an ICMP error and its quoted packet to `to`. The source of the error is unchanged if it is a router.
pub(super) fn apply_quoted(frame: &mut [u8], packet: &Packet, quoted: &Quoted, to: &Flow) -> Result<(), Verdict> {
    let flow = &quoted.flow;
    let field = ETHERNET + packet.transport + 2;
    let v4 = flow.source.0.is_ipv4();
    put_addresses(&mut frame[quoted.at..], to);
    if !v4 {
        // The checksum of the IPv4 header compensates for the difference.
        let sum = renewed(number(frame, field), &address_bytes(flow), &address_bytes(to));
        put(frame, field, sum);
    }
    if has_ports(flow.protocol) && port_bytes(flow) != port_bytes(to) {
        let at = quoted.at + quoted.transport;
        frame[at..at + 4].copy_from_slice(&port_bytes(to));
        let sum = renewed(number(frame, field), &port_bytes(flow), &port_bytes(to));
        put(frame, field, sum);
    }
    let outer = Flow {
        source: (packet.source, 0),
        destination: (packet.destination, 0),
        protocol: packet.protocol,
        network: flow.network,
    };
    let teller = if packet.source == flow.destination.0 {
        to.destination.0
    } else {
        packet.source
    };
    let outer_to = Flow {
        source: (teller, 0),
        destination: (to.source.0, 0),
        ..outer
    };
    apply(frame, packet, &outer, &outer_to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::checksum;

    #[test]
    fn a_renewed_checksum_is_the_computed_one() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..1000 {
            let mut bytes = [0; 32];
            rng.fill(&mut bytes);
            let before = checksum(&[&bytes]);
            let mut after = bytes;
            rng.fill(&mut after[8..20]);
            assert_eq!(renewed(before, &bytes[8..20], &after[8..20]), checksum(&[&after]));
        }
    }
}
