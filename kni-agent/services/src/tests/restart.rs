//! Checks a new engine with the maps of an earlier or an unknown one.

use kni_common::service::BackendKey;

use super::*;

const WEB: &str = "10.96.0.1";
const API: &str = "10.96.0.2";

fn services() -> Vec<Service> {
    vec![service("api", &[API]), service("web", &[WEB, "fd00:96::1"])]
}

fn slices(addresses: &[&str]) -> Vec<EndpointSlice> {
    let endpoints: Vec<_> = addresses.iter().map(|text| ready(text)).collect();
    vec![slice("api", "a", endpoints.clone()), slice("web", "b", endpoints)]
}

/// An engine that starts with the content of the maps.
fn restart(tables: &ServiceTables, services: Vec<Service>, slices: Vec<EndpointSlice>) -> World {
    let mut engine = engine(tables.clone());
    engine.set_services(services);
    engine.set_slices(slices);
    let maps = Maps::holding(tables);
    World { engine, maps }
}

#[test]
fn own_tables_are_taken_over_as_they_are() {
    let before = World::new(services(), slices(&["10.0.0.1", "10.0.0.2", "fd00::1"]))
        .maps
        .tables();
    assert_eq!(before.services.len(), 3);
    let mut world = restart(&before, services(), slices(&["10.0.0.2", "fd00::1", "10.0.0.1"]));
    assert_eq!(world.reconcile(), []);
    assert_eq!(world.engine.tables(), &before);
    for row in before.services.values() {
        assert!(
            world.engine.name(row.service).is_some(),
            "names are known though nothing was planned"
        );
    }
}

#[test]
fn ids_are_kept_and_not_given_to_others() {
    let before = World::new(services(), slices(&["10.0.0.1"])).maps.tables();
    let mut desired = services();
    desired.remove(0);
    desired.push(service("new", &["10.96.0.0"]));
    let mut world = restart(&before, desired, slices(&["10.0.0.9"]));
    world.reconcile();
    let web = key(1, WEB, TCP, 80);
    assert_eq!(world.row(&web).service, before.services[&web].service);
    assert_ne!(world.row(&web).backends, before.services[&web].backends);
    let new = world.row(&key(1, "10.96.0.0", TCP, 80)).service;
    assert!(
        before.services.values().all(|row| row.service != new),
        "also not the one of a port that is gone"
    );
}

#[test]
fn what_went_meanwhile_is_forgotten() {
    let before = World::new(services(), slices(&["10.0.0.1", "10.0.0.2"])).maps.tables();
    let mut world = restart(&before, services(), slices(&["10.0.0.2"]));
    let is_expired = is_expired(&world.reconcile());
    let of: BTreeSet<_> = is_expired.iter().map(|gone| (gone.service, gone.backend)).collect();
    let expected = [API, WEB].map(|vip| (key(1, vip, TCP, 80), backend("10.0.0.1", 8080)));
    assert_eq!(of, expected.into());
}

#[test]
fn backends_that_only_flows_show_are_forgotten_when_there_are_others() {
    let before = World::new(services(), slices(&[])).maps.tables();
    let mut world = restart(&before, services(), slices(&[]));
    let [web, deleted] = [WEB, "10.96.0.7"].map(|vip| key(1, vip, TCP, 80));
    let uses = [web, deleted].map(|key| (key, BTreeSet::from([backend("10.0.0.1", 8080)])));
    world.engine = world.engine.with_uses(uses.into());
    assert_eq!(is_expired(&world.reconcile()), [], "there is no other");
    let steps = world.set_slices(slices(&["10.0.0.2"]));
    let gone = is_expired(&steps);
    let gone: Vec<_> = gone.iter().map(|gone| (gone.service, gone.backend)).collect();
    assert_eq!(gone, [(web, backend("10.0.0.1", 8080))]);
    let later = is_expired(&world.set_slices(slices(&["10.0.0.3"])));
    assert!(
        later.iter().all(|gone| gone.backend == backend("10.0.0.2", 8080)),
        "once: {later:?}"
    );
}

