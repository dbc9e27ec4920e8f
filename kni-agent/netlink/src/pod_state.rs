//! Reads the actual configuration of the interfaces inside a pod's namespace, for health checks and status.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily,
    address::{AddressAttribute, AddressMessage},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage},
};

use super::{
    Link, Netlink, Result,
    host::{destination_of, oif_of},
};

/// An interface inside a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInterface {
    /// The link.
    pub link: Link,
    /// Its addresses, including link-local ones.
    pub addresses: Vec<IpNet>,
    /// Its routes in the main table, of any origin.
    pub routes: Vec<PodRoute>,
}

/// A route inside a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodRoute {
    /// Destination; a prefix of length 0 is the default route.
    pub destination: IpNet,
    /// Gateway; none for destinations on the link.
    pub gateway: Option<IpAddr>,
    /// Its metric; 0 where IPv4 has none.
    pub metric: u32,
}

impl Netlink {
    /// All interfaces of this connection's namespace, including loopback, with addresses and routes.
    pub async fn pod_interfaces(&self) -> Result<Vec<PodInterface>> {
        let links = self.list_links().await?;
        let addresses = self.dump_addresses(None).await?;
        let main = u32::from(RouteHeader::RT_TABLE_MAIN);
        let mut routes = self.dump_routes(AddressFamily::Inet, main, None).await?;
        routes.extend(self.dump_routes(AddressFamily::Inet6, main, None).await?);
        let interface = |link: Link| PodInterface {
            addresses: addresses
                .iter()
                .filter(|a| a.header.index == link.ifindex)
                .filter_map(address_of)
                .collect(),
            routes: routes
                .iter()
                .filter(|r| oif_of(r) == Some(link.ifindex))
                .filter_map(PodRoute::parse)
                .collect(),
            link,
        };
        Ok(links.into_iter().map(interface).collect())
    }
}

impl PodRoute {
    fn parse(route: &RouteMessage) -> Option<Self> {
        let mut parsed = Self {
            destination: destination_of(route)?,
            gateway: None,
            metric: 0,
        };
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Gateway(RouteAddress::Inet(v4)) => parsed.gateway = Some((*v4).into()),
                RouteAttribute::Gateway(RouteAddress::Inet6(v6)) => parsed.gateway = Some((*v6).into()),
                RouteAttribute::Priority(metric) => parsed.metric = *metric,
                _ => {}
            }
        }
        Some(parsed)
    }
}

/// IPv4 has its own address in `IFA_LOCAL`, IPv6 in `IFA_ADDRESS`; the former takes precedence where both exist.
fn address_of(message: &AddressMessage) -> Option<IpNet> {
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let any = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    IpNet::new(local.or(any)?, message.header.prefix_len).ok()
}
