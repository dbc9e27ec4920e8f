//! Lists the interfaces of a namespace without rtnetlink, for callers that cannot await.

use std::{net::IpAddr, path::Path, thread};

use kni_model::{MacAddr, NetnsIdentity};
use nix::{
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    sched::{CloneFlags, setns},
    sys::socket::SockaddrStorage,
};

use super::netns;

/// An interface of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Name.
    pub name: String,
    /// Ethernet address, if it has one.
    pub mac: Option<MacAddr>,
    /// Whether it is administratively up.
    pub up: bool,
    /// Addresses, including link-local ones.
    pub addresses: Vec<IpAddr>,
}

/// The interfaces of the namespace at `path`; none if it is not the expected one, or cannot be entered.
/// Takes about 0.1 ms, on a thread of its own.
pub fn look_inside(path: &Path, expected: NetnsIdentity) -> Option<Vec<InterfaceFacts>> {
    let netns = netns::open(path).ok().filter(|netns| netns.id() == expected)?;
    let look = move || {
        setns(&netns, CloneFlags::CLONE_NEWNET).ok()?;
        list()
    };
    let thread = thread::Builder::new().name("netns".to_owned()).spawn(look);
    thread.ok()?.join().ok()?
}

fn list() -> Option<Vec<InterfaceFacts>> {
    let mut found: Vec<InterfaceFacts> = Vec::new();
    for entry in getifaddrs().ok()? {
        let known = found.iter().position(|facts| facts.name == entry.interface_name);
        let position = known.unwrap_or_else(|| {
            found.push(InterfaceFacts {
                name: entry.interface_name.clone(),
                mac: None,
                up: entry.flags.contains(InterfaceFlags::IFF_UP),
                addresses: Vec::new(),
            });
            found.len() - 1
        });
        if let (Some(facts), Some(address)) = (found.get_mut(position), &entry.address) {
            add(facts, address);
        }
    }
    Some(found)
}

fn add(facts: &mut InterfaceFacts, address: &SockaddrStorage) {
    if let Some(link) = address.as_link_addr() {
        facts.mac = link.addr().map(MacAddr);
    } else if let Some(v4) = address.as_sockaddr_in() {
        facts.addresses.push(v4.ip().into());
    } else if let Some(v6) = address.as_sockaddr_in6() {
        facts.addresses.push(v6.ip().into());
    }
}
