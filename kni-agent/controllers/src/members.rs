//! Reports the pods of the node in `NetworkMembers` objects: one set of objects per network, of limited size.
//!
//! kni-controller compares the reports with the pods and the blocks, and confirms them with labels; see
//! [`super::peers`].

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use kni_api::{
    NETWORK_LABEL, NetworkMembers, NetworkMembersSpec,
    network_members::{self, MAX_MEMBERS, NetworkMember},
};
use kni_cluster::{Key, Tables};
use kni_model::{NetworkName, Sandbox};
use kni_reflectors::version_of;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use tokio::time::{Instant, sleep_until};

use super::{ObjectControllers, retry::Retries};

/// Time between rounds that write: each object is written at most five times a second.
const PAUSE: Duration = Duration::from_millis(200);
/// Changes that arrive within this time are written together, after the answer to an attach.
const GATHER: Duration = Duration::from_millis(50);
/// Failed writes are tried again at this interval, if their pauses are over.
const ROUND: Duration = Duration::from_secs(1);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 8;

/// A change of one object.
#[derive(Debug, PartialEq)]
enum Write {
    Put(Box<NetworkMembers>),
    /// The object with this UID.
    Delete(Option<String>),
}

/// The result of a write.
#[derive(Debug, PartialEq, Eq)]
enum Written {
    Done,
    /// Nothing was changed, or at most something was removed.
    Refused,
    /// Whether the object of this network was changed is not known.
    Unknown(String),
}

/// The objects that may list something else than is known, with their networks.
type Unsure = BTreeMap<Key, String>;

/// A network with its UID.
type NetworkUid = (String, String);

impl ObjectControllers {
    /// Reports changes for as long as the agent runs.
    pub(super) async fn reconcile_members(self: Arc<Self>) {
        let mut attached = self.state.changes.clone();
        let mut known = self.cache.changes();
        let mut retries = Retries::default();
        let (mut unsure, mut reads) = (Unsure::new(), Retries::default());
        let mut seen = None;
        loop {
            let begun = Instant::now();
            let versions = {
                let tables = self.cache.tables();
                (
                    tables.pods.version(),
                    tables.own_members.version(),
                    tables.networks.version(),
                    tables.own_node.version(),
                    *attached.borrow_and_update(),
                )
            };
            let mut wrote = false;
            if seen != Some(versions) || !retries.is_empty() || !unsure.is_empty() {
                seen = Some(versions);
                let writes = self.member_writes();
                retries.retain(|key| writes.contains_key(key));
                self.read_unsure(&mut unsure, &mut reads, &writes).await;
                let due = writes.into_iter().filter(|(key, _)| retries.is_due(key));
                let due: Vec<_> = due.map(|(key, write)| self.write_members(key, write)).collect();
                let mut done = stream::iter(due).buffer_unordered(AT_ONCE);
                while let Some((key, written)) = done.next().await {
                    wrote = true;
                    retries.ended(key.clone(), written == Written::Done);
                    match written {
                        Written::Done => drop(unsure.remove(&key)),
                        Written::Unknown(network) => drop(unsure.insert(key, network)),
                        Written::Refused => {}
                    }
                    kni_tasks::progress();
                }
                self.note_withdrawals(&unsure);
            }
            if wrote {
                kni_tasks::waiting(sleep_until(begun + PAUSE)).await;
            }
            kni_tasks::waiting(async {
                tokio::select! {
                    _ = attached.changed() => tokio::time::sleep(GATHER).await,
                    _ = known.changed() => tokio::time::sleep(GATHER).await,
                    () = tokio::time::sleep(ROUND) => {}
                }
            })
            .await;
        }
    }

