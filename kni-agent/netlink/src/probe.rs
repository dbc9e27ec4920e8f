//! Looks on a link for hosts that have an address, and announces addresses: ARP (RFC 5227) and neighbour discovery
//! (RFC 4862, RFC 4861).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use kni_model::MacAddr;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socket},
};

use super::{
    Netlink, Result,
    error::Place,
    frames::{self, PROTOCOLS},
};

/// Probes of each address. RFC 5227 sends as many, 1 to 2 s apart; the link of a node is a switched Ethernet, where an
/// answer takes milliseconds.
const PROBES: u32 = 3;
/// The wait for answers after each probe.
const PROBE_WAIT: Duration = Duration::from_millis(200);
/// Announcements of each address, as in RFC 5227.
const ANNOUNCEMENTS: u32 = 2;
/// The pause between two announcements.
const ANNOUNCE_PAUSE: Duration = Duration::from_millis(100);
/// Longest part of a frame that is looked at.
const ROOM: usize = 256;

impl Netlink {
    /// Looks for hosts on the link of an Ethernet interface that have one of the addresses: those found, with their MAC
    /// addresses. Sends at most three frames for each address and blocks for 0.6 s. Call it in the namespace of the
    /// interface; no address may be one of the interface.
    pub fn find_hosts(ifindex: u32, own: MacAddr, addresses: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, MacAddr>> {
        let refused = |error: io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            place("look for other hosts with an address", ifindex).refused(nix::Error::from_raw(errno))
        };
        let mut found = BTreeMap::new();
        let sockets = open(ifindex).map_err(refused)?;
        for _ in 0..PROBES {
            let missing = || addresses.iter().filter(|address| !found.contains_key(*address));
            if missing().next().is_none() {
                break;
            }
            for address in missing() {
                transmit(&sockets, *address, &frames::probe(own, *address)).map_err(refused)?;
            }
            listen(&sockets, own, addresses, &mut found).map_err(refused)?;
        }
        Ok(found)
    }

    /// Announces addresses of an Ethernet interface, so that other hosts replace the MAC address that they have for
    /// them. Sends two frames for each address and blocks for 0.1 s.
    pub fn announce_addresses(ifindex: u32, own: MacAddr, addresses: &BTreeSet<IpAddr>) -> Result<()> {
        let refused = |error: io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            place("announce addresses", ifindex).refused(nix::Error::from_raw(errno))
        };
        let sockets = open(ifindex).map_err(refused)?;
        for number in 0..ANNOUNCEMENTS {
            if number != 0 {
                thread::sleep(ANNOUNCE_PAUSE);
            }
            for address in addresses {
                transmit(&sockets, *address, &frames::announcement(own, *address)).map_err(refused)?;
            }
        }
        Ok(())
    }
}

fn place(operation: &'static str, ifindex: u32) -> Place {
    Place::new(operation).interface(format!("#{ifindex}"))
}

/// One socket for ARP and one for IPv6. Frames that the node itself sends do not arrive at them.
fn open(ifindex: u32) -> io::Result<[OwnedFd; 2]> {
    let [arp, ipv6] = PROTOCOLS.map(|protocol| open_for(ifindex, protocol));
    let ipv6 = ipv6?;
    // So that the traffic of the node does not fill the socket.
    attach_filter(&ipv6, &mut frames::neighbour_discovery_filter())?;
    Ok([arp?, ipv6])
}

/// A socket for the frames of one protocol at an interface, or of all protocols.
pub(super) fn open_for(ifindex: u32, ethertype: u16) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    // Without a protocol nothing is received before the socket is bound.
    let opened = socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
    let family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    let address = libc::sockaddr_ll {
        sll_family: family,
        sll_protocol: ethertype.to_be(),
        sll_ifindex: i32::try_from(ifindex).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open; the address has the type that belongs to its family and outlives the call.
    let bound = unsafe { libc::bind(opened.as_raw_fd(), (&raw const address).cast(), length) };
    if bound == 0 {
        Ok(opened)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets only in what the program accepts.
pub(super) fn attach_filter(to: &OwnedFd, program: &mut [libc::sock_filter]) -> io::Result<()> {
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    let length = libc::socklen_t::try_from(size_of_val(&filter)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open; the option's value and the program that it points to outlive the call, which
    // copies both.
    let set = unsafe {
        libc::setsockopt(
            to.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            length,
        )
    };
    if set == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn transmit([arp, ipv6]: &[OwnedFd; 2], address: IpAddr, frame: &[u8]) -> io::Result<()> {
    let through = if address.is_ipv4() { arp } else { ipv6 };
    Ok(send(through.as_raw_fd(), frame, MsgFlags::empty()).map(drop)?)
}

/// Receives until [`PROBE_WAIT`] is over.
fn listen(
    sockets: &[OwnedFd; 2],
    own: MacAddr,
    addresses: &BTreeSet<IpAddr>,
    found: &mut BTreeMap<IpAddr, MacAddr>,
) -> io::Result<()> {
    let end = Instant::now() + PROBE_WAIT;
    while let Some(remaining) = end.checked_duration_since(Instant::now()) {
        let mut ready = sockets
            .each_ref()
            .map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
        let timeout = PollTimeout::try_from(remaining.as_millis().saturating_add(1)).unwrap_or(PollTimeout::ZERO);
        match poll(&mut ready, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        for one in sockets {
            let mut frame = [0; ROOM];
            while let Ok(length) = recv(one.as_raw_fd(), &mut frame, MsgFlags::MSG_DONTWAIT) {
                let holder = frames::holder(frame.get(..length).unwrap_or(&frame));
                if let Some((address, mac)) = holder
                    && mac != own
                    && addresses.contains(&address)
                {
                    found.insert(address, mac);
                }
                if Instant::now() > end {
                    break;
                }
            }
        }
    }
    Ok(())
}
