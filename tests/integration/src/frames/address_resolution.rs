//! Builds ARP and neighbour discovery frames.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{ETHERTYPE_ARP, Ip, Link, Mac, Payload};

/// A broadcast ARP request of `sender` for `target`.
pub fn arp_request(sender_mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    // Ethernet, IPv4, their lengths, request.
    let head = [0, 1, 0x08, 0, 6, 4, 0, 1];
    let body = [&head[..], &sender_mac, &sender.octets(), &[0; 6], &target.octets()].concat();
    Link::new(sender_mac, [0xff; 6]).frame_of(ETHERTYPE_ARP, &body)
}

/// The neighbour solicitation for `target`, to its solicited-node group.
pub fn neighbour_solicitation(sender_mac: Mac, sender: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    // 4 reserved bytes, the target, and the option "source link-layer address" (type 1, 8 bytes long).
    let body = [&[0; 4][..], &target.octets(), &[1, 1], &sender_mac].concat();
    let ip = Ip::new(IpAddr::V6(sender), IpAddr::V6(group)).hop_limit(255);
    let packet = ip.packet(&Payload::Icmp {
        kind: 135,
        code: 0,
        body,
    });
    Link::new(sender_mac, [0x33, 0x33, 0xff, a, b, c]).frame(&packet)
}
