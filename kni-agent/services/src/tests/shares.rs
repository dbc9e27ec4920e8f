//! Checks that the Services of one namespace never take the rows of others, in any order of arrival and at any rate of
//! change.

use super::*;

const SIZES: ServiceQuota = ServiceQuota {
    services: 20,
    backends: 64,
};

/// A Service with this many ports, at an address of its own.
fn wide(namespace: &str, number: u8, ports: u16) -> Service {
    let vip = format!("10.96.{}.{number}", namespace.len());
    Service {
        reference: ServiceRef {
            namespace: namespace.to_owned(),
            name: format!("s{number}"),
        },
        ports: (1..=ports)
            .map(|number| port(&format!("p{number}"), TCP, number))
            .collect(),
        ..service("any", &[&vip])
    }
}

/// The endpoints of the first port of [`wide`].
fn behind(namespace: &str, number: u8, addresses: impl IntoIterator<Item = String>) -> EndpointSlice {
    let endpoints = addresses.into_iter().map(|address| ready(&address)).collect();
    let mut slice = slice(&format!("s{number}"), &format!("s{number}"), endpoints);
    slice.namespace = namespace.to_owned();
    slice.ports[0].name = "p1".to_owned();
    slice
}

fn vip(namespace: &str, number: u8) -> String {
    format!("10.96.{}.{number}", namespace.len())
}

fn rows_of(world: &World, namespace: &str) -> usize {
    let frontends = world.engine.frontends();
    let own = frontends.iter().filter(|view| view.service.namespace == namespace);
    own.count()
}

/// Far more than the tables have room for.
fn attack(namespace: &str) -> Vec<Service> {
    (1..=10).map(|number| wide(namespace, number, 5)).collect()
}

fn victim() -> Vec<Service> {
    (1..=3).map(|number| wide("victim", number, 1)).collect()
}

#[test]
fn a_namespace_with_too_many_ports_stops_no_service_of_others() {
    let mut world = World::new(vec![], vec![]).sized(SIZES);
    world.set_services([victim(), attack("a"), attack("bb")].concat());
    assert_eq!(rows_of(&world, "victim"), 3);
    // 17 rows are left for two: 8 for each, and a Service has 5.
    assert_eq!((rows_of(&world, "a"), rows_of(&world, "bb")), (5, 5));
    let refused = world.engine.refused();
    assert_eq!(refused.len(), 18);
    assert_eq!(
        refused[0],
        "Service a/s10: not applied in network default: the Services of namespace a need 50 rows of table SERVICES, and \
         its share is 8 (--max-services)"
    );
    let over: Vec<&String> = world.engine.overruns().keys().collect();
    assert_eq!(over, ["a", "bb"]);
    // Updates of the others continue.
    world.set_slices(vec![behind("victim", 2, ["10.0.0.1".to_owned()])]);
    let scaled = key(1, &vip("victim", 2), TCP, 1);
    assert_eq!(world.reach(&scaled), ["10.0.0.1:8080"]);
    // A Service without rows keeps its address, so that its clients are refused at once.
    assert!(world.maps.addresses.contains(&address_key(1, &vip("a", 2))));
    world.set_services(victim());
    assert!(world.engine.refused().is_empty() && world.engine.overruns().is_empty());
    assert_eq!(world.maps.services.len(), 3);
}

#[test]
fn who_came_first_does_not_matter() {
    let of = |namespace: &str| {
        if namespace == "victim" {
            victim()
        } else {
            attack(namespace)
        }
    };
    let mut found = BTreeSet::new();
    for order in [
        ["victim", "a", "bb"],
        ["a", "victim", "bb"],
        ["bb", "a", "victim"],
        ["a", "bb", "victim"],
    ] {
        let mut world = World::new(vec![], vec![]).sized(SIZES);
        let mut services = Vec::new();
        for namespace in order {
            services.extend(of(namespace));
            world.set_services(services.clone());
        }
        let rows: Vec<ServiceKey> = world.maps.services.keys().copied().collect();
        found.insert((rows, world.maps.addresses.clone(), world.engine.refused()));
    }
    assert_eq!(found.len(), 1);
}

