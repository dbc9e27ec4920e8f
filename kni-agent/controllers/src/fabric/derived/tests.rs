//! Checks the derivation, and that updates lead to the same as a derivation anew.

use std::sync::Arc;

use kni_cluster::{Key, NodeRow};
use kni_crd::{FromObject as _, PodNetwork};
use kni_ipam::blocks::object_name;
use kni_model::NetworkSpec;
use serde_json::{Value, json};

use super::*;

fn object<K: serde::de::DeserializeOwned>(kind: &str, name: &str, spec: &Value, status: &Value) -> Arc<K> {
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": kind, "metadata": { "name": name, "uid": format!("{name}-uid") },
        "spec": spec, "status": status,
    });
    Arc::new(serde_json::from_value(object).unwrap())
}

fn endpoint(tables: &mut Tables, node: &str, addresses: &[&str], mtu: u32) {
    let spec = json!({
        "nodeName": node, "nodeUID": format!("{node}-1"), "addresses": addresses, "port": 4789, "mtu": mtu, "epoch": 1,
    });
    let row = object("NodeEndpoint", node, &spec, &json!({ "addresses": addresses }));
    tables.node_endpoints.put(Key::new("", node), Some(row));
}

fn name_of(network: &str, cidr: &str) -> String {
    object_name(&network.parse().unwrap(), &cidr.parse().unwrap())
}

#[test]
fn names_of_blocks_are_those_of_their_ranges() {
    let mut tables = Tables::default();
    for (network, cidr) in [("red", "10.0.1.0/26"), ("a-b", "fd00:1::/122"), ("red", "::/0")] {
        block(&mut tables, network, cidr, "n2");
        block_named(&mut tables, "red.v4-10-0-2-0-26", (network, "uid"), cidr, "n2");
    }
    // Other forms of a range.
    for (name, cidr) in [("red.v4-10-0-0-1-26", "10.0.0.1/26"), ("red.v6-FD00---64", "FD00::/64")] {
        block_named(&mut tables, name, ("red", "uid"), cidr, "n2");
    }
    for (key, object) in tables.other_blocks.rows() {
        let range: IpNet = object.spec.cidr.parse().unwrap();
        let is_it = parse_object_name(&key.name) == Some((object.spec.network.parse().unwrap(), range));
        assert_eq!(is_named(key, object), is_it, "{key}");
    }
    let named = tables
        .other_blocks
        .rows()
        .iter()
        .filter(|(key, object)| is_named(key, object));
    assert_eq!(named.count(), 3);
}

fn block(tables: &mut Tables, network: &str, cidr: &str, node: &str) {
    let name = name_of(network, cidr);
    block_named(tables, &name, (network, &format!("{network}-uid")), cidr, node);
}

fn block_named(tables: &mut Tables, name: &str, (network, uid): (&str, &str), cidr: &str, node: &str) {
    let spec = json!({
        "network": network, "networkUID": uid, "cidr": cidr, "nodeName": node, "nodeUID": format!("{node}-1"),
    });
    let row = object("AddressBlock", name, &spec, &json!({}));
    tables.other_blocks.put(Key::new("", name), Some(row));
}

/// Two nodes beside this one, and a block of each in both networks.
fn tables() -> Tables {
    let mut tables = Tables::default();
    for name in ["default", "red"] {
        let row = object("PodNetwork", name, &json!({ "subnets": ["10.0.0.0/16"] }), &json!({}));
        tables.networks.put(Key::new("", name), Some(row));
        block(&mut tables, name, "10.0.1.0/26", "n2");
        block(&mut tables, name, "10.0.2.0/26", "n3");
    }
    endpoint(&mut tables, "n1", &["192.0.2.1", "2001:db8::1"], 1500);
    endpoint(&mut tables, "n2", &["192.0.2.2", "2001:db8::2"], 9000);
    endpoint(&mut tables, "n3", &["2001:db8::3", "192.0.2.3"], 1400);
    tables
}

fn network(name: &str, fabric: Fabric) -> Network {
    let default = name == "default";
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name },
        "spec": { "subnets": ["10.0.0.0/16"], "default": default },
    });
    let object: PodNetwork = serde_json::from_value(object).unwrap();
    let id: NetworkId = if default { 1 } else { 2 }.try_into().unwrap();
    let spec = NetworkSpec {
        fabric,
        ..NetworkSpec::from_object(&object).unwrap()
    };
    Network { id, spec }
}

/// What this node should know with these networks.
fn of_networks(tables: &Tables, networks: &[(Network, Option<u32>)]) -> Desired {
    let mut derived = Derived::default();
    derived.update(tables, networks.to_vec(), "n1");
    Desired::clone(derived.desired())
}

fn of(tables: &Tables, fabric: Fabric) -> Desired {
    let red = (network("red", Fabric::Overlay), Some(5001));
    of_networks(tables, &[(network("default", fabric), Some(5000)), red])
}

