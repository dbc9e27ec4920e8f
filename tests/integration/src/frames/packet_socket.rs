//! Sends and receives frames on an interface.

use std::{
    io::{self, Read as _},
    mem,
    os::fd::AsRawFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::namespaces::Namespaces;

// Options of packet sockets (`linux/if_packet.h`), which libc does not have.
const PACKET_STATISTICS: libc::c_int = 6;
const PACKET_QDISC_BYPASS: libc::c_int = 20;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// Bytes of captured frames for which [`PacketSocket::open_arriving`] has room.
const ROOM: libc::c_int = 32 << 20;

/// A raw packet socket on one interface.
#[derive(Debug)]
pub struct PacketSocket(Socket);

impl PacketSocket {
    /// Opens it inside `ns`. From then on it captures the sent and received frames of the interface.
    pub fn open(ns: &Namespaces, interface: &str) -> Result<Self> {
        Self::bound(ns, interface, || if_nametoindex(interface).map_err(io::Error::from))
    }

    /// Opens it inside `ns` for the frames of all interfaces, in the order in which they were there. It cannot send.
    pub fn open_all(ns: &Namespaces) -> Result<Self> {
        Self::bound(ns, "all interfaces", || Ok(0))
    }

    /// Opens it inside `ns` for the frames that arrive at the interface, with room for thousands.
    pub fn open_arriving(ns: &Namespaces, interface: &str) -> Result<Self> {
        let socket = Self::open(ns, interface)?;
        socket.set_option(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        socket.set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, ROOM)?;
        Ok(socket)
    }

    /// Opens it inside `ns` as [`Self::open`]; what it sends passes no queue of the interface, and with it no program
    /// at TC egress. It needs no capability but `CAP_NET_RAW`.
    pub fn open_past_queues(ns: &Namespaces, interface: &str) -> Result<Self> {
        let socket = Self::open(ns, interface)?;
        socket.set_option(libc::SOL_PACKET, PACKET_QDISC_BYPASS, 1)?;
        Ok(socket)
    }

    fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> Result<()> {
        let (fd, size) = (self.0.as_raw_fd(), libc::socklen_t::try_from(size_of_val(&value))?);
        // SAFETY: the descriptor is open, and the value lives through the call and has this size.
        let set = unsafe { libc::setsockopt(fd, level, option, (&raw const value).cast(), size) };
        anyhow::ensure!(
            set == 0,
            "option {option} of a packet socket: {}",
            io::Error::last_os_error()
        );
        Ok(())
    }

    fn bound(ns: &Namespaces, place: &str, index: impl FnOnce() -> io::Result<u32> + Send) -> Result<Self> {
        let socket = ns.enter(|| {
            let index = index()?;
            let every = u16::try_from(libc::ETH_P_ALL).expect("an EtherType").to_be();
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(i32::from(every))))?;
            socket.bind(&link_address(index, every)?)?;
            io::Result::Ok(socket)
        })?;
        Ok(Self(socket.with_context(|| {
            format!("packet socket on {place} of {}", ns.name())
        })?))
    }

    /// Gives `each` all frames that were captured until now.
    pub fn drain(&self, mut each: impl FnMut(&[u8])) -> Result<()> {
        let mut buffer = vec![0; 65_536];
        self.0.set_nonblocking(true)?;
        loop {
            match (&self.0).read(&mut buffer) {
                Ok(length) => each(&buffer[..length]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(self.0.set_nonblocking(false)?)
    }

    /// How many frames were not captured, for want of room, since the last call.
    pub fn lost(&self) -> Result<u32> {
        // `struct tpacket_stats`: all frames, and the lost ones.
        let mut counted = [0_u32; 2];
        let mut size = libc::socklen_t::try_from(size_of_val(&counted))?;
        let (fd, option, value) = (self.0.as_raw_fd(), PACKET_STATISTICS, counted.as_mut_ptr());
        // SAFETY: the descriptor is open, and the value lives through the call and has this size.
        let got = unsafe { libc::getsockopt(fd, libc::SOL_PACKET, option, value.cast(), &raw mut size) };
        anyhow::ensure!(got == 0, "counters of a packet socket: {}", io::Error::last_os_error());
        Ok(counted[1])
    }

    /// Sends a frame unchanged.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.0.send(frame).map(drop)
    }

    /// The next frame that `wanted` accepts; `None` after `timeout`.
    pub fn receive(&self, timeout: Duration, wanted: impl Fn(&[u8]) -> bool) -> Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        let mut buffer = vec![0; 65_536];
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            self.0.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match (&self.0).read(&mut buffer) {
                Ok(length) if wanted(&buffer[..length]) => return Ok(Some(buffer[..length].to_vec())),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e.into()),
            }
        }
        Ok(None)
    }
}

fn link_address(index: u32, protocol: u16) -> io::Result<SockAddr> {
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: the storage is large and aligned enough for every socket address, and zeroed.
    let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_protocol = protocol;
    address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    let length = libc::socklen_t::try_from(mem::size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: the family, and with it the length, is that of the address written above.
    Ok(unsafe { SockAddr::new(storage, length) })
}
