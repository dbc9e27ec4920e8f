//! Builds the packets of the rows: plain or in a tunnel, whole, in fragments or behind a VLAN tag.

use std::net::IpAddr;

use kni_integration::{
    cluster::wire::{OVERLAY_PORT, ip_packet},
    frames::{Ip, Link, Payload},
};

use super::super::super::forgery::in_tunnel;

/// The ports of all datagrams.
const FROM: u16 = 999;
pub(super) const PORT: u16 = 7111;
/// The source port of tunnels.
const TUNNEL_FROM: u16 = 5556;
/// Bytes of a datagram's content: enough for two fragments, of which the first has the number of the row.
const LENGTH: usize = 72;
/// What each content begins with.
const MARK: &str = "in the name of another ";

/// Source and destination of a packet.
#[derive(Clone, Copy)]
pub(super) struct Ends(pub(super) IpAddr, pub(super) IpAddr);

/// A datagram in the name of a source.
#[derive(Clone, Copy)]
pub(super) enum Packet {
    /// Without a tunnel, to this port.
    Plain(Ends, u16),
    /// In the virtual network with a number, between the outer ends.
    Tunnelled { number: u32, inner: Ends, outer: Ends },
}

/// How a packet is put into frames.
#[derive(Clone, Copy)]
pub(super) enum Shape {
    Whole,
    /// Two IP fragments.
    Fragments,
    /// Behind a tag of this VLAN.
    Tagged(u16),
}

/// The content of a row's datagram.
pub(super) fn content(row: usize, number: u32) -> Vec<u8> {
    let mut content = format!("{MARK}{row:03}-{number:09}").into_bytes();
    content.resize(LENGTH, b'.');
    content
}

/// The row of a datagram, of which a frame that arrived at a pod is all or the first fragment.
pub(super) fn row_of(frame: &[u8]) -> Option<usize> {
    const UDP: u8 = 17;
    const FRAGMENT: u8 = 44;
    let (.., protocol, payload) = ip_packet(frame)?;
    let datagram = match protocol {
        UDP => payload,
        FRAGMENT => payload.get(8..)?,
        _ => return None,
    };
    let port = u16::from_be_bytes(datagram.get(2..4)?.try_into().ok()?);
    let row = datagram.get(8..)?.strip_prefix(MARK.as_bytes())?.get(..3)?;
    (port == PORT).then_some(())?;
    std::str::from_utf8(row).ok()?.parse().ok()
}

impl Packet {
    /// In whose name it is, and to whom.
    const fn ends(&self) -> Ends {
        match self {
            Self::Plain(ends, _) | Self::Tunnelled { inner: ends, .. } => *ends,
        }
    }

    /// The families of addresses.
    pub(super) fn family(&self) -> &'static str {
        let outer_v4 = match self {
            Self::Plain(..) => None,
            Self::Tunnelled { outer, .. } => Some(outer.0.is_ipv4()),
        };
        match (self.ends().0.is_ipv4(), outer_v4) {
            (true, None) => "IPv4",
            (false, None) => "IPv6",
            (true, Some(true)) => "IPv4 in IPv4",
            (true, Some(false)) => "IPv4 in IPv6",
            (false, Some(true)) => "IPv6 in IPv4",
            (false, Some(false)) => "IPv6 in IPv6",
        }
    }

    /// Where a socket sends its datagram to, and what it contains.
    pub(super) fn datagram(&self, content: &[u8]) -> ((IpAddr, u16), Vec<u8>) {
        match self {
            Self::Plain(ends, port) => ((ends.1, *port), content.to_vec()),
            Self::Tunnelled { number, inner, outer } => {
                let packet = Ip::new(inner.0, inner.1).packet(&Payload::udp(FROM, PORT, content));
                ((outer.1, OVERLAY_PORT), in_tunnel(*number, &packet))
            }
        }
    }

    /// Its frames; fragments have this identification.
    pub(super) fn frames(&self, link: &Link, shape: Shape, id: u16, content: &[u8]) -> Vec<Vec<u8>> {
        let ((_, port), data) = self.datagram(content);
        let (ends, from) = match self {
            Self::Plain(ends, _) => (ends, FROM),
            Self::Tunnelled { outer, .. } => (outer, TUNNEL_FROM),
        };
        let mut ip = Ip::new(ends.0, ends.1);
        ip.id = id;
        let payload = Payload::udp(from, port, &data);
        match shape {
            Shape::Whole => vec![link.frame(&ip.packet(&payload))],
            Shape::Tagged(vlan) => vec![link.clone().vlan(vlan).frame(&ip.packet(&payload))],
            Shape::Fragments => {
                let half = (8 + data.len()).div_ceil(2).next_multiple_of(8);
                let parts = ip.fragments(&payload, half);
                parts.iter().map(|part| link.frame(part)).collect()
            }
        }
    }
}
