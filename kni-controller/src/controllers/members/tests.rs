//! Tests which members are confirmed, and which objects a change concerns.

use k8s_openapi::serde::de::DeserializeOwned;
use kni_api::{AddressBlock, network_members};
use kni_cluster::{NodeRow, Table};
use kni_crd::PodFacts;
use kni_ipam::blocks::object_name;
use serde_json::Value;

use super::{surplus::MOST, *};

fn read<K: DeserializeOwned>(value: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(value).unwrap())
}

fn block(network: &str, cidr: &str, (node, uid): (&str, &str)) -> (Key, Arc<AddressBlock>) {
    let name = object_name(&network.parse().unwrap(), &cidr.parse().unwrap());
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": { "name": name },
        "spec": { "network": network, "networkUID": "r1", "cidr": cidr, "nodeName": node, "nodeUID": uid },
    });
    (Key::new("", &name), read(object))
}

fn pod(uid: &str, node: &str, role: &str) -> Arc<PodFacts> {
    Arc::new(PodFacts {
        uid: uid.to_owned(),
        node: node.to_owned(),
        labels: [("role".to_owned(), role.to_owned())].into(),
        ..PodFacts::default()
    })
}

/// Nodes n1 and n2 have a block of network red each; pod shop/web runs on n1.
fn tables() -> Tables {
    let mut tables = Tables::default();
    let network = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "r1" },
        "spec": { "subnets": ["10.0.0.0/16"] },
    });
    tables.networks.put(Key::new("", "red"), Some(read(network)));
    for (cidr, node) in [("10.0.0.64/26", ("n1", "u1")), ("10.0.0.128/26", ("n2", "u2"))] {
        let (key, object) = block("red", cidr, node);
        tables.blocks.put(key, Some(object));
        let row = NodeRow {
            uid: node.1.to_owned(),
            ..NodeRow::default()
        };
        tables.nodes.put(Key::new("", node.0), Some(row));
    }
    tables.pods.put(Key::new("shop", "web"), Some(pod("p1", "n1", "web")));
    listed(&mut tables.members);
    listed(&mut tables.blocks);
    listed(&mut tables.pods);
    listed(&mut tables.networks);
    tables
}

/// Completes the first list with the rows that are there.
fn listed<V: PartialEq + Clone>(table: &mut Table<V>) {
    let rows = table.rows().clone();
    table.begin();
    for (key, row) in rows {
        table.put(key, Some(row));
    }
    table.complete();
}

fn member(pod: &str, uid: &str, address: &str) -> Value {
    json!({ "namespace": "shop", "podName": pod, "podUID": uid, "interface": "eth0", "addresses": [address] })
}

fn report(tables: &mut Tables, name: &str, (node, uid): (&str, &str), members: &[Value]) {
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": name, "uid": "o1" },
        "spec": { "network": "red", "networkUID": "r1", "nodeName": node, "nodeUID": uid, "members": members },
    });
    tables.members.put(Key::new("", name), Some(read(object)));
}

/// Node n1 reports its pod.
fn report_web(tables: &mut Tables) {
    report(tables, &own("n1"), ("n1", "u1"), &[member("web", "p1", "10.0.0.65")]);
}

/// Plans, and carries out what is planned; returns the names of the written objects.
fn carry_out(members: &mut Members, tables: &mut Tables) -> Vec<String> {
    let writes = members.plan(tables, &Networks::default());
    for (key, write) in &writes {
        let Change::Status(status) = &write.change else {
            panic!("{write:?}")
        };
        let mut object = NetworkMembers::clone(&tables.members.rows()[key]);
        object.status = Some((**status).clone());
        tables.members.put(key.clone(), Some(Arc::new(object)));
    }
    writes.into_iter().map(|(key, _)| key.name).collect()
}

/// The name of a node's first object.
fn own(node: &str) -> String {
    network_members::name("red", node, 0)
}

fn status_of(tables: &Tables, name: &str) -> NetworkMembersStatus {
    tables.members.get("", name).unwrap().status.clone().unwrap()
}

