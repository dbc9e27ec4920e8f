//! Tests the rules by source address inside a pod, by the kernel's own choice of a route.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage},
    rule::{RuleAttribute, RuleMessage},
};

use super::{Pod, PodInterfaceConfig, VethSpec, on_node, spec};
use crate::{DirectNetlink, Netlink, Netns, SourceRouting, connection::Request, host::oif_of, message, own};

/// The gateway of an interface on a shared link, and another host there.
const ROUTER: &str = "192.0.2.1";
const NEIGHBOUR: &str = "192.0.2.77";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn routing(ifindex: u32, addresses: &[&str], gateways: &[IpAddr]) -> SourceRouting {
    SourceRouting {
        ifindex,
        addresses: addresses.iter().map(|text| text.parse::<IpNet>().unwrap()).collect(),
        gateways: gateways.to_vec(),
    }
}

/// Works with the messages of one datagram inside the namespace.
async fn inside(netns: &Netns, work: impl FnOnce(&mut DirectNetlink) -> crate::Result<()> + Send + 'static) {
    let done = netns.visit(move |entrance| work(&mut entrance.enter()?)).await;
    done.unwrap().unwrap();
}

/// The interface by which the kernel sends a packet; `None` where it has no route.
async fn leaves_by(netlink: &Netlink, from: IpAddr, to: IpAddr) -> Option<u32> {
    let mut message = RouteMessage::default();
    message.header.address_family = message::family_of(to);
    message.header.destination_prefix_length = message::host_net(to).prefix_len();
    message.header.source_prefix_length = message::host_net(from).prefix_len();
    message.attributes = vec![
        RouteAttribute::Destination(to.into()),
        RouteAttribute::Source(from.into()),
    ];
    let request = Request::new(netlink.place("test"), RouteNetlinkMessage::GetRoute(message), 0);
    let answers = netlink.ask(vec![request]).await.ok()?;
    answers.iter().find_map(|answer| {
        let RouteNetlinkMessage::NewRoute(route) = answer else {
            return None;
        };
        oif_of(route)
    })
}

/// Source, priority and table of the rules by source address.
async fn rules(netlink: &Netlink) -> Vec<(IpAddr, u32, u32)> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut filter = RuleMessage::default();
        filter.header.family = family;
        let request = Request::new(netlink.place("test"), RouteNetlinkMessage::GetRule(filter), 0);
        for answer in netlink.dump(request).await.unwrap() {
            let RouteNetlinkMessage::NewRule(rule) = answer else {
                continue;
            };
            let number = |of: fn(&RuleAttribute) -> Option<u32>| rule.attributes.iter().find_map(of).unwrap_or(0);
            let priority = number(|attribute| {
                let RuleAttribute::Priority(value) = attribute else {
                    return None;
                };
                Some(*value)
            });
            let table = number(|attribute| {
                let RuleAttribute::Table(value) = attribute else {
                    return None;
                };
                Some(*value)
            });
            let source = rule.attributes.iter().find_map(|attribute| {
                let RuleAttribute::Source(address) = attribute else {
                    return None;
                };
                Some(*address)
            });
            found.extend(source.map(|source| (source, priority, table)));
        }
    }
    found
}

async fn table_is_empty(netlink: &Netlink, ifindex: u32) -> bool {
    let mut empty = true;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let routes = netlink.dump_routes(family, own::source_table(ifindex), None).await;
        empty &= routes.unwrap().is_empty();
    }
    empty
}

/// A pod whose `eth0` has the default routes and whose `net1` has other addresses; the index of `net1` too.
async fn pod_of_two(node: &Netlink) -> (Pod, u32) {
    let pod = Pod::new(node, 5).await;
    node.set_up(pod.indexes.host).await.unwrap();
    pod.inside.configure_pod(&pod.config()).await.unwrap();
    let second = VethSpec {
        pod_name: "net1".parse().unwrap(),
        ..spec(6)
    };
    let indexes = node.create_veth(&second, &pod.netns).await.unwrap();
    node.set_up(indexes.host).await.unwrap();
    let config = PodInterfaceConfig {
        ifindex: indexes.pod,
        ipv4: Some([10, 9, 0, 5].into()),
        ipv6: Some("fd09::5".parse().unwrap()),
        gateway_mac: second.host_mac,
        default_route: false,
        ..pod.config()
    };
    pod.inside.configure_pod(&config).await.unwrap();
    (pod, indexes.pod)
}