/// The blocks of a network with the addresses of their nodes.
fn shown(desired: &Desired, network: u32) -> Vec<String> {
    let network = desired.networks.get(&network.try_into().unwrap());
    let blocks = network.into_iter().flat_map(|network| &network.blocks);
    blocks
        .map(|(block, way)| {
            format!(
                "{block} {} {}",
                way.underlay,
                if way.overlay { "tunnel" } else { "direct" }
            )
        })
        .collect()
}

#[test]
fn each_block_leads_to_its_node_by_a_family_that_both_choose() {
    let desired = of(&tables(), Fabric::Overlay);
    // The third node prefers IPv6.
    let expected = ["10.0.1.0/26 192.0.2.2 tunnel", "10.0.2.0/26 2001:db8::3 tunnel"];
    assert_eq!(shown(&desired, 1), expected);
    assert_eq!(shown(&desired, 2), expected);
    let mtus: Vec<u32> = desired.ways.values().map(|path| path.mtu).collect();
    assert_eq!(mtus, [1450, 1330], "of the smaller MTU, less the outer headers");
    let default = &desired.networks[&1.try_into().unwrap()];
    assert_eq!((default.nodes.len(), default.own.len()), (4, 2));
    let red = &desired.networks[&2.try_into().unwrap()];
    assert!(red.nodes.is_empty() && red.own.is_empty(), "no access to nodes");
    let names: BTreeSet<&str> = desired.names.values().map(String::as_str).collect();
    assert_eq!((desired.names.len(), names), (6, ["n1", "n2", "n3"].into()));
    assert_eq!(desired.tunnel.unwrap().mtu, 1450);
    assert_eq!(desired.tunnel.unwrap().host_network, Some(1.try_into().unwrap()));
}

#[test]
fn networks_without_a_tunnel_have_ways_of_their_own_family() {
    let desired = of(&tables(), Fabric::Native);
    assert_eq!(
        shown(&desired, 1),
        ["10.0.1.0/26 192.0.2.2 direct", "10.0.2.0/26 192.0.2.3 direct"]
    );
    assert!(desired.networks[&1.try_into().unwrap()].exposed);
    assert_eq!(desired.tunnel.unwrap().host_network, None);
    // Both would have the same addresses outside of the nodes: the first one has them.
    let both = ["default", "red"].map(|name| (network(name, Fabric::Native), None));
    let desired = of_networks(&tables(), &both);
    assert_eq!(desired.networks.len(), 1);
    assert_eq!(desired.tunnel, None);
}

#[test]
fn what_is_not_known_for_certain_is_left_out() {
    let closed = [
        (network("default", Fabric::Overlay), None),
        (network("red", Fabric::None), Some(7)),
    ];
    assert!(of_networks(&tables(), &closed).networks.is_empty());
    let with = |change: &dyn Fn(&mut Tables)| {
        let mut tables = tables();
        change(&mut tables);
        shown(&of(&tables, Fabric::Overlay), 2)
    };
    let third = ["10.0.2.0/26 2001:db8::3 tunnel"];
    assert_eq!(
        with(&|tables| endpoint(tables, "n2", &[], 1500)),
        third,
        "no address is confirmed"
    );
    assert_eq!(
        with(&|tables| endpoint(tables, "n2", &["192.0.2.1"], 1500)),
        third,
        "this node's own"
    );
    assert_eq!(
        with(&|tables| endpoint(tables, "n2", &["2001:db8::3"], 1500)),
        ["10.0.2.0/26 192.0.2.3 tunnel"],
        "two nodes have one address"
    );
    assert_eq!(with(&|tables| tables.node_endpoints.remove(&Key::new("", "n2"))), third);
    assert_eq!(
        with(&|tables| tables.node_endpoints.remove(&Key::new("", "n1"))),
        [""; 0],
        "no own end"
    );
    let foreign = |tables: &mut Tables| block(tables, "red", "172.16.0.0/26", "n2");
    assert_eq!(with(&foreign).len(), 2, "outside of the subnets");
    let later = |tables: &mut Tables| {
        let row = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "later" },
            "spec": { "subnets": ["10.0.0.0/16"] },
        });
        let row = Arc::new(serde_json::from_value(row).unwrap());
        tables.networks.put(Key::new("", "red"), Some(row));
    };
    assert_eq!(with(&later), [""; 0], "blocks of an earlier network of the name");
}

