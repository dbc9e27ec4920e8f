//! Builds IPv4 and IPv6 packets with options, extension headers and fragments.

use std::net::IpAddr;

use super::{Payload, checksum, pseudo_header};

/// An IPv6 extension header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extension {
    /// Hop-by-hop options (0). Must be the first header.
    HopByHop(Vec<u8>),
    /// Destination options (60).
    DestinationOptions(Vec<u8>),
    /// Routing (43): type, segments left, and the remaining data.
    Routing(u8, u8, Vec<u8>),
    /// Fragment (44): offset in bytes, whether more follow, identification.
    Fragment {
        /// Offset of the payload, in bytes; a multiple of 8.
        offset: u16,
        /// Whether more fragments follow.
        more: bool,
        /// Identification of the original packet.
        id: u32,
    },
}

impl Extension {
    fn protocol(&self) -> u8 {
        match self {
            Self::HopByHop(_) => 0,
            Self::DestinationOptions(_) => 60,
            Self::Routing(..) => 43,
            Self::Fragment { .. } => 44,
        }
    }

    fn to_bytes(&self, next: u8) -> Vec<u8> {
        match self {
            Self::HopByHop(options) | Self::DestinationOptions(options) => padded(next, &[], options),
            Self::Routing(kind, left, data) => padded(next, &[*kind, *left], data),
            Self::Fragment { offset, more, id } => {
                let field = (offset & !7) | u16::from(*more);
                [&[next, 0][..], &field.to_be_bytes(), &id.to_be_bytes()].concat()
            }
        }
    }
}

/// Next header, length in units of 8 bytes without the first unit, the fields, and padding options to a multiple of 8.
fn padded(next: u8, fields: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = [&[next, 0][..], fields, data].concat();
    match (8 - bytes.len() % 8) % 8 {
        0 => {}
        1 => bytes.push(0),
        n => {
            let fill = n - 2;
            bytes.extend_from_slice(&[1, u8::try_from(fill).expect("less than 8")]);
            bytes.resize(bytes.len() + fill, 0);
        }
    }
    bytes[1] = u8::try_from(bytes.len() / 8 - 1).expect("an extension header is at most 2 KiB");
    bytes
}

/// The headers of a packet. Both addresses are of the same family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ip {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Identification, for IPv4 and [`Self::fragments`].
    pub id: u16,
    /// IPv4 options, padded with zeros to a multiple of 4 bytes; at most 40.
    pub options: Vec<u8>,
    /// IPv6 extension headers in order.
    pub extensions: Vec<Extension>,
    /// IPv4 flags and offset, as in the header.
    pub v4_fragment: u16,
}

impl Ip {
    /// A plain header with a hop limit of 64.
    pub fn new(source: IpAddr, destination: IpAddr) -> Self {
        let (options, extensions) = (Vec::new(), Vec::new());
        Self {
            source,
            destination,
            hop_limit: 64,
            id: 0x1234,
            options,
            extensions,
            v4_fragment: 0,
        }
    }

    /// With IPv4 options.
    #[must_use]
    pub fn options(mut self, options: &[u8]) -> Self {
        self.options = options.to_vec();
        self
    }

    /// With one more IPv6 extension header.
    #[must_use]
    pub fn extension(mut self, extension: Extension) -> Self {
        self.extensions.push(extension);
        self
    }

    /// With a different hop limit.
    #[must_use]
    pub fn hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// The complete packet.
    pub fn packet(&self, payload: &Payload) -> Vec<u8> {
        self.around(
            payload.protocol(self.source.is_ipv4()),
            &payload.to_bytes((self.source, self.destination)),
        )
    }

    /// The packet in fragments with at most `size` bytes of payload each, rounded down to a multiple of 8.
    pub fn fragments(&self, payload: &Payload, size: usize) -> Vec<Vec<u8>> {
        let protocol = payload.protocol(self.source.is_ipv4());
        let bytes = payload.to_bytes((self.source, self.destination));
        let size = size / 8 * 8;
        let parts: Vec<_> = bytes.chunks(size).collect();
        let last = parts.len() - 1;
        let fragment = |(index, part): (usize, &&[u8])| {
            let offset = u16::try_from(index * size).expect("a packet fits 64 KiB");
            self.fragment(protocol, part, offset, index != last)
        };
        parts.iter().enumerate().map(fragment).collect()
    }

    /// One fragment; `offset` in bytes, a multiple of 8.
    pub fn fragment(&self, protocol: u8, part: &[u8], offset: u16, more: bool) -> Vec<u8> {
        let mut ip = self.clone();
        if self.source.is_ipv4() {
            ip.v4_fragment = (offset / 8) | if more { 0x2000 } else { 0 };
        } else {
            ip.extensions.push(Extension::Fragment {
                offset,
                more,
                id: self.id.into(),
            });
        }
        ip.around(protocol, part)
    }

    /// The headers with a payload of any protocol.
    pub fn around(&self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut options = self.options.clone();
                options.resize(options.len().next_multiple_of(4), 0);
                let header_length = 20 + options.len();
                let version = 0x40 | u8::try_from(header_length / 4).expect("at most 40 bytes of options");
                let length = u16::try_from(header_length + payload.len()).expect("a packet fits 64 KiB");
                let mut header = [&[version, 0][..], &length.to_be_bytes(), &self.id.to_be_bytes()].concat();
                header.extend_from_slice(&self.v4_fragment.to_be_bytes());
                header.extend_from_slice(&[self.hop_limit, protocol, 0, 0]);
                header.extend_from_slice(&[source.octets(), destination.octets()].concat());
                header.extend_from_slice(&options);
                let sum = checksum(&[&header]);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                [&header[..], payload].concat()
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (first, headers) = self.extension_headers(protocol);
                let length = u16::try_from(headers.len() + payload.len()).expect("a packet fits 64 KiB");
                let mut packet = [&[0x60, 0, 0, 0][..], &length.to_be_bytes(), &[first, self.hop_limit]].concat();
                packet.extend_from_slice(&[source.octets(), destination.octets()].concat());
                [&packet[..], &headers, payload].concat()
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => {
                panic!("{} and {} are of different families", self.source, self.destination)
            }
        }
    }

    /// See [`pseudo_header`].
    pub fn pseudo_header(&self, protocol: u8, length: usize) -> Vec<u8> {
        pseudo_header((self.source, self.destination), protocol, length)
    }

    /// The protocol of the first header, and all headers; each contains the protocol of the next one.
    fn extension_headers(&self, protocol: u8) -> (u8, Vec<u8>) {
        self.extensions
            .iter()
            .rev()
            .fold((protocol, Vec::new()), |(next, behind), extension| {
                (extension.protocol(), [extension.to_bytes(next), behind].concat())
            })
    }
}