    /// Reads the objects that nothing else will be written to.
    async fn read_unsure(&self, unsure: &mut Unsure, reads: &mut Retries<Key>, writes: &BTreeMap<Key, Write>) {
        let api: Api<NetworkMembers> = Api::all(self.client.clone());
        reads.retain(|key| unsure.contains_key(key));
        let due = unsure
            .keys()
            .filter(|key| !writes.contains_key(key) && reads.is_due(key));
        let keys: Vec<Key> = due.cloned().collect();
        for key in keys {
            kni_tasks::progress();
            let since = self.cache.tables().own_members.newest();
            let read = api.get_opt(&key.name).await;
            reads.ended(key.clone(), read.is_ok());
            match read {
                Ok(Some(object)) => self.put_row(&key, since, object),
                Ok(None) => self.cache.change(|tables| tables.own_members.remove(&key)),
                Err(error) => {
                    tracing::debug!(object = %key, %error, "cannot read a NetworkMembers; trying again");
                    continue;
                }
            }
            unsure.remove(&key);
        }
    }

    /// Notes the resting addresses that no object lists any more, as the API server has confirmed: other nodes stop to
    /// take them for their last pods.
    fn note_withdrawals(&self, unsure: &Unsure) {
        let listed: BTreeSet<(String, String)> = {
            let tables = self.cache.tables();
            if !tables.own_members.is_synced() {
                return;
            }
            let rows = tables.own_members.rows().values();
            let of_node = rows.filter(|object| object.spec.node_name == self.node);
            of_node
                .flat_map(|object| {
                    object
                        .spec
                        .members
                        .iter()
                        .map(move |member| (&object.spec.network, member))
                })
                .flat_map(|(network, member)| member.addresses.iter().map(move |ip| (network.clone(), ip.clone())))
                .collect()
        };
        let is_withdrawn = |network: &NetworkName, address: IpAddr| {
            let is_unsure = unsure.values().any(|unsure| unsure == network.as_str());
            !is_unsure && !listed.contains(&(network.to_string(), address.to_string()))
        };
        let resting = (self.state.resting)();
        let all = resting
            .into_iter()
            .flat_map(|(network, addresses)| addresses.into_iter().map(move |address| (network.clone(), address)));
        let withdrawn = all.filter(|(network, address)| is_withdrawn(network, *address));
        if let Err(error) = (self.state.note_withdrawals)(withdrawn.collect()) {
            tracing::warn!(%error, "cannot record which addresses no other node uses any more");
        }
    }

    fn member_writes(&self) -> BTreeMap<Key, Write> {
        let sandboxes = (self.state.sandboxes)();
        let tables = self.cache.tables();
        // Without an answer about the kind nothing is known of the objects.
        if !tables.own_members.is_synced() || tables.own_members.is_absent() {
            return BTreeMap::new();
        }
        let Some(node) = tables.own_node.get("", &self.node).filter(|row| !row.uid.is_empty()) else {
            return BTreeMap::new();
        };
        let node = (self.node.as_str(), node.uid.as_str());
        writes(&tables, node, &desired(&tables, &self.node, &sandboxes))
    }

    /// Returns the object and whether it was written.
    async fn write_members(&self, key: Key, write: Write) -> (Key, Written) {
        let (done, network) = match write {
            Write::Put(object) => (self.put_members(&key, &object).await, object.spec.network),
            // One that arrives late lists nothing.
            Write::Delete(uid) => (self.delete_members(&key, uid).await, String::new()),
        };
        match &done {
            Ok(()) => {}
            // The object of this name is another node's: kni-controller deletes it.
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 422) => {
                tracing::warn!(object = %key, error = %status.message, "the pods of this node in a network are not reported");
            }
            Err(error) => tracing::debug!(object = %key, %error, "cannot write a NetworkMembers; trying again"),
        }
        let written = match done {
            Ok(()) => Written::Done,
            Err(kube::Error::Api(status)) if (400..500).contains(&status.code) => Written::Refused,
            Err(_) if network.is_empty() => Written::Refused,
            Err(_) => Written::Unknown(network),
        };
        (key, written)
    }

    async fn put_members(&self, key: &Key, object: &NetworkMembers) -> Result<(), kube::Error> {
        let api: Api<NetworkMembers> = Api::all(self.client.clone());
        let apply = PatchParams::apply(&self.field_manager()).force();
        let since = self.cache.tables().own_members.newest();
        let written = api.patch(&key.name, &apply, &Patch::Apply(object)).await?;
        self.put_row(key, since, written);
        Ok(())
    }

    /// Notes what the API server has; `since` is the newest version known before the request.
    fn put_row(&self, key: &Key, since: u64, mut object: NetworkMembers) {
        let version = version_of(&object.metadata);
        object.metadata.managed_fields = None;
        self.cache.change_written(|tables| {
            let row = Arc::new(object);
            tables.own_members.put_written(key.clone(), since, version, Some(row))
        });
    }

    async fn delete_members(&self, key: &Key, uid: Option<String>) -> Result<(), kube::Error> {
        let api: Api<NetworkMembers> = Api::all(self.client.clone());
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match api.delete(&key.name, &params).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
        self.cache.change(|tables| tables.own_members.remove(key));
        Ok(())
    }
}

