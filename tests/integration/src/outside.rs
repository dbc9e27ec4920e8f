//! Provides the network behind a node's uplink: a router, a server behind it, and a capture of every packet between
//! node and router.

use std::{
    fs,
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};
use ipnet::IpNet;
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::{
    namespaces::Namespaces,
    node::{FABRIC_V4, FABRIC_V6, Node},
};

/// The server's address.
pub const SERVER_V4: &str = "203.0.113.80";
/// See [`SERVER_V4`].
pub const SERVER_V6: &str = "2001:db8:203::80";
/// The router's address on the server's side.
pub const INNER_V4: &str = "203.0.113.1";
/// See [`INNER_V4`].
pub const INNER_V6: &str = "2001:db8:203::1";

/// The network outside a node: `node --uplink0/fabric0-- router --inner0/server0-- server`. The router has no routes to
/// pods.
#[derive(Debug)]
pub struct Outside {
    /// The other end of the uplink, which forwards.
    pub router: Namespaces,
    /// A host behind the router.
    pub server: Namespaces,
}

impl Outside {
    /// Adds a server behind the node's fabric, which becomes a router.
    pub fn new(node: &Node) -> Result<Self> {
        let router = node.fabric().clone();
        let server = Namespaces::fresh_net(&format!("{}-server", node.name()))?;
        let set = |ns: &Namespaces, name: &str, value: &str| {
            let file = format!("/proc/sys/net/{name}");
            ns.enter(|| fs::write(&file, value))?.context(file.clone())
        };
        for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            set(&router, name, "1")?;
        }
        // All errors are sent, without a rate limit.
        for name in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
            set(&router, name, "0")?;
            set(&server, name, "0")?;
        }
        router.veth("inner0", &server, "server0")?;
        for (ns, link, addresses) in [
            (&router, "inner0", [format!("{INNER_V4}/24"), format!("{INNER_V6}/64")]),
            (
                &server,
                "server0",
                [format!("{SERVER_V4}/24"), format!("{SERVER_V6}/64")],
            ),
        ] {
            for address in addresses {
                ns.add_address(link, &address)?;
            }
        }
        server.ip(&[
            &format!("route add default via {INNER_V4}"),
            &format!("route add default via {INNER_V6}"),
        ])?;
        Ok(Self { router, server })
    }

    /// The server's address of a family.
    #[must_use]
    pub fn server_address(v4: bool) -> IpAddr {
        if v4 {
            Ipv4Addr::from([203, 0, 113, 80]).into()
        } else {
            Ipv6Addr::from([0x2001, 0xdb8, 0x203, 0, 0, 0, 0, 0x80]).into()
        }
    }

    /// The router's address of a family on the node's side.
    pub fn router_address(v4: bool) -> Result<IpAddr> {
        Ok(if v4 { FABRIC_V4 } else { FABRIC_V6 }.parse()?)
    }

    /// Sets the MTU of the link between router and server.
    pub fn set_inner_mtu(&self, mtu: u32) -> Result<()> {
        self.router.ip(&[&format!("link set inner0 mtu {mtu}")])?;
        self.server.ip(&[&format!("link set server0 mtu {mtu}")])
    }
}

/// Captures every packet between node and router, and reports those that have a pod's address as their source, or as
/// the source of the packet that an ICMP error quotes.
#[derive(Debug)]
pub struct LeakWatch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<LeakReport>>>,
}

/// The results of a [`LeakWatch`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeakReport {
    /// IP packets.
    pub packets: u64,
    /// Packets with a source address of a pod.
    pub leaked: Vec<Vec<u8>>,
    /// Packets that were not captured, because the socket buffer was full.
    pub missed: u32,
}

const LOOK: Duration = Duration::from_millis(20);
/// Enough for a minute of short connections while the capturing thread sleeps.
const ROOM: usize = 256 << 20;
/// Headers and the start of a quoted packet.
const SNAP: usize = 256;

impl LeakWatch {
    /// Starts capturing at the router's end of the uplink for sources in `pods`.
    pub fn start(outside: &Outside, pods: &[&str]) -> Result<Self> {
        let ranges = pods
            .iter()
            .map(|range| range.parse())
            .collect::<Result<Vec<IpNet>, _>>()?;
        let socket = outside.router.enter(|| open("fabric0"))?.context("packet socket")?;
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = thread::spawn(move || watch(&socket, &ranges, &told));
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops the capture. All earlier packets are included.
    pub fn finish(mut self) -> Result<LeakReport> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("taken here only")?;
        Ok(thread.join().expect("a watch does not panic")?)
    }

