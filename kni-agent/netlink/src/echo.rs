//! Asks other nodes for echo replies, by the underlay and through the tunnel device, which shows whether the tunnel's
//! packets arrive.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, recv, send, sendto, socket,
    },
};

use super::{
    Netlink, Result,
    error::Place,
    frames::{self, Echo},
    probe,
};

/// Requests of each kind to each node.
const ROUNDS: u32 = 3;
/// The wait for answers after each round. Answers within a cluster take milliseconds.
const WAIT: Duration = Duration::from_millis(400);
/// Longest part of a packet that is looked at.
const ROOM: usize = 256;
/// All protocols: only such sockets get what a program at the interface drops later.
const ALL: u16 = 0x0003;

/// A node to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EchoPeer {
    /// Its address in the underlay, of which both requests ask.
    pub underlay: IpAddr,
    /// The own address in the underlay, of the same family.
    pub own: IpAddr,
    /// The source of the request through the tunnel, of the same family: an address that the other node sends back
    /// through the tunnel, and that no pod has.
    pub inside: IpAddr,
}

/// Which requests a node has answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EchoAnswers {
    /// The one by the underlay.
    pub underlay: bool,
    /// The one through the tunnel.
    pub tunnel: bool,
}

impl EchoAnswers {
    const ALL: Self = Self {
        underlay: true,
        tunnel: true,
    };
}

/// The requests under way.
struct Round<'a> {
    peers: &'a [EchoPeer],
    identifier: u16,
    tunnel: OwnedFd,
    underlay: Vec<(IpAddr, OwnedFd)>,
    answers: Vec<EchoAnswers>,
}

impl Netlink {
    /// Asks nodes, and returns for each what it answered, in the same order. `device` is the interface of the tunnel.
    /// Sends at most six packets for each node, and blocks for 1.2 s at most. Call it in the namespace of the device.
    /// `identifier` is in the requests: another one each time, so that late answers of an earlier call do not count.
    pub fn ask_for_echo(device: u32, identifier: u16, peers: &[EchoPeer]) -> Result<Vec<EchoAnswers>> {
        let refused = |error: io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let place = Place::new("ask other nodes for echo replies").interface(format!("#{device}"));
            place.refused(nix::Error::from_raw(errno))
        };
        let mut round = Round::open(device, identifier, peers).map_err(refused)?;
        for _ in 0..ROUNDS {
            if round.answers.iter().all(|answers| *answers == EchoAnswers::ALL) {
                break;
            }
            round.ask();
            round.listen().map_err(refused)?;
        }
        Ok(round.answers)
    }
}

impl<'a> Round<'a> {
    fn open(device: u32, identifier: u16, peers: &'a [EchoPeer]) -> io::Result<Self> {
        let tunnel = probe::open_for(device, ALL)?;
        probe::attach_filter(&tunnel, &mut frames::echo_reply_filter(identifier))?;
        let mut underlay: Vec<(IpAddr, OwnedFd)> = Vec::new();
        for peer in peers {
            if !underlay.iter().any(|(own, _)| *own == peer.own) {
                underlay.push((peer.own, open_underlay(peer.own)?));
            }
        }
        Ok(Self {
            peers,
            identifier,
            tunnel,
            underlay,
            answers: vec![EchoAnswers::default(); peers.len()],
        })
    }

    /// Sends what is not answered yet. An error is that of a node without a route, or of a full queue: no answer.
    fn ask(&self) {
        let nodes = (0_u16..).zip(self.peers).zip(&self.answers);
        for ((sequence, peer), answers) in nodes {
            let echo = |source| Echo {
                source,
                destination: peer.underlay,
                identifier: self.identifier,
                sequence,
            };
            if !answers.tunnel {
                let frame = frames::echo_request(&echo(peer.inside));
                let _no_answer = send(self.tunnel.as_raw_fd(), &frame, MsgFlags::empty()).is_err();
            }
            let own = self.underlay.iter().find(|(own, _)| *own == peer.own);
            if let (Some((_, socket)), false) = (own, answers.underlay) {
                let message = frames::echo_message(&echo(peer.own));
                let to = SockaddrStorage::from(SocketAddr::new(peer.underlay, 0));
                let _no_answer = sendto(socket.as_raw_fd(), &message, &to, MsgFlags::empty()).is_err();
            }
        }
    }

    /// Receives until [`WAIT`] is over, or everything is answered.
    fn listen(&mut self) -> io::Result<()> {
        let end = Instant::now() + WAIT;
        while let Some(remaining) = end.checked_duration_since(Instant::now()) {
            if self.answers.iter().all(|answers| *answers == EchoAnswers::ALL) {
                break;
            }
            let sockets = self.underlay.iter().map(|(_, socket)| socket).chain([&self.tunnel]);
            let mut ready: Vec<PollFd<'_>> = sockets.map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
            let timeout = PollTimeout::try_from(remaining.as_millis().saturating_add(1)).unwrap_or(PollTimeout::ZERO);
            match poll(&mut ready, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            self.receive(end);
        }
        Ok(())
    }

    fn receive(&mut self, end: Instant) {
        let mut room = [0; ROOM];
        for (own, socket) in &self.underlay {
            while let Ok(length) = recv(socket.as_raw_fd(), &mut room, MsgFlags::MSG_DONTWAIT) {
                let packet = room.get(..length).unwrap_or(&room);
                // Raw sockets of IPv4 have the header, those of IPv6 do not.
                let message = if own.is_ipv4() {
                    frames::behind_ipv4(packet)
                } else {
                    Some(packet)
                };
                let sequence = message.and_then(|message| frames::echo_reply(message, own.is_ipv4(), self.identifier));
                if let Some(answers) = sequence.and_then(|sequence| self.answers.get_mut(usize::from(sequence))) {
                    answers.underlay = true;
                }
                if Instant::now() > end {
                    break;
                }
            }
        }
        while let Ok(length) = recv(self.tunnel.as_raw_fd(), &mut room, MsgFlags::MSG_DONTWAIT) {
            let frame = room.get(..length).unwrap_or(&room);
            let found = frames::echo_reply_in(frame, self.identifier);
            if let Some((sender, receiver, sequence)) = found
                && let Some(peer) = self.peers.get(usize::from(sequence))
                && (peer.underlay, peer.inside) == (sender, receiver)
                && let Some(answers) = self.answers.get_mut(usize::from(sequence))
            {
                answers.tunnel = true;
            }
            if Instant::now() > end {
                break;
            }
        }
    }
}

/// A socket for echo messages from an own address; the kernel adds the IP header.
fn open_underlay(own: IpAddr) -> io::Result<OwnedFd> {
    let (family, protocol) = match own {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let opened = socket(family, SockType::Raw, flags, protocol)?;
    bind(opened.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(own, 0)))?;
    Ok(opened)
}
