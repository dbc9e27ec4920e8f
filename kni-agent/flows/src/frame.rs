//! Builds the frame of an explanation: Ethernet, IP and a transport header with valid checksums.

use std::net::IpAddr;

use etherparse::{IpNumber, PacketBuilder};
use kni_common::crc32c;
use kni_model::MacAddr;

/// The fields that differ between frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub(super) source_mac: MacAddr,
    pub(super) destination_mac: MacAddr,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// IANA number; 1 and 58 both make an echo request of the address family.
    pub(super) protocol: u8,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    /// Bytes of the IP packet, which is filled up to it; `None`: as few as possible.
    pub(super) length: Option<u16>,
}

/// Payload of every frame but those of TCP and SCTP: identifies it in a capture.
const PAYLOAD: &[u8] = b"kni explain";

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

const TIME_TO_LIVE: u8 = 64;
/// Window of a SYN; what Linux sends.
const WINDOW: u16 = 64_240;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

/// Why there is no such frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("the addresses are not of one family")]
    Families,
    /// Hop-by-hop options, for which etherparse panics without such a header.
    #[error("protocol 0 has no packets of its own")]
    Protocol,
    #[error("such a packet has at least {0} bytes")]
    Short(usize),
    #[error("packets of SCTP have the length of their first chunk")]
    Chunk,
}

/// The frame.
pub(super) fn build(packet: &Packet) -> Result<Vec<u8>, FrameError> {
    let shortest = filled(packet, 0)?;
    let Some(length) = packet.length.map(usize::from) else {
        return Ok(shortest);
    };
    let least = shortest.len() - ETHERNET;
    match length.checked_sub(least) {
        None => Err(FrameError::Short(least)),
        Some(0) => Ok(shortest),
        Some(_) if packet.protocol == SCTP => Err(FrameError::Chunk),
        Some(more) => filled(packet, more),
    }
}

/// The frame with so many bytes more of payload.
fn filled(packet: &Packet, more: usize) -> Result<Vec<u8>, FrameError> {
    if packet.protocol == 0 {
        return Err(FrameError::Protocol);
    }
    let payload = [PAYLOAD, &vec![0; more][..]].concat();
    let segment = vec![0; more];
    let ethernet = PacketBuilder::ethernet2(packet.source_mac.0, packet.destination_mac.0);
    let (ip, is_ipv4) = match (packet.source, packet.destination) {
        (IpAddr::V4(from), IpAddr::V4(to)) => (ethernet.ipv4(from.octets(), to.octets(), TIME_TO_LIVE), true),
        (IpAddr::V6(from), IpAddr::V6(to)) => (ethernet.ipv6(from.octets(), to.octets(), TIME_TO_LIVE), false),
        _ => return Err(FrameError::Families),
    };
    let (source, destination) = (packet.source_port, packet.destination_port);
    let mut frame = Vec::new();
    let written = match (packet.protocol, is_ipv4) {
        (TCP, _) => ip.tcp(source, destination, 1, WINDOW).syn().write(&mut frame, &segment),
        (UDP, _) => ip.udp(source, destination).write(&mut frame, &payload),
        (ICMP | ICMPV6, true) => ip.icmpv4_echo_request(source, 1).write(&mut frame, &payload),
        (ICMP | ICMPV6, false) => ip.icmpv6_echo_request(source, 1).write(&mut frame, &payload),
        (SCTP, _) => ip.write(&mut frame, IpNumber(SCTP), &sctp_init(source, destination)),
        (other, _) => ip.write(&mut frame, IpNumber(other), &payload),
    };
    // Too long for the length field of its IP header, which is the only error of a write to memory.
    written
        .map(|()| frame)
        .map_err(|_too_long| FrameError::Short(usize::from(u16::MAX)))
}

