//! Ends UDP sockets of a network namespace that are connected to addresses that are gone.
//!
//! Uses `NETLINK_SOCK_DIAG` (`linux/sock_diag.h`, `linux/inet_diag.h`). All its structures are in host byte order, but
//! for addresses and ports.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use netlink_sys::{Socket, SocketAddr as KernelAddr, protocols::NETLINK_SOCK_DIAG};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::TimeVal,
};

use super::{Result, connection::ANSWER_TIMEOUT, error::Place};

/// Message types.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// `TCP_ESTABLISHED`, the state of a connected socket, as a bit.
const CONNECTED: u32 = 1 << 1;
/// Lengths of `nlmsghdr`, `inet_diag_req_v2` without its id, `inet_diag_msg` without its id and what follows it.
const HEADER: usize = 16;
const BEFORE_ID: usize = 8;
const MESSAGE_BEFORE_ID: usize = 4;
/// `inet_diag_sockid`.
const ID: usize = 48;
/// The room of one answer: the kernel's own is 32 KiB at most.
const ANSWER: usize = 64 * 1024;

/// A socket that is connected through a port of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectedSocket {
    /// The kernel's cookie of the socket, which no other one gets until the next boot.
    pub cookie: u64,
    /// Its peer.
    pub peer: SocketAddr,
}

/// The kernel's `inet_diag_sockid`, with the family of the socket.
#[derive(Debug, Clone, Copy)]
struct Found {
    family: u8,
    id: [u8; ID],
}

impl Found {
    /// One entry of a dump, without its header; `None` if it is none.
    fn read(message: &[u8]) -> Option<Self> {
        Some(Self {
            family: *message.first()?,
            id: message
                .get(MESSAGE_BEFORE_ID..MESSAGE_BEFORE_ID + ID)?
                .try_into()
                .ok()?,
        })
    }

    fn bytes<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        if let Some(found) = self.id.get(offset..offset + N) {
            bytes.copy_from_slice(found);
        }
        bytes
    }

    fn socket(&self) -> ConnectedSocket {
        let port = u16::from_be_bytes(self.bytes(2));
        let address = if i32::from(self.family) == libc::AF_INET {
            IpAddr::V4(Ipv4Addr::from(self.bytes::<4>(20)))
        } else {
            Ipv6Addr::from(self.bytes::<16>(20)).to_canonical()
        };
        // The low half is first.
        let [low, high] = [40, 44].map(|offset| u64::from(u32::from_ne_bytes(self.bytes(offset))));
        ConnectedSocket {
            cookie: high << 32 | low,
            peer: SocketAddr::new(address, port),
        }
    }
}

/// Ends those of the sockets that are still connected to these peers: their next call fails with `ECONNABORTED`, and
/// they are without a peer. Returns those that it ended. Others, which sent to the peer without a connection, stay.
/// Blocks; call it in the namespace of the sockets. Needs `CAP_NET_ADMIN`, and a kernel with `CONFIG_INET_UDP_DIAG` and
/// `CONFIG_INET_DIAG_DESTROY`.
pub fn end_connected(sockets: &BTreeSet<ConnectedSocket>) -> Result<BTreeSet<ConnectedSocket>> {
    let mut ended = BTreeSet::new();
    if sockets.is_empty() {
        return Ok(ended);
    }
    let refused = |error: io::Error| Place::new("end sockets that are connected to a pod that is gone").refused(error);
    let mut diag = Diag::connect().map_err(refused)?;
    for family in [libc::AF_INET, libc::AF_INET6] {
        let family = u8::try_from(family).unwrap_or_default();
        let found = diag.connected(family).map_err(refused)?;
        for found in found.iter().filter(|found| sockets.contains(&found.socket())) {
            if diag.destroy(found).map_err(refused)? {
                ended.insert(found.socket());
            }
        }
    }
    Ok(ended)
}

struct Diag {
    socket: Socket,
    sequence: u32,
}