#[test]
fn lists_that_nobody_names_go_after_two_ticks() {
    let mut before = World::new(services(), slices(&["10.0.0.1"])).maps.tables();
    let own = before.clone();
    for (backends, slot) in [(4000, 0), (4000, 1), (4000, 7), (0, 0)] {
        before
            .backends
            .insert(BackendKey { backends, slot }, backend("10.0.0.5", 1));
    }
    let mut world = restart(&before, services(), slices(&["10.0.0.1"]));
    assert_eq!(world.reconcile(), []);
    world.tick();
    assert_eq!(world.reconcile(), []);
    world.tick();
    world.reconcile();
    assert_eq!(world.maps.tables(), own);
    world.set_slices(slices(&["10.0.0.2"]));
    let first_new = world
        .maps
        .services
        .values()
        .map(|row| row.backends)
        .filter(|list| *list != 0)
        .min();
    assert!(first_new > Some(4000), "above every adopted number");
}

#[test]
fn a_list_that_is_not_what_the_row_says_is_replaced() {
    let web = key(1, WEB, TCP, 80);
    let before = World::new(services(), slices(&["10.0.0.1", "10.0.0.2"])).maps.tables();
    let list = before.services[&web].backends;
    let kinds: [fn(&mut ServiceTables, u32); 4] = [
        |tables, list| {
            tables.backends.remove(&BackendKey {
                backends: list,
                slot: 0,
            });
        },
        |tables, list| {
            let key = BackendKey {
                backends: list,
                slot: 2,
            };
            tables.backends.insert(key, backend("10.0.0.3", 8080));
        },
        |tables, list| {
            let key = BackendKey {
                backends: list,
                slot: 1,
            };
            tables.backends.insert(key, backend("10.0.0.3", 8080));
        },
        |tables, list| {
            let slot = |slot| BackendKey { backends: list, slot };
            let moved = tables.backends.remove(&slot(1)).unwrap();
            tables.backends.insert(slot(2), moved);
        },
    ];
    for spoil in kinds {
        let mut damaged = before.clone();
        spoil(&mut damaged, list);
        let mut engine = engine(damaged.clone());
        engine.set_services(services());
        engine.set_slices(slices(&["10.0.0.1", "10.0.0.2"]));
        let steps = engine.plan();
        let ServiceStep::PutBackends(rows) = &steps[0] else {
            panic!("{steps:?}");
        };
        assert!(
            rows.iter()
                .all(|(key, _)| !damaged.backends.keys().any(|old| old.backends == key.backends))
        );
        engine.confirm();
        let row = engine.tables().services[&web];
        assert_eq!((row.service, row.count), (before.services[&web].service, 2));
        assert_ne!(row.backends, list);
    }
}

#[test]
fn broken_ids_are_replaced() {
    let before = World::new(services(), slices(&["10.0.0.1"])).maps.tables();
    for broken in [0, before.services[&key(1, WEB, TCP, 80)].service] {
        let mut tables = before.clone();
        tables.services.get_mut(&key(1, API, TCP, 80)).unwrap().service = broken;
        let mut world = restart(&tables, services(), slices(&["10.0.0.1"]));
        assert_eq!(world.engine.plan().len(), 1);
        world.engine.confirm();
        let ids: BTreeSet<u32> = world.engine.tables().services.values().map(|row| row.service).collect();
        assert_eq!(ids.len(), 3);
        assert!(!ids.contains(&0));
    }
}

#[test]
fn numbers_start_again_after_the_last_one() {
    let mut tables = ServiceTables::default();
    for list in [1, 3, u32::MAX] {
        tables.backends.insert(
            BackendKey {
                backends: list,
                slot: 0,
            },
            backend("10.0.0.5", 1),
        );
    }
    let mut world = restart(&tables, services(), slices(&["10.0.0.1"]));
    world.reconcile();
    let mut numbers: Vec<u32> = world
        .maps
        .services
        .values()
        .flat_map(|row| [row.service, row.backends])
        .collect();
    numbers.retain(|number| *number != 0);
    numbers.sort_unstable();
    assert_eq!(numbers, [2, 4, 5, 6, 7]);
}
