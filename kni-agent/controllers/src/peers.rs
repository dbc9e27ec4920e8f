//! Derives the pods of other nodes from the confirmed members of networks. Pure.
//!
//! A node's account may write what it likes into the spec of its `NetworkMembers`; it cannot write a status. The status
//! has the members that kni-controller found in the pods and in the blocks of that node, with the labels of the pods.
//! So no node gives an address of another node the identity of a pod, nor the identity of another node's pod to its own
//! address. A node may only withdraw its members: what it does not report any more has no identity, also while
//! kni-controller is away, as the address may soon be that of another pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_api::{NetworkMembers, network_members::ConfirmedMember};
use kni_cluster::{Key, Tables};
use kni_model::{
    IfName, NetworkId, NetworkName, PodRef, SandboxId,
    policy::{ContainerPort, PolicyInterface, PolicyPod},
    selection::PRIMARY_IFNAME,
};

use super::state::{Peer, PeerChanges};

/// The numbers of the networks on this node.
pub(super) type Numbers = BTreeMap<NetworkName, NetworkId>;

/// The pods of other nodes that policies may select, by the object that has them. Each interface is a pod of its own.
#[derive(Debug, Default)]
pub(super) struct Peers {
    objects: BTreeMap<Key, BTreeMap<SandboxId, Peer>>,
    /// The objects of each network, also those without pods.
    of_network: BTreeMap<String, BTreeSet<Key>>,
    /// The network of each object.
    network_of: BTreeMap<Key, String>,
    /// The versions of the tables that the objects are from.
    seen: Option<(u64, u64)>,
    /// UID and number of each network: all that objects depend on.
    identities: BTreeMap<String, Identity>,
    numbers: Numbers,
}

/// UID of a network, and its number on this node.
type Identity = (Option<String>, Option<NetworkId>);

impl Peers {
    /// The changes since the last call. Compares only the objects that changed, and those of networks that have another
    /// UID or number.
    pub(super) fn update(&mut self, tables: &Tables, node: &str, numbers: &Numbers) -> PeerChanges {
        let objects = self.concerned(tables, numbers);
        let mut changes = PeerChanges::default();
        for key in objects {
            let object = tables.members.rows().get(&key);
            self.index(&key, object.map(|object| object.spec.network.as_str()));
            let pods = object
                .map(|object| pods(tables, object, node, numbers))
                .unwrap_or_default();
            self.replace(key, pods, &mut changes);
        }
        changes
    }

    /// The objects that have to be compared.
    fn concerned(&mut self, tables: &Tables, numbers: &Numbers) -> BTreeSet<Key> {
        let versions = (tables.members.version(), tables.networks.version());
        let seen = self.seen.replace(versions);
        let changed = seen.and_then(|seen| Some(tables.members.changed_since(seen.0)?.cloned().collect()));
        let mut objects: BTreeSet<Key> = changed.unwrap_or_else(|| {
            let known = self.network_of.keys().chain(tables.members.rows().keys());
            known.cloned().collect()
        });
        if seen.is_some_and(|seen| seen.1 == versions.1) && self.numbers == *numbers {
            return objects;
        }
        self.numbers.clone_from(numbers);
        let rows = tables.networks.rows().iter();
        let identities: BTreeMap<String, Identity> = rows
            .map(|(key, network)| {
                let number = key.name.parse().ok().and_then(|name: NetworkName| numbers.get(&name));
                (key.name.clone(), (network.metadata.uid.clone(), number.copied()))
            })
            .collect();
        let differs = |name: &&String| self.identities.get(*name) != identities.get(*name);
        let names = self.of_network.keys().filter(differs);
        objects.extend(names.filter_map(|name| self.of_network.get(name)).flatten().cloned());
        self.identities = identities;
        objects
    }