#[test]
fn packets_leave_by_the_interface_that_has_their_source_address() {
    on_node(
        "packets_leave_by_the_interface_that_has_their_source_address",
        async || {
            let node = Netlink::new().unwrap();
            let (pod, net1) = pod_of_two(&node).await;
            let eth0 = pod.indexes.pod;
            let peers = [
                (ip("10.1.0.5"), ip("10.9.0.5"), ip("198.51.100.7")),
                (ip("fd01::5"), ip("fd09::5"), ip("2001:db8::7")),
            ];
            for (_, second, peer) in peers {
                assert_eq!(leaves_by(&pod.inside, second, peer).await, Some(eth0), "without rules");
            }
            let gateways = [own::GATEWAY_V4.into(), own::GATEWAY_V6.into()];
            let both = [
                routing(eth0, &["10.1.0.5/32", "fd01::5/128"], &gateways),
                routing(net1, &["10.9.0.5/32", "fd09::5/128"], &gateways),
            ];
            for _twice in 0..2 {
                let added = both.clone();
                inside(&pod.netns, move |netlink| netlink.add_source_routing(&added)).await;
            }
            let table = own::source_table;
            let expected = [
                (ip("10.1.0.5"), own::SOURCE_RULE_PRIORITY, table(eth0)),
                (ip("10.9.0.5"), own::SOURCE_RULE_PRIORITY, table(net1)),
                (ip("fd01::5"), own::SOURCE_RULE_PRIORITY, table(eth0)),
                (ip("fd09::5"), own::SOURCE_RULE_PRIORITY, table(net1)),
            ];
            assert_eq!(rules(&pod.inside).await, expected);
            for (first, second, peer) in peers {
                assert_eq!(leaves_by(&pod.inside, first, peer).await, Some(eth0));
                assert_eq!(leaves_by(&pod.inside, second, peer).await, Some(net1));
            }

            // The second interface goes, twice; the first one stays as it is.
            for _twice in 0..2 {
                let [_, removed] = both.clone();
                inside(&pod.netns, move |netlink| netlink.remove_source_routing(&[removed])).await;
            }
            assert_eq!(rules(&pod.inside).await, [expected[0], expected[2]]);
            assert!(table_is_empty(&pod.inside, net1).await && !table_is_empty(&pod.inside, eth0).await);
            // Of an interface whose index was not recorded the rules go.
            let unknown = routing(0, &["10.1.0.5/32", "fd01::5/128"], &gateways);
            inside(&pod.netns, move |netlink| netlink.remove_source_routing(&[unknown])).await;
            assert_eq!(rules(&pod.inside).await, []);
        },
    );
}

#[test]
fn an_interface_on_a_shared_link_reaches_its_link_and_its_gateway() {
    on_node(
        "an_interface_on_a_shared_link_reaches_its_link_and_its_gateway",
        async || {
            let node = Netlink::new().unwrap();
            let (pod, net1) = pod_of_two(&node).await;
            let source = ip("192.0.2.5");
            let mut address = message::address(net1, source);
            address.header.prefix_len = 24;
            let address = RouteNetlinkMessage::NewAddress(address);
            let request = Request::new(pod.inside.place("test"), address, message::PUT);
            pod.inside.apply(vec![request]).await.unwrap();

            let alone = routing(net1, &["192.0.2.5/24"], &[]);
            let added = alone.clone();
            inside(&pod.netns, move |netlink| netlink.add_source_routing(&[added])).await;
            assert_eq!(leaves_by(&pod.inside, source, ip(NEIGHBOUR)).await, Some(net1));
            // Without a gateway the main table decides about the rest.
            let far = ip("198.51.100.7");
            assert_eq!(leaves_by(&pod.inside, source, far).await, Some(pod.indexes.pod));

            let routed = routing(net1, &["192.0.2.5/24"], &[ip(ROUTER), own::GATEWAY_V6.into()]);
            let added = routed.clone();
            inside(&pod.netns, move |netlink| netlink.add_source_routing(&[added])).await;
            assert_eq!(leaves_by(&pod.inside, source, far).await, Some(net1));
            assert_eq!(
                rules(&pod.inside).await.len(),
                1,
                "no rule of a family without an address"
            );

            inside(&pod.netns, move |netlink| netlink.remove_source_routing(&[routed])).await;
            assert!(table_is_empty(&pod.inside, net1).await);
            // An address without any route of its own needs no rule.
            let whole = routing(net1, &["192.0.2.5/32"], &[]);
            inside(&pod.netns, move |netlink| netlink.add_source_routing(&[whole])).await;
            assert_eq!(rules(&pod.inside).await, []);
        },
    );
}

#[test]
fn rules_of_the_pods_processes_come_first_and_stay() {
    on_node("rules_of_the_pods_processes_come_first_and_stay", async || {
        let node = Netlink::new().unwrap();
        let (pod, net1) = pod_of_two(&node).await;
        let source = ip("10.9.0.5");
        let ours = routing(net1, &["10.9.0.5/32"], &[own::GATEWAY_V4.into()]);
        let added = ours.clone();
        inside(&pod.netns, move |netlink| netlink.add_source_routing(&[added])).await;
        // As `ip rule add from 10.9.0.5 lookup main`, without a priority.
        let mut theirs = RuleMessage::default();
        theirs.header.family = AddressFamily::Inet;
        theirs.header.src_len = 32;
        theirs.header.action = netlink_packet_route::rule::RuleAction::ToTable;
        theirs.attributes = vec![RuleAttribute::Source(source), RuleAttribute::Table(254)];
        let add = RouteNetlinkMessage::NewRule(theirs);
        let request = Request::new(pod.inside.place("test"), add, NLM_F_CREATE | NLM_F_EXCL);
        pod.inside.apply(vec![request]).await.unwrap();
        assert_eq!(
            leaves_by(&pod.inside, source, ip("198.51.100.7")).await,
            Some(pod.indexes.pod)
        );
        inside(&pod.netns, move |netlink| netlink.remove_source_routing(&[ours])).await;
        let left = rules(&pod.inside).await;
        assert_eq!(left.len(), 1, "{left:?}");
        assert!(left[0].1 < own::SOURCE_RULE_PRIORITY && left[0].2 == 254, "{left:?}");
    });
}
