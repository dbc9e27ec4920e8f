//! Tests which blocks of a node its pods account for.

use std::sync::Arc;

use k8s_openapi::serde::de::DeserializeOwned;
use kni_api::network_members;
use kni_cluster::{HeldBlocks, NodeRow};
use kni_ipam::blocks::object_name;
use serde_json::{Value, json};

use super::*;

fn read<K: DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).unwrap())
}

/// Network red, with units of this size.
fn tables(prefix: u8) -> Tables {
    let mut tables = Tables::default();
    tables.blocks.begin();
    tables.blocks.complete();
    tables.members.begin();
    tables.members.complete();
    let network = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "r" },
        "spec": {
            "subnets": ["10.0.0.0/16"], "perNodePrefix": { "ipv4": prefix }, "access": { "namespaces": { "from": "All" } },
        },
    });
    tables.networks.put(Key::new("", "red"), Some(read(network)));
    tables
}

fn block(tables: &mut Tables, cidr: &str, node: &str) -> Key {
    let name = object_name(&"red".parse().unwrap(), &cidr.parse().unwrap());
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": { "name": name },
        "spec": { "network": "red", "networkUID": "r", "cidr": cidr, "nodeName": node, "nodeUID": "u" },
    });
    let key = Key::new("", &name);
    tables.blocks.put(key.clone(), Some(read(object)));
    key
}

/// Pods of a node that name the network.
fn pods(tables: &mut Tables, node: &str, count: usize) {
    for number in 0..count {
        let pod = PodFacts {
            uid: format!("{node}-{number}"),
            node: node.to_owned(),
            annotations: [(kni_api::NETWORK_ANNOTATION.to_owned(), "red".to_owned())].into(),
            ..PodFacts::default()
        };
        let key = Key::new("shop", &format!("{node}-{number}"));
        tables.pods.put(key, Some(Arc::new(pod)));
    }
}

/// Reports of a node that its pods have these addresses: each by the number of its pod.
fn report(tables: &mut Tables, node: &str, addresses: &[(usize, &str)]) {
    let members = addresses.iter().enumerate().map(|(at, (pod, address))| {
        json!({
            "namespace": "shop", "podName": format!("{node}-{pod}"), "podUID": format!("{node}-{pod}"),
            "interface": format!("net{at}"), "addresses": [address],
        })
    });
    let name = network_members::name("red", node, 0);
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": name },
        "spec": {
            "network": "red", "networkUID": "r", "nodeName": node, "nodeUID": "u", "members": members.collect::<Vec<_>>(),
        },
    });
    tables.members.put(Key::new("", &name), Some(read(object)));
}

/// The nodes that hold too many blocks of network red.
fn found(tables: &Tables) -> Vec<String> {
    let networks = Networks::of(tables, &HeldBlocks::default());
    excessive(tables, &networks)
        .into_iter()
        .map(|(_, node, _)| node)
        .collect()
}

#[test]
fn one_empty_block_is_for_pods_to_come_and_two_are_too_many() {
    let mut tables = tables(26);
    block(&mut tables, "10.0.0.0/26", "n1");
    assert!(found(&tables).is_empty(), "the first pod may come");
    block(&mut tables, "10.0.0.64/26", "n1");
    block(&mut tables, "10.0.0.128/26", "n2");
    assert_eq!(found(&tables), ["n1"]);
    pods(&mut tables, "n1", 1);
    report(&mut tables, "n1", &[(0, "10.0.0.7")]);
    assert!(found(&tables).is_empty(), "one block has a pod");
    let last = block(&mut tables, "10.0.1.0/26", "n1");
    assert_eq!(found(&tables), ["n1"]);
    // Pods that are assigned to the node, and have no address yet.
    pods(&mut tables, "n1", 65);
    assert!(found(&tables).is_empty());
    tables.blocks.remove(&last);
    assert!(found(&tables).is_empty());
}

