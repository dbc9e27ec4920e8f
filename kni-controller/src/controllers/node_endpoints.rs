//! Confirms the addresses at which other nodes reach a node, as its agent reports them, and removes the endpoints of
//! nodes that have left the cluster.
//!
//! Other nodes send the packets of pods to a confirmed address, and believe packets from it. So an address is confirmed
//! only if the node has it according to its `Node`, if it is not reserved for anything else, and for one node at a
//! time.

mod reserved;
#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use kni_api::{NodeEndpoint, NodeEndpointStatus, node_endpoint::RefusedAddress};
use kni_cluster::{Key, Networks, NodeRow, Tables};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::json;
use tokio::time::Instant;

use self::reserved::{Changed, Reserved};
use super::{
    gone_nodes::GRACE,
    reconcile::{Context, Reconciler, ignore_gone, unless_changed},
};

/// Field manager of the status.
const FIELD_MANAGER: &str = "kni-controller/endpoints";

/// The controller. Compares only the objects whose addresses a change concerns.
#[derive(Debug, Default)]
pub(super) struct NodeEndpoints {
    /// Since when objects are there without their nodes.
    without_node: BTreeMap<Key, Instant>,
    reserved: Reserved,
    /// The objects that report an address.
    claims: BTreeMap<IpAddr, BTreeSet<Key>>,
    /// The reverse of it.
    addresses: BTreeMap<Key, BTreeSet<IpAddr>>,
    /// The object for which an address was confirmed last, with its UID: it keeps the address while its status is
    /// written.
    holders: BTreeMap<IpAddr, (Key, Option<String>)>,
    /// What remains to be written.
    outstanding: BTreeMap<Key, Write>,
    seen: Option<Seen>,
}

/// The versions of the tables that were compared last.
#[derive(Debug, Clone, Copy)]
struct Seen {
    endpoints: u64,
    nodes: u64,
}

/// A change of one object, which must still have this UID.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Write {
    Status(String, Arc<NodeEndpointStatus>),
    Delete(String),
}

