//! Sends ICMP and ICMPv6 echo requests with a raw socket.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::{NoAnswer, probe::inside};
use crate::{frames::checksum, namespaces::Namespaces};

const HEADER: usize = 8;

/// Sends one echo request with `token` as its payload from inside `from`, and waits for the reply with the same
/// identifier and payload.
pub fn ping(from: &Namespaces, address: IpAddr, token: &str, timeout: Duration) -> Result<(), NoAnswer> {
    inside(from, || {
        let at = SocketAddr::new(address, 0);
        let protocol = if address.is_ipv4() {
            Protocol::ICMPV4
        } else {
            Protocol::ICMPV6
        };
        let mut socket = Socket::new(Domain::for_address(at), Type::RAW, Some(protocol))?;
        // Connected, so that it receives only packets of this peer, and ICMP errors.
        socket.connect(&SockAddr::from(at))?;
        let request = request(address.is_ipv4(), token);
        let deadline = Instant::now() + timeout;
        socket.write_all(&request)?;
        let mut buffer = vec![0; 65_535];
        loop {
            let left = deadline
                .checked_duration_since(Instant::now())
                .ok_or(NoAnswer::Timeout)?;
            socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let length = socket.read(&mut buffer)?;
            if is_reply(&buffer[..length], &request, address.is_ipv4()) {
                return Ok(());
            }
        }
    })
}

/// The payload of an echo request from a raw socket: with the IP header for IPv4, without it for IPv6.
pub(super) fn echo_request(packet: &[u8], v4: bool) -> Option<&[u8]> {
    let icmp = message(packet, v4)?;
    (icmp[0] == kind(v4).0).then(|| &icmp[HEADER..])
}

fn is_reply(packet: &[u8], request: &[u8], v4: bool) -> bool {
    // Identifier, sequence number and payload are returned unchanged; only type and checksum differ.
    message(packet, v4).is_some_and(|icmp| icmp[0] == kind(v4).1 && icmp[4..] == request[4..])
}

fn message(packet: &[u8], v4: bool) -> Option<&[u8]> {
    let header = if v4 { usize::from(packet.first()? & 0x0f) * 4 } else { 0 };
    packet.get(header..).filter(|icmp| icmp.len() >= HEADER)
}

/// The types of request and reply.
fn kind(v4: bool) -> (u8, u8) {
    if v4 { (8, 0) } else { (128, 129) }
}

fn request(v4: bool, token: &str) -> Vec<u8> {
    let mut packet = vec![kind(v4).0, 0, 0, 0];
    let identifier = std::process::id().to_be_bytes();
    packet.extend_from_slice(&identifier[2..]);
    packet.extend_from_slice(&[0, 1]);
    packet.extend_from_slice(token.as_bytes());
    if v4 {
        // The kernel fills in the checksum of ICMPv6 only.
        let sum = checksum(&[&packet]);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}
