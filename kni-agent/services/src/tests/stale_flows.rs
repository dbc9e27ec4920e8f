//! Checks which flows and affinities are removed, and when.

use super::*;

const DNS: &str = "10.96.0.10";

fn dns() -> Service {
    Service {
        ports: vec![port("", UDP, 53)],
        ..service("dns", &[DNS])
    }
}

fn frontend() -> ServiceKey {
    key(1, DNS, UDP, 53)
}

fn endpoints(endpoints: Vec<SliceEndpoint>) -> Vec<EndpointSlice> {
    let mut slice = slice("dns", "a", endpoints);
    slice.ports[0].protocol = UDP;
    vec![slice]
}

fn gone(world: &World, addresses: &[&str]) -> Vec<GoneBackend> {
    let gone = addresses.iter().map(|text| GoneBackend {
        service: frontend(),
        id: world.row(&frontend()).service,
        backend: backend(text, 8080),
    });
    gone.collect()
}

#[test]
fn flows_to_an_endpoint_that_is_gone_move() {
    let mut world = World::new(vec![dns()], endpoints(vec![ready("10.0.0.1"), ready("10.0.0.2")]));
    let steps = world.set_slices(endpoints(vec![ready("10.0.0.2"), ready("10.0.0.3")]));
    assert_eq!(is_expired(&steps), gone(&world, &["10.0.0.1"]));
    assert!(world.reconcile().is_empty(), "once");
}

#[test]
fn flows_stay_while_the_endpoint_serves() {
    let mut world = World::new(vec![dns()], endpoints(vec![ready("10.0.0.1"), ready("10.0.0.2")]));
    let steps = world.set_slices(endpoints(vec![draining("10.0.0.1"), ready("10.0.0.2")]));
    assert_eq!(world.reach(&frontend()), ["10.0.0.2:8080"], "no new ones");
    assert!(is_expired(&steps).is_empty());
    let steps = world.set_slices(endpoints(vec![down("10.0.0.1"), ready("10.0.0.2")]));
    assert_eq!(steps, [ServiceStep::RemoveFlows(gone(&world, &["10.0.0.1"]))]);
}

#[test]
fn an_endpoint_of_another_node_keeps_its_flows_when_the_policy_becomes_local() {
    let slices = endpoints(vec![ready("10.0.0.1"), here(ready("10.0.0.2"))]);
    let mut world = World::new(vec![dns()], slices);
    let local = Service {
        local_only: true,
        ..dns()
    };
    let steps = world.set_services(vec![local]);
    assert_eq!(world.reach(&frontend()), ["10.0.0.2:8080"]);
    assert!(is_expired(&steps).is_empty());
}

#[test]
fn without_any_endpoint_nothing_is_forgotten_until_there_is_one() {
    let mut world = World::new(vec![dns()], endpoints(vec![ready("10.0.0.1"), ready("10.0.0.2")]));
    assert!(is_expired(&world.set_slices(endpoints(vec![]))).is_empty());
    assert!(is_expired(&world.set_slices(endpoints(vec![down("10.0.0.1")]))).is_empty());
    let steps = world.set_slices(endpoints(vec![ready("10.0.0.2"), ready("10.0.0.3")]));
    assert_eq!(is_expired(&steps), gone(&world, &["10.0.0.1"]));
}

#[test]
fn a_service_made_anew_takes_over_the_udp_flows() {
    let mut world = World::new(vec![dns()], endpoints(vec![ready("10.0.0.1")]));
    assert!(is_expired(&world.set_services(vec![])).is_empty());
    world.tick();
    world.engine.set_services(vec![dns()]);
    let steps = world.set_slices(endpoints(vec![ready("10.0.0.2")]));
    assert_eq!(is_expired(&steps), gone(&world, &["10.0.0.1"]));

    world.set_services(vec![]);
    for _ in 0..300 {
        world.tick();
    }
    world.engine.set_services(vec![dns()]);
    let steps = world.set_slices(endpoints(vec![ready("10.0.0.3")]));
    assert!(is_expired(&steps).is_empty(), "not remembered for ever");
}

#[test]
fn affinities_are_forgotten_for_every_protocol() {
    for protocol in [TCP, UDP, SCTP] {
        let mut sticky = service("web", &[DNS]);
        sticky.affinity_seconds = Some(60);
        sticky.ports[0].protocol = protocol;
        let slices = |address: &str| {
            let mut slice = slice("web", "a", vec![ready(address)]);
            slice.ports[0].protocol = protocol;
            vec![slice]
        };
        let mut world = World::new(vec![sticky], slices("10.0.0.1"));
        let is_expired = is_expired(&world.set_slices(slices("10.0.0.2")));
        assert_eq!(is_expired.len(), 1);
        assert_eq!(is_expired[0].service, key(1, DNS, protocol, 80));
        assert_eq!(is_expired[0].backend, backend("10.0.0.1", 8080));
    }
}

#[test]
fn a_client_with_affinity_opens_no_connections_to_what_is_on_its_way_out() {
    for protocol in [TCP, SCTP] {
        let mut sticky = service("web", &[DNS]);
        sticky.affinity_seconds = Some(60);
        sticky.ports[0].protocol = protocol;
        let slices = |endpoints: Vec<SliceEndpoint>| {
            let mut slice = slice("web", "a", endpoints);
            slice.ports[0].protocol = protocol;
            vec![slice]
        };
        let mut world = World::new(vec![sticky], slices(vec![ready("10.0.0.1"), ready("10.0.0.2")]));
        // The draining backend is used while it is the only one that serves.
        let steps = world.set_slices(slices(vec![draining("10.0.0.1"), down("10.0.0.2")]));
        assert_eq!(is_expired(&steps).len(), 1, "{steps:?}");
        let steps = world.set_slices(slices(vec![draining("10.0.0.1"), ready("10.0.0.3")]));
        let is_expired = is_expired(&steps);
        assert_eq!(is_expired.len(), 1, "{steps:?}");
        assert_eq!(is_expired[0].backend, backend("10.0.0.1", 8080));
        assert!(world.reconcile().is_empty(), "once");
    }
}
