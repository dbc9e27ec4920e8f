//! Checks that connections lead to pods of the Service's network and to hosts outside, and to nothing else.

use kni_model::{EndpointId, PodRef, policy::PolicyInterface};

use super::*;

const WEB: &str = "10.96.0.1";
const SHARED: &str = "10.96.0.10";

/// Three networks. Blue and red have the same subnets.
fn world(services: Vec<Service>, slices: Vec<EndpointSlice>) -> World {
    let mut world = World::new(services, slices);
    let networks = [
        of_subnets("default", 1, &["10.244.0.0/16", "fd00:244::/64"]),
        of_subnets("blue", 2, &["10.10.0.0/16"]),
        of_subnets("red", 3, &["10.10.0.0/16"]),
    ];
    world
        .engine
        .set_networks(networks.into(), Some(network_name("default")));
    // A pod of this node in each network.
    for (number, address) in [(1, "10.244.0.250"), (2, "10.10.0.250"), (3, "10.10.0.250")] {
        world
            .engine
            .put_pod(&pod(&format!("client-{number}"), number, address, true));
    }
    world.reconcile();
    world
}

/// A pod of namespace `x`, on this node or another one.
fn pod(name: &str, net: u32, address: &str, own: bool) -> PolicyPod {
    let (ipv4, ipv6) = match ip(address) {
        IpAddr::V4(address) => (Some(address), None),
        IpAddr::V6(address) => (None, Some(address)),
    };
    PolicyPod {
        sandbox: format!("sandbox-of-{name}").parse().unwrap(),
        pod: PodRef::named("x", name),
        labels: BTreeMap::new(),
        ports: Vec::new(),
        interfaces: vec![PolicyInterface {
            endpoint: own.then_some(EndpointId(1)),
            ifname: "eth0".parse().unwrap(),
            network: network_name("any"),
            definition: None,
            network_id: network(net),
            primary: true,
            ipv4,
            ipv6,
        }],
    }
}

/// An endpoint that stands for a pod.
fn of_pod(name: &str, address: &str) -> SliceEndpoint {
    SliceEndpoint {
        pod: Some(PodRef::named("x", name)),
        ..ready(address)
    }
}

fn of_network(name: &str, network: &str) -> Service {
    Service {
        network: Some(network_name(network)),
        ..service(name, &[SHARED])
    }
}

fn reach(world: &World, net: u32, address: &str) -> Vec<String> {
    world.reach(&key(net, address, TCP, 80))
}

#[test]
fn a_pod_of_another_network_gets_no_row_and_is_named() {
    let endpoints = vec![of_pod("db-0", "10.10.0.5"), of_pod("db-1", "10.10.0.6")];
    let mut world = world(vec![service("db", &[WEB])], vec![slice("db", "a", endpoints)]);
    // A stranger of the default network's clients, whether a network has a pod there or not.
    for number in [2, 3] {
        world.engine.put_pod(&pod("db-0", number, "10.10.0.5", false));
        world.reconcile();
        assert!(reach(&world, 1, WEB).is_empty());
    }
    let problem = world.engine.frontends().remove(0).empty.unwrap().to_string();
    assert_eq!(problem, "no endpoint is a known pod of the network or a host outside");
    assert_eq!(
        world.engine.refused(),
        [
            "Service x/db: endpoint 10.10.0.5 (pod x/db-0) is neither a pod of network default nor a host outside, \
             and gets no connections; 1 more endpoint likewise"
        ]
    );
}

#[test]
fn an_address_that_two_networks_have_is_that_of_the_services_own_pod() {
    let slices = vec![slice("db", "a", vec![of_pod("db", "10.10.0.5")])];
    let mut world = world(vec![of_network("db", "blue")], slices);
    // Another pod has the address in the other network.
    world.engine.put_pod(&pod("other", 3, "10.10.0.5", true));
    world.reconcile();
    assert!(reach(&world, 2, SHARED).is_empty());
    world.engine.put_pod(&pod("db", 2, "10.10.0.5", false));
    world.reconcile();
    assert_eq!(reach(&world, 2, SHARED), ["10.10.0.5:8080"]);
    assert!(world.engine.refused().is_empty());
}

#[test]
fn the_row_comes_and_goes_with_the_membership() {
    let slices = vec![slice("db", "a", vec![of_pod("db", "10.244.0.5")])];
    let mut world = world(vec![service("db", &[WEB])], slices);
    assert!(reach(&world, 1, WEB).is_empty(), "the member is late");
    let db = pod("db", 1, "10.244.0.5", false);
    world.engine.put_pod(&db);
    world.reconcile();
    assert_eq!(reach(&world, 1, WEB), ["10.244.0.5:8080"]);
    // Its address is another pod's now.
    world.engine.remove_pod(&db.sandbox);
    world.engine.put_pod(&pod("other", 1, "10.244.0.5", false));
    world.reconcile();
    assert!(reach(&world, 1, WEB).is_empty());
    world.engine.put_pod(&db);
    world.reconcile();
    assert_eq!(reach(&world, 1, WEB), ["10.244.0.5:8080"], "sandboxes may overlap");
    world.engine.remove_pod(&db.sandbox);
    world.reconcile();
    assert!(reach(&world, 1, WEB).is_empty());
}