impl Diag {
    fn connect() -> io::Result<Self> {
        let socket = Socket::new(NETLINK_SOCK_DIAG)?;
        let limit = TimeVal::new(i64::try_from(ANSWER_TIMEOUT.as_secs()).unwrap_or(i64::MAX), 0);
        setsockopt(&socket, sockopt::ReceiveTimeout, &limit)?;
        socket.connect(&KernelAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// The connected UDP sockets of a family.
    fn connected(&mut self, family: u8) -> io::Result<Vec<Found>> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_DUMP;
        self.send(SOCK_DIAG_BY_FAMILY, flags, family, &[0; ID])?;
        let mut found = Vec::new();
        loop {
            let answer = self.receive()?;
            for (kind, message) in messages(&answer) {
                match i32::from(kind) {
                    // Without the module for UDP the end of the dump has the error.
                    libc::NLMSG_DONE | libc::NLMSG_ERROR => return error_of(message).map_or(Ok(found), Err),
                    _ => found.extend(Found::read(message)),
                }
            }
        }
    }

    /// Whether the socket was still there.
    fn destroy(&mut self, found: &Found) -> io::Result<bool> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK;
        self.send(SOCK_DESTROY, flags, found.family, &found.id)?;
        let answer = self.receive()?;
        let error = messages(&answer).next().and_then(|(_, message)| error_of(message));
        match error {
            None => Ok(true),
            Some(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Some(error) => Err(error),
        }
    }

    fn send(&mut self, kind: u16, flags: i32, family: u8, id: &[u8; ID]) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADER + BEFORE_ID + ID).unwrap_or_default();
        let protocol = u8::try_from(libc::IPPROTO_UDP).unwrap_or_default();
        let flags = u16::try_from(flags).unwrap_or_default();
        let mut message = Vec::with_capacity(HEADER + BEFORE_ID + ID);
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend([family, protocol, 0, 0]);
        message.extend(CONNECTED.to_ne_bytes());
        message.extend(id);
        self.socket.send(&message, 0).map(drop)
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = Vec::with_capacity(ANSWER);
        self.socket.recv(&mut buffer, 0)?;
        Ok(buffer)
    }
}

/// Type and content of each message.
fn messages(mut answer: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length: [u8; 4] = answer.get(..4)?.try_into().ok()?;
        let kind: [u8; 2] = answer.get(4..6)?.try_into().ok()?;
        let length = usize::try_from(u32::from_ne_bytes(length)).ok()?;
        let content = answer.get(HEADER..length)?;
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(kind), content))
    })
}

/// The error of `struct nlmsgerr`; `None` for an acknowledgement.
fn error_of(message: &[u8]) -> Option<io::Error> {
    let code: [u8; 4] = message.get(..4)?.try_into().ok()?;
    let code = i32::from_ne_bytes(code);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel wrote for a socket of `[::1]:40000` that is connected to `::ffff:10.0.0.2` port 53.
    #[test]
    fn entries_of_dumps_are_read_and_cut_ones_are_none() {
        let mut message = vec![10, 1, 0, 0];
        message.extend(40_000_u16.to_be_bytes());
        message.extend(53_u16.to_be_bytes());
        message.extend(Ipv6Addr::LOCALHOST.octets());
        message.extend(Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().octets());
        message.extend(0_u32.to_ne_bytes());
        message.extend(7_u32.to_ne_bytes());
        message.extend(1_u32.to_ne_bytes());
        message.extend([0; 20]);
        let found = Found::read(&message).unwrap().socket();
        assert_eq!(found.cookie, 1 << 32 | 7);
        assert_eq!(found.peer, "10.0.0.2:53".parse().unwrap());
        assert!((0..MESSAGE_BEFORE_ID + ID).all(|length| Found::read(&message[..length]).is_none()));
    }

    #[test]
    fn answers_that_lie_about_their_length_end() {
        let header = |length: u32, kind: u16| {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes
        };
        let two = [header(20, 20), vec![1, 2, 3, 4], header(16, 3)].concat();
        let read: Vec<(u16, Vec<u8>)> = messages(&two).map(|(kind, content)| (kind, content.to_vec())).collect();
        assert_eq!(read, [(20, vec![1, 2, 3, 4]), (3, Vec::new())]);
        for length in [0, 15, 17, u32::MAX] {
            assert_eq!(messages(&header(length, 3)).count(), 0, "{length}");
        }
        assert!(error_of(&0_i32.to_ne_bytes()).is_none());
        assert!(error_of(&[]).is_none());
        let error = error_of(&(-libc::EPERM).to_ne_bytes()).unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}
