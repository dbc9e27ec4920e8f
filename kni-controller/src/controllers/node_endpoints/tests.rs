//! Which addresses are confirmed, for whom, and what is compared after a change.

use kni_api::Fabric;
use kni_cluster::Table;
use kni_crd::{PodNetwork, read_service_addresses};
use kni_model::service::{EndpointSlice, SliceEndpoint};

use super::*;

fn key(name: &str) -> Key {
    Key::new("", name)
}

/// Completes an empty first list.
fn listed<V: PartialEq>(table: &mut Table<V>) {
    table.begin();
    table.complete();
}

/// Nodes n1 to n3, with an address each, and n2 with one of each family.
fn tables() -> Tables {
    let mut tables = Tables::default();
    listed(&mut tables.node_endpoints);
    node(&mut tables, "n1", "u1", &["192.0.2.1"]);
    node(&mut tables, "n2", "u2", &["192.0.2.2", "2001:db8::2"]);
    node(&mut tables, "n3", "u3", &["192.0.2.3"]);
    tables
}

fn node(tables: &mut Tables, name: &str, uid: &str, addresses: &[&str]) {
    let row = NodeRow {
        uid: uid.to_owned(),
        addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
        ..NodeRow::default()
    };
    tables.nodes.put(key(name), Some(row));
}

/// An object under `name` that is about node `node`; its UID is made of its name and age.
fn endpoint(tables: &mut Tables, name: &str, (node, uid): (&str, &str), second: u8, addresses: &[&str]) {
    let status = tables.node_endpoints.get("", name).and_then(|row| row.status.clone());
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "NodeEndpoint",
        "metadata": {
            "name": name, "uid": format!("{name}-{second}"), "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z"),
        },
        "spec": {
            "nodeName": node, "nodeUID": uid, "addresses": addresses, "port": 4789, "mtu": 1500, "epoch": 1,
        },
        "status": status,
    });
    let object = serde_json::from_value(object).unwrap();
    tables.node_endpoints.put(key(name), Some(Arc::new(object)));
}

fn service(tables: &mut Tables, name: &str, internal: &[&str], external: &[&str]) {
    let object = json!({
        "metadata": { "name": name, "namespace": "shop" },
        "spec": { "clusterIPs": internal, "externalIPs": external },
        "status": { "loadBalancer": { "ingress": external.iter().map(|ip| json!({ "ip": ip })).collect::<Vec<_>>() } },
    });
    let row = read_service_addresses(&serde_json::from_value(object).unwrap());
    tables.service_addresses.put(Key::new("shop", name), row);
}

fn api_server(tables: &mut Tables, namespace: &str, service: &str, address: &str) {
    let endpoint = SliceEndpoint {
        addresses: vec![address.parse().unwrap()],
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        pod: None,
        for_zones: BTreeSet::new(),
        for_nodes: BTreeSet::new(),
    };
    let slice = EndpointSlice {
        namespace: namespace.to_owned(),
        name: service.to_owned(),
        service: service.to_owned(),
        ports: Vec::new(),
        endpoints: vec![endpoint],
    };
    tables.slices.put(Key::new(namespace, service), Some(Ok(slice)));
}

fn network(tables: &mut Tables, name: &str, default: bool, fabric: Option<Fabric>, subnet: &str) {
    let object = json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name },
        "spec": { "default": default, "fabric": fabric, "subnets": [subnet] },
    });
    let object: PodNetwork = serde_json::from_value(object).unwrap();
    tables.networks.put(key(name), Some(Arc::new(object)));
}

/// Plans, and carries out what is planned; returns the names of the written objects.
fn carry_out(endpoints: &mut NodeEndpoints, tables: &mut Tables) -> Vec<String> {
    let writes = endpoints.plan(tables, &Networks::default());
    for (key, write) in &writes {
        let object = Arc::clone(&tables.node_endpoints.rows()[key]);
        match write {
            Write::Status(uid, status) => {
                assert_eq!(object.uid().as_ref(), Some(uid));
                let mut object = NodeEndpoint::clone(&object);
                object.status = Some((**status).clone());
                tables.node_endpoints.put(key.clone(), Some(Arc::new(object)));
            }
            Write::Delete(uid) => {
                assert_eq!(object.uid().as_ref(), Some(uid));
                tables.node_endpoints.remove(key);
            }
        }
    }
    writes.into_iter().map(|(key, _)| key.name).collect()
}

