//! Builds and reads the frames that show who has an address on a link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use kni_model::MacAddr;

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV6: u16 = 0x86dd;
/// The protocols of [`probe`] and [`announcement`], that of IPv4 addresses first.
pub(super) const PROTOCOLS: [u16; 2] = [ETHERTYPE_ARP, ETHERTYPE_IPV6];

const ARP_REQUEST: [u8; 2] = [0, 1];
const BROADCAST: [u8; 6] = [0xff; 6];
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Flags of an advertisement: replace the MAC address that is known.
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// The question who has the address, from a host that does not claim it: an ARP probe, or the solicitation of duplicate
/// address detection.
pub(super) fn probe(own: MacAddr, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => arp(own, Ipv4Addr::UNSPECIFIED, v4),
        IpAddr::V6(v6) => {
            let [.., a, b, c] = v6.octets();
            let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
            let body = [&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0][..], &v6.octets()].concat();
            icmpv6((own, Ipv6Addr::UNSPECIFIED), group, body)
        }
    }
}

/// The announcement of an address: an ARP announcement, or an unsolicited advertisement.
pub(super) fn announcement(own: MacAddr, address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => arp(own, v4, v4),
        IpAddr::V6(v6) => {
            // The option "target link-layer address" is type 2 and 8 bytes long.
            let head = [ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0];
            let body = [&head[..], &v6.octets(), &[2, 1], &own.0].concat();
            icmpv6((own, v6), ALL_NODES, body)
        }
    }
}

fn ethernet(own: MacAddr, destination: [u8; 6], ethertype: u16) -> Vec<u8> {
    [&destination[..], &own.0, &ethertype.to_be_bytes()].concat()
}

fn arp(own: MacAddr, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    // Ethernet, IPv4, the lengths of their addresses.
    let kinds = [0, 1, 8, 0, 6, 4];
    let head = ethernet(own, BROADCAST, ETHERTYPE_ARP);
    [
        &head[..],
        &kinds,
        &ARP_REQUEST,
        &own.0,
        &sender.octets(),
        &[0; 6],
        &target.octets(),
    ]
    .concat()
}

fn icmpv6((own, source): (MacAddr, Ipv6Addr), group: Ipv6Addr, mut body: Vec<u8>) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap_or(0);
    let pseudo = [
        &source.octets()[..],
        &group.octets(),
        &u32::from(length).to_be_bytes(),
        &[0, 0, 0, ICMPV6],
    ]
    .concat();
    let sum = checksum([pseudo.as_slice(), body.as_slice()]);
    if let Some(field) = body.get_mut(2..4) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    let [.., a, b, c, d] = group.octets();
    let frame = ethernet(own, [0x33, 0x33, a, b, c, d], ETHERTYPE_IPV6);
    // Version 6, the length, the next header, the hop limit that no router forwards.
    let [high, low] = length.to_be_bytes();
    let header = [0x60, 0, 0, 0, high, low, ICMPV6, 255];
    [&frame[..], &header, &source.octets(), &group.octets(), &body].concat()
}

