//! Checks by which addresses outside of the cluster pods reach a Service, and that these take nothing from others.

use super::*;

const LB: &str = "198.51.100.7";
const LB6: &str = "2001:db8::7";

/// A Service with addresses of a load balancer.
fn balanced(name: &str, cluster_ip: &str, addresses: &[&str]) -> Service {
    let mut service = service(name, &[cluster_ip]);
    service.external.balanced = addresses.iter().map(|text| ip(text)).collect();
    service
}

fn clients(mut service: Service, ranges: &[&str]) -> Service {
    service.external.clients = Some(ranges.iter().map(|range| range.parse().unwrap()).collect());
    service
}

fn chosen(mut service: Service, addresses: &[&str]) -> Service {
    service.external.chosen = addresses.iter().map(|text| ip(text)).collect();
    service
}

/// A default network of both families, which routes or not, and a tenant's.
fn set_networks(world: &mut World, routed: bool) {
    let mut default = of_subnets("default", 1, &["10.244.0.0/16", "fd00:244::/64"]);
    default.1.routed = routed;
    let networks = [default, of_subnets("blue", 2, &["10.10.0.0/16"])];
    world
        .engine
        .set_networks(networks.into(), Some(network_name("default")));
    world.reconcile();
}

fn world(services: Vec<Service>, endpoints: &[(&str, &str)], routed: bool) -> World {
    let slices = endpoints.iter().map(|(service, address)| {
        let name = address.replace([':', '.'], "-");
        slice(service, &name, vec![ready(address)])
    });
    let mut world = World::new(services, slices.collect());
    set_networks(&mut world, routed);
    world
}

fn reach(world: &World, net: u32, address: &str) -> Vec<String> {
    let key = key(net, address, TCP, 80);
    if world.maps.services.contains_key(&key) {
        world.reach(&key)
    } else {
        vec!["no row".to_owned()]
    }
}

#[test]
fn an_address_of_a_load_balancer_leads_to_the_backends_of_its_family() {
    for routed in [false, true] {
        let web = balanced("web", "10.96.0.1", &[LB, LB6]);
        let world = world(vec![web], &[("web", "192.0.2.1"), ("web", "2001:db8:2::1")], routed);
        assert_eq!(reach(&world, 1, "10.96.0.1"), ["192.0.2.1:8080"]);
        assert_eq!(reach(&world, 1, LB), ["192.0.2.1:8080"]);
        assert_eq!(reach(&world, 1, LB6), ["2001:db8:2::1:8080"]);
        assert_eq!(world.engine.refused(), Vec::<String>::new());
        // The other ports of the address belong to the host that has it.
        assert_eq!(world.engine.tables().addresses, [address_key(1, "10.96.0.1")]);
    }
}

#[test]
fn a_network_has_only_the_addresses_of_its_own_services() {
    let blue = Service {
        network: Some(network_name("blue")),
        ..balanced("web", "10.96.0.1", &[LB])
    };
    let world = world(vec![blue], &[("web", "192.0.2.1")], false);
    assert_eq!(reach(&world, 2, LB), ["192.0.2.1:8080"]);
    assert_eq!(reach(&world, 1, LB), ["no row"]);
}

/// As kube-proxy does for pods: as if the packet went to the load balancer and came back.
#[test]
fn local_policies_do_not_hold_at_an_address_of_a_load_balancer() {
    let web = Service {
        local_only: true,
        ..balanced("web", "10.96.0.1", &[LB])
    };
    let world = world(vec![web], &[("web", "192.0.2.1")], true);
    assert_eq!(reach(&world, 1, "10.96.0.1"), Vec::<String>::new());
    assert_eq!(reach(&world, 1, LB), ["192.0.2.1:8080"]);
}

#[test]
fn no_address_of_a_load_balancer_takes_that_of_a_pod_or_a_service() {
    let taken = ["10.244.3.4", "10.10.0.9", "10.96.0.2", "10.96.0.3"];
    for address in taken {
        let other = service("other", &["10.96.0.2"]);
        let of_another_proxy = Service {
            foreign: true,
            ports: Vec::new(),
            ..service("third", &["10.96.0.3"])
        };
        // First by name: the order decides nothing.
        let greedy = balanced("a", "10.96.0.1", &[address]);
        let endpoints = [("a", "192.0.2.66"), ("other", "192.0.2.2")];
        let world = world(vec![greedy, other, of_another_proxy], &endpoints, false);
        assert_eq!(reach(&world, 1, "10.96.0.2"), ["192.0.2.2:8080"], "{address}");
        if address != "10.96.0.2" {
            assert_eq!(reach(&world, 1, address), ["no row"], "{address}");
        }
        let refused = format!(
            "Service x/a: pods of network default do not reach it at {address}: it is in a subnet of a network, or the \
             clusterIP of a Service"
        );
        assert_eq!(world.engine.refused(), [refused]);
    }
}

