//! Checks the rows of Services: frontends, families, ports, networks and addresses.

use super::*;
use crate::NoBackendReason;

const WEB: &str = "10.96.0.1";

fn web() -> ServiceKey {
    key(1, WEB, TCP, 80)
}

#[test]
fn no_usable_endpoint_anywhere_refuses() {
    for (endpoints, why) in [
        (vec![], NoBackendReason::NoEndpoint),
        (vec![down("10.0.0.1")], NoBackendReason::NoneReady),
        (
            vec![SliceEndpoint {
                terminating: false,
                ..draining("10.0.0.1")
            }],
            NoBackendReason::NoneReady,
        ),
    ] {
        for local_only in [false, true] {
            let service = Service {
                local_only,
                ..service("web", &[WEB])
            };
            let world = World::new(vec![service], vec![slice("web", "a", endpoints.clone())]);
            let row = world.row(&web());
            assert_eq!((row.count, row.backends, row.flags), (0, 0, 0), "{why}");
            let view = world.engine.lookup(network(1), ip(WEB), TCP, 80).unwrap();
            assert_eq!(view.empty, Some(why));
            assert_eq!(
                world.maps.addresses,
                [address_key(1, WEB)].into(),
                "the address stays one of ours"
            );
        }
    }
}

#[test]
fn endpoints_elsewhere_under_local_policy_drop() {
    let local = Service {
        local_only: true,
        ..service("web", &[WEB])
    };
    for elsewhere in [ready("10.0.0.1"), draining("10.0.0.1")] {
        let mut world = World::new(vec![local.clone()], vec![slice("web", "a", vec![elsewhere.clone()])]);
        assert_eq!(
            (world.row(&web()).count, world.row(&web()).flags),
            (0, SERVICE_DROP_IF_EMPTY)
        );
        let view = world.engine.frontends().remove(0);
        assert_eq!(view.empty, Some(NoBackendReason::NoneLocal));

        let endpoints = vec![elsewhere.clone(), here(draining("10.0.0.2"))];
        world.set_slices(vec![slice("web", "a", endpoints)]);
        assert_eq!(
            world.reach(&web()),
            ["10.0.0.2:8080"],
            "a local one that drains is better than none"
        );
        assert_eq!(world.row(&web()).flags, 0);

        world.set_services(vec![service("web", &[WEB])]);
        let cluster = if elsewhere.ready {
            vec!["10.0.0.1:8080"]
        } else {
            vec!["10.0.0.1:8080", "10.0.0.2:8080"]
        };
        assert_eq!(
            world.reach(&web()),
            cluster,
            "no Local policy, no preference for this node"
        );
    }
}

#[test]
fn each_virtual_address_has_a_row() {
    let blue = Service {
        network: Some(network_name("blue")),
        ..service("blue", &[WEB])
    };
    let both = service("both", &["10.96.0.2", "fd00:96::2"]);
    let mut world = World::new(vec![service("web", &[WEB]), blue, both.clone()], vec![]);
    let rows = [(1, WEB), (2, WEB), (1, "10.96.0.2"), (1, "fd00:96::2")];
    assert_eq!(
        world.maps.addresses,
        rows.map(|(net, text)| address_key(net, text)).into()
    );

    let steps = world.set_services(vec![both]);
    assert!(
        steps.contains(&ServiceStep::RemoveAddresses(vec![
            address_key(1, WEB),
            address_key(2, WEB)
        ])),
        "{steps:?}"
    );
}

#[test]
fn one_of_several_ports_going_keeps_the_address() {
    let mut two = service("web", &[WEB]);
    two.ports = vec![port("a", TCP, 80), port("b", TCP, 81)];
    let mut one = two.clone();
    let mut world = World::new(vec![two], vec![]);
    one.ports.pop();
    assert_eq!(
        world.set_services(vec![one]),
        [ServiceStep::RemoveServices(vec![key(1, WEB, TCP, 81)])]
    );
}

#[test]
fn a_headless_service_leaves_no_trace() {
    let endpoints = vec![slice("web", "a", vec![ready("10.0.0.1")])];
    let world = World::new(vec![service("web", &[])], endpoints);
    assert_eq!(world.maps.tables(), ServiceTables::default());
    assert!(world.engine.refused().is_empty());
}

#[test]
fn each_family_has_its_own_backends() {
    let slices = vec![
        slice("web", "v4", vec![ready("10.0.0.2"), ready("10.0.0.1")]),
        slice("web", "v6", vec![ready("fd00::1")]),
    ];
    let world = World::new(vec![service("web", &[WEB, "fd00:96::1"])], slices);
    assert_eq!(world.reach(&web()), ["10.0.0.1:8080", "10.0.0.2:8080"]);
    assert_eq!(world.reach(&key(1, "fd00:96::1", TCP, 80)), ["fd00::1:8080"]);
    assert_ne!(
        world.row(&web()).service,
        world.row(&key(1, "fd00:96::1", TCP, 80)).service
    );
}