/// The Internet checksum (RFC 1071) of parts of even length.
fn checksum(parts: [&[u8]; 2]) -> u16 {
    let words = parts.iter().flat_map(|part| part.as_chunks::<2>().0);
    let mut sum: u32 = words.map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    while let Some(carry) = Some(sum >> 16).filter(|carry| *carry != 0) {
        sum = (sum & 0xffff) + carry;
    }
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

/// The address that a frame's sender has, or is about to take, and its MAC address. `None` for frames that say nothing
/// of the kind.
pub(super) fn holder(frame: &[u8]) -> Option<(IpAddr, MacAddr)> {
    let ethertype = u16::from_be_bytes(bytes(frame, 12)?);
    let sender = MacAddr(bytes(frame, 6)?);
    match ethertype {
        ETHERTYPE_ARP => {
            let (mac, address, target): ([u8; 6], [u8; 4], [u8; 4]) =
                (bytes(frame, 22)?, bytes(frame, 28)?, bytes(frame, 38)?);
            // A probe of another host claims its target.
            let claimed = if address == [0; 4] { target } else { address };
            Some((IpAddr::from(claimed), MacAddr(mac)))
        }
        ETHERTYPE_IPV6 => {
            let (kind, source): ([u8; 1], [u8; 16]) = (bytes(frame, 54)?, bytes(frame, 22)?);
            let target: [u8; 16] = bytes(frame, 62)?;
            let claims = match kind {
                [ADVERTISEMENT] => true,
                [SOLICITATION] => source == [0; 16],
                _ => false,
            };
            (claims && frame.get(20) == Some(&ICMPV6)).then(|| (IpAddr::from(target), sender))
        }
        _ => None,
    }
}

fn bytes<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// A classic BPF program that accepts neighbour solicitations and advertisements.
pub(super) fn neighbour_discovery_filter() -> [libc::sock_filter; 7] {
    // linux/bpf_common.h: load a byte from the frame; jump if equal; return.
    const LOAD: u16 = 0x30;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    [
        step(LOAD, 0, 0, 20),
        step(EQUAL, 0, 4, ICMPV6.into()),
        step(LOAD, 0, 0, 54),
        step(EQUAL, 1, 0, SOLICITATION.into()),
        step(EQUAL, 0, 1, ADVERTISEMENT.into()),
        step(RETURN, 0, 0, u32::from(u16::MAX)),
        step(RETURN, 0, 0, 0),
    ]
}

const ETHERTYPE_IPV4: u16 = 0x0800;
const ICMP: u8 = 1;
/// Bytes of an Ethernet header, and of IP headers without options.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const IPV6: usize = 40;
/// Types of echo requests and replies of ICMP and of `ICMPv6`.
const ECHO_REQUESTS: [u8; 2] = [8, 128];
const ECHO_REPLIES: [u8; 2] = [0, 129];
/// Content of a request: identifies it in a capture.
const ECHO_CONTENT: &[u8] = b"kni: does the tunnel work?  ";

/// An echo request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Echo {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) identifier: u16,
    pub(super) sequence: u16,
}

/// The message of a request, with its checksum.
pub(super) fn echo_message(echo: &Echo) -> Vec<u8> {
    let [v4, v6] = ECHO_REQUESTS;
    let kind = if echo.source.is_ipv4() { v4 } else { v6 };
    let (identifier, sequence) = (echo.identifier.to_be_bytes(), echo.sequence.to_be_bytes());
    let mut message = [&[kind, 0, 0, 0][..], &identifier, &sequence, ECHO_CONTENT].concat();
    let pseudo = match (echo.source, echo.destination) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => [
            &source.octets()[..],
            &destination.octets(),
            &u32::try_from(message.len()).unwrap_or(0).to_be_bytes(),
            &[0, 0, 0, ICMPV6],
        ]
        .concat(),
        _ => Vec::new(),
    };
    let sum = checksum([&pseudo, &message]);
    if let Some(field) = message.get_mut(2..4) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    message
}

/// The frame of a request. No program reads its MAC addresses.
pub(super) fn echo_request(echo: &Echo) -> Vec<u8> {
    const HOPS: u8 = 64;
    let message = echo_message(echo);
    let length = u16::try_from(message.len()).unwrap_or(0);
    let macs = [[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]].concat();
    match (echo.source, echo.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let [high, low] = length.saturating_add(20).to_be_bytes();
            let head = [0x45, 0, high, low, 0, 0, 0x40, 0, HOPS, ICMP];
            let addresses = [source.octets(), destination.octets()].concat();
            let sum = checksum([&head, &addresses]).to_be_bytes();
            [
                &macs[..],
                &ETHERTYPE_IPV4.to_be_bytes(),
                &head,
                &sum,
                &addresses,
                &message,
            ]
            .concat()
        }
        (source, destination) => {
            let [high, low] = length.to_be_bytes();
            let octets = |ip| match ip {
                IpAddr::V4(v4) => Ipv4Addr::to_ipv6_mapped(&v4).octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            [
                &macs[..],
                &ETHERTYPE_IPV6.to_be_bytes(),
                &[0x60, 0, 0, 0, high, low, ICMPV6, HOPS],
                &octets(source),
                &octets(destination),
                &message,
            ]
            .concat()
        }
    }
}