/// The inputs of a history: each change is one of those that the API server can report.
struct World {
    tables: Tables,
    networks: Vec<Numbered>,
    random: fastrand::Rng,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut tables = Tables::default();
        // A list was read before, so that changes are known by name.
        tables.other_blocks.begin();
        tables.other_blocks.complete();
        let mut world = Self {
            tables,
            networks: Vec::new(),
            random: fastrand::Rng::with_seed(seed),
        };
        for _ in 0..20 {
            world.change();
        }
        world
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        self.random.choice(of.iter().copied()).unwrap()
    }

    fn change(&mut self) {
        match self.random.u8(0..24) {
            0 => self.change_node(),
            1 => self.change_network(),
            2 => self.join(),
            3 | 4 => self.change_claim(),
            5 => {
                let uid = format!("n1-{}", self.random.u8(0..2));
                let row = NodeRow {
                    uid,
                    ..NodeRow::default()
                };
                self.tables.own_node.put(Key::new("", "n1"), Some(row));
            }
            6 => self.misname(),
            7 => {
                let networks = [self.one(&["default", "red", "blue"]).parse().unwrap()];
                self.tables.other_blocks.cover(&networks.into());
            }
            _ => self.change_block(),
        }
    }

    fn change_node(&mut self) {
        let node = self.one(&["n1", "n2", "n3", "n4"]);
        let all = ["192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1", "2001:db8::2"];
        let first = self.one(&all);
        let second = self.one(&all);
        let addresses: &[&str] = match self.random.u8(0..8) {
            0 => &[],
            1..4 => &[first],
            _ if first == second => &[first],
            _ => &[first, second],
        };
        match self.random.u8(0..6) {
            0 => self.tables.node_endpoints.remove(&Key::new("", node)),
            _ => endpoint(&mut self.tables, node, addresses, self.random.u32(1300..1310)),
        }
    }

    fn change_network(&mut self) {
        let name = self.one(&["default", "red", "blue"]);
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": { "name": name, "uid": format!("{name}-{}", self.one(&["uid", "uid", "uid", "later"])) },
            "spec": { "subnets": ["10.0.0.0/16"], "mtu": self.random.u32(1300..1303) },
        });
        let row = Arc::new(serde_json::from_value(object).unwrap());
        self.tables.networks.put(Key::new("", name), Some(row));
    }

    /// Other networks of this node, or others of their properties.
    fn join(&mut self) {
        self.networks.clear();
        for (id, name) in [(1, "default"), (2, "red"), (3, "blue")] {
            let fabric = match self.random.u8(0..8) {
                0 => continue,
                1 => Fabric::None,
                2 | 3 => Fabric::Native,
                _ => Fabric::Overlay,
            };
            let mut network = network(name, fabric);
            network.id = id.try_into().unwrap();
            let number = (self.random.u8(0..8) > 0).then_some(5000 + id);
            self.networks.push((network, number));
        }
    }

    fn change_claim(&mut self) {
        let address = self.one(&["198.51.100.1", "198.51.100.2"]);
        let key = Key::new("", address);
        if self.random.u8(0..4) == 0 {
            self.tables.egress_claims.remove(&key);
            return;
        }
        let share = |unit: u8, node: &str| json!({ "unit": unit, "nodeName": node, "nodeUid": format!("{node}-1") });
        let nodes = ["n1", "n2", "n3", "n4"];
        let (holder, first, second) = (self.one(&nodes), self.one(&nodes), self.one(&nodes));
        let spec = json!({
            "address": address, "nodeName": holder, "nodeUid": format!("{holder}-1"), "epoch": 1,
            "shares": [share(0, "n1"), share(1, first), share(2, second)],
        });
        let holder = json!({ "nodeName": holder, "nodeUid": format!("{holder}-1"), "epoch": 1 });
        let row = object("EgressAddressClaim", address, &spec, &json!({ "holder": holder }));
        self.tables.egress_claims.put(key, Some(row));
    }

    fn change_block(&mut self) {
        let (network, cidr) = (self.one(&["default", "red", "blue"]), self.range());
        let name = name_of(network, &cidr);
        if self.random.u8(0..3) == 0 {
            self.tables.other_blocks.remove(&Key::new("", &name));
            return;
        }
        let node = self.one(&["n2", "n3", "n4", "n1"]);
        let uid = format!("{network}-{}", self.one(&["uid", "uid", "uid", "later"]));
        block_named(&mut self.tables, &name, (network, &uid), &cidr, node);
    }

    /// Some of them are outside of the subnets.
    fn range(&mut self) -> String {
        let second = u8::from(self.random.u8(0..10) == 0);
        format!("10.{second}.0.{}/26", self.random.u8(0..4) * 64)
    }

    /// A block whose name is not that of its range, as the API server does not accept it; or none of this name.
    fn misname(&mut self) {
        let name = match self.random.u8(0..3) {
            0 => "odd".to_owned(),
            _ => name_of(self.one(&["default", "red"]), "10.0.0.0/26"),
        };
        if self.random.bool() {
            self.tables.other_blocks.remove(&Key::new("", &name));
            return;
        }
        let (network, cidr) = (self.one(&["default", "red", "blue"]), self.range());
        let uid = format!("{network}-uid");
        block_named(&mut self.tables, &name, (network, &uid), &cidr, "n2");
    }
}

