//! Reads the network of the node: the uplink, and the addresses of its interfaces.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use kni_common::IFINDEX_BASE;
use kni_dataplane::NodeRoutes;
use kni_netlink as netlink;
use kni_netlink::{DefaultRoute, Link, LinkAddress, Netlink, own::is_our_link};

use super::error::{LEAST_MTU, UnusableUplink};

/// The uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UplinkLink {
    pub(super) ifname: String,
    pub(super) ifindex: u32,
    /// The source address that the node itself would use.
    pub(super) ipv4: Option<Ipv4Addr>,
    pub(super) ipv6: Option<Ipv6Addr>,
}

/// The network of the node as of the last read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeNetwork {
    pub(super) uplink: Option<UplinkLink>,
    /// Why the interface towards the outside is not the uplink.
    pub(super) unusable: Option<UnusableUplink>,
    /// Addresses of all interfaces except those of pods.
    pub(super) addresses: Vec<LinkAddress>,
}

/// Reads the network of the node. `name` is the configured uplink; by default it is the interface of the default route.
pub(super) async fn read(
    netlink: &Netlink,
    name: Option<&str>,
    ours: &BTreeSet<IpAddr>,
) -> netlink::Result<NodeNetwork> {
    let addresses = read_addresses(netlink).await?;
    let routes = netlink.list_default_routes().await?;
    let link = match name {
        Some(name) => netlink.get_link(name).await?,
        None => match default_interface(&routes) {
            Some(ifindex) => netlink.get_link(ifindex).await?,
            None => None,
        },
    };
    let link = link.filter(is_uplink_candidate);
    let unusable = link.as_ref().and_then(unusable);
    let Some(link) = link.filter(|_| unusable.is_none()) else {
        return Ok(NodeNetwork {
            uplink: None,
            unusable,
            addresses,
        });
    };
    let mut sources = [None, None];
    for (source, v4) in sources.iter_mut().zip([true, false]) {
        let preferred = match source_of_route(&routes, link.ifindex, v4) {
            Some(address) => Some(address),
            None => netlink.preferred_source(link.ifindex, v4).await?,
        };
        *source = choose_source(&addresses, link.ifindex, v4, preferred, ours);
    }
    let [v4, v6] = sources;
    let uplink = UplinkLink {
        ifname: link.name,
        ifindex: link.ifindex,
        ipv4: v4.and_then(|address| if let IpAddr::V4(v4) = address { Some(v4) } else { None }),
        ipv6: v6.and_then(|address| if let IpAddr::V6(v6) = address { Some(v6) } else { None }),
    };
    Ok(NodeNetwork {
        uplink: Some(uplink),
        unusable: None,
        addresses,
    })
}

/// Addresses of all interfaces except those of pods.
pub(super) async fn read_addresses(netlink: &Netlink) -> netlink::Result<Vec<LinkAddress>> {
    let mut addresses = netlink.list_addresses().await?;
    addresses.retain(|address| address.ifindex < IFINDEX_BASE);
    Ok(addresses)
}

/// Whether an interface can be the uplink: the interface of a pod never is, even if configured or used by a route.
fn is_uplink_candidate(link: &Link) -> bool {
    link.up && link.ifindex < IFINDEX_BASE && !is_our_link(&link.name, link.alias.as_deref())
}

/// Why the interface cannot be the uplink.
fn unusable(link: &Link) -> Option<UnusableUplink> {
    if !link.ethernet {
        return Some(UnusableUplink::NotEthernet(link.name.clone()));
    }
    (link.mtu < LEAST_MTU).then(|| UnusableUplink::SmallMtu {
        ifname: link.name.clone(),
        mtu: link.mtu,
    })
}

/// IPv4 first: the default routes of both families almost always use the same interface.
fn default_interface(routes: &[DefaultRoute]) -> Option<u32> {
    let best = |v4| {
        let of_family = routes.iter().filter(|route| route.v4 == v4);
        of_family.min_by_key(|route| (route.metric, route.ifindex))
    };
    best(true).or_else(|| best(false)).map(|route| route.ifindex)
}

fn source_of_route(routes: &[DefaultRoute], ifindex: u32, v4: bool) -> Option<IpAddr> {
    let here = routes.iter().filter(|route| route.ifindex == ifindex && route.v4 == v4);
    here.min_by_key(|route| route.metric)?.source
}

/// The source that the kernel prefers, if it is a usable address of the node; else the first usable one of the uplink.
fn choose_source(
    addresses: &[LinkAddress],
    ifindex: u32,
    v4: bool,
    preferred: Option<IpAddr>,
    ours: &BTreeSet<IpAddr>,
) -> Option<IpAddr> {
    let may_be_used = |found: &&LinkAddress| {
        found.address.is_ipv4() == v4
            && found.usable
            && !found.deprecated
            && !is_ours(found, ours)
            && is_global(found.address)
    };
    let candidates = || addresses.iter().filter(may_be_used);
    let preferred = candidates().find(|found| Some(found.address) == preferred);
    let first = || candidates().find(|found| found.ifindex == ifindex);
    preferred.or_else(first).map(|found| found.address)
}

fn is_ours(found: &LinkAddress, ours: &BTreeSet<IpAddr>) -> bool {
    found.ours || ours.contains(&found.address)
}

fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    }
}

impl NodeNetwork {
    /// The properties of the node that routes of the networks depend on.
    pub(super) fn routes(&self) -> NodeRoutes {
        let uplink = self.uplink.as_ref().map(|uplink| uplink.ifindex);
        let global = || self.addresses.iter().filter(|found| is_global(found.address));
        NodeRoutes {
            own: global().map(|found| found.address).collect(),
            connected: global()
                .filter(|found| Some(found.ifindex) != uplink)
                .filter_map(subnet)
                .collect(),
        }
    }