/// What follows the IPv4 header of a packet.
pub(super) fn behind_ipv4(packet: &[u8]) -> Option<&[u8]> {
    packet.get(usize::from(packet.first()? & 0x0f) * 4..)
}

/// The sequence number of a message, if it is the reply to a request with this identifier.
pub(super) fn echo_reply(message: &[u8], v4: bool, identifier: u16) -> Option<u16> {
    let [kind, found, sequence] = [0, 4, 6].map(|at| bytes::<2>(message, at));
    let [kind, _code] = kind?;
    let [reply4, reply6] = ECHO_REPLIES;
    let expected = if v4 { reply4 } else { reply6 };
    let is_reply = kind == expected && found? == identifier.to_be_bytes();
    is_reply.then_some(u16::from_be_bytes(sequence?))
}

/// Sender, receiver and sequence number of a frame, if it has the reply to a request with this identifier.
pub(super) fn echo_reply_in(frame: &[u8], identifier: u16) -> Option<(IpAddr, IpAddr, u16)> {
    let packet = frame.get(ETHERNET..)?;
    let (source, destination, message): (IpAddr, IpAddr, &[u8]) = match u16::from_be_bytes(bytes(frame, 12)?) {
        ETHERTYPE_IPV4 if packet.get(9) == Some(&ICMP) => (
            bytes::<4>(packet, 12)?.into(),
            bytes::<4>(packet, 16)?.into(),
            packet.get(IPV4..)?,
        ),
        ETHERTYPE_IPV6 if packet.get(6) == Some(&ICMPV6) => (
            bytes::<16>(packet, 8)?.into(),
            bytes::<16>(packet, 24)?.into(),
            packet.get(IPV6..)?,
        ),
        _ => return None,
    };
    let sequence = echo_reply(message, source.is_ipv4(), identifier)?;
    Some((source, destination, sequence))
}