    /// [`Self::finish`]; panics unless it captured packets, missed none, and none had a pod's source address.
    #[track_caller]
    pub fn assert_clean(self) {
        let report = self.finish().expect("the capture works");
        assert!(report.packets > 0, "a watch that saw nothing proves nothing");
        assert_eq!(report.missed, 0, "the watch was too slow");
        assert!(
            report.leaked.is_empty(),
            "{} packets left with a pod's address, the first one: {:02x?}",
            report.leaked.len(),
            report.leaked.first()
        );
    }
}

impl Drop for LeakWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn open(interface: &str) -> io::Result<Socket> {
    let every = u16::try_from(libc::ETH_P_ALL).map_err(io::Error::other)?.to_be();
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(i32::from(every))))?;
    let room = libc::c_int::try_from(ROOM).map_err(io::Error::other)?;
    let size = libc::socklen_t::try_from(size_of_val(&room)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open and the option's value is an int that lives through the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const room).cast(),
            size,
        )
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    socket.set_read_timeout(Some(LOOK))?;
    socket.bind(&link_address(if_nametoindex(interface)?, every)?)?;
    Ok(socket)
}

fn link_address(index: u32, protocol: u16) -> io::Result<SockAddr> {
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: the storage is large and aligned enough for every socket address, and zeroed.
    let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_protocol = protocol;
    address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
    // SAFETY: the family, and with it the length, is that of the address written above.
    Ok(unsafe { SockAddr::new(storage, length) })
}

fn watch(socket: &Socket, ranges: &[IpNet], stop: &AtomicBool) -> io::Result<LeakReport> {
    let mut report = LeakReport::default();
    let mut frame = [0; SNAP];
    loop {
        // Read first: packets sent before the stop are in the socket by then.
        let last = stop.load(Ordering::Relaxed);
        match (&*socket).read(&mut frame) {
            Ok(length) => {
                let frame = &frame[..length.min(SNAP)];
                report.packets += u64::from(source(frame.get(14..).unwrap_or_default(), frame).is_some());
                if is_leak(frame, ranges) {
                    report.leaked.push(frame.to_vec());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if last {
                    report.missed = missed(socket)?;
                    return Ok(report);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// Packets that the kernel dropped because the socket buffer was full.
fn missed(socket: &Socket) -> io::Result<u32> {
    // SAFETY: all zeros are a valid value.
    let mut stats: libc::tpacket_stats = unsafe { std::mem::zeroed() };
    let mut size = libc::socklen_t::try_from(size_of_val(&stats)).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the buffer and its length live through the call.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut stats).cast(),
            &raw mut size,
        )
    };
    if got == 0 {
        Ok(stats.tp_drops)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The source address of an IP packet in a frame.
fn source(ip: &[u8], frame: &[u8]) -> Option<IpAddr> {
    match frame.get(12..14)? {
        [0x08, 0x00] => Some(<[u8; 4]>::try_from(ip.get(12..16)?).ok()?.into()),
        [0x86, 0xdd] => Some(<[u8; 16]>::try_from(ip.get(8..24)?).ok()?.into()),
        _ => None,
    }
}

fn is_leak(frame: &[u8], ranges: &[IpNet]) -> bool {
    let ip = frame.get(14..).unwrap_or_default();
    let is_pods =
        |address: Option<IpAddr>| address.is_some_and(|found| ranges.iter().any(|range| range.contains(&found)));
    let quoted = match frame.get(12..14) {
        Some([0x08, 0x00]) if ip.get(9) == Some(&1) => {
            let header = usize::from(ip.first().copied().unwrap_or(0) & 15) * 4;
            let is_error = matches!(ip.get(header), Some(3 | 11 | 12));
            is_error.then(|| ip.get(header + 8..).unwrap_or_default())
        }
        Some([0x86, 0xdd]) if ip.get(6) == Some(&58) => {
            let is_error = matches!(ip.get(40), Some(1..=4));
            is_error.then(|| ip.get(48..).unwrap_or_default())
        }
        _ => None,
    };
    is_pods(source(ip, frame)) || quoted.is_some_and(|quoted| is_pods(source(quoted, frame)))
}
