//! Builds the rtnetlink messages for addresses, routes and neighbours.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use kni_model::MacAddr;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState},
    route::{RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};

use super::own::ROUTE_PROTOCOL;

/// Creates a missing object and replaces an existing one.
pub(super) const PUT: u16 = NLM_F_CREATE | NLM_F_REPLACE;

/// A route of our protocol.
#[derive(Debug, Clone)]
pub(super) struct RouteSpec {
    pub(super) destination: IpNet,
    /// `None`: the destination is on the link.
    pub(super) gateway: Option<IpAddr>,
    pub(super) ifindex: u32,
    pub(super) table: u32,
    /// 0 for the kernel's default.
    pub(super) metric: u32,
}

pub(super) fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

/// The address alone, as a network of one.
pub(super) fn host_net(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

/// A /32 or /128. IPv6 skips duplicate address detection, so that the address is usable at once, and adds no route.
pub(super) fn address(ifindex: u32, address: IpAddr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family_of(address);
    message.header.prefix_len = host_net(address).prefix_len();
    message.header.index = ifindex;
    message.attributes.push(AddressAttribute::Address(address));
    message.attributes.push(AddressAttribute::Local(address));
    if address.is_ipv6() {
        message.attributes.push(AddressAttribute::Flags(
            AddressFlags::Nodad | AddressFlags::Noprefixroute,
        ));
    }
    message
}

pub(super) fn route(spec: &RouteSpec) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family_of(spec.destination.addr());
    message.header.destination_prefix_length = spec.destination.prefix_len();
    message.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    message.header.kind = RouteType::Unicast;
    message.header.table = RouteHeader::RT_TABLE_UNSPEC;
    let attributes = &mut message.attributes;
    attributes.push(RouteAttribute::Table(spec.table));
    if spec.destination.prefix_len() > 0 {
        attributes.push(RouteAttribute::Destination(spec.destination.addr().into()));
    }
    attributes.push(RouteAttribute::Oif(spec.ifindex));
    if spec.metric > 0 {
        attributes.push(RouteAttribute::Priority(spec.metric));
    }
    if let Some(gateway) = spec.gateway {
        attributes.push(RouteAttribute::Gateway(gateway.into()));
        message.header.flags = RouteFlags::Onlink;
    } else {
        message.header.scope = RouteScope::Link;
    }
    message
}

/// Delivers packets to an IPv6 address to its own namespace. The kernel adds such a route for each address from a work
/// queue, also without duplicate address detection (`addrconf_dad_work` in net/ipv6/addrconf.c), and drops earlier
/// packets. The kernel's own, which follows, has a better metric than this one; both go with the interface.
pub(super) fn local_route(ifindex: u32, address: Ipv6Addr) -> RouteMessage {
    let mut message = route(&RouteSpec {
        destination: host_net(address.into()),
        gateway: None,
        ifindex,
        table: u32::from(libc::RT_TABLE_LOCAL),
        metric: 0,
    });
    message.header.kind = RouteType::Local;
    message.header.scope = RouteScope::Universe;
    message
}

/// A permanent neighbour, which is never resolved.
pub(super) fn neighbour(ifindex: u32, address: IpAddr, mac: MacAddr) -> RouteNetlinkMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family_of(address);
    message.header.ifindex = ifindex;
    message.header.state = NeighbourState::Permanent;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    message
        .attributes
        .push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    RouteNetlinkMessage::NewNeighbour(message)
}