    /// Notes the network of an object; `None` if the object is gone.
    fn index(&mut self, key: &Key, network: Option<&str>) {
        let before = match network {
            Some(network) => self.network_of.insert(key.clone(), network.to_owned()),
            None => self.network_of.remove(key),
        };
        if before.as_deref() == network {
            return;
        }
        if let Some(name) = before
            && let Some(keys) = self.of_network.get_mut(&name)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.of_network.remove(&name);
            }
        }
        if let Some(network) = network {
            self.of_network
                .entry(network.to_owned())
                .or_default()
                .insert(key.clone());
        }
    }

    /// Compares everything again at the next call: the changes could not be applied.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn replace(&mut self, key: Key, pods: BTreeMap<SandboxId, Peer>, changes: &mut PeerChanges) {
        let before = self.objects.remove(&key).unwrap_or_default();
        let new = pods.iter().filter(|(id, pod)| before.get(*id) != Some(*pod));
        changes.put.extend(new.map(|(_, pod)| pod.clone()));
        changes
            .gone
            .extend(before.into_keys().filter(|id| !pods.contains_key(id)));
        if !pods.is_empty() {
            self.objects.insert(key, pods);
        }
    }
}

/// The members of an object of another node; none if its network is not the one of this name, or has no number here.
fn pods(tables: &Tables, object: &NetworkMembers, node: &str, numbers: &Numbers) -> BTreeMap<SandboxId, Peer> {
    let spec = &object.spec;
    let network = tables.networks.get("", &spec.network);
    let is_it = network.is_some_and(|network| network.metadata.uid.as_ref() == Some(&spec.network_uid));
    let name = spec.network.parse::<NetworkName>().ok();
    let number = name.as_ref().and_then(|name| numbers.get(name));
    let (Some(status), Some(name), Some(number)) = (&object.status, name, number) else {
        return BTreeMap::new();
    };
    if spec.node_name == node || !is_it {
        return BTreeMap::new();
    }
    let pods = status.members.iter().filter_map(|confirmed| {
        let ConfirmedMember { member, kind } = confirmed;
        if !spec.members.contains(member) {
            return None;
        }
        let kind = status.kinds.get(usize::try_from(*kind).ok()?)?;
        // With the object's name: where two objects have one interface, the end of one does not end the other.
        let object = object.metadata.name.as_deref()?;
        let sandbox = format!("peer:{object}:{}:{}", member.pod_uid, member.interface);
        let sandbox: SandboxId = sandbox.parse().ok()?;
        let ports = kind.ports.iter().map(|port| ContainerPort {
            name: port.name.clone(),
            protocol: port.protocol,
            port: port.port,
        });
        let pod = PolicyPod {
            sandbox: sandbox.clone(),
            pod: PodRef {
                namespace: member.namespace.clone(),
                name: member.pod_name.clone(),
                uid: member.pod_uid.clone(),
            },
            labels: kind.labels.clone(),
            ports: ports.collect(),
            interfaces: vec![interface(member, &name, *number)?],
        };
        let node = spec.node_name.clone();
        Some((sandbox, Peer { node, pod }))
    });
    pods.collect()
}

