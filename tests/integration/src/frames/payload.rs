//! Builds the payload of an IP packet, with the checksum that its addresses require.

use std::net::IpAddr;

use super::{checksum, crc32c, pseudo_header};

/// The flags byte of a TCP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// Opens a connection.
    pub const SYN: Self = Self(0x02);
    /// The answer to SYN.
    pub const SYN_ACK: Self = Self(0x12);
    /// A segment of an established connection.
    pub const ACK: Self = Self(0x10);
    /// Closes one direction.
    pub const FIN_ACK: Self = Self(0x11);
    /// Resets a connection.
    pub const RST: Self = Self(0x04);
}

/// The part after the IP headers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the headers")]
pub enum Payload {
    Udp {
        source_port: u16,
        destination_port: u16,
        data: Vec<u8>,
    },
    Tcp {
        source_port: u16,
        destination_port: u16,
        flags: TcpFlags,
        sequence: u32,
        data: Vec<u8>,
    },
    /// The common header and the following chunks.
    Sctp {
        source_port: u16,
        destination_port: u16,
        tag: u32,
        chunks: Vec<u8>,
    },
    /// ICMP or ICMPv6 by the addresses of the packet. `body` starts after the checksum.
    Icmp { kind: u8, code: u8, body: Vec<u8> },
    /// Arbitrary bytes.
    Raw { protocol: u8, bytes: Vec<u8> },
}

impl Payload {
    /// A datagram.
    pub fn udp(source_port: u16, destination_port: u16, data: &[u8]) -> Self {
        Self::Udp {
            source_port,
            destination_port,
            data: data.to_vec(),
        }
    }

    /// A segment without data.
    pub fn tcp(source_port: u16, destination_port: u16, flags: TcpFlags) -> Self {
        Self::Tcp {
            source_port,
            destination_port,
            flags,
            sequence: 1000,
            data: Vec::new(),
        }
    }

    /// An SCTP packet with an INIT chunk.
    pub fn sctp_init(source_port: u16, destination_port: u16) -> Self {
        // Type 1, length 20; initiate tag, window, 1 stream each way, initial TSN.
        let chunks = [1, 0, 0, 20, 0, 0, 0, 9, 0, 0, 255, 255, 0, 1, 0, 1, 0, 0, 0, 1].to_vec();
        Self::Sctp {
            source_port,
            destination_port,
            tag: 0,
            chunks,
        }
    }

    /// An echo request for an address of the given family.
    pub fn echo_request(v4: bool, identifier: u16, sequence: u16, data: &[u8]) -> Self {
        let body = [&identifier.to_be_bytes()[..], &sequence.to_be_bytes(), data].concat();
        Self::Icmp {
            kind: if v4 { 8 } else { 128 },
            code: 0,
            body,
        }
    }

    /// The IP protocol number in a packet of the given family.
    pub fn protocol(&self, v4: bool) -> u8 {
        match self {
            Self::Udp { .. } => 17,
            Self::Tcp { .. } => 6,
            Self::Sctp { .. } => 132,
            Self::Icmp { .. } => {
                if v4 {
                    1
                } else {
                    58
                }
            }
            Self::Raw { protocol, .. } => *protocol,
        }
    }

    /// The bytes in a packet between these addresses, the source first.
    pub fn to_bytes(&self, ends: (IpAddr, IpAddr)) -> Vec<u8> {
        let v4 = ends.0.is_ipv4();
        let mut bytes = self.without_checksum();
        match self {
            Self::Udp { .. } => {
                let sum = checksum(&[&pseudo_header(ends, 17, bytes.len()), &bytes]);
                // 0 would mean "no checksum".
                put(&mut bytes, 6, if sum == 0 { u16::MAX } else { sum });
            }
            Self::Tcp { .. } => {
                let sum = checksum(&[&pseudo_header(ends, 6, bytes.len()), &bytes]);
                put(&mut bytes, 16, sum);
            }
            Self::Sctp { .. } => {
                let sum = crc32c(&bytes);
                bytes[8..12].copy_from_slice(&sum.to_le_bytes());
            }
            Self::Icmp { .. } => {
                let pseudo = if v4 {
                    Vec::new()
                } else {
                    pseudo_header(ends, 58, bytes.len())
                };
                let sum = checksum(&[&pseudo, &bytes]);
                put(&mut bytes, 2, sum);
            }
            Self::Raw { .. } => {}
        }
        bytes
    }

    fn without_checksum(&self) -> Vec<u8> {
        match self {
            Self::Udp {
                source_port,
                destination_port,
                data,
            } => {
                let length = u16::try_from(8 + data.len()).expect("a datagram fits 64 KiB");
                [
                    &ports(*source_port, *destination_port)[..],
                    &length.to_be_bytes(),
                    &[0, 0],
                    data,
                ]
                .concat()
            }
            Self::Tcp {
                source_port,
                destination_port,
                flags,
                sequence,
                data,
            } => {
                let ports = ports(*source_port, *destination_port);
                // Acknowledgement 0; 5 words of header; window 65535; checksum and urgent pointer 0.
                let rest = [0, 0, 0, 0, 5 << 4, flags.0, 255, 255, 0, 0, 0, 0];
                [&ports[..], &sequence.to_be_bytes(), &rest, data].concat()
            }
            Self::Sctp {
                source_port,
                destination_port,
                tag,
                chunks,
            } => [
                &ports(*source_port, *destination_port)[..],
                &tag.to_be_bytes(),
                &[0; 4],
                chunks,
            ]
            .concat(),
            Self::Icmp { kind, code, body } => [&[*kind, *code, 0, 0], &body[..]].concat(),
            Self::Raw { bytes, .. } => bytes.clone(),
        }
    }
}

fn ports(source: u16, destination: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (source.to_be_bytes(), destination.to_be_bytes());
    [a, b, c, d]
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