#[test]
fn false_reports_account_for_nothing() {
    let mut tables = tables(26);
    for number in 0..8 {
        block(&mut tables, &format!("10.0.{number}.0/26"), "n1");
    }
    pods(&mut tables, "n2", 1);
    let all: Vec<String> = (0..8).map(|number| format!("10.0.{number}.1")).collect();
    let of = |pod: usize| all.iter().map(|ip| (pod, ip.as_str())).collect::<Vec<_>>();
    // It has no such pod.
    report(&mut tables, "n1", &of(0));
    assert_eq!(found(&tables), ["n1"]);
    // One pod has an interface in each block.
    pods(&mut tables, "n1", 1);
    assert_eq!(found(&tables), ["n1"]);
    pods(&mut tables, "n1", 8);
    let each: Vec<(usize, &str)> = all.iter().enumerate().map(|(pod, ip)| (pod, ip.as_str())).collect();
    report(&mut tables, "n1", &each);
    assert!(found(&tables).is_empty());
}

#[test]
fn small_units_leave_room_for_spare_addresses() {
    let mut tables = tables(32);
    for number in 0..16 {
        block(&mut tables, &format!("10.0.0.{number}/32"), "n1");
    }
    pods(&mut tables, "n1", 12);
    let addresses: Vec<String> = (0..12).map(|number| format!("10.0.0.{number}")).collect();
    let members: Vec<(usize, &str)> = addresses
        .iter()
        .enumerate()
        .map(|(pod, ip)| (pod, ip.as_str()))
        .collect();
    report(&mut tables, "n1", &members);
    assert!(found(&tables).is_empty(), "four spare ones for twelve");
    block(&mut tables, "10.0.0.16/32", "n1");
    assert_eq!(found(&tables), ["n1"]);
    report(&mut tables, "n1", &members[..11]);
    pods(&mut tables, "n1", 14);
    assert!(
        found(&tables).is_empty(),
        "three spare ones for eleven, and three more pods to come"
    );
}

#[test]
fn only_what_lasts_is_reported() {
    let mut tables = tables(26);
    let networks = Networks::of(&tables, &HeldBlocks::default());
    let (mut excess, start) = (BlockExcess::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    block(&mut tables, "10.0.0.0/26", "n1");
    let second = block(&mut tables, "10.0.0.64/26", "n1");
    assert!(excess.update(&tables, &networks, at(0)).is_empty());
    tables.blocks.remove(&second);
    assert!(excess.update(&tables, &networks, at(30)).is_empty());
    block(&mut tables, "10.0.0.64/26", "n1");
    assert!(
        excess.update(&tables, &networks, at(60)).is_empty(),
        "released meanwhile"
    );
    assert!(excess.update(&tables, &networks, at(119)).is_empty());
    let expected = BTreeMap::from([("red".to_owned(), Nodes::from([("n1".to_owned(), false)]))]);
    assert_eq!(*excess.update(&tables, &networks, at(122)), expected);
    tables.blocks.remove(&second);
    assert_eq!(
        *excess.update(&tables, &networks, at(123)),
        expected,
        "at most every three seconds"
    );
    assert!(excess.update(&tables, &networks, at(125)).is_empty());
}

/// Its agent may not run yet.
#[test]
fn blocks_of_before_are_told_apart_where_a_node_was_registered_again() {
    let mut tables = tables(26);
    let networks = Networks::of(&tables, &HeldBlocks::default());
    let start = Instant::now();
    for cidr in ["10.0.0.0/26", "10.0.0.64/26"] {
        block(&mut tables, cidr, "n1");
    }
    for (uid, again) in [("u", false), ("v", true)] {
        let node = NodeRow {
            uid: uid.to_owned(),
            ..NodeRow::default()
        };
        tables.nodes.put(Key::new("", "n1"), Some(node));
        let mut excess = BlockExcess::default();
        excess.update(&tables, &networks, start);
        let found = excess.update(&tables, &networks, start + GRACE);
        assert_eq!(
            found.get("red"),
            Some(&Nodes::from([("n1".to_owned(), again)])),
            "{uid}"
        );
    }
}
