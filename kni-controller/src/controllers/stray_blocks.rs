//! Removes address blocks whose network does not exist, by name and UID, and in which no pod has an address.
//!
//! An agent releases such blocks by itself. They stay where none does, or where a token of the node was used to claim
//! them: the API server cannot refuse a claim because a network does not exist, and a later network of that name could
//! not use the range. A block is deleted first, which its node sees and answers by releasing it, and is taken away from
//! a node that does not.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::ObjectReference;
use kni_api::{AddressBlock, PodNetwork};
use kni_cluster::{Key, Networks, Tables};
use kube::{Api, ResourceExt as _};
use tokio::time::Instant;

use super::{
    gone_blocks::{delete, drop_finalizer},
    gone_nodes::GRACE,
    overview::exists,
    reconcile::{Context, Reconciler},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct StrayBlocks {
    /// Since when blocks have neither a network nor a pod, with their UIDs.
    since: BTreeMap<Key, (String, Instant)>,
}

/// A block to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stray {
    uid: String,
    node: String,
    network: String,
    network_uid: String,
    /// Its node has not released it.
    is_taken_away: bool,
}

impl StrayBlocks {
    /// The blocks that are stray for long enough.
    fn due(&mut self, tables: &Tables, now: Instant) -> Vec<(Key, Stray)> {
        // A block whose pods are not read yet has pods.
        if !tables.blocks.is_synced() || !tables.members.is_synced() {
            self.since.clear();
            return Vec::new();
        }
        let rows = tables.blocks.rows().iter();
        let mut strays: BTreeMap<&Key, &AddressBlock> = rows
            .filter(|(_, row)| !exists(tables, &row.spec.network, &row.spec.network_uid))
            .map(|(key, row)| (key, row.as_ref()))
            .collect();
        if !strays.is_empty() {
            let used = Used::of(tables, &strays);
            strays.retain(|_, block| !used.has(block));
        }
        self.since
            .retain(|key, (uid, _)| strays.get(key).is_some_and(|block| block.uid().as_ref() == Some(uid)));
        let due = strays.into_iter().filter_map(|(key, block)| {
            let uid = block.uid()?;
            let (_, since) = *self.since.entry(key.clone()).or_insert_with(|| (uid.clone(), now));
            let age = now.saturating_duration_since(since);
            let is_taken_away = age >= 2 * GRACE;
            if age < GRACE || (block.metadata.deletion_timestamp.is_some() && !is_taken_away) {
                return None;
            }
            let stray = Stray {
                uid,
                node: block.spec.node_name.clone(),
                network: block.spec.network.clone(),
                network_uid: block.spec.network_uid.clone(),
                is_taken_away,
            };
            Some((key.clone(), stray))
        });
        due.collect()
    }
}

impl Reconciler for StrayBlocks {
    const NAME: &'static str = "stray-blocks";
    const NEEDS_NETWORKS: bool = false;
    type Write = Stray;

    fn version(tables: &Tables) -> u64 {
        tables.networks.version() + tables.blocks.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Stray)> {
        self.due(tables, Instant::now())
    }

    fn share(write: &Stray) -> &str {
        &write.node
    }

    async fn write(context: Context, key: Key, stray: Stray) -> kube::Result<()> {
        let api: Api<AddressBlock> = Api::all(context.client.clone());
        let is_it = |object: &AddressBlock| object.uid().as_ref() == Some(&stray.uid);
        let Some(object) = api.get_opt(&key.name).await?.filter(is_it) else {
            return Ok(());
        };
        // The cache may be older than the network.
        let networks: Api<PodNetwork> = Api::all(context.client.clone());
        let network = networks.get_metadata_opt(&stray.network).await?;
        if network.is_some_and(|network| network.metadata.uid.as_ref() == Some(&stray.network_uid)) {
            return Ok(());
        }
        if object.metadata.deletion_timestamp.is_none() {
            delete(&api, &object).await?;
        }
        if stray.is_taken_away
            && let Some(object) = api.get_opt(&key.name).await?.filter(is_it)
        {
            drop_finalizer(&api, &object).await?;
            report(&context, &key, &stray).await;
        }
        Ok(())
    }
}

/// Publishes that a node has not released a block of a network that does not exist.
async fn report(context: &Context, key: &Key, stray: &Stray) {
    let Stray { node, network, .. } = stray;
    let message = format!(
        "node {node} has not released AddressBlock {}: its network {network} does not exist, or was made again, and no pod has \
         an address of it; it is removed",
        key.name
    );
    tracing::warn!(block = key.name, node, network, "{message}");
    let about = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(node.clone()),
        ..ObjectReference::default()
    };
    let events = &context.events;
    events
        .warning_about(&about, "StrayBlock", "RemoveBlock", &message)
        .await;
}

/// The addresses of pods by node and network.
struct Used(BTreeMap<(String, String), Vec<IpAddr>>);

impl Used {
    /// In the networks of these blocks, whatever their UIDs: that of an interface is not known. Pods that the cluster
    /// does not have on the node have none.
    fn of(tables: &Tables, blocks: &BTreeMap<&Key, &AddressBlock>) -> Self {
        let networks: BTreeSet<&str> = blocks.values().map(|block| block.spec.network.as_str()).collect();
        let runs = |(namespace, pod): (&str, &str), uid: &str, node: &str| {
            let pod = tables.pods.get(namespace, pod);
            pod.is_some_and(|pod| pod.uid == uid && pod.node == node)
        };
        let mut used: BTreeMap<(String, String), Vec<IpAddr>> = BTreeMap::new();
        for (key, row) in tables.interfaces.rows() {
            let spec = &row.spec;
            let network = spec.pod_network_name.as_str();
            let pod = (key.namespace.as_str(), spec.pod_name.as_str());
            if networks.contains(network) && runs(pod, &spec.pod_uid, &spec.node_name) {
                let addresses = row.status.iter().flat_map(|status| &status.addresses);
                let of_node = used.entry((spec.node_name.clone(), network.to_owned())).or_default();
                of_node.extend(addresses.filter_map(|address| address.ip.parse::<IpAddr>().ok()));
            }
        }
        for network in networks {
            for (_, report) in tables.members.of_network(network) {
                let node = &report.spec.node_name;
                let members = report.spec.members.iter();
                let members =
                    members.filter(|member| runs((&member.namespace, &member.pod_name), &member.pod_uid, node));
                let addresses = members.flat_map(|member| &member.addresses);
                let of_node = used.entry((node.clone(), network.to_owned())).or_default();
                of_node.extend(addresses.filter_map(|text| text.parse::<IpAddr>().ok()));
            }
        }
        Self(used)
    }

    fn has(&self, block: &AddressBlock) -> bool {
        let spec = &block.spec;
        let Ok(range) = spec.cidr.parse::<IpNet>() else {
            return false;
        };
        let addresses = self.0.get(&(spec.node_name.clone(), spec.network.clone()));
        addresses.is_some_and(|addresses| addresses.iter().any(|address| range.contains(address)))
    }
}