/// An SCTP packet with an INIT chunk (RFC 9260, 3.3.2), which etherparse does not build.
fn sctp_init(source: u16, destination: u16) -> Vec<u8> {
    let init = [
        &[1, 0, 0, 20][..], // INIT, 20 bytes
        &[0, 0, 0, 1],      // initiate tag
        &[0, 1, 0, 0],      // receiver window
        &[0, 1, 0, 1],      // outbound and inbound streams
        &[0, 0, 0, 1],      // initial TSN
    ]
    .concat();
    let packet = |checksum: u32| {
        let ports = [source.to_be_bytes(), destination.to_be_bytes()].concat();
        [&ports[..], &[0; 4], &checksum.to_le_bytes(), &init].concat()
    };
    packet(crc32c::checksum(&packet(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(source: &str, destination: &str, protocol: u8) -> Packet {
        Packet {
            source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            source: source.parse().unwrap(),
            destination: destination.parse().unwrap(),
            protocol,
            source_port: 40_000,
            destination_port: 80,
            length: None,
        }
    }

    /// The Internet checksum (RFC 1071), independent of the builder's. Each part but the last has an even length.
    fn checksum(parts: &[&[u8]]) -> u16 {
        let words = parts.iter().flat_map(|part| part.chunks(2));
        let word = |bytes: &[u8]| u32::from(bytes[0]) << 8 | bytes.get(1).map_or(0, |low| u32::from(*low));
        let mut sum: u32 = words.map(word).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    /// The sum over all bytes that a checksum covers, including the checksum, is all ones.
    fn is_right(parts: &[&[u8]]) -> bool {
        checksum(parts) == 0
    }

    #[test]
    fn checksums_of_ipv4_are_right() {
        for protocol in [TCP, UDP, ICMP, ICMPV6] {
            let frame = build(&packet("10.0.0.1", "10.0.0.2", protocol)).unwrap();
            let (header, transport) = frame[14..].split_at(20);
            assert!(is_right(&[header]), "{protocol}");
            assert_eq!(
                usize::from(u16::from_be_bytes([header[2], header[3]])),
                frame.len() - 14
            );
            let found = header[9];
            let length = u16::try_from(transport.len()).unwrap().to_be_bytes();
            let pseudo = [&header[12..20], &[0, found], &length].concat();
            if protocol == ICMP || protocol == ICMPV6 {
                assert_eq!(found, ICMP);
                assert!(is_right(&[transport]));
            } else {
                assert!(is_right(&[&pseudo, transport]), "{protocol}");
            }
        }
    }

    #[test]
    fn checksums_of_ipv6_are_right() {
        for protocol in [TCP, UDP, ICMP, ICMPV6] {
            let frame = build(&packet("fd00::1", "fd00::2", protocol)).unwrap();
            let (header, transport) = frame[14..].split_at(40);
            let found = header[6];
            assert_eq!(found, if protocol == ICMP { ICMPV6 } else { protocol });
            assert_eq!(usize::from(u16::from_be_bytes([header[4], header[5]])), transport.len());
            let length = u32::try_from(transport.len()).unwrap().to_be_bytes();
            let pseudo = [&header[8..40], &length, &[0, 0, 0, found]].concat();
            assert!(is_right(&[&pseudo, transport]), "{protocol}");
        }
    }

    #[test]
    fn sctp_has_its_own_sum() {
        // The check value of CRC-32C.
        assert_eq!(crc32c::checksum(b"123456789"), 0xe306_9283);
        let frame = build(&packet("10.0.0.1", "10.0.0.2", SCTP)).unwrap();
        let mut transport = frame[34..].to_vec();
        let sum = u32::from_le_bytes(transport[8..12].try_into().unwrap());
        transport[8..12].fill(0);
        assert_eq!(crc32c::checksum(&transport), sum);
        assert_eq!(transport.len(), 32);
    }

    #[test]
    fn any_protocol_number_makes_a_frame() {
        assert_eq!(build(&packet("fd00::1", "fd00::2", 0)), Err(FrameError::Protocol));
        for protocol in 1..=u8::MAX {
            let frame = build(&packet("10.0.0.1", "10.0.0.2", protocol)).unwrap();
            assert_eq!(frame[23], if protocol == ICMPV6 { ICMP } else { protocol });
            let frame = build(&packet("fd00::1", "fd00::2", protocol)).unwrap();
            assert_eq!(frame[20], if protocol == ICMP { ICMPV6 } else { protocol });
        }
    }

    /// The bytes of a SYN, so that a new version of the builder changes no field unnoticed.
    #[test]
    fn a_syn_has_these_bytes() {
        let frame = build(&packet("10.0.0.1", "10.0.0.2", TCP)).unwrap();
        let (ethernet, rest) = frame.split_at(14);
        assert_eq!(ethernet, [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
        let (ip, tcp) = rest.split_at(20);
        assert_eq!(ip[..10], [0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6]);
        assert_eq!(
            tcp[..16],
            [0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xfa, 0xf0]
        );
    }

    #[test]
    fn families_do_not_mix() {
        assert_eq!(build(&packet("10.0.0.1", "fd00::2", TCP)), Err(FrameError::Families));
    }

    #[test]
    fn a_packet_has_the_length_that_is_asked_for() {
        let of_length = |ip: [&str; 2], protocol, length| {
            let built = build(&Packet {
                length: Some(length),
                ..packet(ip[0], ip[1], protocol)
            });
            built.map(|frame| frame.len() - 14)
        };
        let (v4, v6) = (["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]);
        for protocol in [TCP, UDP, ICMP, 47] {
            assert_eq!(of_length(v4, protocol, 1400), Ok(1400));
            assert_eq!(of_length(v6, protocol, 1400), Ok(1400));
        }
        assert_eq!(of_length(v4, TCP, 40), Ok(40));
        assert_eq!(of_length(v4, TCP, 39), Err(FrameError::Short(40)));
        assert_eq!(of_length(v4, SCTP, 1400), Err(FrameError::Chunk));
    }
}
