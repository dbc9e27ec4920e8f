//! Models the gateway's answers to ARP and neighbour solicitations.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    Endpoint, Verdict,
    packet::{ETHERNET, ICMPV6, Packet, take},
};
use crate::frames::checksum;

const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// ARP from a pod: a request for the gateway becomes its reply; everything else that is not spoofed is dropped.
pub(super) fn arp(endpoint: &Endpoint, frame: &mut [u8]) -> Result<Verdict, Verdict> {
    let arp: [u8; 28] = take(frame, ETHERNET)?;
    let (kinds, operation) = (&arp[..6], &arp[6..8]);
    let (sender_mac, sender) = (&arp[8..14], Ipv4Addr::from(take::<4>(&arp, 14)?));
    let target = Ipv4Addr::from(take::<4>(&arp, 24)?);
    if kinds != [0, 1, 8, 0, 6, 4] {
        return Err(Verdict::Malformed);
    }
    // A probe for a duplicate has no sender address (RFC 5227).
    let honest = sender.is_unspecified() || endpoint.ipv4 == Some(sender);
    if sender_mac != endpoint.mac || !honest {
        return Err(Verdict::SourceAddress);
    }
    if operation != [0, 1] || target != GATEWAY_V4 {
        return Ok(Verdict::Absorbed);
    }
    let reply = [
        &endpoint.mac[..],
        &endpoint.host_mac,
        &[8, 6],
        &[0, 1, 8, 0, 6, 4, 0, 2],
        &endpoint.host_mac,
        &GATEWAY_V4.octets(),
        &endpoint.mac,
        &sender.octets(),
    ]
    .concat();
    frame[..reply.len()].copy_from_slice(&reply);
    Ok(Verdict::Answered)
}

/// Neighbour discovery from a pod: a solicitation for the gateway becomes the advertisement (RFC 4861); everything else
/// is dropped. The checksum of the solicitation is not verified.
pub(super) fn solicitation(endpoint: &Endpoint, packet: &Packet, kind: u8, frame: &mut [u8]) -> Verdict {
    const ICMP: usize = ETHERNET + 40;
    let IpAddr::V6(asker) = packet.source else {
        return Verdict::Absorbed;
    };
    let length = packet.length - 40;
    let hop_limit = frame[ETHERNET + 7];
    if kind != 135 || asker.is_unspecified() || packet.extended || hop_limit != 255 || ![24, 32].contains(&length) {
        return Verdict::Absorbed;
    }
    let code = frame[ICMP + 1];
    if code != 0 || frame[ICMP + 8..ICMP + 24] != GATEWAY_V6.octets() {
        return Verdict::Absorbed;
    }
    // Router, solicited, override; then the target and, if there is room, its link-layer address (type 2).
    let mut icmp = [&[136, 0, 0, 0, 0xe0, 0, 0, 0][..], &GATEWAY_V6.octets()].concat();
    if length == 32 {
        icmp.extend_from_slice(&[&[2, 1][..], &endpoint.host_mac].concat());
    }
    let ends = [GATEWAY_V6.octets(), asker.octets()].concat();
    let upper = u32::try_from(length).expect("a short packet").to_be_bytes();
    let sum = checksum(&[&ends, &upper, &[0, 0, 0, ICMPV6], &icmp]);
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    frame[..6].copy_from_slice(&endpoint.mac);
    frame[6..12].copy_from_slice(&endpoint.host_mac);
    frame[ETHERNET + 8..ICMP].copy_from_slice(&ends);
    frame[ICMP..ICMP + length].copy_from_slice(&icmp);
    Verdict::Answered
}
