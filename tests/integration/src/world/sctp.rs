//! Implements SCTP's INIT and INIT ACK over raw sockets, because the kernel's own SCTP is not used.

use std::{
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::io::unix::AsyncFd;

use crate::frames::{Payload, crc32c};

const SCTP: i32 = 132;
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
/// Length of the common header; `FIXED` is the length of the fixed part of both chunks.
const COMMON: usize = 12;
const FIXED: usize = 20;

/// A raw socket that sends and receives SCTP packets.
pub(super) struct Sctp(AsyncFd<Socket>);

/// One packet with an INIT or INIT ACK chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) source_port: u16,
    pub(super) destination_port: u16,
    /// The tag of the common header: 0 in an INIT, the initiate tag of the INIT in its answer.
    pub(super) tag: u32,
    /// Whether it is an INIT ACK.
    pub(super) answer: bool,
    pub(super) initiate_tag: u32,
    /// The data after the fixed part.
    pub(super) text: String,
}

impl Packet {
    fn encode(&self) -> Vec<u8> {
        let length = u16::try_from(FIXED + self.text.len()).expect("a short text");
        let kind = if self.answer { INIT_ACK } else { INIT };
        let chunks = [
            &[kind, 0][..],
            &length.to_be_bytes(),
            &self.initiate_tag.to_be_bytes(),
            // Window, one stream each way, first TSN.
            &[0, 0, 255, 255, 0, 1, 0, 1, 0, 0, 0, 1],
            self.text.as_bytes(),
        ]
        .concat();
        let payload = Payload::Sctp {
            source_port: self.source_port,
            destination_port: self.destination_port,
            tag: self.tag,
            chunks,
        };
        // The checksum of SCTP covers only the packet, so the addresses do not matter.
        payload.to_bytes(([0; 4].into(), [0; 4].into()))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, chunk) = (bytes.get(..COMMON)?, bytes.get(COMMON..)?);
        let u16_at = |bytes: &[u8], at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let u32_at = |bytes: &[u8], at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let kind = *chunk.first()?;
        let length = usize::from(u16_at(chunk, 2)?);
        (has_right_checksum(bytes) && matches!(kind, INIT | INIT_ACK)).then_some(())?;
        Some(Self {
            source_port: u16_at(header, 0)?,
            destination_port: u16_at(header, 2)?,
            tag: u32_at(header, 4)?,
            answer: kind == INIT_ACK,
            initiate_tag: u32_at(chunk, 4)?,
            text: String::from_utf8(chunk.get(FIXED..length)?.to_vec()).ok()?,
        })
    }
}

fn has_right_checksum(bytes: &[u8]) -> bool {
    let mut zeroed = bytes.to_vec();
    let stands = zeroed[8..12].to_vec();
    zeroed[8..12].fill(0);
    crc32c(&zeroed).to_le_bytes()[..] == stands
}

impl Sctp {
    /// A socket of the family of `at` in the namespace of the calling thread, inside a runtime. It receives packets to
    /// that address, or to every address if it is unspecified.
    pub(super) fn open(at: IpAddr) -> io::Result<Self> {
        let at = SocketAddr::new(at, 0);
        let socket = Socket::new(Domain::for_address(at), Type::RAW, Some(Protocol::from(SCTP)))?;
        socket.set_nonblocking(true)?;
        socket.set_recv_buffer_size(1 << 20)?;
        socket.bind(&SockAddr::from(at))?;
        // SAFETY: the socket owns its descriptor, and nothing replaces the socket inside until both are dropped.
        let registered = unsafe { AsyncFd::register(socket) };
        Ok(Self(registered?))
    }

    /// Sends; the kernel writes the IP header.
    pub(super) fn send(&self, to: IpAddr, packet: &Packet) -> io::Result<()> {
        let to = SockAddr::from(SocketAddr::new(to, 0));
        self.0.get_ref().send_to(&packet.encode(), &to).map(drop)
    }

    /// The next complete packet with a correct checksum, and its sender.
    pub(super) async fn receive(&self) -> io::Result<(IpAddr, Packet)> {
        let mut buffer = vec![0; 4096];
        loop {
            let mut ready = self.0.readable().await?;
            let read = ready.try_io(|socket| read_from(socket.get_ref(), &mut buffer));
            let Ok(read) = read else { continue };
            let (length, from) = read?;
            if let Some(packet) = strip(&buffer[..length], from).and_then(Packet::decode) {
                return Ok((from, packet));
            }
        }
    }
}

/// Removes the IP header that a raw IPv4 socket returns.
fn strip(bytes: &[u8], from: IpAddr) -> Option<&[u8]> {
    match from {
        IpAddr::V4(_) => bytes.get(usize::from(bytes.first()? & 15) * 4..),
        IpAddr::V6(_) => Some(bytes),
    }
}

fn read_from(socket: &Socket, buffer: &mut [u8]) -> io::Result<(usize, IpAddr)> {
    let peeked = socket.peek_sender()?;
    let length = (&mut &*socket).read(buffer)?;
    let from = peeked.as_socket().ok_or_else(|| io::Error::other("no sender"))?;
    Ok((length, from.ip()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_survive_encoding_and_broken_ones_do_not() {
        for answer in [false, true] {
            let packet = Packet {
                source_port: 40_000,
                destination_port: 80,
                tag: u32::from(answer) * 77,
                answer,
                initiate_tag: 0xdead_beef,
                text: "x/a 10.0.0.1 80 token".into(),
            };
            let bytes = packet.encode();
            assert_eq!(Packet::decode(&bytes), Some(packet));
            for at in 0..bytes.len() {
                let mut broken = bytes.clone();
                broken[at] ^= 1;
                assert_eq!(Packet::decode(&broken), None, "byte {at}");
                assert_eq!(Packet::decode(&bytes[..at]), None, "{at} bytes");
            }
        }
    }
}
