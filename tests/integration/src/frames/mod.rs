//! Builds frames that no socket would send: spoofed, fragmented, truncated, with options and extension headers.
//!
//! A frame is built from the inside out: a [`Payload`] in an [`Ip`] packet on a [`Link`]. Lengths and checksums are
//! correct unless bytes are changed afterwards.

mod address_resolution;
mod checksum;
mod ip;
mod packet_socket;
mod payload;

pub use address_resolution::{arp_request, neighbour_solicitation};
pub use checksum::{checksum, crc32c, pseudo_header};
pub use ip::{Extension, Ip};
pub use packet_socket::PacketSocket;
pub use payload::{Payload, TcpFlags};

/// A MAC address.
pub type Mac = [u8; 6];

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;

/// The Ethernet header of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Source MAC address.
    pub source: Mac,
    /// Destination MAC address.
    pub destination: Mac,
    /// The control information of the 802.1Q tags, the outermost first.
    pub vlans: Vec<u16>,
}

impl Link {
    /// An untagged header.
    pub fn new(source: Mac, destination: Mac) -> Self {
        Self {
            source,
            destination,
            vlans: Vec::new(),
        }
    }

    /// Adds an inner 802.1Q tag.
    #[must_use]
    pub fn vlan(mut self, id: u16) -> Self {
        self.vlans.push(id);
        self
    }

    /// A frame with an IP packet, whose version implies the EtherType.
    pub fn frame(&self, packet: &[u8]) -> Vec<u8> {
        let v6 = packet.first().is_some_and(|byte| byte >> 4 == 6);
        self.frame_of(if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }, packet)
    }

    /// A frame with any payload.
    pub fn frame_of(&self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = [self.destination, self.source].concat();
        for vlan in &self.vlans {
            frame.extend_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            frame.extend_from_slice(&vlan.to_be_bytes());
        }
        frame.extend_from_slice(&ethertype.to_be_bytes());
        frame.extend_from_slice(payload);
        frame
    }
}

/// The frame truncated to every length from zero to one byte less than complete.
pub fn truncations(frame: &[u8]) -> impl Iterator<Item = &[u8]> {
    (0..frame.len()).map(|length| &frame[..length])
}

/// Parses a MAC address in the form `aa:bb:cc:dd:ee:ff`.
pub fn parse_mac(text: &str) -> Option<Mac> {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect::<Result<_, _>>()
        .ok()?;
    bytes.try_into().ok()
}