#[test]
fn rows_within_an_equal_part_are_never_displaced() {
    let mut world = World::new(vec![], vec![]).sized(SIZES);
    world.set_services(victim());
    let rows = |world: &World| {
        (1..=3)
            .map(|n| world.row(&key(1, &vip("victim", n), TCP, 1)))
            .collect::<Vec<_>>()
    };
    let before = rows(&world);
    let mut services = victim();
    for namespace in ["a", "bb", "ccc", "dddd", "eeeee"] {
        services.extend(attack(namespace));
        world.set_services(services.clone());
        assert_eq!(rows(&world), before, "{namespace}");
        assert!(world.maps.services.len() <= SIZES.services);
    }
}

#[test]
fn many_backends_and_many_addresses_are_limited_too() {
    let mut world = World::new(vec![], vec![]).sized(SIZES);
    let endpoints = |count: u8| (1..=count).map(|last| format!("10.0.0.{last}"));
    world.engine.set_slices(vec![
        behind("a", 1, endpoints(100)),
        behind("a", 2, endpoints(20)),
        behind("victim", 1, endpoints(9)),
    ]);
    world.set_services([victim(), vec![wide("a", 1, 1), wide("a", 2, 1)]].concat());
    assert_eq!(world.reach(&key(1, &vip("victim", 1), TCP, 1)).len(), 9);
    assert_eq!(world.reach(&key(1, &vip("a", 2), TCP, 1)).len(), 20);
    assert_eq!(world.engine.refused().len(), 1, "half of the table is for changes");

    world.set_services([victim(), (1..=30).map(|number| wide("a", number, 1)).collect()].concat());
    assert_eq!((rows_of(&world, "victim"), rows_of(&world, "a")), (3, 16));
    assert!(
        world
            .engine
            .refused()
            .iter()
            .any(|reason| reason.contains("table ADDRESSES"))
    );
}

#[test]
fn services_that_change_all_the_time_stop_no_change_of_others() {
    let mut world = World::new(vec![], vec![]).sized(SIZES);
    let endpoints = |round: u8| (1..=8).map(move |last| format!("10.{}.0.{last}", round % 2));
    world
        .engine
        .set_services(vec![wide("a", 1, 1), wide("bb", 1, 1), wide("victim", 1, 1)]);
    let mut scaled = vec!["10.0.0.1".to_owned()];
    for round in 0..60 {
        if round % 10 == 0 {
            for _ in 0..3 {
                world.tick();
                world.reconcile();
            }
            scaled = vec![format!("10.0.1.{round}"), format!("10.0.2.{round}")];
        }
        world.set_slices(vec![
            behind("a", 1, endpoints(round)),
            behind("bb", 1, endpoints(round + 1)),
            behind("victim", 1, scaled.clone()),
        ]);
        let expected: Vec<String> = scaled.iter().map(|address| format!("{address}:8080")).collect();
        assert_eq!(
            world.reach(&key(1, &vip("victim", 1), TCP, 1)),
            expected,
            "round {round}"
        );
    }
    for _ in 0..4 {
        world.tick();
        world.reconcile();
    }
    for (namespace, round) in [("a", 59), ("bb", 60)] {
        let last: Vec<String> = endpoints(round).map(|address| format!("{address}:8080")).collect();
        assert_eq!(
            world.reach(&key(1, &vip(namespace, 1), TCP, 1)),
            last,
            "the last change is made up for"
        );
    }
}

/// A list that is larger than the one that follows it must not keep it out.
#[test]
fn a_large_list_can_be_replaced_by_a_smaller_one() {
    let endpoints = |network: u8, count: u8| (1..=count).map(move |last| format!("10.{network}.0.{last}"));
    let behind_both = |of_a: (u8, u8)| {
        vec![
            behind("a", 1, endpoints(of_a.0, of_a.1)),
            behind("victim", 1, endpoints(9, 8)),
        ]
    };
    let mut world = World::new(vec![], vec![]).sized(SIZES);
    world.engine.set_services(vec![wide("a", 1, 1), wide("victim", 1, 1)]);
    for (network, count) in [(0, 24), (1, 20), (2, 24), (3, 1), (4, 24)] {
        world.set_slices(behind_both((network, count)));
        for _ in 0..3 {
            world.tick();
            world.reconcile();
        }
        let rows = world.reach(&key(1, &vip("a", 1), TCP, 1));
        assert_eq!(rows.len(), usize::from(count));
        assert!(rows[0].starts_with(&format!("10.{network}.")), "{rows:?}");
    }
}
