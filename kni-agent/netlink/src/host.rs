//! Manages the host's routes to pods of the default network, in a table of their own.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol},
};

use super::{
    Netlink, Result,
    connection::Request,
    message::{self, PUT, RouteSpec},
    own::{ROUTE_PROTOCOL, ROUTE_TABLE},
};

/// A route of the host to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OurRoute {
    /// The pod's address, /32 or /128.
    pub destination: IpNet,
    /// The host end of the pod's interface.
    pub ifindex: u32,
}

impl Netlink {
    /// Routes `address` to the host end of its pod's interface, which must be up. Replaces an older route.
    pub async fn add_pod_route(&self, address: IpAddr, host_ifindex: u32) -> Result<()> {
        let message = RouteNetlinkMessage::NewRoute(message::route(&spec(address, host_ifindex)));
        let place = self
            .place(format!("add route to pod {address}"))
            .interface(format!("#{host_ifindex}"));
        self.apply(vec![Request::new(place, message, PUT)]).await
    }

    /// Removes the route of `address` over that interface. Idempotent; keeps a newer route over another interface.
    pub async fn del_pod_route(&self, address: IpAddr, host_ifindex: u32) -> Result<()> {
        let message = RouteNetlinkMessage::DelRoute(message::route(&spec(address, host_ifindex)));
        let place = self
            .place(format!("remove route to pod {address}"))
            .interface(format!("#{host_ifindex}"));
        self.apply(vec![Request::new(place, message, 0).forgive(&[
            libc::ESRCH,
            libc::ENODEV,
            libc::EAFNOSUPPORT,
            libc::EOPNOTSUPP,
        ])])
        .await
    }

    /// All routes that KNI created in this namespace, by table and protocol.
    pub async fn list_our_routes(&self) -> Result<Vec<OurRoute>> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let answers = self.dump_routes(family, ROUTE_TABLE, None).await?;
            routes.extend(answers.iter().filter_map(OurRoute::recognise));
        }
        Ok(routes)
    }

    /// The routes of one table, optionally only those over one interface.
    pub(super) async fn dump_routes(
        &self,
        family: AddressFamily,
        table: u32,
        ifindex: Option<u32>,
    ) -> Result<Vec<RouteMessage>> {
        let mut filter = RouteMessage::default();
        filter.header.address_family = family;
        filter.attributes.push(RouteAttribute::Table(table));
        filter.attributes.extend(ifindex.map(RouteAttribute::Oif));
        // A table without routes does not exist; neither does a disabled family.
        let request = Request::new(self.place("list routes"), RouteNetlinkMessage::GetRoute(filter), 0).forgive(&[
            libc::ENOENT,
            libc::EAFNOSUPPORT,
            libc::EOPNOTSUPP,
        ]);
        let answers = self.dump(request).await?.into_iter();
        let routes = answers.filter_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(route) if route.header.address_family == family => Some(route),
            _ => None,
        });
        Ok(routes.filter(|route| table_of(route) == table).collect())
    }
}

impl OurRoute {
    fn recognise(route: &RouteMessage) -> Option<Self> {
        if route.header.protocol != RouteProtocol::Other(ROUTE_PROTOCOL) {
            return None;
        }
        Some(Self {
            destination: destination_of(route)?,
            ifindex: oif_of(route)?,
        })
    }
}

/// The destination of a route; the default route has no attribute for it.
pub(super) fn destination_of(route: &RouteMessage) -> Option<IpNet> {
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        RouteAttribute::Destination(RouteAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    });
    let any = if route.header.address_family == AddressFamily::Inet {
        IpAddr::from([0_u8; 4])
    } else {
        IpAddr::from([0_u8; 16])
    };
    IpNet::new(address.unwrap_or(any), route.header.destination_prefix_length).ok()
}

/// The outgoing interface of a route.
pub(super) fn oif_of(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    })
}

fn table_of(route: &RouteMessage) -> u32 {
    let wide = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    wide.unwrap_or_else(|| u32::from(route.header.table))
}

fn spec(address: IpAddr, ifindex: u32) -> RouteSpec {
    RouteSpec {
        destination: message::host_net(address),
        gateway: None,
        ifindex,
        table: ROUTE_TABLE,
        metric: 0,
    }
}