#[test]
fn a_report_of_the_pods_own_node_is_confirmed_with_the_labels_of_the_pod() {
    let (mut members, mut tables) = (Members::default(), tables());
    report_web(&mut tables);
    assert_eq!(carry_out(&mut members, &mut tables), [own("n1")]);
    let status = status_of(&tables, &own("n1"));
    assert_eq!((status.summary.as_str(), status.members[0].kind), ("1/1", 0));
    assert_eq!(status.kinds[0].labels["role"], "web");
    assert!(carry_out(&mut members, &mut tables).is_empty(), "it is right");
    tables.pods.put(Key::new("shop", "web"), Some(pod("p1", "n1", "admin")));
    assert_eq!(carry_out(&mut members, &mut tables), [own("n1")]);
    assert_eq!(status_of(&tables, &own("n1")).kinds[0].labels["role"], "admin");
    tables.pods.remove(&Key::new("shop", "web"));
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own("n1")).summary, "0/1");
}

#[test]
fn false_reports_are_refused_and_the_reason_is_named() {
    for (node, member, reason) in [
        (
            ("n2", "u2"),
            member("web", "p1", "10.0.0.129"),
            "assigned to node \"n1\", not to n2",
        ),
        (
            ("n1", "u1"),
            member("web", "p0", "10.0.0.65"),
            "no pod shop/web with UID p0",
        ),
        (("n1", "u1"), member("ghost", "p1", "10.0.0.65"), "no pod shop/ghost"),
        (
            ("n1", "u1"),
            member("web", "p1", "10.0.0.129"),
            "10.0.0.129 is in no block of node n1",
        ),
        (
            ("n1", "u1"),
            member("web", "p1", "10.0.7.1"),
            "10.0.7.1 is in no block of node n1",
        ),
        (
            ("n1", "u1"),
            member("web", "p1", "192.0.2.1"),
            "192.0.2.1 is in no block of node n1",
        ),
        (("n1", "u0"), member("web", "p1", "10.0.0.65"), "not the UID of node n1"),
        (("n9", "u1"), member("web", "p1", "10.0.0.65"), "not the UID of node n9"),
    ] {
        let (mut members, mut tables) = (Members::default(), tables());
        report(&mut tables, &own(node.0), node, &[member]);
        carry_out(&mut members, &mut tables);
        let status = status_of(&tables, &own(node.0));
        assert!(status.members.is_empty() && status.kinds.is_empty(), "{status:?}");
        assert!(status.refused[0].reason.contains(reason), "{status:?}, not {reason}");
    }
}

#[test]
fn a_pod_with_very_many_labels_takes_no_room_from_others() {
    let (mut members, mut tables) = (Members::default(), tables());
    let mut large = PodFacts::clone(&pod("p2", "n1", "db"));
    // Of short labels most bytes are quotes and commas.
    large
        .labels
        .extend((0..2000).map(|number| (format!("{number:03}"), String::new())));
    tables.pods.put(Key::new("shop", "db"), Some(Arc::new(large)));
    report(
        &mut tables,
        &own("n1"),
        ("n1", "u1"),
        &[member("web", "p1", "10.0.0.65"), member("db", "p2", "10.0.0.66")],
    );
    carry_out(&mut members, &mut tables);
    let status = status_of(&tables, &own("n1"));
    assert_eq!((status.summary.as_str(), status.kinds.len()), ("1/2", 1));
    assert!(status.refused[0].reason.contains("more than 16384"), "{status:?}");
}

#[test]
fn the_status_of_a_network_concerns_no_member_and_its_subnets_do() {
    let (mut members, mut tables) = (Members::default(), tables());
    report_web(&mut tables);
    carry_out(&mut members, &mut tables);
    assert!(carry_out(&mut members, &mut tables).is_empty());
    let mut network = PodNetwork::clone(tables.networks.get("", "red").unwrap());
    network.status = Some(kni_api::PodNetworkStatus::default());
    tables
        .networks
        .put(Key::new("", "red"), Some(Arc::new(network.clone())));
    assert_eq!(members.concerned(&tables), [].into());
    carry_out(&mut members, &mut tables);
    network.spec.subnets = vec!["10.1.0.0/16".to_owned()];
    tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own("n1")).summary, "0/1");
}

