//! Confirms the members of networks: adds the labels of the pods to what the nodes report, and refuses what other objects
//! contradict. Removes the reports of nodes that have left the cluster.
//!
//! A report gives an address the identity of a pod on all nodes. So a member is confirmed only if its pod exists, with
//! this UID and on this node, and if its addresses lie in blocks of the node in this network.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Bound,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use kni_api::{
    NetworkMembers, NetworkMembersSpec, NetworkMembersStatus,
    network_members::{self, ConfirmedMember, MemberKind, MemberPort, NetworkMember, RefusedMember},
    provider::ProviderType,
};
use kni_cluster::{Key, Networks, Table, Tables};
use kni_crd::{PodFacts, PodNetwork};
use kni_ipam::blocks::{Prefixes, object_name, unit_of};
use kni_model::NetworkName;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;

use super::{
    gone_nodes::Missing,
    reconcile::{Context, Reconciler, ignore_gone, unless_changed},
};

/// Maximum size in bytes of what one member adds to an object, as JSON: labels, and named ports. With 64 such members an
/// object stays below the 1.5 MiB that etcd stores.
const MOST_BYTES: usize = 16 * 1024;
/// Field manager of the status.
const FIELD_MANAGER: &str = "kni-controller/members";

/// The controller. Compares only the objects that a change of a pod, a block, a node or a network concerns.
#[derive(Debug, Default)]
pub(super) struct Members {
    missing: Missing,
    /// The objects that report a pod, by its namespace and name.
    of_pod: BTreeMap<Key, BTreeSet<Key>>,
    /// The reverse of it.
    pods_of: BTreeMap<Key, BTreeSet<Key>>,
    /// What remains to be written.
    outstanding: BTreeMap<Key, Write>,
    /// What members depend on of each network.
    networks: BTreeMap<String, Shape>,
    /// The beginning of the names of the objects whose addresses a block has: of its node, in its network.
    of_block: BTreeMap<Key, String>,
    /// The UIDs of the nodes.
    nodes: BTreeMap<String, String>,
    seen: Option<Seen>,
}

/// The versions of the tables that were compared last.
#[derive(Debug, Clone, Copy)]
struct Seen {
    members: u64,
    pods: u64,
    blocks: u64,
    networks: u64,
    nodes: u64,
}

impl Seen {
    fn of(tables: &Tables) -> Self {
        Self {
            members: tables.members.version(),
            pods: tables.pods.version(),
            blocks: tables.blocks.version(),
            networks: tables.networks.version(),
            nodes: tables.nodes.version(),
        }
    }
}

/// The parts of a network that a confirmation depends on. Its status changes with every pod, and concerns no member.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    uid: Option<String>,
    subnets: Vec<String>,
    prefixes: (Option<u8>, Option<u8>),
    has_blocks: bool,
}

impl Shape {
    fn of(network: &PodNetwork) -> Self {
        let asked = network.spec.per_node_prefix.unwrap_or_default();
        Self {
            uid: network.metadata.uid.clone(),
            subnets: network.spec.subnets.clone(),
            prefixes: (asked.ipv4, asked.ipv6),
            has_blocks: has_blocks(network),
        }
    }
}

/// A change of one object, which must still have this UID.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Write {
    /// The node whose report it is.
    node: String,
    uid: String,
    change: Change,
}

#[derive(Debug, Clone, PartialEq)]
enum Change {
    Status(Arc<NetworkMembersStatus>),
    Delete,
}

