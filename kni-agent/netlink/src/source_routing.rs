//! Lets packets of a pod leave by the interface that has their source address: a routing table for each interface, and
//! a rule for each address.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleMessage},
};

use super::{
    DirectNetlink, Result,
    connection::Request,
    error::Place,
    message::{self, PUT, RouteSpec, family_of, host_net},
    own::{ROUTE_PROTOCOL, SOURCE_RULE_PRIORITY, source_table},
};

/// Already removed, with its interface or its namespace's family.
const GONE: &[i32] = &[
    libc::ENOENT,
    libc::ESRCH,
    libc::ENODEV,
    libc::EAFNOSUPPORT,
    libc::EOPNOTSUPP,
];

/// The table of an interface inside a pod, and the source addresses that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRouting {
    /// The interface, by its index inside the pod; 0 if it is not known. Of such a one only the rules are removed: its
    /// routes go with it.
    pub ifindex: u32,
    /// Its addresses. The prefix is that of the destinations on its link; of a whole address there are none.
    pub addresses: Vec<IpNet>,
    /// Gateways of the default routes of its table, at most one per family.
    pub gateways: Vec<IpAddr>,
}

impl DirectNetlink {
    /// Adds the tables and the rules, those of the first interface first, in one request. An address whose interface
    /// has no route of its family gets no rule. The interfaces are up, in this connection's namespace. Idempotent.
    pub fn add_source_routing(&mut self, interfaces: &[SourceRouting]) -> Result<()> {
        let place = self.places();
        let requests = interfaces.iter().flat_map(|interface| interface.additions(&place));
        self.apply(requests.collect())
    }

    /// Removes the rules and the tables, in one request. Idempotent.
    pub fn remove_source_routing(&mut self, interfaces: &[SourceRouting]) -> Result<()> {
        let place = self.places();
        let requests = interfaces.iter().flat_map(|interface| interface.removals(&place));
        self.apply(requests.collect())
    }
}

impl SourceRouting {
    fn additions(&self, place: &dyn Fn(Cow<'static, str>) -> Place) -> Vec<Request> {
        let here = |operation: String| place(operation.into()).interface(format!("#{}", self.ifindex));
        let routes = self.routes();
        let has_route = |source: &IpAddr| {
            let mut destinations = routes.iter().map(|route| route.destination.addr());
            destinations.any(|destination| destination.is_ipv4() == source.is_ipv4())
        };
        let sources = self.addresses.iter().map(IpNet::addr).filter(has_route);
        let rules = sources.map(|source| {
            let message = RouteNetlinkMessage::NewRule(rule(source, self.ifindex));
            let place = here(format!("add rule from {source}"));
            Request::new(place, message, NLM_F_CREATE | NLM_F_EXCL).forgive(&[libc::EEXIST])
        });
        // Routes first: no packet finds an empty table, and leaves by another one.
        let mut requests: Vec<Request> = routes
            .iter()
            .map(|route| {
                let place = here(format!("add route to {} by source", route.destination));
                Request::new(place, RouteNetlinkMessage::NewRoute(message::route(route)), PUT)
            })
            .collect();
        requests.extend(rules);
        requests
    }

    fn removals(&self, place: &dyn Fn(Cow<'static, str>) -> Place) -> Vec<Request> {
        let here = |operation: String| place(operation.into()).interface(format!("#{}", self.ifindex));
        let rules = self.addresses.iter().map(IpNet::addr).map(|source| {
            let message = RouteNetlinkMessage::DelRule(rule(source, self.ifindex));
            Request::new(here(format!("remove rule from {source}")), message, 0).forgive(GONE)
        });
        let mut requests: Vec<Request> = rules.collect();
        if self.ifindex > 0 {
            requests.extend(self.routes().iter().map(|route| {
                let place = here(format!("remove route to {} by source", route.destination));
                Request::new(place, RouteNetlinkMessage::DelRoute(message::route(route)), 0).forgive(GONE)
            }));
        }
        requests
    }

    /// The contents of the table.
    fn routes(&self) -> Vec<RouteSpec> {
        let route = |destination, gateway| RouteSpec {
            destination,
            gateway,
            ifindex: self.ifindex,
            table: source_table(self.ifindex),
            metric: 0,
        };
        let on_link = self.addresses.iter().filter(|net| **net != host_net(net.addr()));
        let has_address = |gateway: &&IpAddr| {
            let mut addresses = self.addresses.iter();
            addresses.any(|net| net.addr().is_ipv4() == gateway.is_ipv4())
        };
        let gateways = self.gateways.iter().filter(has_address);
        let default = gateways.map(|gateway| route(any(*gateway), Some(*gateway)));
        on_link.map(|net| route(net.trunc(), None)).chain(default).collect()
    }
}

/// All destinations of the family of an address.
fn any(address: IpAddr) -> IpNet {
    let unspecified = match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    IpNet::new_assert(unspecified, 0)
}

/// Leads from one source address to the table of an interface; to any table if the interface is not known, which only a
/// removal may ask for.
fn rule(source: IpAddr, ifindex: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family_of(source);
    message.header.src_len = host_net(source).prefix_len();
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Source(source),
        RuleAttribute::Priority(SOURCE_RULE_PRIORITY),
        RuleAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL)),
    ];
    if ifindex > 0 {
        message.attributes.push(RuleAttribute::Table(source_table(ifindex)));
    }
    message
}
