//! Tests how many blocks a node claims and releases, alone and among many nodes.

use super::*;
use crate::blocks::MOST_AT_ONCE;

const POD: Need = Need {
    in_use: true,
    coming: 1,
};
const IDLE: Need = Need {
    in_use: true,
    coming: 0,
};
const UNUSED: Need = Need {
    in_use: false,
    coming: 0,
};

fn holding(size: u128, blocks: usize, used: u128) -> Holding {
    let free = size * blocks as u128 - used;
    Holding {
        blocks,
        used,
        free,
        size,
    }
}

#[test]
fn blocks_are_claimed_for_the_pods_that_are_coming_and_a_few_more() {
    let plenty = || Supply::Plenty;
    let coming = |coming| Need { in_use: true, coming };
    for (holding, need, blocks) in [
        (holding(1, 0, 0), UNUSED, 0),
        (holding(1, 0, 0), IDLE, 1),
        (holding(1, 0, 0), POD, 2),
        (holding(1, 2, 1), IDLE, 0),
        (holding(1, 0, 0), coming(30), 31),
        (holding(1, 31, 30), IDLE, 3),
        (holding(1, 0, 0), coming(1000), MOST_AT_ONCE),
        (holding(64, 1, 48), IDLE, 0),
        (holding(64, 1, 49), IDLE, 1),
        (holding(64, 1, 0), coming(110), 1),
        (holding(64, 0, 0), coming(110), 2),
    ] {
        assert_eq!(holding.short_of(need, plenty), blocks, "{holding:?} {need:?}");
    }
}

#[test]
fn where_addresses_are_few_none_are_held_for_later() {
    for supply in [Supply::Moderate, Supply::Scarce] {
        assert_eq!(holding(1, 1, 1).short_of(IDLE, || supply), 0);
        assert_eq!(holding(1, 1, 1).short_of(POD, || supply), 1);
        assert_eq!(
            holding(1, 0, 0).short_of(IDLE, || supply),
            1,
            "a network in use has a block"
        );
    }
    let idle = || vec!["10.0.0.5/32".parse().unwrap(), "10.0.0.6/32".parse().unwrap()];
    let of = |supply, need, blocks, used| holding(1, blocks, used).unneeded(&idle(), need, || supply).len();
    assert_eq!(of(Supply::Moderate, IDLE, 3, 1), 1, "one stays for later");
    assert_eq!(of(Supply::Scarce, IDLE, 3, 1), 2);
    assert_eq!(of(Supply::Scarce, POD, 3, 1), 1, "one stays for the pod");
    assert_eq!(of(Supply::Scarce, IDLE, 2, 0), 1, "a network in use has a block");
    assert_eq!(of(Supply::Plenty, UNUSED, 2, 0), 2);
    let large = vec!["10.0.0.0/26".parse().unwrap()];
    assert_eq!(holding(64, 2, 40).unneeded(&large, IDLE, || Supply::Plenty), large);
    assert_eq!(holding(64, 2, 50).unneeded(&large, IDLE, || Supply::Plenty), []);
}

/// Many nodes share a /24 in units of one address: every pod gets an address, whatever the nodes hold in between.
#[test]
fn a_small_network_has_room_for_a_pod_on_each_of_many_nodes() {
    for (nodes, pods) in [(200, 1), (100, 2), (60, 4), (253, 1), (1, 253)] {
        let mut random = fastrand::Rng::with_seed(nodes as u64);
        let mut net = Simulated::new(nodes, pods);
        for round in 0..60 {
            let mut order: Vec<usize> = (0..nodes).collect();
            random.shuffle(&mut order);
            for node in order {
                net.step(node, round, &mut random);
            }
        }
        let waiting: u128 = net.nodes.iter().map(|node| node.need.coming).sum();
        assert_eq!(waiting, 0, "{nodes} nodes with {pods} pods");
        println!(
            "{nodes} nodes with {pods} pods: the last address after {} rounds",
            net.last
        );
    }
}

struct SimulatedNode {
    need: Need,
    used: Vec<IpNet>,
    /// With the round since which they are empty.
    empty: Vec<(IpNet, u32)>,
    seed: u64,
}

struct Simulated {
    units: Units,
    nodes: Vec<SimulatedNode>,
    last: u32,
}

impl Simulated {
    fn new(nodes: usize, pods: u128) -> Self {
        let units = Units {
            subnets: vec!["10.0.0.0/24".parse().unwrap()],
            prefixes: Prefixes {
                ipv4: Some(32),
                ipv6: None,
            },
            taken: Taken::default(),
            excluded: Taken::default(),
            covered: true,
        };
        let node = |number: usize| SimulatedNode {
            need: Need {
                in_use: true,
                coming: pods,
            },
            used: Vec::new(),
            empty: Vec::new(),
            seed: number as u64,
        };
        Self {
            units,
            nodes: (0..nodes).map(node).collect(),
            last: 0,
        }
    }

    fn step(&mut self, number: usize, round: u32, random: &mut fastrand::Rng) {
        let node = &mut self.nodes[number];
        while node.need.coming > 0
            && let Some((unit, _)) = node.empty.pop()
        {
            node.used.push(unit);
            node.need.coming -= 1;
            self.last = round;
        }
        let holding = Holding {
            blocks: node.used.len() + node.empty.len(),
            used: node.used.len() as u128,
            free: node.empty.len() as u128,
            size: 1,
        };
        let short = holding.short_of(node.need, || self.units.supply(true));
        for _ in 0..short {
            if let Some(unit) = self.units.next(&node.seed.to_string(), true, random.u32(..)) {
                self.units.taken.insert(&unit);
                node.empty.push((unit, round));
            }
        }
        if short == 0 {
            let idle = node.empty.iter().filter(|(_, since)| round - since >= 15);
            let idle: Vec<IpNet> = idle.map(|(unit, _)| *unit).collect();
            let unneeded = holding.unneeded(&idle, node.need, || self.units.supply(true));
            if !unneeded.is_empty() {
                node.empty.retain(|(unit, _)| !unneeded.contains(unit));
                self.rebuild();
            }
        }
    }

    fn rebuild(&mut self) {
        let all = self.nodes.iter();
        let held = all.flat_map(|node| node.used.iter().chain(node.empty.iter().map(|(unit, _)| unit)));
        self.units.taken = held.collect();
    }
}
