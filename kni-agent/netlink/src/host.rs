//! Manages the host's routes to pods of the default network, in a table of their own.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::MacAddr;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol},
};

use super::{
    DirectNetlink, Netlink, Result,
    connection::Request,
    link::{self, Link, LinkKey},
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

/// The host end of a pod's interface that is about to be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostEnd {
    /// Its index.
    pub ifindex: u32,
    /// The alias that it gets, where it has another one (at most 255 bytes).
    pub alias: Option<String>,
    /// The MTU that it gets, where it has another one, in bytes.
    pub mtu: Option<u32>,
    /// Ethernet address of the pod end.
    pub pod_mac: MacAddr,
    /// The pod's addresses that the node reaches through it.
    pub addresses: Vec<IpAddr>,
}

impl DirectNetlink {
    /// Gives the host end its alias and MTU, and the node its neighbours and routes to the pod, in one request; the
    /// link must be up. Returns whether it can transmit; if not yet, see [`Netlink::wait_for_carrier`]. Idempotent.
    pub fn configure_host_end(&mut self, end: &HostEnd) -> Result<bool> {
        let place = self.places();
        let here = |operation: String| place(operation.into()).interface(format!("#{}", end.ifindex));
        let set = |operation: &str, attribute| {
            let mut message = LinkMessage::default();
            message.header.index = end.ifindex;
            message.attributes.push(attribute);
            Request::new(here(operation.to_owned()), RouteNetlinkMessage::SetLink(message), 0)
        };
        let mut requests = Vec::new();
        requests.extend(
            end.alias
                .clone()
                .map(|alias| set("set alias", LinkAttribute::IfAlias(alias))),
        );
        requests.extend(end.mtu.map(|mtu| set("set MTU", LinkAttribute::Mtu(mtu))));
        for address in &end.addresses {
            let neighbour = message::neighbour(end.ifindex, *address, end.pod_mac);
            requests.push(Request::new(here(format!("add neighbour {address}")), neighbour, PUT));
            let route = RouteNetlinkMessage::NewRoute(message::route(&spec(*address, end.ifindex)));
            requests.push(Request::new(here(format!("add route to pod {address}")), route, PUT));
        }
        let query = RouteNetlinkMessage::GetLink(LinkKey::Index(end.ifindex).message());
        requests.push(Request::new(here("read link".to_owned()), query, 0));
        let link = self.ask(requests)?.into_iter().find_map(Link::from_message);
        Ok(link.is_some_and(|link| link.operational))
    }

    /// Sets the link administratively up. Idempotent.
    pub fn set_up(&mut self, ifindex: u32) -> Result<()> {
        let place = self.places()("set link up".into()).interface(format!("#{ifindex}"));
        self.apply(vec![link::set_up_request(place, ifindex)])
    }
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