#[test]
fn ports_are_matched_by_name_and_protocol() {
    let mut dns = service("dns", &[WEB]);
    dns.ports = vec![
        port("dns", UDP, 53),
        port("dns-tcp", TCP, 53),
        port("dns-sctp", SCTP, 53),
    ];
    let numbers = |list: &[(&str, u8, u16)]| {
        let ports = list.iter().map(|(name, protocol, port)| SlicePort {
            name: (*name).to_owned(),
            protocol: *protocol,
            port: *port,
        });
        ports.collect::<Vec<_>>()
    };
    let mut a = slice("dns", "a", vec![ready("10.0.0.1")]);
    a.ports = numbers(&[("dns", UDP, 1053), ("dns-tcp", TCP, 1054), ("dns-sctp", TCP, 1055)]);
    let mut b = slice("dns", "b", vec![ready("10.0.0.2")]);
    b.ports = numbers(&[("dns", UDP, 2053), ("other", TCP, 2054)]);
    let world = World::new(vec![dns], vec![a, b]);
    assert_eq!(world.reach(&key(1, WEB, UDP, 53)), ["10.0.0.1:1053", "10.0.0.2:2053"]);
    assert_eq!(world.reach(&key(1, WEB, TCP, 53)), ["10.0.0.1:1054"]);
    assert!(
        world.reach(&key(1, WEB, SCTP, 53)).is_empty(),
        "another protocol is another port"
    );
    let ids: BTreeSet<u32> = world.maps.services.values().map(|row| row.service).collect();
    assert_eq!(ids.len(), 3);
    for (key, row) in &world.maps.services {
        let (reference, port) = world.engine.name(row.service).unwrap();
        assert_eq!(reference.to_string(), "x/dns");
        assert_eq!(u16::from(port.protocol), key.protocol);
    }
}

#[test]
fn many_slices_are_one_list_and_an_endpoint_counts_once() {
    let address = |n: u32| format!("10.0.{}.{}", n / 250, 1 + n % 250);
    let part = |from: u32, to: u32| (from..to).map(|n| ready(&address(n))).collect::<Vec<_>>();
    let mut moving = part(90, 200);
    moving.extend(part(100, 110));
    let slices = vec![
        slice("web", "a", part(0, 100)),
        slice("web", "b", moving),
        slice("web", "c", part(200, 250)),
    ];
    let world = World::new(vec![service("web", &[WEB])], slices);
    assert_eq!(world.row(&web()).count, 250);
    let all: BTreeSet<String> = world.reach(&web()).into_iter().collect();
    assert_eq!(all, (0..250).map(|n| format!("{}:8080", address(n))).collect());
}

#[test]
fn an_endpoint_that_moves_between_slices_is_as_good_as_the_better_copy() {
    for order in [["a", "b"], ["b", "a"]] {
        let slices = vec![
            slice("web", order[0], vec![down("10.0.0.1")]),
            slice("web", order[1], vec![ready("10.0.0.1"), draining("10.0.0.2")]),
        ];
        let world = World::new(vec![service("web", &[WEB])], slices);
        assert_eq!(world.reach(&web()), ["10.0.0.1:8080"]);

        let slices = vec![
            slice("web", order[0], vec![here(ready("10.0.0.1"))]),
            slice("web", order[1], vec![ready("10.0.0.1"), ready("10.0.0.2")]),
        ];
        let local = Service {
            local_only: true,
            ..service("web", &[WEB])
        };
        let world = World::new(vec![local], slices);
        assert_eq!(world.reach(&web()), ["10.0.0.1:8080"]);
    }
}

#[test]
fn slices_of_other_namespaces_and_services_do_not_count() {
    let foreign = EndpointSlice {
        namespace: "y".to_owned(),
        ..slice("web", "a", vec![ready("10.0.0.1")])
    };
    let other = slice("api", "a", vec![ready("10.0.0.2")]);
    let world = World::new(vec![service("web", &[WEB])], vec![foreign, other]);
    assert!(world.reach(&web()).is_empty());
}