/// Carries out until nothing is left.
fn finish(endpoints: &mut NodeEndpoints, tables: &mut Tables) {
    for _ in 0..4 {
        if carry_out(endpoints, tables).is_empty() {
            return;
        }
    }
    panic!("the writes do not end");
}

/// Lets time pass.
fn wait(endpoints: &mut NodeEndpoints, time: Duration) {
    for since in endpoints.without_node.values_mut() {
        *since -= time;
    }
}

fn confirmed(tables: &Tables, name: &str) -> Vec<String> {
    let object = tables.node_endpoints.get("", name).unwrap();
    object.confirmed().map(str::to_owned).collect()
}

fn refusal(tables: &Tables, name: &str) -> String {
    let object = tables.node_endpoints.get("", name).unwrap();
    let status = object.status.as_ref().unwrap();
    assert_eq!(
        status.addresses.len() + status.refused.len(),
        object.spec.addresses.len()
    );
    let reasons = status.refused.iter().map(|refused| refused.reason.as_str());
    reasons.collect::<Vec<_>>().join("; ")
}

#[test]
fn the_nodes_own_addresses_are_confirmed_in_the_order_of_the_report() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    endpoint(&mut tables, "n2", ("n2", "u2"), 1, &["2001:db8::2", "192.0.2.2"]);
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n2"]);
    assert_eq!(confirmed(&tables, "n2"), ["2001:db8::2", "192.0.2.2"]);
    assert!(carry_out(&mut endpoints, &mut tables).is_empty(), "it is right");
    node(&mut tables, "n2", "u2", &["192.0.2.2"]);
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n2"]);
    assert_eq!(confirmed(&tables, "n2"), ["192.0.2.2"]);
    assert!(refusal(&tables, "n2").contains("2001:db8::2 is no InternalIP or ExternalIP of node n2"));
    let mut row = tables.nodes.get("", "n2").unwrap().clone();
    row.external_addresses = vec!["2001:db8:0::2".to_owned()];
    tables.nodes.put(key("n2"), Some(row));
    carry_out(&mut endpoints, &mut tables);
    assert_eq!(
        confirmed(&tables, "n2").len(),
        2,
        "an ExternalIP counts, however it is written"
    );
}

#[test]
fn an_address_that_is_not_the_nodes_is_refused_and_the_reason_is_named() {
    for (node, address, reason) in [
        (("n1", "u0"), "192.0.2.1", "spec.nodeUID is not the UID of node n1"),
        (
            ("n1", "u1"),
            "192.0.2.2",
            "192.0.2.2 is no InternalIP or ExternalIP of node n1",
        ),
        (("n9", "u9"), "192.0.2.1", "spec.nodeUID is not the UID of node n9"),
    ] {
        let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
        endpoint(&mut tables, node.0, node, 1, &[address]);
        carry_out(&mut endpoints, &mut tables);
        assert!(confirmed(&tables, node.0).is_empty());
        assert!(
            refusal(&tables, node.0).contains(reason),
            "{}",
            refusal(&tables, node.0)
        );
    }
}

#[test]
fn addresses_of_services_and_of_the_api_server_are_no_nodes() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    service(&mut tables, "web", &["192.0.2.1"], &[]);
    service(&mut tables, "out", &["192.0.2.2"], &[]);
    api_server(&mut tables, "default", "kubernetes", "192.0.2.3");
    for (name, uid, address) in [
        ("n1", "u1", "192.0.2.1"),
        ("n2", "u2", "192.0.2.2"),
        ("n3", "u3", "192.0.2.3"),
    ] {
        endpoint(&mut tables, name, (name, uid), 1, &[address]);
    }
    assert_eq!(carry_out(&mut endpoints, &mut tables).len(), 3);
    assert!(refusal(&tables, "n1").contains("192.0.2.1 is the address of Service shop/web"));
    assert!(refusal(&tables, "n2").contains("192.0.2.2 is the address of Service shop/out"));
    assert!(refusal(&tables, "n3").contains("192.0.2.3 is an address of the API server"));
    let mut row = tables.nodes.get("", "n3").unwrap().clone();
    row.control_plane = true;
    tables.nodes.put(key("n3"), Some(row));
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n3"]);
    assert_eq!(
        confirmed(&tables, "n3"),
        ["192.0.2.3"],
        "it is part of the control plane"
    );
    tables.service_addresses.remove(&Key::new("shop", "web"));
    service(&mut tables, "out", &["192.0.2.9"], &[]);
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n1", "n2"]);
    assert_eq!((confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()), (1, 1));
}

