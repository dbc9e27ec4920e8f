//! Configures the addresses, neighbours and routes of an interface inside a pod's namespace.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use kni_model::MacAddr;
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::AddressMessage,
    link::{LinkAttribute, LinkFlags, LinkMessage},
    route::RouteHeader,
};

use super::{
    DirectNetlink, Netlink, Result,
    connection::Request,
    error::Place,
    link,
    message::{self, PUT, RouteSpec},
    own::gateway_of,
};

/// The loopback interface has this index in every namespace.
const LOOPBACK: u32 = 1;

/// The configuration of an interface inside a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInterfaceConfig {
    /// The interface, by its index inside the pod.
    pub ifindex: u32,
    /// IPv4 address, set as /32.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, set as /128.
    pub ipv6: Option<Ipv6Addr>,
    /// Ethernet address of the host end, which is the gateway's.
    pub gateway_mac: MacAddr,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether the default routes, and the gateway address itself, lead through this interface.
    pub default_route: bool,
    /// Additional destinations through this interface; those of families without an address are omitted.
    pub routes: Vec<IpNet>,
    /// Metric of all these routes, 0 for the kernel's default. Two interfaces of a pod that have a destination in
    /// common (the default route) need different metrics, or the later one replaces the earlier one's route.
    pub route_metric: u32,
}

impl Netlink {
    /// Sets loopback and the interface up and gives it addresses, permanent gateway neighbours and routes, in one
    /// request; about 0.4 ms. The handle is one of the pod's namespace. IPv6 is usable when this returns: there is
    /// no duplicate address detection, and the local route of the address is part of the request. Idempotent: replaces
    /// existing configuration, removes nothing.
    ///
    /// Set the host end up before, so that the pod can transmit when this returns; afterwards the host end needs
    /// [`Self::wait_for_carrier`].
    pub async fn configure_pod(&self, config: &PodInterfaceConfig) -> Result<()> {
        self.apply(config.requests(&|operation| self.place(operation))).await
    }

    /// The addresses of all interfaces, or of one.
    pub(super) async fn dump_addresses(&self, ifindex: Option<u32>) -> Result<Vec<AddressMessage>> {
        let mut filter = AddressMessage::default();
        filter.header.index = ifindex.unwrap_or(0);
        let request = Request::new(self.place("list addresses"), RouteNetlinkMessage::GetAddress(filter), 0);
        let answers = self.dump(request.forgive(&[libc::ENODEV])).await?.into_iter();
        Ok(answers
            .filter_map(|answer| match answer {
                RouteNetlinkMessage::NewAddress(address) => Some(address),
                _ => None,
            })
            .filter(|address| ifindex.is_none_or(|index| index == address.header.index))
            .collect())
    }
}

impl DirectNetlink {
    /// As [`Netlink::configure_pod`].
    pub fn configure_pod(&mut self, config: &PodInterfaceConfig) -> Result<()> {
        let requests = config.requests(&self.places());
        self.apply(requests)
    }

    /// Sets the loopback interface of this connection's namespace up, ahead of [`Self::configure_pod`], which then has
    /// less to do.
    pub fn set_loopback_up(&mut self) -> Result<()> {
        self.set_up(LOOPBACK)
    }
}

impl PodInterfaceConfig {
    fn requests(&self, place: &dyn Fn(Cow<'static, str>) -> Place) -> Vec<Request> {
        let here = |operation: String| place(operation.into()).interface(format!("#{}", self.ifindex));
        let loopback = place("set link up".into()).interface(format!("#{LOOPBACK}"));
        let mut up = LinkMessage::default();
        up.header.index = self.ifindex;
        up.header.flags = LinkFlags::Up;
        up.header.change_mask = LinkFlags::Up;
        up.attributes.push(LinkAttribute::Mtu(self.mtu));
        let up = Request::new(here("set link up".to_owned()), RouteNetlinkMessage::SetLink(up), 0);
        let mut requests = vec![link::set_up_request(loopback, LOOPBACK), up];
        let addresses = [self.ipv4.map(IpAddr::V4), self.ipv6.map(IpAddr::V6)];
        for address in addresses.into_iter().flatten() {
            let gateway = gateway_of(address);
            let message = RouteNetlinkMessage::NewAddress(message::address(self.ifindex, address));
            requests.push(Request::new(here(format!("add address {address}")), message, PUT));
            if let IpAddr::V6(ipv6) = address {
                let message = RouteNetlinkMessage::NewRoute(message::local_route(self.ifindex, ipv6));
                requests.push(Request::new(here(format!("add local route to {ipv6}")), message, PUT));
            }
            let message = message::neighbour(self.ifindex, gateway, self.gateway_mac);
            requests.push(Request::new(here(format!("add neighbour {gateway}")), message, PUT));
            for route in self.routes_of(address) {
                let place = here(format!("add route to {}", route.destination));
                let message = RouteNetlinkMessage::NewRoute(message::route(&route));
                requests.push(Request::new(place, message, PUT));
            }
        }
        requests
    }

    /// The routes of the family of one of the pod's addresses.
    fn routes_of(&self, address: IpAddr) -> Vec<RouteSpec> {
        let gateway = gateway_of(address);
        let route = |destination, gateway| RouteSpec {
            destination,
            gateway,
            ifindex: self.ifindex,
            table: u32::from(RouteHeader::RT_TABLE_MAIN),
            metric: self.route_metric,
        };
        let mut routes = Vec::new();
        if self.default_route {
            let any = IpNet::new_assert(
                if address.is_ipv4() {
                    [0; 4].into()
                } else {
                    [0; 16].into()
                },
                0,
            );
            routes.push(route(message::host_net(gateway), None));
            routes.push(route(any, Some(gateway)));
        }
        let others = self
            .routes
            .iter()
            .filter(|net| net.addr().is_ipv4() == address.is_ipv4());
        routes.extend(others.map(|net| route(net.trunc(), Some(gateway))));
        routes
    }
}
