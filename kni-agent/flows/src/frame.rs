//! Builds the packet that a question is about: headers, and checksums that are right.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kni_model::MacAddr;

/// A packet in words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packet {
    pub(super) source_mac: MacAddr,
    pub(super) destination_mac: MacAddr,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// IANA number; 1 and 58 both make an echo request of the family.
    pub(super) protocol: u8,
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
}

/// Carried by echo requests and UDP, so that nobody takes them for something else on a wire.
const PAYLOAD: &[u8] = b"kni explain";

const TIME_TO_LIVE: u8 = 64;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

/// The frame, or `None` when the addresses are not of one family.
pub(super) fn build(packet: &Packet) -> Option<Vec<u8>> {
    let Packet {
        source_mac,
        destination_mac,
        source,
        destination,
        ..
    } = packet;
    let (ethertype, body) = match (source, destination) {
        (IpAddr::V4(from), IpAddr::V4(to)) => (0x0800_u16, v4(packet, *from, *to)),
        (IpAddr::V6(from), IpAddr::V6(to)) => (0x86dd, v6(packet, *from, *to)),
        _ => return None,
    };
    let mut frame = Vec::with_capacity(14 + body.len());
    frame.extend(destination_mac.0);
    frame.extend(source_mac.0);
    frame.extend(ethertype.to_be_bytes());
    frame.extend(body);
    Some(frame)
}

fn v4(packet: &Packet, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let protocol = if packet.protocol == ICMPV6 {
        ICMP
    } else {
        packet.protocol
    };
    let length = |transport: usize| u32::try_from(transport).unwrap_or(0).to_be_bytes();
    let transport = transport(packet, protocol, |transport| {
        [
            &from.octets(),
            &to.octets(),
            &[0, 0, 0, protocol][..],
            &length(transport),
        ]
        .concat()
    });
    let total = u16::try_from(20 + transport.len()).unwrap_or(u16::MAX);
    let header = |sum: [u8; 2]| {
        let [high, low] = total.to_be_bytes();
        // Do not fragment, as TCP sends.
        let fixed = [0x45, 0, high, low, 0, 0, 0x40, 0, TIME_TO_LIVE, protocol];
        [&fixed[..], &sum, &from.octets(), &to.octets()].concat()
    };
    [header(checksum(&[&header([0; 2])])), transport].concat()
}

fn v6(packet: &Packet, from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let protocol = if packet.protocol == ICMP {
        ICMPV6
    } else {
        packet.protocol
    };
    let length = |transport: usize| u32::try_from(transport).unwrap_or(0).to_be_bytes();
    let transport = transport(packet, protocol, |transport| {
        [
            &from.octets()[..],
            &to.octets(),
            &length(transport),
            &[0, 0, 0, protocol],
        ]
        .concat()
    });
    let [high, low] = u16::try_from(transport.len()).unwrap_or(u16::MAX).to_be_bytes();
    let header = [0x60, 0, 0, 0, high, low, protocol, TIME_TO_LIVE];
    [&header[..], &from.octets(), &to.octets(), &transport].concat()
}

/// The transport header and what it carries. `pseudo` makes the pseudo header for a length.
fn transport(packet: &Packet, protocol: u8, pseudo: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let ports = [packet.source_port.to_be_bytes(), packet.destination_port.to_be_bytes()].concat();
    let identifier = packet.source_port.to_be_bytes();
    match protocol {
        TCP => summed(
            |sum| {
                // Sequence 1, no acknowledgement, five words, SYN, window 64240.
                let fixed = [0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0xfa, 0xf0];
                [&ports[..], &fixed, &sum, &[0, 0]].concat()
            },
            pseudo,
        ),
        UDP => summed(
            |sum| {
                let length = u16::try_from(8 + PAYLOAD.len()).unwrap_or(u16::MAX);
                [&ports[..], &length.to_be_bytes(), &sum, PAYLOAD].concat()
            },
            pseudo,
        ),
        // The one of ICMP has no pseudo header.
        ICMP => summed(
            |sum| [&[8, 0][..], &sum, &identifier, &[0, 1], PAYLOAD].concat(),
            |_| Vec::new(),
        ),
        ICMPV6 => summed(
            |sum| [&[128, 0][..], &sum, &identifier, &[0, 1], PAYLOAD].concat(),
            pseudo,
        ),
        SCTP => sctp(&ports),
        _ => PAYLOAD.to_vec(),
    }
}

/// Puts the Internet checksum (RFC 1071) into what `bytes` makes.
fn summed(bytes: impl Fn([u8; 2]) -> Vec<u8>, pseudo: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let without = bytes([0; 2]);
    let sum = match checksum(&[&pseudo(without.len()), &without]) {
        // UDP says none by 0; for the others both mean the same.
        [0, 0] => [0xff, 0xff],
        sum => sum,
    };
    bytes(sum)
}

/// Each part but the last has an even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words
        .map(|word| match word {
            [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
            [high] => u32::from(u16::from_be_bytes([*high, 0])),
            _ => 0,
        })
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let [_, _, high, low] = (!sum).to_be_bytes();
    [high, low]
}

/// An INIT (RFC 9260, 3.3.2).
fn sctp(ports: &[u8]) -> Vec<u8> {
    let init = [
        &[1, 0, 0, 20][..], // INIT, 20 bytes
        &[0, 0, 0, 1],      // initiate tag
        &[0, 1, 0, 0],      // window
        &[0, 1, 0, 1],      // streams out and in
        &[0, 0, 0, 1],      // first number
    ]
    .concat();
    let packet = |sum: u32| [ports, &[0; 4], &sum.to_le_bytes(), &init].concat();
    packet(crc32c(&packet(0)))
}

/// CRC-32C (RFC 9260, appendix A), reflected.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 {
                (sum >> 1) ^ 0x82f6_3b78
            } else {
                sum >> 1
            };
        }
    }
    !sum
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
        }
    }

    /// A sum over everything that a checksum covers, itself included, is all ones: nothing is left of it.
    fn is_right(parts: &[&[u8]]) -> bool {
        checksum(parts) == [0, 0]
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
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let frame = build(&packet("10.0.0.1", "10.0.0.2", SCTP)).unwrap();
        let mut transport = frame[34..].to_vec();
        let sum = u32::from_le_bytes(transport[8..12].try_into().unwrap());
        transport[8..12].fill(0);
        assert_eq!(crc32c(&transport), sum);
        assert_eq!(transport.len(), 32);
    }

    #[test]
    fn families_do_not_mix() {
        assert!(build(&packet("10.0.0.1", "fd00::2", TCP)).is_none());
    }
}