#[test]
fn only_the_api_servers_own_slices_name_its_addresses() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    api_server(&mut tables, "shop", "kubernetes", "192.0.2.1");
    api_server(&mut tables, "default", "web", "192.0.2.1");
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    carry_out(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
}

#[test]
fn external_addresses_of_services_keep_no_node_off_the_fabric() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    service(&mut tables, "lb", &[], &["192.0.2.1", "192.0.2.2", "192.0.2.3"]);
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    carry_out(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
}

#[test]
fn what_writers_of_services_and_networks_choose_takes_no_node_off_the_fabric() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    carry_out(&mut endpoints, &mut tables);
    service(&mut tables, "mine", &[], &["192.0.2.1", "192.0.2.2"]);
    network(&mut tables, "wide", false, Some(Fabric::Native), "192.0.2.0/24");
    assert!(carry_out(&mut endpoints, &mut tables).is_empty());
    let mut fresh = NodeEndpoints::default();
    assert!(
        carry_out(&mut fresh, &mut tables).is_empty(),
        "after a change of the leader, too"
    );
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
    endpoint(&mut tables, "n2", ("n2", "u2"), 1, &["192.0.2.2"]);
    carry_out(&mut endpoints, &mut tables);
    assert!(confirmed(&tables, "n2").is_empty(), "it is new");
    service(&mut tables, "mine", &["192.0.2.1"], &[]);
    carry_out(&mut endpoints, &mut tables);
    assert!(
        confirmed(&tables, "n1").is_empty(),
        "the API server alone assigns internal addresses"
    );
    service(&mut tables, "mine", &[], &[]);
    tables.networks.remove(&key("wide"));
    carry_out(&mut endpoints, &mut tables);
    api_server(&mut tables, "default", "kubernetes", "192.0.2.1");
    carry_out(&mut endpoints, &mut tables);
    assert!(refusal(&tables, "n1").contains("API server"), "so are its own");
}

#[test]
fn subnets_of_networks_that_share_addresses_with_nodes_are_no_nodes() {
    for (default, fabric, shared) in [
        (true, None, true),
        (false, Some(Fabric::Native), true),
        (false, Some(Fabric::Overlay), false),
        (false, None, false),
    ] {
        let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
        network(&mut tables, "red", default, fabric, "192.0.2.0/26");
        endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
        carry_out(&mut endpoints, &mut tables);
        assert_eq!(confirmed(&tables, "n1").is_empty(), shared, "{default} {fabric:?}");
        if shared {
            assert!(refusal(&tables, "n1").contains("192.0.2.1 is inside 192.0.2.0/26 of PodNetwork red"));
            network(&mut tables, "red", default, fabric, "198.51.100.0/26");
            carry_out(&mut endpoints, &mut tables);
            assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
        }
    }
}

#[test]
fn of_two_nodes_the_first_confirmed_keeps_the_address() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    endpoint(&mut tables, "n2", ("n2", "u2"), 5, &["192.0.2.2"]);
    carry_out(&mut endpoints, &mut tables);
    // Its kubelet reports the address of n2, and its object is older.
    node(&mut tables, "n1", "u1", &["192.0.2.1", "192.0.2.2"]);
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.2"]);
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n1"]);
    assert_eq!((confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()), (0, 1));
    assert!(refusal(&tables, "n1").contains("192.0.2.2 is confirmed for node n2"));
    assert!(
        carry_out(&mut NodeEndpoints::default(), &mut tables).is_empty(),
        "for another leader, too"
    );
    tables.nodes.remove(&key("n2"));
    finish(&mut endpoints, &mut tables);
    assert_eq!((confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()), (1, 0));
}