    /// The node's own addresses, without those added for pods.
    pub(super) fn own(&self, ours: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
        let global = self.addresses.iter().filter(|found| is_global(found.address));
        let own = global.filter(|found| !is_ours(found, ours));
        own.map(|found| found.address).collect()
    }

    /// Addresses of an interface that carry the mark of KNI.
    pub(super) fn marked(&self, ifindex: u32) -> BTreeSet<IpAddr> {
        let marked = self
            .addresses
            .iter()
            .filter(|found| found.ours && found.ifindex == ifindex);
        marked.map(|found| found.address).collect()
    }

    /// Subnets that are directly connected to the node.
    pub(super) fn connected(&self) -> Vec<IpNet> {
        let global = self.addresses.iter().filter(|found| is_global(found.address));
        global.filter_map(subnet).collect()
    }

    /// Whether an interface has an address.
    pub(super) fn has(&self, ifindex: u32, address: IpAddr) -> bool {
        self.addresses
            .iter()
            .any(|found| found.ifindex == ifindex && found.address == address)
    }
}

/// The subnet of the link; `None` for a single address.
fn subnet(found: &LinkAddress) -> Option<IpNet> {
    let subnet = IpNet::new(found.address, found.prefix_len).ok()?.trunc();
    (subnet.prefix_len() < subnet.max_prefix_len()).then_some(subnet)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ifindex: u32, text: &str) -> LinkAddress {
        let net: IpNet = text.parse().unwrap();
        LinkAddress {
            ifindex,
            address: net.addr(),
            prefix_len: net.prefix_len(),
            usable: true,
            deprecated: false,
            ours: false,
        }
    }

    fn route(v4: bool, ifindex: u32, metric: u32) -> DefaultRoute {
        DefaultRoute {
            v4,
            ifindex,
            metric,
            source: None,
        }
    }

    #[test]
    fn the_default_route_of_the_smallest_metric_leads_out() {
        assert_eq!(default_interface(&[]), None);
        assert_eq!(default_interface(&[route(false, 3, 1024)]), Some(3));
        let routes = [
            route(false, 3, 0),
            route(true, 5, 100),
            route(true, 4, 100),
            route(true, 2, 200),
        ];
        assert_eq!(default_interface(&routes), Some(4), "IPv4 before IPv6");
    }

    #[test]
    fn an_interface_of_a_small_mtu_is_refused_by_its_name() {
        let link = |ethernet, mtu| Link {
            name: "eth0".to_owned(),
            ethernet,
            mtu,
            ..Link::default()
        };
        assert_eq!(unusable(&link(true, 1280)), None);
        let problem = unusable(&link(true, 1279)).unwrap().to_string();
        assert!(
            problem.starts_with("eth0 cannot be the uplink: its MTU of 1279 is below 1280;"),
            "{problem}"
        );
        let problem = unusable(&link(false, 1279)).unwrap();
        assert_eq!(problem, UnusableUplink::NotEthernet("eth0".to_owned()));
    }

    #[test]
    fn a_source_is_an_address_of_the_node_that_may_be_used() {
        let mut addresses = vec![
            address(2, "fe80::1/64"),
            address(2, "192.0.2.9/24"),
            address(2, "192.0.2.10/24"),
            address(7, "198.51.100.1/32"),
            address(2, "2001:db8::1/64"),
            address(2, "2001:db8::2/64"),
            address(2, "2001:db8::3/64"),
        ];
        let ours = BTreeSet::new();
        let choose = |addresses: &[LinkAddress], v4, preferred: Option<&str>| {
            let preferred = preferred.map(|text| text.parse().unwrap());
            choose_source(addresses, 2, v4, preferred, &ours).map(|found| found.to_string())
        };
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(choose(&addresses, true, None), is("192.0.2.9"));
        assert_eq!(choose(&addresses, true, Some("192.0.2.10")), is("192.0.2.10"));
        assert_eq!(choose(&addresses, true, Some("198.51.100.1")), is("198.51.100.1"));
        assert_eq!(
            choose(&addresses, true, Some("203.0.113.1")),
            is("192.0.2.9"),
            "not the node's"
        );
        addresses[4].usable = false;
        addresses[5].deprecated = true;
        assert_eq!(choose(&addresses, false, Some("2001:db8::1")), is("2001:db8::3"));
        addresses[6].ours = true;
        assert_eq!(choose(&addresses, false, Some("2001:db8::3")), None);
    }

    #[test]
    fn the_uplinks_own_subnet_is_outside() {
        let node = NodeNetwork {
            unusable: None,
            uplink: Some(UplinkLink {
                ifname: "eth0".to_owned(),
                ifindex: 2,
                ipv4: None,
                ipv6: None,
            }),
            addresses: vec![
                address(1, "127.0.0.1/8"),
                address(2, "192.0.2.9/24"),
                address(3, "172.17.0.1/16"),
                address(3, "fe80::5/64"),
                address(4, "10.9.9.9/32"),
            ],
        };
        let routes = node.routes();
        let own: Vec<_> = routes.own.iter().map(ToString::to_string).collect();
        assert_eq!(own, ["10.9.9.9", "172.17.0.1", "192.0.2.9"]);
        let connected: Vec<_> = routes.connected.iter().map(ToString::to_string).collect();
        assert_eq!(connected, ["172.17.0.0/16"]);
        assert!(node.has(2, "192.0.2.9".parse().unwrap()) && !node.has(3, "192.0.2.9".parse().unwrap()));
    }
}