#[test]
fn what_arrives_later_confirms_what_was_refused() {
    let (mut members, mut tables) = (Members::default(), tables());
    let own = own("n1");
    report(
        &mut tables,
        &own,
        ("n1", "u1"),
        &[member("web", "p1", "10.0.0.65"), member("db", "p2", "10.0.1.1")],
    );
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own).summary, "1/2");
    tables.pods.put(Key::new("shop", "db"), Some(pod("p2", "n1", "web")));
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own).summary, "1/2", "its block is missing");
    let (key, object) = block("red", "10.0.1.0/26", ("n1", "u1"));
    tables.blocks.put(key.clone(), Some(object));
    carry_out(&mut members, &mut tables);
    let status = status_of(&tables, &own);
    assert_eq!(
        (status.summary.as_str(), status.kinds.len()),
        ("2/2", 1),
        "both have one entry"
    );
    tables.blocks.remove(&key);
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own).summary, "1/2", "the block has gone");
}

#[test]
fn nothing_is_refused_before_the_blocks_are_known() {
    let (mut members, mut complete) = (Members::default(), tables());
    report_web(&mut complete);
    let blocks = std::mem::take(&mut complete.blocks);
    assert!(members.plan(&complete, &Networks::default()).is_empty());
    complete.blocks = blocks;
    carry_out(&mut members, &mut complete);
    assert_eq!(status_of(&complete, &own("n1")).summary, "1/1");
}

#[test]
fn a_change_of_one_pod_concerns_its_object_only() {
    let (mut members, mut tables) = (Members::default(), tables());
    tables.pods.put(Key::new("shop", "db"), Some(pod("p2", "n2", "db")));
    report_web(&mut tables);
    report(
        &mut tables,
        &own("n2"),
        ("n2", "u2"),
        &[member("db", "p2", "10.0.0.129")],
    );
    carry_out(&mut members, &mut tables);
    assert!(carry_out(&mut members, &mut tables).is_empty());
    tables.pods.put(Key::new("shop", "db"), Some(pod("p2", "n2", "admin")));
    assert_eq!(members.concerned(&tables), [Key::new("", &own("n2"))].into());
    carry_out(&mut members, &mut tables);
    assert!(carry_out(&mut members, &mut tables).is_empty());
    tables
        .pods
        .put(Key::new("shop", "other"), Some(pod("p3", "n2", "admin")));
    assert_eq!(members.concerned(&tables), [].into());
    let (key, object) = block("blue", "10.0.1.0/26", ("n1", "u1"));
    tables.blocks.put(key, Some(object));
    assert_eq!(members.concerned(&tables), [].into(), "a block of another network");
    carry_out(&mut members, &mut tables);
    let (key, object) = block("red", "10.0.2.0/26", ("n1", "u1"));
    tables.blocks.put(key.clone(), Some(object));
    assert_eq!(
        members.concerned(&tables),
        [Key::new("", &own("n1"))].into(),
        "a block of its node"
    );
    carry_out(&mut members, &mut tables);
    let (_, object) = block("red", "10.0.2.0/26", ("n2", "u2"));
    tables.blocks.put(key.clone(), Some(object));
    assert_eq!(members.concerned(&tables).len(), 2, "a block that another node has now");
    carry_out(&mut members, &mut tables);
    tables.blocks.remove(&key);
    assert_eq!(
        members.concerned(&tables),
        [Key::new("", &own("n2"))].into(),
        "a block that is gone"
    );
}

#[test]
fn a_node_that_takes_the_name_of_another_nodes_object_loses_it() {
    let (mut members, mut tables) = (Members::default(), tables());
    report(&mut tables, &own("n1"), ("n2", "u2"), &[]);
    let writes = members.plan(&tables, &Networks::default());
    let deletion = Write {
        node: "n2".to_owned(),
        uid: "o1".to_owned(),
        change: Change::Delete,
    };
    assert_eq!(writes, [(Key::new("", &own("n1")), deletion)]);
}

