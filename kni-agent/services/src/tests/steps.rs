//! Checks the steps of plans and their order, also after a failed plan.

use super::*;

const WEB: &str = "10.96.0.1";

fn web() -> ServiceKey {
    key(1, WEB, TCP, 80)
}

fn endpoints(addresses: &[&str]) -> Vec<EndpointSlice> {
    vec![slice("web", "a", addresses.iter().map(|text| ready(text)).collect())]
}

fn kinds(steps: &[ServiceStep]) -> Vec<&'static str> {
    let kinds = steps.iter().map(|step| match step {
        ServiceStep::PutBackends(_) => "put backends",
        ServiceStep::PutServices(_) => "put services",
        ServiceStep::PutAddresses(_) => "put addresses",
        ServiceStep::RemoveAddresses(_) => "remove addresses",
        ServiceStep::RemoveServices(_) => "remove services",
        ServiceStep::RemoveFlows(_) => "remove flows",
        ServiceStep::RemoveBackends(_) => "remove backends",
    });
    kinds.collect()
}

#[test]
fn nothing_changes_nothing_is_planned() {
    let services = vec![service("a", &["10.96.0.9"]), service("web", &[WEB])];
    let mut world = World::new(services.clone(), endpoints(&["10.0.0.1", "10.0.0.2"]));
    assert!(world.engine.plan().is_empty());
    let backwards = services.into_iter().rev().collect();
    assert!(world.set_services(backwards).is_empty(), "order is no change");
    assert!(
        world.set_slices(endpoints(&["10.0.0.2", "10.0.0.1"])).is_empty(),
        "order is no change"
    );
    for _ in 0..5 {
        world.tick();
        assert!(world.reconcile().is_empty());
    }
}

#[test]
fn steps_come_in_an_order_that_serves_every_packet() {
    let mut world = World::new(
        vec![service("old", &["10.96.0.8"]), service("web", &[WEB])],
        endpoints(&["10.0.0.1"]),
    );
    world.set_slices(endpoints(&["10.0.0.1", "10.0.0.2"]));
    world.tick();
    world.tick();
    world
        .engine
        .set_services(vec![service("new", &["10.96.0.9"]), service("web", &[WEB])]);
    let steps = world.set_slices(endpoints(&["10.0.0.2", "10.0.0.3"]));
    assert_eq!(
        kinds(&steps),
        [
            "put backends",
            "put services",
            "put addresses",
            "remove addresses",
            "remove services",
            "remove flows",
            "remove backends"
        ]
    );
}

#[test]
fn a_list_changes_only_by_being_replaced() {
    let mut world = World::new(vec![service("web", &[WEB])], endpoints(&["10.0.0.1", "10.0.0.2"]));
    let first = world.row(&web());
    let steps = world.set_slices(endpoints(&["10.0.0.2"]));
    assert_eq!(kinds(&steps), ["put backends", "put services", "remove flows"]);
    let second = world.row(&web());
    assert_eq!(first.service, second.service);
    assert_ne!(first.backends, second.backends);
    assert_eq!(
        world.maps.list(first.backends).len(),
        2,
        "a reader of the old row finds its list"
    );

    world.set_slices(endpoints(&["10.0.0.1", "10.0.0.2"]));
    assert_ne!(
        world.row(&web()).backends,
        first.backends,
        "not even the same list comes back"
    );
}

#[test]
fn another_affinity_needs_no_other_list() {
    let mut world = World::new(vec![service("web", &[WEB])], endpoints(&["10.0.0.1"]));
    let before = world.row(&web());
    let sticky = Service {
        affinity_seconds: Some(1),
        ..service("web", &[WEB])
    };
    assert_eq!(kinds(&world.set_services(vec![sticky])), ["put services"]);
    assert_eq!(
        world.row(&web()),
        ServiceValue {
            affinity: 100,
            ..before
        }
    );
}

#[test]
fn a_list_goes_after_two_ticks() {
    let mut world = World::new(vec![service("web", &[WEB])], endpoints(&["10.0.0.1"]));
    let old = world.row(&web()).backends;
    world.tick();
    world.set_slices(endpoints(&["10.0.0.2"]));
    assert!(world.reconcile().is_empty());
    world.tick();
    assert!(world.reconcile().is_empty());
    assert_eq!(world.maps.list(old).len(), 1);
    world.tick();
    assert_eq!(kinds(&world.reconcile()), ["remove backends"]);
    assert!(world.maps.list(old).is_empty());
    assert!(world.reconcile().is_empty());
}

#[test]
fn a_service_that_goes_takes_everything_with_it() {
    let mut world = World::new(vec![service("web", &[WEB])], endpoints(&["10.0.0.1", "10.0.0.2"]));
    let id = world.row(&web()).service;
    let steps = world.set_services(vec![]);
    assert_eq!(kinds(&steps), ["remove addresses", "remove services"]);
    assert_eq!(world.engine.name(id), None);
    world.tick();
    world.tick();
    world.reconcile();
    assert_eq!(world.maps.tables(), ServiceTables::default());
    world.set_services(vec![service("web", &[WEB])]);
    assert_ne!(world.row(&web()).service, id, "another port, another id");
}

#[test]
fn a_failed_plan_is_repeated() {
    let mut engine = engine(ServiceTables::default());
    engine.set_services(vec![service("web", &[WEB])]);
    engine.set_slices(endpoints(&["10.0.0.1"]));
    let first = engine.plan();
    assert_eq!(kinds(&first), ["put backends", "put services", "put addresses"]);
    assert_eq!(
        engine.plan(),
        first,
        "the same numbers, so that retries do not fill the maps"
    );
}

#[test]
fn what_a_failed_plan_may_have_done_is_undone() {
    let mut world = World::new(vec![service("web", &[WEB])], endpoints(&["10.0.0.1"]));
    let before = world.maps.tables();
    // All steps are carried out without a confirmation.
    world
        .engine
        .set_services(vec![service("new", &["10.96.0.9"]), service("web", &[WEB])]);
    world.engine.set_slices(endpoints(&["10.0.0.2"]));
    let steps = world.engine.plan();
    world.maps.carry_out(&steps);

    world.engine.set_services(vec![service("web", &[WEB])]);
    let steps = world.set_slices(endpoints(&["10.0.0.1"]));
    assert_eq!(
        kinds(&steps),
        ["put services", "remove addresses", "remove services", "remove flows"],
        "flows may have reached the other backend"
    );
    world.tick();
    world.tick();
    world.reconcile();
    assert_eq!(world.maps.tables(), before);
}