#[test]
fn pods_with_the_addresses_of_their_node_and_other_hosts_are_outside() {
    let endpoints = vec![
        of_pod("on-the-host", "192.0.2.7"),
        ready("192.0.2.8"),
        ready("10.10.0.9"),
    ];
    let world = world(vec![service("web", &[WEB])], vec![slice("web", "a", endpoints)]);
    let expected = ["10.10.0.9:8080", "192.0.2.7:8080", "192.0.2.8:8080"];
    assert_eq!(reach(&world, 1, WEB), expected, "the last one names no pod");
    assert!(world.engine.refused().is_empty());
}

#[test]
fn an_endpoint_without_a_pod_has_to_be_a_member_within_the_networks_subnets() {
    let endpoints = vec![ready("10.244.0.5"), ready("fd00:244::5"), ready("10.244.0.6")];
    let vips = [WEB, "fd00:96::1"];
    let mut world = world(vec![service("web", &vips)], vec![slice("web", "a", endpoints)]);
    for vip in vips {
        assert!(reach(&world, 1, vip).is_empty());
    }
    world.engine.put_pod(&pod("four", 1, "10.244.0.5", true));
    world.engine.put_pod(&pod("six", 1, "fd00:244::5", false));
    world.reconcile();
    assert_eq!(reach(&world, 1, WEB), ["10.244.0.5:8080"]);
    assert_eq!(reach(&world, 1, "fd00:96::1"), ["fd00:244::5:8080"]);
    assert_eq!(world.engine.strangers()[0].address, ip("10.244.0.6"));
}

/// The copy of a Service in another network keeps hosts outside only.
#[test]
fn pods_behind_a_shared_service_are_no_endpoints_in_another_network() {
    let endpoints = vec![of_pod("dns-0", "10.244.0.53"), of_pod("dns-1", "192.0.2.53")];
    let services = vec![service("dns", &[SHARED]), of_network("dns", "blue")];
    let mut world = world(services, vec![slice("dns", "a", endpoints)]);
    world.engine.put_pod(&pod("dns-0", 1, "10.244.0.53", false));
    world.reconcile();
    assert_eq!(reach(&world, 1, SHARED), ["10.244.0.53:8080", "192.0.2.53:8080"]);
    assert_eq!(reach(&world, 2, SHARED), ["192.0.2.53:8080"]);
    let strangers: Vec<_> = world.engine.strangers().iter().map(|s| s.network.as_str()).collect();
    assert_eq!(strangers, ["blue"]);
}

#[test]
fn a_network_without_a_pod_of_this_node_is_not_reported() {
    let endpoints = vec![of_pod("db-0", "10.10.0.5"), here(of_pod("db-1", "10.10.0.6"))];
    let mut world = world(vec![of_network("db", "blue")], vec![slice("db", "a", endpoints)]);
    assert_eq!(world.engine.strangers()[0].count, 2);
    world.engine.remove_pod(&"sandbox-of-client-2".parse().unwrap());
    world.reconcile();
    // The node knows its own pods in any case.
    let strangers = world.engine.strangers();
    assert_eq!((strangers[0].address, strangers[0].count), (ip("10.10.0.6"), 1));
}

#[test]
fn pods_that_no_endpoint_names_cause_no_plan() {
    let slices = vec![slice("db", "a", vec![of_pod("db", "10.244.0.5")])];
    let mut world = world(vec![service("db", &[WEB])], slices);
    assert!(!world.engine.changed);
    for number in 0..1000 {
        let address = format!("10.244.{}.{}", 1 + number / 250, number % 250);
        world
            .engine
            .put_pod(&pod(&format!("other-{number}"), 1, &address, number % 2 == 0));
    }
    world.engine.remove_pod(&"sandbox-of-other-7".parse().unwrap());
    assert!(!world.engine.changed, "nothing is resolved again");
    let db = pod("db", 1, "10.244.0.5", false);
    world.engine.put_pod(&db);
    assert!(world.engine.changed);
    world.reconcile();
    let labelled = PolicyPod {
        labels: [("role".to_owned(), "db".to_owned())].into(),
        ..db
    };
    world.engine.put_pod(&labelled);
    assert!(!world.engine.changed, "labels do not matter");
}