/// Node n1 makes so many objects in network red, of which the last two list its pod.
fn flood(tables: &mut Tables, count: usize) {
    for number in 0..count {
        let listed = if number + 2 < count { "ghost" } else { "web" };
        let name = network_members::name("red", "n1", number);
        report(tables, &name, ("n1", "u1"), &[member(listed, "p1", "10.0.0.65")]);
    }
}

/// The writes by whether they delete a surplus object.
fn planned(members: &mut Members, tables: &Tables) -> (Vec<Key>, Vec<(Key, Write)>) {
    let writes = members.plan(tables, &Networks::default());
    let (refused, others): (Vec<_>, Vec<_>) = writes
        .into_iter()
        .partition(|(_, write)| matches!(write.change, Change::Refuse { .. }));
    (refused.into_iter().map(|(key, _)| key).collect(), others)
}

#[test]
fn surplus_objects_of_a_node_are_removed() {
    let (mut members, mut tables) = (Members::default(), tables());
    report(&mut tables, &own("n2"), ("n2", "u2"), &[]);
    flood(&mut tables, MOST);
    let (refused, others) = planned(&mut members, &tables);
    assert_eq!((refused.len(), others.len()), (0, MOST + 1), "a node may have as many");
    carry_out(&mut members, &mut tables);
    flood(&mut tables, 300);
    let (refused, others) = planned(&mut members, &tables);
    assert_eq!(refused.len(), 300 - MOST);
    assert!(others.iter().all(|(_, write)| write.node == "n1"), "{others:?}");
    let first = members.plan(&tables, &Networks::default()).into_iter();
    let first = first.filter(|(_, write)| matches!(write.change, Change::Refuse { is_first: true, .. }));
    assert_eq!(first.count(), 1, "one of them is reported");
    for key in &refused {
        tables.members.remove(key);
    }
    let (refused, _) = planned(&mut members, &tables);
    assert!(refused.is_empty(), "{refused:?}");
    // Each further one is removed, and not one that has pods.
    carry_out(&mut members, &mut tables);
    let web = network_members::name("red", "n1", 3);
    report(&mut tables, &web, ("n1", "u1"), &[member("web", "p1", "10.0.0.65")]);
    carry_out(&mut members, &mut tables);
    report(&mut tables, &network_members::name("red", "n1", 900), ("n1", "u1"), &[]);
    let (refused, _) = planned(&mut members, &tables);
    assert_eq!(refused, [Key::new("", &network_members::name("red", "n1", 900))]);
}

#[test]
fn a_node_with_many_pods_may_have_more_objects() {
    let (mut members, mut tables) = (Members::default(), tables());
    for number in 0..160 {
        let row = pod(&format!("u{number}"), "n1", "web");
        tables.pods.put(Key::new("shop", &format!("more-{number}")), Some(row));
    }
    flood(&mut tables, MOST + 10);
    assert!(planned(&mut members, &tables).0.is_empty());
    flood(&mut tables, MOST + 11);
    assert_eq!(planned(&mut members, &tables).0.len(), 1);
}

#[test]
fn reports_of_a_network_that_does_not_exist_go_after_a_minute() {
    let (mut members, mut tables) = (Members::default(), tables());
    report_web(&mut tables);
    carry_out(&mut members, &mut tables);
    let network = Arc::clone(tables.networks.get("", "red").unwrap());
    tables.networks.remove(&Key::new("", "red"));
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own("n1")).summary, "0/1");
    let later = |members: &mut Members| {
        for since in members.strays.values_mut() {
            *since -= GRACE;
        }
    };
    later(&mut members);
    // It is there again, before anything was removed.
    tables.networks.put(Key::new("", "red"), Some(network));
    carry_out(&mut members, &mut tables);
    assert_eq!(status_of(&tables, &own("n1")).summary, "1/1");
    tables.networks.remove(&Key::new("", "red"));
    carry_out(&mut members, &mut tables);
    assert!(members.plan(&tables, &Networks::default()).is_empty());
    later(&mut members);
    let writes = members.plan(&tables, &Networks::default());
    assert_eq!(writes.len(), 1, "{writes:?}");
    assert_eq!(
        (&*writes[0].0.name, &writes[0].1.change),
        (&*own("n1"), &Change::Delete)
    );
}