#[test]
fn an_update_leads_to_the_same_as_a_derivation_anew() {
    let mut outcomes = BTreeMap::new();
    for seed in 0..400 {
        let mut world = World::new(seed);
        let mut derived = Derived::default();
        for round in 0..60 {
            let before = Arc::clone(derived.desired());
            let updated = derived.update(&world.tables, world.networks.clone(), "n1");
            let mut anew = Derived::default();
            anew.update(&world.tables, world.networks.clone(), "n1");
            assert_eq!(derived.desired(), anew.desired(), "seed {seed}, round {round}");
            assert_eq!(derived.uses, anew.uses, "seed {seed}, round {round}");
            assert_eq!(updated == Updated::Desired, before != *derived.desired());
            *outcomes.entry(format!("{updated:?}")).or_insert(0) += 1;
            for _ in 0..world.random.u8(0..4) {
                world.change();
            }
        }
    }
    assert!(
        outcomes.len() == 3 && outcomes.values().all(|times| *times > 1000),
        "{outcomes:?}"
    );
}

#[test]
fn a_change_of_a_block_is_an_update_of_this_block() {
    let mut tables = tables();
    tables.other_blocks.begin();
    for network in ["default", "red"] {
        block(&mut tables, network, "10.0.1.0/26", "n2");
        block(&mut tables, network, "10.0.2.0/26", "n3");
    }
    tables.other_blocks.complete();
    let mut derived = Derived::default();
    let networks = || vec![(network("red", Fabric::Overlay), Some(5001))];
    assert_eq!(derived.update(&tables, networks(), "n1"), Updated::Desired);
    assert_eq!(derived.update(&tables, networks(), "n1"), Updated::Nothing);
    block(&mut tables, "red", "10.0.3.0/26", "n2");
    assert_eq!(derived.update_blocks(&tables), Some(true));
    assert_eq!(derived.update_blocks(&tables), Some(false));
    block(&mut tables, "red", "10.0.2.0/26", "n2");
    assert_eq!(derived.update(&tables, networks(), "n1"), Updated::Desired);
    let desired = derived.desired();
    assert_eq!(
        shown(desired, 2),
        [
            "10.0.1.0/26 192.0.2.2 tunnel",
            "10.0.2.0/26 192.0.2.2 tunnel",
            "10.0.3.0/26 192.0.2.2 tunnel"
        ]
    );
    assert_eq!(desired.ways.len(), 1, "no block of the third node is left");
    block(&mut tables, "default", "10.0.3.0/26", "n2");
    assert_eq!(
        derived.update(&tables, networks(), "n1"),
        Updated::Inputs,
        "of another network"
    );
    block_named(&mut tables, "odd", ("red", "red-uid"), "10.0.4.0/26", "n2");
    assert_eq!(derived.update_blocks(&tables), None, "two may have one range");
}

/// Prints how long a change of one block takes: `cargo test --release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn a_change_of_a_block_among_many() {
    let mut tables = Tables::default();
    tables.other_blocks.begin();
    tables.other_blocks.complete();
    let networks: Vec<Numbered> = (1..=30_u32)
        .map(|id| {
            let name = format!("net{id}");
            let row = object("PodNetwork", &name, &json!({ "subnets": ["10.0.0.0/8"] }), &json!({}));
            tables.networks.put(Key::new("", &name), Some(row));
            let mut network = network(&name, Fabric::Overlay);
            network.id = id.try_into().unwrap();
            network.spec.subnets = vec!["10.0.0.0/8".parse().unwrap()];
            (network, Some(5000 + id))
        })
        .collect();
    for number in 0..5000_u32 {
        let node = if number == 0 {
            "n1".to_owned()
        } else {
            format!("node{number}")
        };
        let address = format!("172.16.{}.{}", number / 250, number % 250 + 1);
        endpoint(&mut tables, &node, &[&address], 1500);
        for network in 1..=30 {
            let cidr = format!("10.{}.{}.0/26", number / 256, number % 256);
            block(&mut tables, &format!("net{network}"), &cidr, &node);
        }
    }
    let mut derived = Derived::default();
    let mut update = |tables: &Tables| {
        let begun = std::time::Instant::now();
        let updated = derived.update(tables, networks.clone(), "n1");
        (updated, begun.elapsed())
    };
    println!("anew: {:?}", update(&tables));
    endpoint(&mut tables, "n1", &["172.31.0.1"], 1500);
    println!("anew: {:?}", update(&tables));
    for node in ["node7", "node8", "node9"] {
        block(&mut tables, "net5", "10.200.0.0/26", node);
        println!("one block: {:?}", update(&tables));
    }
}
