//! Checks the choice of endpoints against an oracle that evaluates the rules one after the other.

use proptest::prelude::*;

use super::*;

/// A generated endpoint; its position is its address.
#[derive(Debug, Clone)]
struct Drawn {
    ready: bool,
    serving: bool,
    terminating: bool,
    node: Option<&'static str>,
    zones: Vec<&'static str>,
    nodes: Vec<&'static str>,
    /// The slices, out of three, that contain it.
    slices: Vec<usize>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let zones = prop::sample::subsequence(vec!["east", "west"], 0..=2);
    let nodes = prop::sample::subsequence(vec!["here", "there"], 0..=2);
    // Mostly with hints: one endpoint without hints turns them off for all.
    let hinted = |all: Vec<&'static str>| prop_oneof![4 => prop::sample::subsequence(all, 1..=2), 1 => Just(vec![])];
    let hints = prop_oneof![
        (zones, nodes),
        (hinted(vec!["east", "west"]), hinted(vec!["here", "there"])),
        (hinted(vec!["west", "north"]), hinted(vec!["there", "here"])),
    ];
    (
        prop::bool::weighted(0.5),
        prop::bool::weighted(0.7),
        any::<bool>(),
        prop::sample::select(vec![None, Some("here"), Some("there")]),
        hints,
        prop::sample::subsequence(vec![0, 1, 2], 1..=3),
    )
        .prop_map(|(ready, serving, terminating, node, (zones, nodes), slices)| Drawn {
            ready,
            serving,
            terminating,
            node,
            zones,
            nodes,
            slices,
        })
}

fn strings(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

fn address(position: usize) -> String {
    format!("10.0.0.{}", position + 1)
}

fn slices(all: &[Drawn]) -> Vec<EndpointSlice> {
    let of = |number: usize| {
        let members = all.iter().enumerate().filter(|(_, d)| d.slices.contains(&number));
        let endpoints = members.map(|(position, d)| SliceEndpoint {
            addresses: vec![ip(&address(position))],
            ready: d.ready,
            serving: d.serving,
            terminating: d.terminating,
            node: d.node.map(str::to_owned),
            pod: None,
            for_zones: strings(&d.zones),
            for_nodes: strings(&d.nodes),
        });
        slice("web", &number.to_string(), endpoints.collect())
    };
    (0..3).map(of).collect()
}

/// The positions of the endpoints that get new connections, and whether packets are dropped without any.
fn oracle(
    all: &[Drawn],
    zone: Option<&str>,
    local_only: bool,
    distribution: TrafficDistribution,
) -> (Vec<usize>, bool) {
    let mut answer = Vec::new();
    let any_usable = all.iter().any(|d| d.ready || (d.serving && d.terminating));
    if local_only {
        for want_ready in [true, false] {
            for (position, d) in all.iter().enumerate() {
                let fits = if want_ready {
                    d.ready
                } else {
                    !d.ready && d.serving && d.terminating
                };
                if fits && d.node == Some("here") {
                    answer.push(position);
                }
            }
            if !answer.is_empty() {
                break;
            }
        }
        let drop = answer.is_empty() && any_usable;
        return (answer, drop);
    }
    let count_ready = all.iter().filter(|d| d.ready).count();
    if count_ready == 0 {
        let last_resort = (0..all.len()).filter(|p| all[*p].serving && all[*p].terminating);
        return (last_resort.collect(), false);
    }
    let with_node_hints = all.iter().filter(|d| d.ready && !d.nodes.is_empty()).count();
    let with_zone_hints = all.iter().filter(|d| d.ready && !d.zones.is_empty()).count();
    let for_this_node: Vec<usize> = (0..all.len())
        .filter(|p| all[*p].ready && all[*p].nodes.contains(&"here"))
        .collect();
    let for_this_zone: Vec<usize> = (0..all.len())
        .filter(|p| all[*p].ready && zone.is_some_and(|zone| all[*p].zones.contains(&zone)))
        .collect();
    if distribution == TrafficDistribution::SameNode && with_node_hints == count_ready && !for_this_node.is_empty() {
        return (for_this_node, false);
    }
    if distribution != TrafficDistribution::Any && with_zone_hints == count_ready && !for_this_zone.is_empty() {
        return (for_this_zone, false);
    }
    ((0..all.len()).filter(|p| all[*p].ready).collect(), false)
}

/// The engine's result: backends and flags.
fn chosen(
    all: &[Drawn],
    zone: Option<&str>,
    local_only: bool,
    distribution: TrafficDistribution,
) -> (Vec<String>, u32) {
    let place = NodePlace {
        zone: zone.map(str::to_owned),
        ..place()
    };
    let mut engine = ServiceEngine::new(ServiceTables::default(), place, 100);
    networks(&mut engine);
    engine.set_services(vec![Service {
        local_only,
        distribution,
        ..service("web", &["10.96.0.1"])
    }]);
    engine.set_slices(slices(all));
    let mut maps = Maps::default();
    maps.carry_out(&engine.plan());
    let web = key(1, "10.96.0.1", TCP, 80);
    (maps.reach(&web), maps.services[&web].flags)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_choice_is_the_oracles(
        all in prop::collection::vec(drawn(), 0..6),
        zone in prop::sample::select(vec![None, Some("east"), Some("north")]),
        local_only in any::<bool>(),
        distribution in prop::sample::select(vec![
            TrafficDistribution::Any,
            TrafficDistribution::SameZone,
            TrafficDistribution::SameNode,
        ]),
    ) {
        let (positions, drop) = oracle(&all, zone, local_only, distribution);
        let expected: Vec<String> = positions.into_iter().map(|p| format!("{}:8080", address(p))).collect();
        let flags = if drop { SERVICE_DROP_IF_EMPTY } else { 0 };
        prop_assert_eq!(chosen(&all, zone, local_only, distribution), (expected, flags));
    }
}

/// Ready, with these hints.
fn hinted(zones: &[&'static str], nodes: &[&'static str]) -> Drawn {
    Drawn {
        ready: true,
        serving: true,
        terminating: false,
        node: Some("there"),
        zones: zones.to_vec(),
        nodes: nodes.to_vec(),
        slices: vec![0],
    }
}

#[test]
fn hints_decide_only_if_all_have_them_and_one_is_for_us() {
    use TrafficDistribution::{Any, SameNode, SameZone};
    let full = [
        hinted(&["east"], &["here"]),
        hinted(&["east"], &["there"]),
        hinted(&["west"], &["there"]),
    ];
    let no_node = [hinted(&["east"], &[]), hinted(&["west"], &["here"])];
    let other_node = [hinted(&["east"], &["there"]), hinted(&["west"], &["there"])];
    let no_zone = [hinted(&["east"], &[]), hinted(&[], &[])];
    let other_zone = [hinted(&["west"], &[]), hinted(&["west"], &[])];
    let cases: [(&[Drawn], TrafficDistribution, &[usize]); 8] = [
        (&full, Any, &[0, 1, 2]),
        (&full, SameZone, &[0, 1]),
        (&full, SameNode, &[0]),
        (&no_node, SameNode, &[0]),
        (&other_node, SameNode, &[0]),
        (&no_zone, SameZone, &[0, 1]),
        (&other_zone, SameZone, &[0, 1]),
        (&other_zone, SameNode, &[0, 1]),
    ];
    for (all, distribution, expected) in cases {
        let expected: Vec<String> = expected.iter().map(|p| format!("{}:8080", address(*p))).collect();
        assert_eq!(
            chosen(all, Some("east"), false, distribution).0,
            expected,
            "{all:?} {distribution:?}"
        );
    }
}