#[test]
fn of_two_new_ones_the_older_then_the_lower_name_has_the_address() {
    for (first, second, winner) in [(5, 1, "n2"), (1, 5, "n1"), (3, 3, "n1")] {
        let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
        node(&mut tables, "n1", "u1", &["192.0.2.9"]);
        node(&mut tables, "n2", "u2", &["192.0.2.9"]);
        endpoint(&mut tables, "n1", ("n1", "u1"), first, &["192.0.2.9"]);
        endpoint(&mut tables, "n2", ("n2", "u2"), second, &["192.0.2.9"]);
        finish(&mut endpoints, &mut tables);
        let holders: Vec<&str> = ["n1", "n2"]
            .into_iter()
            .filter(|name| !confirmed(&tables, name).is_empty())
            .collect();
        assert_eq!(holders, [winner]);
    }
}

#[test]
fn an_address_is_of_one_node_while_statuses_are_still_being_written() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    node(&mut tables, "n1", "u1", &["192.0.2.1", "192.0.2.2"]);
    endpoint(&mut tables, "n2", ("n2", "u2"), 5, &["192.0.2.2"]);
    let planned = endpoints.plan(&tables, &Networks::default());
    assert!(matches!(&planned[0].1, Write::Status(_, status) if status.addresses == ["192.0.2.2"]));
    // It has not been written yet when an older object reports the address.
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.2"]);
    finish(&mut endpoints, &mut tables);
    assert_eq!((confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()), (0, 1));
    // Withdrawn from n2, but not written yet: no other node has it.
    node(&mut tables, "n2", "u2", &[]);
    let planned = endpoints.plan(&tables, &Networks::default());
    let of = |name: &str| planned.iter().find(|(key, _)| key.name == name).map(|(_, write)| write);
    assert!(matches!(of("n2"), Some(Write::Status(_, status)) if status.addresses.is_empty()));
    assert!(matches!(of("n1"), Some(Write::Status(_, status)) if status.refused[0].reason.contains("still")));
    finish(&mut endpoints, &mut tables);
    assert_eq!((confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()), (1, 0));
    // Both are confirmed, by a restore of the API server's storage: one remains.
    node(&mut tables, "n2", "u2", &["192.0.2.2"]);
    let mut object = NodeEndpoint::clone(tables.node_endpoints.get("", "n2").unwrap());
    object.status = tables.node_endpoints.get("", "n1").unwrap().status.clone();
    tables.node_endpoints.put(key("n2"), Some(Arc::new(object)));
    finish(&mut NodeEndpoints::default(), &mut tables);
    assert_eq!(
        (confirmed(&tables, "n1").len(), confirmed(&tables, "n2").len()),
        (1, 0),
        "the older one"
    );
}

