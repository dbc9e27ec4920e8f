//! Finds the node's egress: its default routes, and the source address that the kernel prefers.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType},
};

use super::{
    Netlink, Result,
    connection::Request,
    host::{destination_of, oif_of},
};

/// Destinations of lookups that only a default route matches: documentation prefixes (RFC 5737, RFC 3849). No packet is
/// sent there.
const EXTERNAL_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const EXTERNAL_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0xffff, 0, 0, 0, 1);

/// A default route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRoute {
    /// Whether it is an IPv4 route.
    pub v4: bool,
    /// The interface; that of the first of several next hops.
    pub ifindex: u32,
    /// Metric; the route with the smallest one is used.
    pub metric: u32,
    /// The source address that the route prefers.
    pub source: Option<IpAddr>,
}

impl Netlink {
    /// The default routes of the main table.
    pub async fn list_default_routes(&self) -> Result<Vec<DefaultRoute>> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let routes = self
                .dump_routes(family, u32::from(RouteHeader::RT_TABLE_MAIN), None)
                .await?;
            found.extend(routes.iter().filter_map(DefaultRoute::recognise));
        }
        Ok(found)
    }

    /// The kernel's source address for packets through an interface to an external destination. `None` without a route.
    pub async fn preferred_source(&self, ifindex: u32, v4: bool) -> Result<Option<IpAddr>> {
        let mut message = RouteMessage::default();
        let (family, destination): (_, IpAddr) = if v4 {
            (AddressFamily::Inet, EXTERNAL_V4.into())
        } else {
            (AddressFamily::Inet6, EXTERNAL_V6.into())
        };
        message.header.address_family = family;
        message.header.destination_prefix_length = if v4 { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(destination.into()));
        message.attributes.push(RouteAttribute::Oif(ifindex));
        let place = self.place("look a source address up").interface(format!("#{ifindex}"));
        let request = Request::new(place, RouteNetlinkMessage::GetRoute(message), 0).forgive(&[
            libc::ENETUNREACH,
            libc::EHOSTUNREACH,
            libc::ENODEV,
            libc::EACCES,
            libc::EINVAL,
            libc::EAFNOSUPPORT,
            libc::EOPNOTSUPP,
        ]);
        let answers = self.ask(vec![request]).await?;
        Ok(answers.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => source_of(route),
            _ => None,
        }))
    }
}

impl DefaultRoute {
    fn recognise(route: &RouteMessage) -> Option<Self> {
        let is_default = destination_of(route)?.prefix_len() == 0 && route.header.kind == RouteType::Unicast;
        let hop = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::MultiPath(hops) => hops.first().map(|hop| hop.interface_index),
            _ => None,
        });
        let metric = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Priority(metric) => Some(*metric),
            _ => None,
        });
        is_default.then_some(Self {
            v4: route.header.address_family == AddressFamily::Inet,
            ifindex: oif_of(route).or(hop)?,
            metric: metric.unwrap_or(0),
            source: source_of(route),
        })
    }
}

fn source_of(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(RouteAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        RouteAttribute::PrefSource(RouteAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })
}