#[test]
fn the_same_address_in_two_networks_never_mixes() {
    let blue = Service {
        network: Some(network_name("blue")),
        ..service("blue", &[WEB])
    };
    let slices = vec![
        slice("web", "a", vec![ready("10.0.0.1")]),
        slice("blue", "b", vec![ready("10.0.0.2")]),
    ];
    let mut world = World::new(vec![service("web", &[WEB]), blue.clone()], slices);
    assert!(world.engine.refused().is_empty());
    assert_eq!(world.reach(&web()), ["10.0.0.1:8080"]);
    assert_eq!(world.reach(&key(2, WEB, TCP, 80)), ["10.0.0.2:8080"]);
    let before = world.row(&web());
    world.set_slices(vec![slice("web", "a", vec![ready("10.0.0.1")])]);
    assert_eq!(world.row(&web()), before);
    world.set_services(vec![blue]);
    assert_eq!(world.maps.services.keys().collect::<Vec<_>>(), [&key(2, WEB, TCP, 80)]);
}

#[test]
fn a_service_of_an_unknown_network_is_not_in_force() {
    let red = Service {
        network: Some(network_name("red")),
        ..service("red", &[WEB])
    };
    let mut world = World::new(vec![red], vec![]);
    assert_eq!(world.maps.tables(), ServiceTables::default());
    assert_eq!(world.engine.refused(), ["Service x/red: network red is not known"]);

    world.engine.set_networks([of_subnets("red", 7, &[])].into(), None);
    world.reconcile();
    assert!(world.engine.refused().is_empty());
    assert_eq!(world.maps.services.keys().collect::<Vec<_>>(), [&key(7, WEB, TCP, 80)]);

    world.set_services(vec![service("web", &[WEB])]);
    assert!(world.maps.services.is_empty(), "there is no default network");
    assert!(world.engine.refused().is_empty());
}

#[test]
fn the_first_by_name_wins_an_address() {
    let slices = vec![
        slice("a", "a", vec![ready("10.0.0.1")]),
        slice("b", "b", vec![ready("10.0.0.2")]),
    ];
    let mut second = service("b", &[WEB]);
    second.ports.push(port("more", TCP, 81));
    let mut world = World::new(vec![second.clone(), service("a", &[WEB])], slices);
    assert_eq!(world.reach(&web()), ["10.0.0.1:8080"]);
    let refused = world.engine.refused();
    assert_eq!(refused.len(), 1);
    for word in ["x/b", "x/a", WEB, "80", "default"] {
        assert!(refused[0].contains(word), "{refused:?}");
    }
    assert!(
        world.maps.services.contains_key(&key(1, WEB, TCP, 81)),
        "its other port is applied"
    );

    let id = world.row(&web()).service;
    world.set_services(vec![second]);
    assert_eq!(world.reach(&web()), ["10.0.0.2:8080"]);
    assert!(world.engine.refused().is_empty());
    assert_eq!(world.engine.name(id).unwrap().0.name, "b");
}

#[test]
fn affinity_is_in_jiffies_and_per_port() {
    for (seconds, jiffies) in [(Some(10_800), 1_080_000), (Some(u32::MAX), u32::MAX), (None, 0)] {
        let web = Service {
            affinity_seconds: seconds,
            ports: vec![port("a", TCP, 80), port("b", TCP, 81)],
            ..service("web", &[WEB])
        };
        let world = World::new(vec![web], vec![]);
        let rows: Vec<_> = world.maps.services.values().collect();
        assert_eq!(rows.len(), 2);
        assert!(rows.iter().all(|row| row.affinity == jiffies), "{rows:?}");
        assert_ne!(rows[0].service, rows[1].service, "affinity is kept by id");
    }
}

#[test]
fn views_show_what_stands_behind_an_address() {
    let web = Service {
        affinity_seconds: Some(60),
        ..service("web", &[WEB])
    };
    let world = World::new(vec![web], vec![slice("web", "a", vec![ready("10.0.0.1")])]);
    let view = world.engine.lookup(network(1), ip(WEB), TCP, 80).unwrap();
    assert_eq!(view.service.to_string(), "x/web");
    assert_eq!((view.network.as_str(), view.network_id), ("default", 1));
    assert_eq!((view.address, view.port.port, view.port.protocol), (ip(WEB), 80, TCP));
    assert_eq!(view.backends, ["10.0.0.1:8080".parse().unwrap()]);
    assert_eq!((view.affinity_seconds, view.empty), (Some(60), None));
    assert_eq!(world.engine.frontends(), [view]);
    for (net, address, protocol, port) in [
        (2, WEB, TCP, 80),
        (1, "10.96.0.2", TCP, 80),
        (1, WEB, UDP, 80),
        (1, WEB, TCP, 81),
    ] {
        assert_eq!(world.engine.lookup(network(net), ip(address), protocol, port), None);
    }
}
