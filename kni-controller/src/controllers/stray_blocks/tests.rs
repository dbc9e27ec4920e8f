//! Tests which blocks count as those of no network, and when.

use std::{sync::Arc, time::Duration};

use k8s_openapi::serde::de::DeserializeOwned;
use kni_crd::PodFacts;
use kni_ipam::blocks::object_name;
use serde_json::{Value, json};

use super::*;

fn read<K: DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).unwrap())
}

/// Network red with UID r2, and blocks of red and of ghost: of each, one of node n1 and one of n2.
fn tables() -> Tables {
    let mut tables = Tables::default();
    tables.blocks.begin();
    tables.members.begin();
    let network = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "r2" },
        "spec": { "subnets": ["10.0.0.0/16"] },
    });
    tables.networks.put(Key::new("", "red"), Some(read(network)));
    for (network, uid, cidr, node) in [
        ("red", "r2", "10.0.0.0/26", "n1"),
        ("red", "r1", "10.0.0.64/26", "n1"),
        ("red", "r1", "10.0.0.128/26", "n2"),
        ("ghost", "g", "10.0.0.0/26", "n1"),
        ("ghost", "g", "10.0.0.64/26", "n2"),
    ] {
        let name = object_name(&network.parse().unwrap(), &cidr.parse().unwrap());
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": { "name": name, "uid": name },
            "spec": { "network": network, "networkUID": uid, "cidr": cidr, "nodeName": node, "nodeUID": "u" },
        });
        tables.blocks.put(Key::new("", &name), Some(read(object)));
    }
    let pod = PodFacts {
        uid: "p1".to_owned(),
        node: "n1".to_owned(),
        ..PodFacts::default()
    };
    tables.pods.put(Key::new("shop", "web"), Some(Arc::new(pod)));
    tables.blocks.complete();
    tables.members.complete();
    tables
}

/// Reports of node n1 that its pod has an address.
fn report(tables: &mut Tables, network: &str, address: &str) {
    let name = format!("{network}.n1.0");
    let member = json!({
        "namespace": "shop", "podName": "web", "podUID": "p1", "interface": "eth0", "addresses": [address],
    });
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": name },
        "spec": { "network": network, "networkUID": "r1", "nodeName": "n1", "nodeUID": "u", "members": [member] },
    });
    tables.members.put(Key::new("", &name), Some(read(object)));
}

fn interface(tables: &mut Tables, network: &str, address: &str) {
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface", "metadata": { "name": "web.eth0", "namespace": "shop" },
        "spec": {
            "podName": "web", "podUid": "p1", "nodeName": "n1", "podNetworkName": network, "interfaceName": "eth0",
            "sandboxId": "s",
        },
        "status": { "addresses": [{ "ip": address, "family": "IPv4" }] },
    });
    tables.interfaces.put(Key::new("shop", "web.eth0"), Some(read(object)));
}

fn at(seconds: u64) -> Instant {
    // Later than any other moment of a test.
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    *START.get_or_init(Instant::now) + Duration::from_secs(seconds)
}

fn due(blocks: &mut StrayBlocks, tables: &Tables, seconds: u64) -> Vec<String> {
    let due = blocks.due(tables, at(seconds)).into_iter();
    due.map(|(key, stray)| format!("{}{}", key.name, if stray.is_taken_away { "!" } else { "" }))
        .collect()
}

#[test]
fn blocks_of_no_network_are_deleted_and_then_taken_away() {
    let (mut blocks, mut tables) = (StrayBlocks::default(), tables());
    assert!(due(&mut blocks, &tables, 0).is_empty());
    assert!(due(&mut blocks, &tables, 59).is_empty());
    let strays = [
        "ghost.v4-10-0-0-0-26",
        "ghost.v4-10-0-0-64-26",
        "red.v4-10-0-0-128-26",
        "red.v4-10-0-0-64-26",
    ];
    assert_eq!(due(&mut blocks, &tables, 60), strays);
    // Its node has the time to release it.
    let key = Key::new("", strays[0]);
    let mut deleted = AddressBlock::clone(&tables.blocks.rows()[&key]);
    let time = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    deleted.metadata.deletion_timestamp = Some(time);
    tables.blocks.put(key, Some(Arc::new(deleted)));
    assert_eq!(due(&mut blocks, &tables, 61), strays[1..]);
    assert_eq!(due(&mut blocks, &tables, 120), strays.map(|name| format!("{name}!")));
}

#[test]
fn the_network_may_come_and_pods_may_use_the_block() {
    let (mut blocks, mut tables) = (StrayBlocks::default(), tables());
    due(&mut blocks, &tables, 0);
    report(&mut tables, "ghost", "10.0.0.7");
    interface(&mut tables, "red", "10.0.0.70");
    let unused = ["ghost.v4-10-0-0-64-26", "red.v4-10-0-0-128-26"];
    assert_eq!(due(&mut blocks, &tables, 60), unused);
    let network = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "ghost", "uid": "g" },
        "spec": { "subnets": ["10.0.0.0/16"] },
    });
    tables.networks.put(Key::new("", "ghost"), Some(read(network)));
    assert_eq!(due(&mut blocks, &tables, 120), ["red.v4-10-0-0-128-26!"]);
    // Its pod has gone: the time begins anew.
    tables.pods.remove(&Key::new("shop", "web"));
    assert_eq!(due(&mut blocks, &tables, 121), ["red.v4-10-0-0-128-26!"]);
    assert_eq!(due(&mut blocks, &tables, 180), ["red.v4-10-0-0-128-26!"]);
    assert_eq!(
        due(&mut blocks, &tables, 181),
        ["red.v4-10-0-0-128-26!", "red.v4-10-0-0-64-26"]
    );
}

#[test]
fn nothing_is_stray_before_everything_is_read() {
    let (mut blocks, mut tables) = (StrayBlocks::default(), tables());
    due(&mut blocks, &tables, 0);
    let reports = std::mem::take(&mut tables.members);
    assert!(due(&mut blocks, &tables, 60).is_empty());
    tables.members = reports;
    assert!(due(&mut blocks, &tables, 61).is_empty(), "the time begins anew");
    assert_eq!(due(&mut blocks, &tables, 121).len(), 4);
    // A network that is not understood exists.
    tables
        .networks
        .refuse(Key::new("", "ghost"), 1, "a field is not known".to_owned(), |_| None);
    assert_eq!(due(&mut blocks, &tables, 122).len(), 2);
}