fn interface(
    member: &kni_api::network_members::NetworkMember,
    network: &NetworkName,
    network_id: NetworkId,
) -> Option<PolicyInterface> {
    let ifname: IfName = member.interface.parse().ok()?;
    let addresses = || {
        member
            .addresses
            .iter()
            .filter_map(|address| address.parse::<IpAddr>().ok())
    };
    Some(PolicyInterface {
        endpoint: None,
        primary: ifname.as_str() == PRIMARY_IFNAME,
        ifname,
        network_id,
        network: network.clone(),
        definition: None,
        ipv4: addresses().find_map(|ip| match ip {
            IpAddr::V4(v4) => Some(v4),
            IpAddr::V6(_) => None,
        }),
        ipv6: addresses().find_map(|ip| match ip {
            IpAddr::V6(v6) => Some(v6),
            IpAddr::V4(_) => None,
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn tables() -> Tables {
        let mut tables = Tables::default();
        let network = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "r1" },
            "spec": { "subnets": ["10.0.0.0/16"] },
        });
        let network = serde_json::from_value(network).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
        tables
    }

    fn numbers() -> Numbers {
        [("red".parse().unwrap(), NetworkId::try_from(7).unwrap())].into()
    }

    fn web(uid: &str, address: &str, role: u32) -> Value {
        json!({
            "namespace": "shop", "podName": "web", "podUID": uid, "interface": "eth0", "addresses": [address],
            "kind": role,
        })
    }

    /// An object that reports and confirms these members, and reports one that is not confirmed.
    fn put(tables: &mut Tables, name: &str, of: (&str, &str), members: &[Value]) {
        let unconfirmed = json!({
            "namespace": "shop", "podName": "admin", "podUID": "u9", "interface": "eth0", "addresses": ["10.0.0.99"],
        });
        let reported: Vec<Value> = members.iter().cloned().chain([unconfirmed]).collect();
        put_reported(tables, name, of, (&reported, members));
    }

    fn put_reported(
        tables: &mut Tables,
        name: &str,
        (node, network_uid): (&str, &str),
        (reported, members): (&[Value], &[Value]),
    ) {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": name },
            "spec": {
                "network": "red", "networkUID": network_uid, "nodeName": node, "nodeUID": "n", "members": reported,
            },
            "status": {
                "kinds": [{ "labels": { "role": "web" } }, { "labels": { "role": "admin" } }], "members": members,
            },
        });
        let object = serde_json::from_value(object).unwrap();
        tables.members.put(Key::new("", name), Some(Arc::new(object)));
    }

    fn roles(changes: &PeerChanges) -> Vec<(&str, &str)> {
        let pods = changes.put.iter();
        pods.map(|peer| (peer.pod.pod.uid.as_str(), peer.pod.labels["role"].as_str()))
            .collect()
    }

    #[test]
    fn only_what_is_confirmed_gives_an_identity() {
        let mut tables = tables();
        put(&mut tables, "red.n2.0", ("n2", "r1"), &[web("u1", "10.0.0.65", 1)]);
        put(&mut tables, "red.n1.0", ("n1", "r1"), &[web("u2", "10.0.0.1", 1)]);
        put(&mut tables, "red.n3.0", ("n3", "r0"), &[web("u3", "10.0.0.129", 1)]);
        put(&mut tables, "red.n4.0", ("n4", "r1"), &[web("u4", "10.0.1.1", 2)]);
        let mut peers = Peers::default();
        let changes = peers.update(&tables, "n1", &numbers());
        assert_eq!(
            roles(&changes),
            [("u1", "admin")],
            "own pods, another network, no such labels"
        );
        assert_eq!(changes.put[0].pod.interfaces[0].ipv4, Some([10, 0, 0, 65].into()));
        assert_eq!(changes.put[0].node, "n2");
        assert!(peers.update(&tables, "n1", &numbers()).is_empty());
        let none = peers.update(&tables, "n1", &Numbers::new());
        assert_eq!(
            (none.put.len(), none.gone.len()),
            (0, 1),
            "the network has no number any more"
        );
    }

    #[test]
    fn what_its_node_withdraws_has_no_identity_although_it_is_still_confirmed() {
        let mut tables = tables();
        let (first, second) = (web("u1", "10.0.0.65", 0), web("u2", "10.0.0.66", 0));
        let both = [first.clone(), second.clone()];
        put(&mut tables, "red.n2.0", ("n2", "r1"), &both);
        let mut peers = Peers::default();
        assert_eq!(peers.update(&tables, "n1", &numbers()).put.len(), 2);
        // Its pod is gone, and the other one has another address.
        let moved = [web("u2", "10.0.0.67", 0)];
        put_reported(&mut tables, "red.n2.0", ("n2", "r1"), (&moved, &both));
        let changes = peers.update(&tables, "n1", &numbers());
        assert_eq!((changes.put.len(), changes.gone.len()), (0, 2));
        put_reported(&mut tables, "red.n2.0", ("n2", "r1"), (&moved, &moved));
        assert_eq!(roles(&peers.update(&tables, "n1", &numbers())), [("u2", "web")]);
    }

    #[test]
    fn changes_are_those_of_the_objects_that_changed() {
        let mut tables = tables();
        // A list was read before, so that changes are known by name.
        tables.members.begin();
        tables.members.complete();
        let mut peers = Peers::default();
        assert!(peers.update(&tables, "n1", &numbers()).is_empty());
        put(
            &mut tables,
            "red.n2.0",
            ("n2", "r1"),
            &[web("u1", "10.0.0.65", 0), web("u2", "10.0.0.66", 0)],
        );
        assert_eq!(
            roles(&peers.update(&tables, "n1", &numbers())),
            [("u1", "web"), ("u2", "web")]
        );
        put(
            &mut tables,
            "red.n2.0",
            ("n2", "r1"),
            &[web("u1", "10.0.0.65", 0), web("u2", "10.0.0.66", 1)],
        );
        let relabelled = peers.update(&tables, "n1", &numbers());
        assert_eq!((roles(&relabelled), relabelled.gone.len()), (vec![("u2", "admin")], 0));
        // Moves to another object.
        put(&mut tables, "red.n2.1", ("n2", "r1"), &[web("u2", "10.0.0.66", 1)]);
        put(&mut tables, "red.n2.0", ("n2", "r1"), &[web("u1", "10.0.0.65", 0)]);
        let moved = peers.update(&tables, "n1", &numbers());
        assert_eq!(roles(&moved), [("u2", "admin")]);
        let names = |ids: &BTreeSet<SandboxId>| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(&moved.gone), ["peer:red.n2.0:u2:eth0"]);
        tables.members.remove(&Key::new("", "red.n2.1"));
        assert_eq!(
            names(&peers.update(&tables, "n1", &numbers()).gone),
            ["peer:red.n2.1:u2:eth0"]
        );
        peers.clear();
        assert_eq!(roles(&peers.update(&tables, "n1", &numbers())), [("u1", "web")]);
    }

    #[test]
    fn a_change_of_networks_concerns_only_objects_of_those_with_another_uid_or_number() {
        let mut tables = tables();
        let network = |name: &str, uid: &str, mtu: u32| {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": name, "uid": uid },
                "spec": { "subnets": ["10.0.0.0/16"], "mtu": mtu },
            });
            Some(Arc::new(serde_json::from_value(object).unwrap()))
        };
        for number in 0..50 {
            let name = format!("red.n{number}.0");
            put(
                &mut tables,
                &name,
                ("n2", "r1"),
                &[web(&format!("u{number}"), "10.0.0.65", 0)],
            );
        }
        let mut peers = Peers::default();
        assert_eq!(peers.update(&tables, "n1", &numbers()).put.len(), 50);
        tables.networks.put(Key::new("", "red"), network("red", "r1", 1400));
        tables.networks.put(Key::new("", "blue"), network("blue", "b1", 1400));
        let mut more = numbers();
        more.insert("blue".parse().unwrap(), NetworkId::try_from(8).unwrap());
        assert_eq!(peers.concerned(&tables, &more).len(), 0);
        tables.networks.put(Key::new("", "red"), network("red", "r2", 1400));
        let changes = peers.update(&tables, "n1", &more);
        assert_eq!(
            (changes.put.len(), changes.gone.len()),
            (0, 50),
            "it is another network"
        );
        tables.networks.put(Key::new("", "red"), network("red", "r1", 1400));
        assert_eq!(peers.update(&tables, "n1", &more).put.len(), 50);
        assert_eq!(
            peers.update(&tables, "n1", &Numbers::new()).gone.len(),
            50,
            "it has no number"
        );
    }
}
