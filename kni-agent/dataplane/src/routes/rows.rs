//! Derives the rows of a network from its routes and those of the node.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kni_common::{
    address::from_ip,
    route::{
        ACTION_REMOTE, ACTION_SERVICE_RANGE, ACTION_STACK, ACTION_UNREACHABLE, ROUTE_NODE, ROUTE_OVERLAY, ROUTE_OWNED,
        RouteData, RouteKey, RouteValue,
    },
};
use kni_model::NetworkId;

use super::{NetworkRoutes, NodeRoutes, RemoteRoutes, RouteEgress};
use crate::route_change::Rows;

pub(super) fn rows(
    network: NetworkId,
    routes: &NetworkRoutes,
    node: &NodeRoutes,
    foreign: Option<&BTreeSet<IpAddr>>,
    remote: Option<&RemoteRoutes>,
) -> Rows {
    let route = |net: IpNet, action: u16| to_row(network, net, action, 0, 0);
    let defaults = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
    let default_action = routes.egress.action();
    let mut rows = Rows::new();
    rows.extend(
        default_action
            .iter()
            .flat_map(|action| defaults.map(|net| route(net, *action))),
    );
    // Without host access the stack does not accept the packet either, and it is dropped.
    rows.extend(beside_uplink(routes, node).map(|net| route(net, ACTION_STACK)));
    // Where there are other nodes, each address is that of a pod, or of no sender.
    let owned = if remote.is_some() { ROUTE_OWNED } else { 0 };
    let subnets = routes.subnets.iter();
    rows.extend(subnets.map(|net| to_row(network, *net, ACTION_UNREACHABLE, owned, 0)));
    rows.extend(
        routes
            .service_subnets
            .iter()
            .map(|net| route(*net, ACTION_SERVICE_RANGE)),
    );
    // Outside of the virtual ranges the network's egress decides.
    let is_virtual = |address: &&IpAddr| routes.service_subnets.iter().any(|range| range.contains(*address));
    let foreign = foreign.into_iter().flatten().filter(is_virtual);
    rows.extend(foreign.map(|address| route(IpNet::from(*address), ACTION_STACK)));
    let Some(RemoteRoutes { remote, own }) = remote else {
        return rows;
    };
    let flag = |set: bool, flag: u16| if set { flag } else { 0 };
    rows.extend(remote.iter().map(|(net, way)| {
        let flags = flag(way.overlay, ROUTE_OVERLAY) | flag(way.node, ROUTE_NODE);
        to_row(network, *net, ACTION_REMOTE, flags, way.number)
    }));
    let own = own.iter().map(|address| IpNet::from(*address));
    rows.extend(own.map(|net| to_row(network, net, ACTION_STACK, ROUTE_NODE, 0)));
    rows
}

pub(super) fn to_row(network: NetworkId, net: IpNet, action: u16, flags: u16, node: u32) -> (RouteKey, RouteValue) {
    let offset = if matches!(net, IpNet::V4(_)) { 96 } else { 0 };
    let key = RouteKey {
        prefix_length: 32 + offset + u32::from(net.prefix_len()),
        data: RouteData {
            network: network.get().to_be_bytes(),
            address: from_ip(net.network()),
        },
    };
    (key, RouteValue { action, flags, node })
}

/// Destinations that do not leave by the uplink although the network masquerades. The network's own ranges take
/// precedence.
fn beside_uplink<'a>(routes: &'a NetworkRoutes, node: &'a NodeRoutes) -> impl Iterator<Item = IpNet> {
    let (own, connected) = match routes.egress {
        RouteEgress::None | RouteEgress::Stack => (false, false),
        RouteEgress::Masquerade { host_access } => (true, host_access),
    };
    let own = node
        .own
        .iter()
        .filter(move |_| own)
        .map(|address| IpNet::from(*address));
    let connected = node.connected.iter().filter(move |_| connected).copied();
    let ranges = || routes.subnets.iter().chain(&routes.service_subnets);
    own.chain(connected)
        .filter(move |net| !ranges().any(|range| range.contains(net)))
}

#[cfg(test)]
mod tests {
    use kni_common::route::ACTION_MASQUERADE;

    use super::*;

    #[test]
    fn each_range_has_its_action() {
        let routes = |egress| NetworkRoutes {
            subnets: vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
            service_subnets: vec!["10.96.0.0/12".parse().unwrap()],
            egress,
        };
        let network = NetworkId::try_from(7).unwrap();
        let actions = |egress| -> Vec<(u32, u16)> {
            let rows = rows(network, &routes(egress), &NodeRoutes::default(), None, None);
            assert!(rows.keys().all(|key| key.data.network == [0, 0, 0, 7]));
            rows.into_iter()
                .map(|(key, value)| (key.prefix_length, value.action))
                .collect()
        };
        let own = [
            (32 + 64, ACTION_UNREACHABLE),
            (32 + 96 + 12, ACTION_SERVICE_RANGE),
            (32 + 96 + 24, ACTION_UNREACHABLE),
        ];
        assert_eq!(actions(RouteEgress::None), own);
        for (egress, action) in [
            (RouteEgress::Stack, ACTION_STACK),
            (RouteEgress::Masquerade { host_access: true }, ACTION_MASQUERADE),
        ] {
            let found = actions(egress);
            assert_eq!(found.len(), 5);
            assert!(found.contains(&(32, action)) && found.contains(&(32 + 96, action)));
            assert!(own.iter().all(|row| found.contains(row)));
        }
    }

    #[test]
    fn packets_for_the_node_do_not_leave_by_the_uplink() {
        let node = NodeRoutes {
            own: ["192.0.2.2", "10.0.0.7", "2001:db8::2"]
                .map(|ip| ip.parse().unwrap())
                .into(),
            connected: ["172.17.0.0/16", "10.0.0.128/25"]
                .map(|net| net.parse().unwrap())
                .into(),
        };
        let kept = |egress| -> Vec<String> {
            let routes = NetworkRoutes {
                subnets: vec!["10.0.0.0/24".parse().unwrap()],
                service_subnets: Vec::new(),
                egress,
            };
            beside_uplink(&routes, &node).map(|net| net.to_string()).collect()
        };
        assert_eq!(
            kept(RouteEgress::Masquerade { host_access: true }),
            ["192.0.2.2/32", "2001:db8::2/128", "172.17.0.0/16"]
        );
        assert_eq!(
            kept(RouteEgress::Masquerade { host_access: false }),
            ["192.0.2.2/32", "2001:db8::2/128"]
        );
        assert!(kept(RouteEgress::Stack).is_empty() && kept(RouteEgress::None).is_empty());
    }
}
