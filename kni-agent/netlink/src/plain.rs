//! Configures an interface on a shared link: addresses with the link's prefix, default routes by its gateways.

use std::net::IpAddr;

use ipnet::IpNet;
use kni_model::MacAddr;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags},
    link::{LinkAttribute, LinkFlags, LinkMessage},
    route::{RouteHeader, RouteType},
};

use super::{
    Netlink, Result,
    connection::Request,
    host::{destination_of, oif_of},
    message::{self, PUT, RouteSpec},
};

/// The loopback interface has this index in every namespace.
const LOOPBACK: u32 = 1;
/// Already removed.
const GONE: &[i32] = &[libc::ESRCH, libc::ENOENT, libc::ENODEV];

/// The configuration of an interface on a shared link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainConfig {
    /// The interface, by its index inside the pod.
    pub ifindex: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// Addresses with the prefixes of the link.
    pub addresses: Vec<IpNet>,
    /// Gateways of the default routes.
    pub gateways: Vec<IpAddr>,
    /// Metric of the default routes, 0 for the kernel's default.
    pub route_metric: u32,
}

impl Netlink {
    /// Sets loopback and the interface up and adds addresses and default routes. The handle is one of the pod's
    /// namespace. IPv6 is usable when this returns: there is no duplicate address detection. Idempotent.
    pub async fn configure_plain(&self, config: &PlainConfig) -> Result<()> {
        let place = |what: String| self.place(what).interface(format!("#{}", config.ifindex));
        let mut up = LinkMessage::default();
        up.header.index = config.ifindex;
        up.header.flags = LinkFlags::Up;
        up.header.change_mask = LinkFlags::Up;
        up.attributes.push(LinkAttribute::Mtu(config.mtu));
        let up = Request::new(place("set link up".to_owned()), RouteNetlinkMessage::SetLink(up), 0);
        let mut requests = vec![self.set_up_request(LOOPBACK), up];
        for address in &config.addresses {
            let mut message = message::address(config.ifindex, address.addr());
            message.header.prefix_len = address.prefix_len();
            for attribute in &mut message.attributes {
                if let AddressAttribute::Flags(flags) = attribute {
                    // Keeps the route of the prefix: its addresses are on the link.
                    *flags = AddressFlags::Nodad;
                }
            }
            let message = RouteNetlinkMessage::NewAddress(message);
            requests.push(Request::new(place(format!("add address {address}")), message, PUT));
            if let IpAddr::V6(ipv6) = address.addr() {
                let message = RouteNetlinkMessage::NewRoute(message::local_route(config.ifindex, ipv6));
                requests.push(Request::new(place(format!("add local route to {ipv6}")), message, PUT));
            }
        }
        for gateway in &config.gateways {
            let any: IpAddr = if gateway.is_ipv4() {
                [0; 4].into()
            } else {
                [0; 16].into()
            };
            let route = message::route(&RouteSpec {
                destination: IpNet::new_assert(any, 0),
                gateway: Some(*gateway),
                ifindex: config.ifindex,
                table: u32::from(RouteHeader::RT_TABLE_MAIN),
                metric: config.route_metric,
            });
            let message = RouteNetlinkMessage::NewRoute(route);
            requests.push(Request::new(place(format!("add route via {gateway}")), message, PUT));
        }
        self.apply(requests).await
    }

    /// Sets loopback up. Idempotent.
    pub async fn set_loopback_up(&self) -> Result<()> {
        self.set_up(LOOPBACK).await
    }

    /// Removes the default routes through an interface, of any origin. Idempotent.
    pub async fn remove_default_routes(&self, ifindex: u32) -> Result<()> {
        let mut requests = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let main = u32::from(RouteHeader::RT_TABLE_MAIN);
            for route in self.dump_routes(family, main, None).await? {
                let is_default = destination_of(&route).is_some_and(|net| net.prefix_len() == 0);
                if is_default && route.header.kind == RouteType::Unicast && oif_of(&route) == Some(ifindex) {
                    let place = self.place("remove default route").interface(format!("#{ifindex}"));
                    requests.push(Request::new(place, RouteNetlinkMessage::DelRoute(route), 0).forgive(GONE));
                }
            }
        }
        self.apply(requests).await
    }

    /// Deletes the link of that name if it has that kind and, where one is given, that Ethernet address. Idempotent:
    /// returns whether there was such a link.
    pub async fn delete_if(&self, name: &str, kind: &str, mac: Option<MacAddr>) -> Result<bool> {
        let Some(link) = self.get_link(name).await? else {
            return Ok(false);
        };
        if link.kind.as_deref() != Some(kind) || mac.is_some_and(|mac| link.mac != Some(mac)) {
            return Ok(false);
        }
        self.delete_link(link.ifindex, name).await
    }
}
