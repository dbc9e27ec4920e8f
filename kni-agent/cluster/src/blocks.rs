//! Tracks which networks need address blocks of the node: requested by attach, taken and released by a controller.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use ipnet::IpNet;
use kni_model::{NetworkName, view::NetworkView};
use tokio::sync::Notify;

/// The demand for blocks, and the controller's results.
#[derive(Debug, Default)]
pub struct BlockDemand {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    demanded: BTreeSet<NetworkName>,
    exhausted: BTreeSet<NetworkName>,
    /// Blocks of each network that are being released.
    withheld: BTreeMap<NetworkName, Vec<IpNet>>,
}

impl BlockDemand {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attach waits for addresses.
    pub fn demand(&self, networks: &[NetworkName]) {
        self.state().demanded.extend(networks.iter().cloned());
        self.changed.notify_one();
    }

    /// Waits for [`Self::demand`].
    pub async fn demanded(&self) {
        self.changed.notified().await;
    }

    /// The networks that attaches wait for, since the last call.
    pub fn take_demanded(&self) -> BTreeSet<NetworkName> {
        std::mem::take(&mut self.state().demanded)
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
    }

    /// Blocks from which no address is leased any more.
    pub fn withheld(&self) -> Vec<IpNet> {
        self.state().withheld.values().flatten().copied().collect()
    }

    /// Withholds these blocks of a network, and no others.
    pub fn withhold(&self, network: &NetworkName, blocks: &[IpNet]) {
        let mut state = self.state();
        if blocks.is_empty() {
            state.withheld.remove(network);
        } else {
            state.withheld.insert(network.clone(), blocks.to_vec());
        }
    }
}

/// Whether the node has no address left of a family that the network has.
pub fn needs_block(view: &NetworkView) -> bool {
    let spec = &view.network.spec;
    let families = [(true, &view.ipv4), (false, &view.ipv6)];
    let has = |ipv4: bool| spec.subnets.iter().any(|net| net.addr().is_ipv4() == ipv4);
    spec.blocks.is_some() && families.iter().any(|(ipv4, usage)| has(*ipv4) && usage.free == 0)
}
