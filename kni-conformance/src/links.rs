//! Reads the interfaces and addresses of a network namespace from the kernel.

use std::{io, net::IpAddr};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use crate::{
    error::{During as _, Result},
    namespace::Netns,
};

/// An interface.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    /// Its index in its namespace.
    pub(crate) index: u32,
    /// Its name.
    pub(crate) name: String,
    /// Its Ethernet address, as text.
    pub(crate) mac: String,
    /// Whether it is up.
    pub(crate) up: bool,
    /// Whether it has a carrier.
    pub(crate) carrier: bool,
    /// Whether its other end is in the same namespace.
    pub(crate) has_near_peer: bool,
    /// Its addresses except link-local ones.
    pub(crate) addresses: Vec<Address>,
}

/// An address of an interface.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address {
    /// The address.
    pub(crate) ip: IpAddr,
    /// Whether sockets can use it: the kernel does not test for a duplicate.
    pub(crate) usable: bool,
}

/// All interfaces of a namespace.
pub(crate) async fn links(netns: &Netns) -> Result<Vec<Link>> {
    netns.run(read).await?.during("list interfaces")
}

fn read() -> io::Result<Vec<Link>> {
    let links = dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let mut links: Vec<Link> = links.iter().filter_map(to_link).collect();
    for (index, address) in dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?
        .iter()
        .filter_map(to_address)
    {
        let owner = links.iter_mut().find(|link| link.index == index);
        if let Some(owner) = owner.filter(|_| !is_link_local(address.ip)) {
            owner.addresses.push(address);
        }
    }
    Ok(links)
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

fn to_link(message: &RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = message else {
        return None;
    };
    let flags = message.header.flags;
    let mut link = Link {
        index: message.header.index,
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        ..Link::default()
    };
    let (mut has_peer, mut is_far) = (false, false);
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(name) = attribute {
            link.name.clone_from(name);
        } else if let LinkAttribute::Address(bytes) = attribute {
            let digits: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            link.mac = digits.join(":");
        } else if let LinkAttribute::Link(index) = attribute {
            has_peer = *index != 0;
        } else if let LinkAttribute::LinkNetNsId(_) = attribute {
            is_far = true;
        }
    }
    link.has_near_peer = has_peer && !is_far;
    Some(link)
}

fn to_address(message: &RouteNetlinkMessage) -> Option<(u32, Address)> {
    let RouteNetlinkMessage::NewAddress(message) = message else {
        return None;
    };
    let (mut local, mut address) = (None, None);
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    for attribute in &message.attributes {
        if let AddressAttribute::Local(found) = attribute {
            local = Some(*found);
        } else if let AddressAttribute::Address(found) = attribute {
            // The other end's address if the message also contains a local one.
            address = Some(*found);
        } else if let AddressAttribute::Flags(found) = attribute {
            flags = *found;
        }
    }
    let unusable = AddressFlags::Tentative | AddressFlags::Dadfailed;
    let usable = !flags.intersects(unusable) || flags.contains(AddressFlags::Optimistic);
    let ip = local.or(address)?;
    Some((message.header.index, Address { ip, usable }))
}

fn dump(request: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(request));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut found = Vec::new();
    loop {
        let (datagram, _kernel) = socket.recv_from_full()?;
        let mut rest = datagram.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest).map_err(io::Error::other)?;
            let length = usize::try_from(message.header.length).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::InnerMessage(inner) => found.push(inner),
                NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) | NetlinkPayload::Noop | NetlinkPayload::Overrun(_) | _ => {}
            }
            // Messages are aligned to 4 bytes.
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}