#[test]
fn an_address_that_is_not_reported_any_more_is_free() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    node(&mut tables, "n1", "u1", &["192.0.2.1", "192.0.2.9"]);
    node(&mut tables, "n2", "u2", &["192.0.2.2", "192.0.2.9"]);
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.9"]);
    carry_out(&mut endpoints, &mut tables);
    endpoint(&mut tables, "n2", ("n2", "u2"), 2, &["192.0.2.9"]);
    carry_out(&mut endpoints, &mut tables);
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    finish(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
    assert_eq!(confirmed(&tables, "n2"), ["192.0.2.9"]);
    tables.node_endpoints.remove(&key("n2"));
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.9"]);
    finish(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.9"]);
    assert_eq!(
        (
            endpoints.claims.len(),
            endpoints.holders.len(),
            endpoints.addresses.len()
        ),
        (1, 1, 1)
    );
}

#[test]
fn a_change_concerns_the_objects_that_report_its_addresses_only() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    for (name, uid, address) in [
        ("n1", "u1", "192.0.2.1"),
        ("n2", "u2", "192.0.2.2"),
        ("n3", "u3", "192.0.2.3"),
    ] {
        endpoint(&mut tables, name, (name, uid), 1, &[address]);
    }
    finish(&mut endpoints, &mut tables);
    assert_eq!(endpoints.concerned(&tables), [].into());
    service(&mut tables, "web", &["10.96.0.1", "192.0.2.2"], &["192.0.2.1"]);
    assert_eq!(endpoints.concerned(&tables), [key("n2")].into());
    api_server(&mut tables, "default", "kubernetes", "192.0.2.3");
    assert_eq!(endpoints.concerned(&tables), [key("n3")].into());
    node(&mut tables, "n1", "u1", &["192.0.2.1", "192.0.2.7"]);
    assert_eq!(endpoints.concerned(&tables), [key("n1")].into());
    network(&mut tables, "blue", false, None, "10.0.0.0/16");
    assert_eq!(
        endpoints.concerned(&tables),
        [].into(),
        "a network of its own addresses"
    );
    network(&mut tables, "main", true, None, "10.1.0.0/16");
    assert_eq!(endpoints.concerned(&tables).len(), 3);
    let mut main = PodNetwork::clone(tables.networks.get("", "main").unwrap());
    main.status = Some(kni_api::PodNetworkStatus::default());
    tables.networks.put(key("main"), Some(Arc::new(main)));
    assert_eq!(endpoints.concerned(&tables), [].into(), "its status has other contents");
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.2"]);
    assert_eq!(endpoints.concerned(&tables), [key("n1"), key("n2")].into());
}

#[test]
fn nothing_is_written_before_the_objects_are_known() {
    let mut tables = Tables::default();
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    assert!(NodeEndpoints::default().plan(&tables, &Networks::default()).is_empty());
}

#[test]
fn a_node_that_takes_the_name_of_another_nodes_object_loses_it() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    endpoint(&mut tables, "n1", ("n2", "u2"), 1, &["192.0.2.2"]);
    endpoint(&mut tables, "n2", ("n2", "u2"), 2, &["192.0.2.2"]);
    let writes = endpoints.plan(&tables, &Networks::default());
    assert_eq!(writes[0], (key("n1"), Write::Delete("n1-1".to_owned())));
    finish(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n2"), ["192.0.2.2"]);
}

#[test]
fn the_endpoint_of_a_node_that_is_gone_is_refused_at_once_and_deleted_after_a_minute() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    endpoint(&mut tables, "n1", ("n1", "u1"), 1, &["192.0.2.1"]);
    carry_out(&mut endpoints, &mut tables);
    tables.nodes.remove(&key("n1"));
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n1"]);
    assert!(confirmed(&tables, "n1").is_empty());
    wait(&mut endpoints, GRACE / 2);
    assert!(carry_out(&mut endpoints, &mut tables).is_empty());
    node(&mut tables, "n1", "u9", &["192.0.2.1"]);
    carry_out(&mut endpoints, &mut tables);
    wait(&mut endpoints, GRACE);
    assert!(
        carry_out(&mut endpoints, &mut tables).is_empty(),
        "a node of this name is back"
    );
    tables.nodes.remove(&key("n1"));
    carry_out(&mut endpoints, &mut tables);
    wait(&mut endpoints, GRACE);
    assert_eq!(carry_out(&mut endpoints, &mut tables), ["n1"]);
    assert!(tables.node_endpoints.rows().is_empty());
}

#[test]
fn a_confirmation_that_is_being_written_outlives_a_change_of_its_node() {
    let (mut endpoints, mut tables) = (NodeEndpoints::default(), tables());
    node(&mut tables, "n3", "u3", &["192.0.2.3", "192.0.2.1"]);
    endpoint(&mut tables, "n1", ("n1", "u1"), 9, &["192.0.2.1"]);
    let first = endpoints.plan(&tables, &Networks::default());
    assert_eq!(first.len(), 1, "confirmed for n1, and not written yet");
    node(&mut tables, "n1", "u1", &["192.0.2.1", "192.0.2.9"]);
    endpoint(&mut tables, "n3", ("n3", "u3"), 1, &["192.0.2.1"]);
    finish(&mut endpoints, &mut tables);
    assert_eq!(confirmed(&tables, "n1"), ["192.0.2.1"]);
    assert!(
        confirmed(&tables, "n3").is_empty(),
        "an older object, which comes later"
    );
}
