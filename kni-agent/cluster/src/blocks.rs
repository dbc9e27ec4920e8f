//! Tracks the address blocks of the node: requested by attach, claimed and released by a controller, leased from.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use kni_model::{NetworkName, view::NetworkView};
use tokio::sync::{Notify, futures::Notified};

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