impl Reconciler for Members {
    const NAME: &'static str = "network-members";
    const GATHER: Duration = Duration::from_millis(20);
    /// At most five writes a second.
    const REST: Duration = Duration::from_millis(200);
    const NEEDS_NETWORKS: bool = false;
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        let Seen {
            members,
            pods,
            blocks,
            networks,
            nodes,
        } = Seen::of(tables);
        members + pods + blocks + networks + nodes
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Write)> {
        // A report must not be refused because what it is compared with is not read yet.
        if !tables.members.is_synced() || !tables.blocks.is_synced() {
            return Vec::new();
        }
        let concerned = self.concerned(tables);
        for key in concerned {
            self.index(&key, tables);
            let write = tables
                .members
                .rows()
                .get(&key)
                .and_then(|object| write_of(tables, object));
            match write {
                Some(write) => self.outstanding.insert(key, write),
                None => self.outstanding.remove(&key),
            };
        }
        self.seen = Some(Seen::of(tables));
        let gone = self.missing.gone(tables);
        let mut writes = self.outstanding.clone();
        if !gone.is_empty() {
            for (key, object) in tables.members.rows() {
                if gone.contains(&object.spec.node_name) {
                    writes.extend(write(object, Change::Delete).map(|write| (key.clone(), write)));
                }
            }
        }
        writes.into_iter().collect()
    }

    /// A node that makes many objects delays only its own.
    fn share(write: &Write) -> &str {
        &write.node
    }

    async fn write(context: Context, key: Key, write: Write) -> kube::Result<()> {
        let api: Api<NetworkMembers> = Api::all(context.client.clone());
        let Write { uid, change, .. } = write;
        match change {
            Change::Status(status) => {
                let body = json!({
                    "apiVersion": "kni.dev/v1alpha1",
                    "kind": "NetworkMembers",
                    "metadata": { "name": key.name, "uid": uid },
                    "status": *status,
                });
                let apply = PatchParams::apply(FIELD_MANAGER).force();
                unless_changed(api.patch_status(&key.name, &apply, &Patch::Apply(&body)).await).map(drop)
            }
            Change::Delete => {
                let params = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: Some(uid),
                        resource_version: None,
                    }),
                    ..DeleteParams::default()
                };
                ignore_gone(unless_changed(api.delete(&key.name, &params).await))
            }
        }
    }
}

impl Members {
    /// The objects that the changes since the last comparison concern.
    fn concerned(&mut self, tables: &Tables) -> BTreeSet<Key> {
        let changed = self.seen.and_then(|seen| self.changed_networks(tables, seen.networks));
        let changed = changed.unwrap_or_else(|| {
            let all = tables.networks.rows().iter();
            self.networks = all
                .map(|(key, network)| (key.name.clone(), Shape::of(network)))
                .collect();
            self.networks.keys().cloned().collect()
        });
        let partly = self.seen.and_then(|seen| {
            let mut concerned: BTreeSet<Key> = tables.members.changed_since(seen.members)?.cloned().collect();
            for node in tables.nodes.changed_since(seen.nodes)? {
                concerned.extend(self.of_node(node, tables));
            }
            for pod in tables.pods.changed_since(seen.pods)? {
                concerned.extend(self.of_pod.get(pod).into_iter().flatten().cloned());
            }
            for block in tables.blocks.changed_since(seen.blocks)? {
                let now = tables.blocks.rows().get(block);
                let now = now.map(|row| prefix(&row.spec.network, &row.spec.node_name));
                // Between two comparisons a block may get another node.
                let before = match now.clone() {
                    Some(now) => self.of_block.insert(block.clone(), now),
                    None => self.of_block.remove(block),
                };
                for prefix in [before, now].iter().flatten() {
                    concerned.extend(beginning_with(&tables.members, prefix));
                }
            }
            for network in &changed {
                concerned.extend(beginning_with(&tables.members, &format!("{network}.")));
            }
            Some(concerned)
        });
        partly.unwrap_or_else(|| {
            let blocks = tables.blocks.rows().iter();
            self.of_block = blocks
                .map(|(key, row)| (key.clone(), prefix(&row.spec.network, &row.spec.node_name)))
                .collect();
            let nodes = tables.nodes.rows().iter();
            self.nodes = nodes.map(|(key, row)| (key.name.clone(), row.uid.clone())).collect();
            let known = self.pods_of.keys().chain(self.outstanding.keys());
            known.chain(tables.members.rows().keys()).cloned().collect()
        })
    }

    /// The objects of a node that has come, gone or been made again; none after any other change of a node.
    fn of_node(&mut self, node: &Key, tables: &Tables) -> BTreeSet<Key> {
        let uid = tables.nodes.rows().get(node).map(|row| row.uid.clone());
        let before = match uid.clone() {
            Some(uid) => self.nodes.insert(node.name.clone(), uid),
            None => self.nodes.remove(&node.name),
        };
        if before == uid {
            return BTreeSet::new();
        }
        let networks = self.networks.keys();
        networks
            .flat_map(|network| beginning_with(&tables.members, &prefix(network, &node.name)))
            .collect()
    }