/// A tenant may write them: `8.8.8.8` would be the tenant's for the pods of all others.
#[test]
fn external_ips_take_no_connection_and_are_reported_where_no_proxy_serves_them() {
    for routed in [false, true] {
        let greedy = chosen(service("web", &["10.96.0.1"]), &["203.0.113.9", "203.0.113.5", LB6]);
        let world = world(vec![greedy], &[("web", "192.0.2.1")], routed);
        assert_eq!(world.engine.frontends().len(), 1, "only the virtual address");
        let unserved = world.engine.unserved();
        if routed {
            assert_eq!(unserved, []);
            continue;
        }
        let [unserved] = unserved else { panic!("{unserved:?}") };
        assert_eq!(unserved.reason, UnservedReason::Chosen);
        assert_eq!(unserved.node.as_deref(), Some("there"), "its agent reports it");
        let text = unserved.to_string();
        assert!(
            text.contains("do not reach it at 203.0.113.5: spec.externalIPs"),
            "{text}"
        );
        assert!(text.ends_with("; they do not reach it at 2 more addresses"), "{text}");
    }
}

/// The rows know no clients: only where all pods of the network are admitted, none is admitted that should not be.
#[test]
fn source_ranges_admit_all_pods_of_the_network_or_none() {
    for (ranges, v4, v6) in [
        (&["10.0.0.0/8", "fd00::/8"][..], true, true),
        (&["10.244.0.0/16"], true, false),
        (&["10.244.0.0/17", "10.244.128.0/17"], false, false),
        (&["10.244.0.0/24", "0.0.0.0/32"], false, false),
        (&["::/0"], false, true),
        (&["0.0.0.0/0", "::/0"], true, true),
        (&[], false, false),
    ] {
        for routed in [false, true] {
            let web = clients(balanced("web", "10.96.0.1", &[LB, LB6]), ranges);
            let world = world(vec![web], &[("web", "192.0.2.1"), ("web", "2001:db8:2::1")], routed);
            let is_served = |address| reach(&world, 1, address) != ["no row"];
            assert_eq!((is_served(LB), is_served(LB6)), (v4, v6), "{ranges:?}");
            let unserved = usize::from(!v4) + usize::from(!v6);
            let reported: usize = world.engine.unserved().iter().map(|unserved| unserved.count).sum();
            assert_eq!(reported, if routed { 0 } else { unserved }, "{ranges:?}");
        }
    }
}

#[test]
fn services_share_an_address_of_a_load_balancer_by_port() {
    let mut second = balanced("second", "10.96.0.2", &[LB]);
    second.ports = vec![port("", TCP, 80), port("dns", UDP, 53)];
    let mut dns = slice("second", "dns", vec![ready("192.0.2.2")]);
    dns.ports[0] = SlicePort {
        name: "dns".to_owned(),
        protocol: UDP,
        port: 5353,
    };
    let first = slice("first", "first", vec![ready("192.0.2.1")]);
    let mut world = World::new(vec![balanced("first", "10.96.0.1", &[LB]), second], vec![first, dns]);
    set_networks(&mut world, false);
    assert_eq!(reach(&world, 1, LB), ["192.0.2.1:8080"], "the first by name");
    assert_eq!(world.reach(&key(1, LB, UDP, 53)), ["192.0.2.2:5353"]);
    let [refused] = &world.engine.refused()[..] else {
        panic!("{:?}", world.engine.refused())
    };
    assert!(refused.contains("belongs to Service x/first"), "{refused}");
}

#[test]
fn an_address_that_the_load_balancer_takes_back_leads_nowhere() {
    let mut world = world(
        vec![balanced("web", "10.96.0.1", &[LB])],
        &[("web", "192.0.2.1")],
        false,
    );
    assert_eq!(reach(&world, 1, LB), ["192.0.2.1:8080"]);
    world.set_services(vec![service("web", &["10.96.0.1"])]);
    assert_eq!(reach(&world, 1, LB), ["no row"]);
    assert_eq!(reach(&world, 1, "10.96.0.1"), ["192.0.2.1:8080"]);
}

/// Each port at each of them is a row: a namespace pays for its own.
#[test]
fn rows_of_load_balancers_count_for_the_namespace() {
    let addresses: Vec<String> = (1..=30).map(|last| format!("198.51.100.{last}")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let greedy = balanced("greedy", "10.96.0.1", &addresses);
    let mut modest = balanced("modest", "10.96.0.2", &[LB]);
    modest.reference.namespace = "y".to_owned();
    let mut of_modest = slice("modest", "modest", vec![ready("192.0.2.2")]);
    of_modest.namespace = "y".to_owned();
    let mut world = World::new(vec![], vec![]).sized(ServiceQuota {
        services: 20,
        backends: 64,
    });
    set_networks(&mut world, false);
    world.engine.set_slices(vec![of_modest]);
    world.set_services(vec![greedy, modest]);
    assert_eq!(reach(&world, 1, "10.96.0.2"), ["192.0.2.2:8080"]);
    let overruns: Vec<&String> = world.engine.overruns().keys().collect();
    assert_eq!(overruns, ["x"]);
}