impl Reconciler for NodeEndpoints {
    const NAME: &'static str = "node-endpoints";
    const GATHER: Duration = Duration::from_millis(20);
    /// At most five writes a second.
    const REST: Duration = Duration::from_millis(200);
    const NEEDS_NETWORKS: bool = false;
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        [
            tables.node_endpoints.version(),
            tables.nodes.version(),
            tables.service_addresses.version(),
            tables.slices.version(),
            tables.networks.version(),
        ]
        .into_iter()
        .sum()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Write)> {
        if !tables.node_endpoints.is_synced() {
            return Vec::new();
        }
        for key in self.concerned(tables) {
            let object = tables.node_endpoints.rows().get(&key);
            if object.is_some() && tables.nodes.rows().get(&key).is_none() {
                self.without_node.entry(key.clone()).or_insert_with(Instant::now);
            } else {
                self.without_node.remove(&key);
            }
            match object.and_then(|object| self.write_of(tables, &key, object)) {
                Some(write) => self.outstanding.insert(key, write),
                None => self.outstanding.remove(&key),
            };
        }
        let mut writes = self.outstanding.clone();
        let gone = self.without_node.iter().filter(|(_, since)| since.elapsed() >= GRACE);
        for (key, _) in gone {
            let uid = tables.node_endpoints.rows().get(key).and_then(|object| object.uid());
            writes.extend(uid.map(|uid| (key.clone(), Write::Delete(uid))));
        }
        writes.into_iter().collect()
    }

    async fn write(context: Context, key: Key, write: Write) -> kube::Result<()> {
        let api: Api<NodeEndpoint> = Api::all(context.client.clone());
        match write {
            Write::Status(uid, status) => {
                let body = json!({
                    "apiVersion": "kni.dev/v1alpha1",
                    "kind": "NodeEndpoint",
                    "metadata": { "name": key.name, "uid": uid },
                    "status": *status,
                });
                let apply = PatchParams::apply(FIELD_MANAGER).force();
                unless_changed(api.patch_status(&key.name, &apply, &Patch::Apply(&body)).await).map(drop)
            }
            Write::Delete(uid) => {
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

impl NodeEndpoints {
    /// The objects that the changes since the last comparison concern: those that changed, those of nodes that changed,
    /// and all that report an address of these, or one that is reserved since or no more.
    fn concerned(&mut self, tables: &Tables) -> BTreeSet<Key> {
        let reserved = self.reserved.follow(tables);
        let now = Seen {
            endpoints: tables.node_endpoints.version(),
            nodes: tables.nodes.version(),
        };
        let seen = self.seen.replace(now);
        let changed = seen.and_then(|seen| {
            let objects = tables.node_endpoints.changed_since(seen.endpoints)?;
            let nodes = tables.nodes.changed_since(seen.nodes)?;
            Some(objects.chain(nodes).cloned().collect::<BTreeSet<Key>>())
        });
        let (Some(mut concerned), Changed::Only(mut addresses)) = (changed, reserved) else {
            let rows = tables.node_endpoints.rows().keys();
            let all: BTreeSet<Key> = rows.chain(self.addresses.keys()).cloned().collect();
            for key in &all {
                self.index(key, tables);
            }
            return all;
        };
        for key in &concerned {
            addresses.extend(self.index(key, tables));
        }
        for address in addresses {
            concerned.extend(self.claims.get(&address).into_iter().flatten().cloned());
        }
        concerned
    }

    /// Returns the addresses that the object reported or reports.
    fn index(&mut self, key: &Key, tables: &Tables) -> BTreeSet<IpAddr> {
        let mut touched = self.addresses.remove(key).unwrap_or_default();
        for address in &touched {
            if let Some(objects) = self.claims.get_mut(address) {
                objects.remove(key);
            }
        }
        if let Some(object) = tables.node_endpoints.rows().get(key) {
            let texts = object.spec.addresses.iter();
            let addresses: BTreeSet<IpAddr> = texts.filter_map(|text| text.parse().ok()).collect();
            for address in &addresses {
                self.claims.entry(*address).or_default().insert(key.clone());
            }
            touched.extend(&addresses);
            self.addresses.insert(key.clone(), addresses);
        }
        // Only now: an address that the object still reports keeps its holder.
        for address in &touched {
            if self.claims.get(address).is_some_and(BTreeSet::is_empty) {
                self.claims.remove(address);
                self.holders.remove(address);
            }
        }
        touched
    }

    /// The write that makes the object right; `None` if it is. One that has the name of another node's object is
    /// deleted: that node could not report its own.
    fn write_of(&mut self, tables: &Tables, key: &Key, object: &NodeEndpoint) -> Option<Write> {
        if object.spec.node_name != key.name {
            return object.uid().map(Write::Delete);
        }
        let mut status = NodeEndpointStatus::default();
        for text in &object.spec.addresses {
            match self.check(tables, key, object, text) {
                Ok(()) => status.addresses.push(text.clone()),
                Err(reason) => status.refused.push(RefusedAddress {
                    address: text.clone(),
                    reason,
                }),
            }
        }
        let differs = object.status.as_ref() != Some(&status);
        differs
            .then(|| Some(Write::Status(object.uid()?, Arc::new(status))))
            .flatten()
    }

    /// Whether an address of an object is confirmed.
    fn check(&mut self, tables: &Tables, key: &Key, object: &NodeEndpoint, text: &str) -> Result<(), String> {
        let address: IpAddr = text.parse().map_err(|_not_one| format!("{text} is no address"))?;
        self.may_have(tables, object, address)?;
        match self.holder(tables, address) {
            Some(holder) if holder == *key => {
                self.holders.insert(address, (holder, object.uid()));
                Ok(())
            }
            Some(other) => Err(format!("{address} is confirmed for node {}", other.name)),
            None => Err(format!("{address} is still confirmed for another node")),
        }
    }

    /// Whether the node is in the cluster and may have an address, if no other node had it.
    fn may_have(&self, tables: &Tables, object: &NodeEndpoint, address: IpAddr) -> Result<(), String> {
        let Some(node) = node_of(tables, object) else {
            return Err(format!("spec.nodeUID is not the UID of node {}", object.spec.node_name));
        };
        let of_node = node.addresses.iter().chain(&node.external_addresses);
        if !of_node
            .filter_map(|text| text.parse().ok())
            .any(|own: IpAddr| own == address)
        {
            return Err(format!(
                "{address} is no InternalIP or ExternalIP of node {}",
                object.spec.node_name
            ));
        }
        let confirmed = is_confirmed(object, address);
        match self.reserved.reason(address, node.control_plane, confirmed) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// The object for which an address is confirmed: the one for which it is already, else the oldest, else the one
    /// with the lowest name. `None` while it is confirmed for a node that may not have it: no other one gets it before
    /// that is withdrawn.
    fn holder(&self, tables: &Tables, address: IpAddr) -> Option<Key> {
        let keys = self.claims.get(&address).into_iter().flatten();
        let rows = keys.filter_map(|key| Some((key, tables.node_endpoints.rows().get(key)?)));
        // An object with the name of another node's is deleted, and that of a node that is gone means nothing.
        let rows: Vec<(&Key, &Arc<NodeEndpoint>)> = rows
            .filter(|(key, object)| object.spec.node_name == key.name && node_of(tables, object).is_some())
            .collect();
        let standing: Vec<_> = rows
            .iter()
            .filter(|(_, object)| is_confirmed(object, address))
            .copied()
            .collect();
        let eligible = if standing.is_empty() { rows } else { standing };
        let eligible = || {
            let rows = eligible.iter().copied();
            rows.filter(|(_, object)| self.may_have(tables, object, address).is_ok())
        };
        let last = self.holders.get(&address);
        let keeps =
            eligible().find(|(key, object)| last.is_some_and(|(last, uid)| last == *key && *uid == object.uid()));
        let oldest = || {
            eligible().min_by_key(|(key, object)| {
                let created = object.creation_timestamp().map(|time| time.0);
                // An object without a time is younger than any other.
                (Reverse(created.map(Reverse)), *key)
            })
        };
        keeps.or_else(oldest).map(|(key, _)| key.clone())
    }
}

/// The node of an object, if it has the UID of the report.
fn node_of<'a>(tables: &'a Tables, object: &NodeEndpoint) -> Option<&'a NodeRow> {
    let node = tables.nodes.get("", &object.spec.node_name)?;
    (node.uid == object.spec.node_uid).then_some(node)
}

/// Whether other nodes use an address as that of the object's node.
fn is_confirmed(object: &NodeEndpoint, address: IpAddr) -> bool {
    object.confirmed().any(|text| text.parse() == Ok(address))
}
