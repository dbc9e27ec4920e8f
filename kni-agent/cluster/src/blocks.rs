//! Tracks the address blocks of the node: requested by attach, claimed and released by a controller, leased from.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use kni_model::{NetworkName, view::NetworkView};
use tokio::sync::{Notify, futures::Notified};

use super::tables::Tables;

/// Blocks by network, in order.
pub type HeldBlocks = BTreeMap<NetworkName, BTreeSet<IpNet>>;

/// Numbers of addresses by network.
pub type Addresses = BTreeMap<NetworkName, u32>;

/// The demand for blocks, and the controller's results.
///
/// Blocks from which the node leases are held here and are not derived from cached objects: an older event of a watch
/// must not bring back a block that was released.
#[derive(Debug, Default)]
pub struct BlockDemand {
    state: Mutex<State>,
    changed: Notify,
    refused: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: Addresses,
    exhausted: BTreeSet<NetworkName>,
    held: Arc<HeldBlocks>,
    conflicts: Vec<String>,
}

impl BlockDemand {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attach waits for this many addresses, until the result is dropped.
    pub fn wait(&self, addresses: Addresses) -> Waiting<'_> {
        {
            let waiting = &mut self.state().waiting;
            for (network, count) in &addresses {
                let total = waiting.entry(network.clone()).or_default();
                *total = total.saturating_add(*count);
            }
        }
        let refused = self.refused.notified();
        self.changed.notify_one();
        Waiting {
            demand: self,
            addresses,
            refused: Box::pin(refused),
        }
    }

    /// Waits for [`Self::wait`].
    pub async fn demanded(&self) {
        self.changed.notified().await;
    }

    /// How many addresses of each network attaches wait for.
    pub fn waiting(&self) -> Addresses {
        self.state().waiting.clone()
    }

    /// Whether no block of a network is left, as last reported by the controller.
    pub fn is_exhausted(&self, network: &NetworkName) -> bool {
        self.state().exhausted.contains(network)
    }

    /// Notes whether a block of a network is left.
    pub fn set_exhausted(&self, network: &NetworkName, exhausted: bool) {
        let mut state = self.state();
        if exhausted {
            state.exhausted.insert(network.clone());
        } else {
            state.exhausted.remove(network);
        }
        drop(state);
        if exhausted {
            self.refused.notify_waiters();
        }
    }

    /// The blocks from which addresses are leased.
    pub fn held(&self) -> Arc<HeldBlocks> {
        Arc::clone(&self.state().held)
    }

    /// Leases from a block from the next application of the networks on. Only for a block that a reply of the API
    /// server has just confirmed.
    pub fn hold(&self, network: &NetworkName, block: IpNet) {
        let mut state = self.state();
        Arc::make_mut(&mut state.held)
            .entry(network.clone())
            .or_default()
            .insert(block);
    }

    /// Leases no longer from a block, from the next application of the networks on.
    pub fn unhold(&self, network: &NetworkName, block: &IpNet) {
        let mut state = self.state();
        let held = Arc::make_mut(&mut state.held);
        if let Some(blocks) = held.get_mut(network) {
            blocks.remove(block);
            if blocks.is_empty() {
                held.remove(network);
            }
        }
    }

    /// Addresses of pods of this node that lie in blocks of others, one sentence per block.
    pub fn conflicts(&self) -> Vec<String> {
        self.state().conflicts.clone()
    }

    /// Replaces the conflicts.
    pub fn set_conflicts(&self, conflicts: Vec<String>) {
        self.state().conflicts = conflicts;
    }
}

/// An attach that waits for addresses.
#[derive(Debug)]
pub struct Waiting<'a> {
    demand: &'a BlockDemand,
    addresses: Addresses,
    refused: Pin<Box<Notified<'a>>>,
}

impl Waiting<'_> {
    /// Waits until no block of some network is left.
    pub async fn refused(mut self) {
        self.refused.as_mut().await;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let waiting = &mut self.demand.state().waiting;
        for (network, count) in &self.addresses {
            if let Some(total) = waiting.get_mut(network) {
                *total = total.saturating_sub(*count);
            }
        }
        waiting.retain(|_, total| *total > 0);
    }
}

/// The block of another node that an address of a network is in: its name, and the node. `None` also where the agent
/// does not know the blocks of other nodes in the network.
pub fn block_with<'a>(tables: &'a Tables, network: &NetworkName, address: IpAddr) -> Option<(&'a str, &'a str)> {
    let uid = tables.networks.get("", network.as_str())?.metadata.uid.as_deref();
    let mut blocks = tables.other_blocks.of_network(network.as_str());
    let (key, block) = blocks.find(|(_, block)| {
        let range: Option<IpNet> = block.spec.cidr.parse().ok();
        Some(block.spec.network_uid.as_str()) == uid && range.is_some_and(|range| range.contains(&address))
    })?;
    Some((&key.name, &block.spec.node_name))
}

/// Whether the node has fewer than `count` free addresses of a family that the network has.
pub fn needs_blocks(view: &NetworkView, count: u32) -> bool {
    let spec = &view.network.spec;
    let families = [(true, &view.ipv4), (false, &view.ipv6)];
    let has = |ipv4: bool| spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
    spec.blocks.is_some()
        && families
            .iter()
            .any(|(ipv4, usage)| has(*ipv4) && usage.free < count.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Key;

    #[test]
    fn an_address_is_found_in_the_block_of_its_network() {
        let mut tables = Tables::default();
        let network = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red", "uid": "u" },
            "spec": { "subnets": ["10.0.0.0/16"] },
        });
        let network = serde_json::from_value(network).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(network)));
        for (name, of, uid, cidr) in [
            ("red.here", "red", "u", "10.0.0.64/26"),
            ("red.earlier", "red", "gone", "10.0.0.128/26"),
            ("blue.there", "blue", "u", "10.0.0.192/26"),
        ] {
            let block = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock", "metadata": { "name": name },
                "spec": { "network": of, "networkUID": uid, "cidr": cidr, "nodeName": "n2", "nodeUID": "n" },
            });
            let block = serde_json::from_value(block).unwrap();
            tables.other_blocks.put(Key::new("", name), Some(Arc::new(block)));
        }
        let find =
            |network: &str, address: &str| block_with(&tables, &network.parse().unwrap(), address.parse().unwrap());
        assert_eq!(find("red", "10.0.0.70"), Some(("red.here", "n2")));
        for address in ["10.0.0.1", "10.0.0.130", "10.0.0.200", "fd00::1"] {
            assert_eq!(find("red", address), None, "{address}");
        }
        assert_eq!(find("blue", "10.0.0.200"), None, "a network without an object");
    }
}
