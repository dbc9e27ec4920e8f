//! Sends and receives frames on an interface.

use std::{
    io::{self, Read as _},
    mem,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::namespaces::Namespaces;

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