    /// The networks whose [`Shape`] changed after a version of their table; `None` if it is not known which.
    fn changed_networks(&mut self, tables: &Tables, since: u64) -> Option<BTreeSet<String>> {
        let touched: BTreeSet<&str> = tables
            .networks
            .changed_since(since)?
            .map(|key| key.name.as_str())
            .collect();
        let mut changed = BTreeSet::new();
        for name in touched {
            let now = tables.networks.get("", name).map(|network| Shape::of(network));
            if now.as_ref() != self.networks.get(name) {
                changed.insert(name.to_owned());
                match now {
                    Some(now) => self.networks.insert(name.to_owned(), now),
                    None => self.networks.remove(name),
                };
            }
        }
        Some(changed)
    }

    fn index(&mut self, key: &Key, tables: &Tables) {
        for pod in self.pods_of.remove(key).into_iter().flatten() {
            if let Some(objects) = self.of_pod.get_mut(&pod) {
                objects.remove(key);
                if objects.is_empty() {
                    self.of_pod.remove(&pod);
                }
            }
        }
        let Some(object) = tables.members.rows().get(key) else {
            return;
        };
        let members = object.spec.members.iter();
        let pods: BTreeSet<Key> = members
            .map(|member| Key::new(&member.namespace, &member.pod_name))
            .collect();
        for pod in &pods {
            self.of_pod.entry(pod.clone()).or_default().insert(key.clone());
        }
        self.pods_of.insert(key.clone(), pods);
    }
}

/// The beginning of the names of a node's objects in a network.
fn prefix(network: &str, node: &str) -> String {
    let mut first = network_members::name(network, node, 0);
    first.truncate(first.len() - 1);
    first
}

/// The objects whose names begin with `prefix`: those of a network, or of a node in a network.
fn beginning_with<'a, V>(table: &'a Table<V>, prefix: &str) -> impl Iterator<Item = Key> + use<'a, V>
where
    V: PartialEq,
{
    let prefix = prefix.to_owned();
    let first = Key::new("", &prefix);
    let rows = table.rows().range((Bound::Included(first), Bound::Unbounded));
    rows.take_while(move |(key, _)| key.name.starts_with(&prefix))
        .map(|(key, _)| key.clone())
}

/// The write that makes the status right; `None` if it is. An object with a name of another node's objects is deleted: that
/// node could not report its pods.
fn write_of(tables: &Tables, object: &NetworkMembers) -> Option<Write> {
    if !object
        .name_any()
        .starts_with(&prefix(&object.spec.network, &object.spec.node_name))
    {
        return write(object, Change::Delete);
    }
    let status = status(tables, &object.spec);
    let differs = object.status.as_ref() != Some(&status);
    differs
        .then(|| write(object, Change::Status(Arc::new(status))))
        .flatten()
}

fn write(object: &NetworkMembers, change: Change) -> Option<Write> {
    Some(Write {
        node: object.spec.node_name.clone(),
        uid: object.uid()?,
        change,
    })
}

fn status(tables: &Tables, spec: &NetworkMembersSpec) -> NetworkMembersStatus {
    let mut status = NetworkMembersStatus::default();
    let owner = owner(tables, spec);
    for member in &spec.members {
        let confirmed = owner.as_ref().map_err(Clone::clone).and_then(|network| {
            let pod = pod_of(tables, spec, member)?;
            check_addresses(tables, network, spec, member)?;
            let kind = kind_of(pod);
            check_size(&kind).map(|()| kind)
        });
        match confirmed {
            Ok(kind) => {
                let known = status.kinds.iter().position(|known| *known == kind);
                let position = known.unwrap_or_else(|| {
                    status.kinds.push(kind);
                    status.kinds.len() - 1
                });
                status.members.push(ConfirmedMember {
                    member: member.clone(),
                    kind: u32::try_from(position).unwrap_or(u32::MAX),
                });
            }
            Err(reason) => status.refused.push(RefusedMember {
                pod_uid: member.pod_uid.clone(),
                interface: member.interface.clone(),
                reason,
            }),
        }
    }
    status.summary = format!("{}/{}", status.members.len(), spec.members.len());
    status
}

