//! Checks Services of another proxy: they have no rows, but their addresses are reported.

use super::*;

const WEB: &str = "10.96.0.1";

/// A Service of another proxy.
fn foreign(name: &str, network: Option<&str>, cluster_ips: &[&str]) -> Service {
    Service {
        network: network.map(network_name),
        foreign: true,
        ports: Vec::new(),
        ..service(name, cluster_ips)
    }
}

fn reported(world: &World) -> Vec<(u32, Vec<String>)> {
    let foreign = world.engine.foreign_addresses().iter();
    foreign
        .map(|(network, addresses)| (network.get(), addresses.iter().map(ToString::to_string).collect()))
        .collect()
}

#[test]
fn they_have_no_rows_and_their_addresses_are_told() {
    let services = vec![
        foreign("a", None, &[WEB, "fd00:96::1"]),
        foreign("b", Some("default"), &["::ffff:10.96.0.2"]),
        foreign("c", Some("blue"), &[WEB]),
        foreign("d", Some("red"), &["10.96.0.4"]),
    ];
    let slices = vec![slice("a", "a", vec![ready("10.0.0.1")])];
    let world = World::new(services, slices);
    assert_eq!(world.maps.tables(), ServiceTables::default());
    let addresses = |list: &[&str]| list.iter().map(|address| (*address).to_owned()).collect();
    assert_eq!(
        reported(&world),
        [
            (1, addresses(&[WEB, "10.96.0.2", "fd00:96::1"])),
            (2, addresses(&[WEB]))
        ]
    );
    assert!(
        world.engine.refused().is_empty(),
        "problems of another proxy's Service are not reported"
    );
    assert!(world.engine.frontends().is_empty());
}

#[test]
fn one_that_changes_its_proxy_has_rows_or_is_told() {
    let slices = vec![slice("web", "a", vec![ready("10.0.0.1")])];
    let mut world = World::new(vec![service("web", &[WEB])], slices);
    assert!(reported(&world).is_empty());

    world.set_services(vec![foreign("web", None, &[WEB])]);
    assert!(world.maps.services.is_empty() && world.maps.addresses.is_empty());
    assert_eq!(reported(&world), [(1, vec![WEB.to_owned()])]);

    world.set_services(vec![service("web", &[WEB])]);
    assert_eq!(world.reach(&key(1, WEB, TCP, 80)), ["10.0.0.1:8080"]);
    assert!(reported(&world).is_empty());
}

#[test]
fn where_there_is_no_default_network_they_are_nowhere() {
    let mut world = World::new(vec![foreign("web", None, &[WEB])], vec![]);
    world.engine.set_networks([of_subnets("blue", 2, &[])].into(), None);
    world.reconcile();
    assert!(reported(&world).is_empty());
}