/// The members of the node by network. Pods that the cluster does not have on the node are none.
fn desired(tables: &Tables, node: &str, sandboxes: &[Arc<Sandbox>]) -> BTreeMap<NetworkUid, Vec<NetworkMember>> {
    let mut desired: BTreeMap<NetworkUid, BTreeMap<(String, String), NetworkMember>> = BTreeMap::new();
    for sandbox in sandboxes {
        let Some(pod) = tables.pod_of(node, &sandbox.pod) else {
            continue;
        };
        for attachment in &sandbox.attachments {
            let network = tables.networks.get("", attachment.network.as_str());
            let Some(uid) = network.and_then(|network| network.metadata.uid.clone()) else {
                continue;
            };
            let member = NetworkMember {
                namespace: sandbox.pod.namespace.clone(),
                pod_name: sandbox.pod.name.clone(),
                pod_uid: pod.uid.clone(),
                interface: attachment.ifname.to_string(),
                addresses: attachment.addresses().map(|ip| ip.to_string()).collect(),
            };
            let of_network = desired.entry((attachment.network.to_string(), uid)).or_default();
            of_network.insert((pod.uid.clone(), member.interface.clone()), member);
        }
    }
    let members = |members: BTreeMap<_, NetworkMember>| members.into_values().collect();
    desired
        .into_iter()
        .map(|(network, of)| (network, members(of)))
        .collect()
}

/// The necessary writes. A member stays in its object, so that a change of one pod rewrites one object.
fn writes(
    tables: &Tables,
    (node, node_uid): (&str, &str),
    desired: &BTreeMap<NetworkUid, Vec<NetworkMember>>,
) -> BTreeMap<Key, Write> {
    let mut writes = BTreeMap::new();
    let mut known: BTreeMap<NetworkUid, BTreeMap<&Key, &NetworkMembers>> = BTreeMap::new();
    for (key, object) in tables.own_members.rows() {
        let spec = &object.spec;
        let network = (spec.network.clone(), spec.network_uid.clone());
        if spec.node_name == node && spec.node_uid == node_uid && desired.contains_key(&network) {
            known.entry(network).or_default().insert(key, object);
        } else if spec.node_name == node {
            writes.insert(key.clone(), Write::Delete(object.uid()));
        }
    }
    for ((network, network_uid), members) in desired {
        let known = known
            .remove(&(network.clone(), network_uid.clone()))
            .unwrap_or_default();
        let names: Vec<Key> = {
            let count = members.len().div_ceil(MAX_MEMBERS).max(known.len());
            let numbered = (0..).map(|number| Key::new("", &network_members::name(network, node, number)));
            // An object of another UID, which is deleted first, may have the name.
            let free = numbered.filter(|key| !known.contains_key(key) && !writes.contains_key(key));
            let mut names: Vec<Key> = known.keys().map(|key| (*key).clone()).collect();
            let missing = count - known.len();
            names.extend(free.take(missing));
            names
        };
        let parts = distributed(&names, &known, members);
        for (key, members) in parts {
            let before = known.get(&key);
            if members.is_empty() {
                if let Some(before) = before {
                    writes.insert(key, Write::Delete(before.uid()));
                }
                continue;
            }
            if before.is_some_and(|before| before.spec.members == members) {
                continue;
            }
            let spec = NetworkMembersSpec {
                network: network.clone(),
                network_uid: network_uid.clone(),
                node_name: node.to_owned(),
                node_uid: node_uid.to_owned(),
                members,
            };
            let mut object = NetworkMembers::new(&key.name, spec);
            object.metadata.labels = Some([(NETWORK_LABEL.to_owned(), network.clone())].into());
            writes.insert(key, Write::Put(Box::new(object)));
        }
    }
    writes
}