/// The network, if it and the node are those of the report.
fn owner<'a>(tables: &'a Tables, spec: &NetworkMembersSpec) -> Result<&'a PodNetwork, String> {
    let node = tables.nodes.get("", &spec.node_name).map(|row| row.uid.as_str());
    if node != Some(&spec.node_uid) {
        return Err(format!("spec.nodeUID is not the UID of node {}", spec.node_name));
    }
    let network = tables.networks.get("", &spec.network).map(AsRef::as_ref);
    network
        .filter(|network| network.metadata.uid.as_ref() == Some(&spec.network_uid))
        .ok_or_else(|| format!("spec.networkUID is not the UID of network {}", spec.network))
}

fn pod_of<'a>(tables: &'a Tables, spec: &NetworkMembersSpec, member: &NetworkMember) -> Result<&'a PodFacts, String> {
    let NetworkMember {
        namespace,
        pod_name,
        pod_uid,
        ..
    } = member;
    let pod = tables.pods.get(namespace, pod_name).filter(|pod| pod.uid == *pod_uid);
    let pod = pod.ok_or_else(|| format!("there is no pod {namespace}/{pod_name} with UID {pod_uid}"))?;
    if pod.node != spec.node_name {
        return Err(format!(
            "pod {namespace}/{pod_name} is assigned to node {:?}, not to {}",
            pod.node, spec.node_name
        ));
    }
    if pod.host_network {
        return Err(format!("pod {namespace}/{pod_name} uses the network of its node"));
    }
    Ok(pod)
}

/// Whether the addresses lie in blocks of the node. CNI plugins assign addresses without blocks.
fn check_addresses(
    tables: &Tables,
    network: &PodNetwork,
    spec: &NetworkMembersSpec,
    member: &NetworkMember,
) -> Result<(), String> {
    if !has_blocks(network) {
        return Ok(());
    }
    for text in &member.addresses {
        let address: IpAddr = text.parse().map_err(|_not_one| format!("{text} is no address"))?;
        if !is_of_node(tables, network, spec, address) {
            return Err(format!(
                "address {address} is in no block of node {} in network {}",
                spec.node_name, spec.network
            ));
        }
    }
    Ok(())
}

/// Whether addresses of the network are assigned from blocks: those of CNI plugins are not.
fn has_blocks(network: &PodNetwork) -> bool {
    let provider = network.spec.provider.as_ref();
    provider.is_none_or(|provider| provider.kind != ProviderType::Cni)
}

/// Whether the labels of a pod leave room for those of the other members.
fn check_size(kind: &MemberKind) -> Result<(), String> {
    let size = serde_json::to_vec(kind).map_or(usize::MAX, |json| json.len());
    if size > MOST_BYTES {
        return Err(format!(
            "its labels and ports have {size} bytes as JSON, more than {MOST_BYTES}"
        ));
    }
    Ok(())
}

/// Whether the unit of an address is a block of the node.
fn is_of_node(tables: &Tables, network: &PodNetwork, spec: &NetworkMembersSpec, address: IpAddr) -> bool {
    let subnets: Vec<IpNet> = network.spec.subnets.iter().filter_map(|net| net.parse().ok()).collect();
    let asked = network.spec.per_node_prefix.unwrap_or_default();
    let asked = Prefixes {
        ipv4: asked.ipv4,
        ipv6: asked.ipv6,
    };
    let Some(unit) = unit_of(&subnets, asked, address) else {
        return false;
    };
    let Ok(name) = spec.network.parse::<NetworkName>() else {
        return false;
    };
    let block = tables.blocks.get("", &object_name(&name, &unit));
    block.is_some_and(|block| {
        let owner = &block.spec;
        owner.network_uid == spec.network_uid && owner.node_name == spec.node_name && owner.node_uid == spec.node_uid
    })
}

fn kind_of(pod: &PodFacts) -> MemberKind {
    let ports = pod.ports.iter().map(|port| MemberPort {
        name: port.name.clone(),
        protocol: port.protocol,
        port: port.port,
    });
    MemberKind {
        labels: pod.labels.clone(),
        ports: ports.collect(),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde::de::DeserializeOwned;
    use kni_api::AddressBlock;
    use kni_cluster::NodeRow;
    use serde_json::Value;

    use super::*;

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
}