/// A classic BPF program that accepts echo replies with this identifier, in packets without options.
pub(super) fn echo_reply_filter(identifier: u16) -> [libc::sock_filter; 17] {
    // linux/bpf_common.h: load a half word or a byte from the frame; jump if equal; return.
    const HALF: u16 = 0x28;
    const LOAD: u16 = 0x30;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let step = |code, jt, jf, k: u32| libc::sock_filter { code, jt, jf, k };
    let [reply4, reply6] = ECHO_REPLIES.map(u32::from);
    [
        step(HALF, 0, 0, 12),
        step(EQUAL, 0, 6, ETHERTYPE_IPV4.into()),
        step(LOAD, 0, 0, 23),
        step(EQUAL, 0, 12, ICMP.into()),
        step(LOAD, 0, 0, 34),
        step(EQUAL, 0, 10, reply4),
        step(HALF, 0, 0, 38),
        step(EQUAL, 7, 8, identifier.into()),
        step(EQUAL, 0, 7, ETHERTYPE_IPV6.into()),
        step(LOAD, 0, 0, 20),
        step(EQUAL, 0, 5, ICMPV6.into()),
        step(LOAD, 0, 0, 54),
        step(EQUAL, 0, 3, reply6),
        step(HALF, 0, 0, 58),
        step(EQUAL, 0, 1, identifier.into()),
        step(RETURN, 0, 0, u32::from(u16::MAX)),
        step(RETURN, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);

    #[test]
    fn a_probe_claims_nothing_in_a_neighbour_table() {
        let frame = probe(OWN, "192.0.2.7".parse().unwrap());
        assert_eq!(frame.len(), 42);
        assert_eq!(frame[..6], BROADCAST);
        assert_eq!(frame[28..32], [0; 4], "no sender address");
        assert_eq!(frame[38..], [192, 0, 2, 7]);
        let frame = probe(OWN, "2001:db8::aa:bbcc".parse().unwrap());
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0xaa, 0xbb, 0xcc]);
        assert_eq!(frame[22..38], [0; 16], "from the unspecified address");
        assert_eq!(frame[54], SOLICITATION);
    }

    #[test]
    fn checksums_are_those_of_rfc_1071() {
        let frame = announcement(OWN, "2001:db8::25".parse().unwrap());
        let length = u32::try_from(frame.len() - 54).unwrap();
        let pseudo = [&frame[22..54], &length.to_be_bytes(), &[0, 0, 0, ICMPV6]].concat();
        assert_eq!(
            checksum([&pseudo, &frame[54..]]),
            0,
            "the sum with the checksum is 0xffff"
        );
    }

    #[test]
    fn frames_say_who_has_an_address() {
        let v4: IpAddr = "192.0.2.7".parse().unwrap();
        let v6: IpAddr = "2001:db8::7".parse().unwrap();
        for address in [v4, v6] {
            assert_eq!(holder(&probe(OWN, address)), Some((address, OWN)), "about to take it");
            assert_eq!(holder(&announcement(OWN, address)), Some((address, OWN)));
            for cut in 0..42 {
                assert_eq!(holder(&announcement(OWN, address)[..cut]), None, "{cut} bytes");
            }
        }
        let mut question = probe(OWN, v6);
        question[22] = 0x20;
        assert_eq!(holder(&question), None, "a plain solicitation only asks");
    }

    #[test]
    fn requests_are_answered_with_the_same_numbers() {
        let ends: [(IpAddr, IpAddr, usize); 2] = [
            ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap(), 34),
            ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap(), 54),
        ];
        for (source, destination, at) in ends {
            let echo = Echo {
                source,
                destination,
                identifier: 0x1234,
                sequence: 7,
            };
            let mut frame = echo_request(&echo);
            assert_eq!(echo_reply_in(&frame, 0x1234), None, "a request");
            if source.is_ipv4() {
                assert_eq!(checksum([&frame[14..34], &[]]), 0);
                assert_eq!(checksum([&frame[34..], &[]]), 0);
                assert_eq!(behind_ipv4(&frame[14..]), Some(&frame[34..]));
            }
            assert!(!accepts(&echo_reply_filter(0x1234), &frame), "a request");
            frame[at] = ECHO_REPLIES[usize::from(source.is_ipv6())];
            assert!(accepts(&echo_reply_filter(0x1234), &frame));
            assert!(!accepts(&echo_reply_filter(0x1235), &frame));
            let mut other = frame.clone();
            other[12] ^= 1;
            assert!(!accepts(&echo_reply_filter(0x1234), &other), "another protocol");
            assert_eq!(echo_reply_in(&frame, 0x1234), Some((source, destination, 7)));
            assert_eq!(echo_reply_in(&frame, 0x1235), None);
            for cut in 0..at + 8 {
                assert_eq!(echo_reply_in(&frame[..cut], 0x1234), None, "{cut} bytes");
            }
        }
    }

    /// Runs a classic BPF program of the instructions that the filters here consist of.
    fn accepts(program: &[libc::sock_filter], frame: &[u8]) -> bool {
        let (mut at, mut word) = (0, 0);
        loop {
            let step = program[at];
            let place = usize::try_from(step.k).unwrap();
            at += 1;
            match step.code {
                0x28 => word = u32::from(u16::from_be_bytes([frame[place], frame[place + 1]])),
                0x30 => word = u32::from(frame[place]),
                0x15 if word == step.k => at += usize::from(step.jt),
                0x15 => at += usize::from(step.jf),
                0x06 => return step.k != 0,
                other => panic!("instruction {other:#x}"),
            }
        }
    }
}