/// The members of each object: where they are already, else in the first object with room. `names` has room for all of
/// them.
fn distributed(
    names: &[Key],
    known: &BTreeMap<&Key, &NetworkMembers>,
    members: &[NetworkMember],
) -> BTreeMap<Key, Vec<NetworkMember>> {
    let id = |member: &NetworkMember| (member.pod_uid.clone(), member.interface.clone());
    let mut place = BTreeMap::new();
    for (key, object) in known {
        for member in object.spec.members.iter().take(MAX_MEMBERS) {
            place.entry(id(member)).or_insert(*key);
        }
    }
    let mut parts: BTreeMap<Key, Vec<NetworkMember>> = names.iter().map(|key| (key.clone(), Vec::new())).collect();
    let (staying, new): (Vec<_>, Vec<_>) = members.iter().partition(|member| place.contains_key(&id(member)));
    for member in staying {
        if let Some(part) = place.get(&id(member)).and_then(|key| parts.get_mut(*key)) {
            part.push(member.clone());
        }
    }
    let mut new = new.into_iter();
    for key in names {
        if let Some(part) = parts.get_mut(key) {
            let room = MAX_MEMBERS.saturating_sub(part.len());
            part.extend(new.by_ref().take(room).cloned());
            part.sort_by_key(id);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use kni_crd::PodFacts;
    use serde_json::json;

    use super::*;

    const NODE: (&str, &str) = ("n1", "u1");

    fn member(number: usize) -> NetworkMember {
        NetworkMember {
            namespace: "shop".into(),
            pod_name: format!("web-{number}"),
            pod_uid: format!("{number:05}"),
            interface: "eth0".into(),
            addresses: vec![format!("10.0.{}.{}", number / 256, number % 256)],
        }
    }

    /// A sandbox in network red.
    fn sandbox(id: &str, pod: (&str, &str), address: &str) -> Arc<Sandbox> {
        let sandbox = json!({
            "id": id, "pod": { "namespace": "shop", "name": pod.0, "uid": pod.1 }, "phase": "Ready",
            "netns": "/run/netns/x", "netns_identity": { "dev": 4, "inode": 5 }, "labels": {}, "port_mappings": [],
            "attachments": [{
                "endpoint": 7, "network": "red", "network_id": 9, "ifname": "eth0", "ifindex": 2, "host_ifname": "kni7",
                "host_ifindex": 1007, "mac": "02:00:00:00:00:07", "host_mac": "02:00:00:00:00:08", "ipv4": address,
                "ipv6": null, "mtu": 1500, "default_route": true, "host_access": true,
            }],
        });
        Arc::new(serde_json::from_value(sandbox).unwrap())
    }

    #[test]
    fn a_static_pod_is_reported_by_the_uid_of_its_mirror_pod() {
        let mut tables = Tables::default();
        let network = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "r1" },
            "spec": { "subnets": ["10.0.0.0/16"] },
        });
        let network = serde_json::from_value(network).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
        let mirror = |uid: &str, hash: &str| {
            Arc::new(PodFacts {
                uid: uid.to_owned(),
                mirror_of: Some(hash.to_owned()),
                node: "n1".to_owned(),
                ..PodFacts::default()
            })
        };
        let reported = |tables: &Tables| -> Vec<(String, Vec<String>)> {
            let sandboxes = [
                sandbox("s0", ("fixed-n1", "hash0"), "10.0.0.2"),
                sandbox("s1", ("fixed-n1", "hash1"), "10.0.0.3"),
                sandbox("s2", ("copy", "own"), "10.0.0.4"),
            ];
            let members = desired(tables, "n1", &sandboxes).into_values().flatten();
            members.map(|member| (member.pod_uid, member.addresses)).collect()
        };
        let expected = |uid: &str, address: &str| vec![(uid.to_owned(), vec![address.to_owned()])];
        assert_eq!(reported(&tables), [], "the API server has no mirror pod yet");
        // Another pod has the same annotation; the sandbox of its name has another UID.
        tables.pods.put(Key::new("shop", "copy"), Some(mirror("m9", "hash1")));
        assert_eq!(reported(&tables), []);
        for (uid, hash, address) in [
            ("m1", "hash1", "10.0.0.3"),
            // The kubelet has replaced the mirror pod, then the manifest was changed.
            ("m2", "hash1", "10.0.0.3"),
            ("m3", "hash0", "10.0.0.2"),
        ] {
            tables.pods.put(Key::new("shop", "fixed-n1"), Some(mirror(uid, hash)));
            assert_eq!(reported(&tables), expected(uid, address));
        }
    }

    fn red(numbers: impl IntoIterator<Item = usize>) -> BTreeMap<NetworkUid, Vec<NetworkMember>> {
        let members = numbers.into_iter().map(member).collect();
        [(("red".to_owned(), "r1".to_owned()), members)].into()
    }

    /// Carries the writes out; returns how many objects were written and deleted.
    fn carry_out(tables: &mut Tables, desired: &BTreeMap<NetworkUid, Vec<NetworkMember>>) -> (usize, usize) {
        let writes = writes(tables, NODE, desired);
        let puts = writes.values().filter(|write| matches!(write, Write::Put(_))).count();
        let count = writes.len();
        for (key, write) in writes {
            match write {
                Write::Put(object) => tables.own_members.put(key, Some(Arc::from(object))),
                Write::Delete(_) => tables.own_members.remove(&key),
            }
        }
        (puts, count - puts)
    }

    fn sizes(tables: &Tables) -> Vec<usize> {
        let rows = tables.own_members.rows().values();
        rows.map(|object| object.spec.members.len()).collect()
    }

    #[test]
    fn a_change_of_one_pod_rewrites_one_object() {
        let mut tables = Tables::default();
        assert_eq!(carry_out(&mut tables, &red(0..150)), (3, 0));
        assert_eq!(sizes(&tables), [64, 64, 22]);
        assert_eq!(carry_out(&mut tables, &red(0..150)), (0, 0), "nothing has changed");
        assert_eq!(carry_out(&mut tables, &red((0..150).filter(|n| *n != 7))), (1, 0));
        assert_eq!(sizes(&tables), [63, 64, 22]);
        assert_eq!(
            carry_out(&mut tables, &red((0..151).filter(|n| *n != 7))),
            (1, 0),
            "the gap is used"
        );
        assert_eq!(sizes(&tables), [64, 64, 22]);
        let mut moved = red((0..151).filter(|n| *n != 7));
        for members in moved.values_mut() {
            members[3].addresses = vec!["10.9.9.9".into()];
        }
        assert_eq!(carry_out(&mut tables, &moved), (1, 0), "another address");
        assert_eq!(carry_out(&mut tables, &red([])), (0, 3));
        assert_eq!(carry_out(&mut tables, &BTreeMap::new()), (0, 0));
    }

    #[test]
    fn what_an_earlier_node_or_network_left_goes() {
        let mut tables = Tables::default();
        carry_out(&mut tables, &red(0..3));
        let again = [(("red".to_owned(), "r2".to_owned()), vec![member(1)])].into();
        let old: Vec<Key> = tables.own_members.rows().keys().cloned().collect();
        assert_eq!(carry_out(&mut tables, &again), (1, 1));
        assert!(old.iter().all(|key| !tables.own_members.rows().contains_key(key)));
        let writes = writes(&tables, ("n1", "u2"), &again);
        assert_eq!(writes.len(), 2, "the node came back with another UID: {writes:?}");
        assert_eq!(
            writes
                .values()
                .filter(|write| matches!(write, Write::Delete(_)))
                .count(),
            1
        );
    }

    #[test]
    fn an_object_of_another_node_is_left_alone() {
        let mut tables = Tables::default();
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": "red.x.0" },
            "spec": { "network": "red", "networkUID": "r1", "nodeName": "n2", "nodeUID": "u2", "members": [] },
        });
        let object: NetworkMembers = serde_json::from_value(object).unwrap();
        tables.own_members.put(Key::new("", "red.x.0"), Some(Arc::new(object)));
        assert_eq!(carry_out(&mut tables, &red([])), (0, 0));
    }
}
