//! Takes over from an earlier agent: adopts whole interfaces, finishes interrupted calls, sweeps the rest.
//!
//! Order: records, then policies, then adoption, then the sweep; nothing is swept before every record was read, and
//! nothing at all after the loss of the state, when missing records are rebuilt from the kernel (I3).
//! Traffic of adopted interfaces never stops: their rows stay as they are and their links move to the new programs in
//! place.

use std::{collections::BTreeSet, sync::Arc};

use kni_dataplane::DataplaneError;
use kni_model::{EndpointId, Network, Phase, Sandbox, error_chain};
use kni_store::{Change, Contents};

use crate::{
    error::{AttachError, Subject},
    interfaces::Interfaces,
    kernel::Kernel,
    namespaces::NamespacePool,
    recovery::{Recovery, recover},
    registry::{KnownNetwork, Registry, State},
    rests::lease_owner,
    sandboxes::Sandboxes,
};

/// The owners that take over.
pub(crate) struct Takeover<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) kernel: &'a Kernel,
    pub(crate) interfaces: &'a Interfaces,
    pub(crate) namespaces: &'a NamespacePool,
    pub(crate) sandboxes: &'a Sandboxes,
    /// Whether the operator wants objects without a record removed, however many.
    pub(crate) force_sweep: bool,
}

impl Takeover<'_> {
    pub(crate) async fn run(&self, mut contents: Contents) -> Result<Recovery, AttachError> {
        let recovery = self.recover(&mut contents).await?;
        let unfinished = read(&mut self.registry.lock(), contents);
        let (ready, namespaces) = {
            let state = self.registry.lock();
            let ready: Vec<Arc<Sandbox>> = state.ready().map(Arc::clone).collect();
            (ready, state.namespaces.values().cloned().collect::<Vec<_>>())
        };
        self.sandboxes.admit_adopted(&ready).await?;
        for sandbox in &ready {
            for attachment in &sandbox.attachments {
                self.interfaces.adopt(sandbox, attachment).await;
            }
        }
        for sandbox in unfinished {
            tracing::info!(pod = %sandbox.pod, sandbox = %sandbox.id, "finishing an interrupted call");
            if let Err(error) = self.sandboxes.detach_locked(&sandbox).await {
                // The record stays; the client's next call for it, or the next start, continues with it.
                tracing::error!(%error, "cannot finish an interrupted call");
            }
        }
        for record in &namespaces {
            if let Err(error) = self.namespaces.restore(record) {
                tracing::error!(path = %record.path.display(), %error, "cannot restore a namespace");
            }
        }
        if recovery.sweeps() {
            self.interfaces.delete_unrecorded(self.registry).await;
            self.sweep().await?;
        }
        self.interfaces.return_strays(self.registry).await?;
        Ok(recovery)
    }

    /// Rebuilds missing records and writes them. Endpoints that remain without one keep their numbers.
    async fn recover(&self, contents: &mut Contents) -> Result<Recovery, AttachError> {
        let before = (contents.sandboxes.len(), contents.namespaces.len());
        let recovery = recover(self.kernel, self.namespaces.dir(), contents, self.force_sweep).await?;
        let change = contents
            .sandboxes
            .iter()
            .skip(before.0)
            .fold(Change::new(), Change::sandbox);
        let change = contents
            .namespaces
            .iter()
            .skip(before.1)
            .fold(change, Change::namespace);
        let mut state = self.registry.lock();
        state.commit_deferred(change)?;
        for endpoint in &recovery.kept {
            state.slots.adopt(*endpoint);
        }
        Ok(recovery)
    }

    /// Removes everything that carries the agent's marks and is in no record.
    async fn sweep(&self) -> Result<(), AttachError> {
        let node = Subject::node();
        let known = self.known_endpoints();
        let links = self.kernel.teardown.list_our_links().await;
        for link in links.map_err(node.failed("listing interfaces"))? {
            let endpoint = link.ifindex.checked_sub(kni_common::IFINDEX_BASE).map(EndpointId);
            if endpoint.is_some_and(|endpoint| known.contains(&endpoint)) {
                continue;
            }
            tracing::info!(ifname = %link.name, "removing an interface that is in no record");
            let removed = self.kernel.teardown.delete_link(link.ifindex, &link.name).await;
            removed.map_err(node.failed("removing an unknown interface"))?;
        }
        self.sweep_dataplane(&known)
            .and_then(|()| self.kernel.dataplane.remove_other_layouts())
            .map_err(node.failed("sweeping the dataplane"))?;
        self.sweep_routes().await
    }

    fn known_endpoints(&self) -> BTreeSet<EndpointId> {
        let state = self.registry.lock();
        let attached = state.attachments().map(|(_, attachment)| attachment.endpoint);
        let prewarmed = state.namespaces.values().filter_map(|record| record.warm.as_ref());
        let prewarmed = prewarmed.map(|warm| warm.endpoint);
        attached
            .chain(prewarmed)
            .chain(state.removals.keys().copied())
            .collect()
    }

    fn sweep_dataplane(&self, known: &BTreeSet<EndpointId>) -> Result<(), DataplaneError> {
        let dataplane = &self.kernel.dataplane;
        for endpoint in dataplane.published_endpoints()? {
            if !known.contains(&endpoint) {
                dataplane.withdraw(endpoint)?;
            }
        }
        for endpoint in dataplane.pinned_endpoints()? {
            if !known.contains(&endpoint) {
                dataplane.unpin(endpoint)?;
            }
        }
        dataplane.remove_stale_addresses()
    }

    async fn sweep_routes(&self) -> Result<(), AttachError> {
        let netlink = &self.kernel.netlink;
        let routes = netlink.list_our_routes().await;
        for route in routes.map_err(Subject::node().failed("listing routes"))? {
            let address = route.destination.addr();
            let owned = self
                .registry
                .lock()
                .attachments()
                .any(|(_, attachment)| attachment.host_access && attachment.addresses().any(|own| own == address));
            if !owned && let Err(error) = netlink.del_pod_route(address, route.ifindex).await {
                tracing::warn!(
                    error = error_chain(&error),
                    "cannot remove a route that is in no record"
                );
            }
        }
        Ok(())
    }
}

/// Fills the state. Returns the sandboxes whose call was interrupted.
fn read(state: &mut State, contents: Contents) -> Vec<Sandbox> {
    let Contents {
        sandboxes,
        namespaces,
        removals,
        networks,
        rests,
        ..
    } = contents;
    let ids = networks.iter().map(|network| (network.spec.name.clone(), network.id));
    state.network_ids.extend(ids);
    // A network may be without a record of its own.
    let attached = sandboxes.iter().flat_map(|sandbox| &sandbox.attachments);
    let numbers = attached.map(|attachment| (attachment.network.clone(), attachment.network_id));
    state.network_ids.extend(numbers);
    for removal in removals {
        state.slots.adopt(removal.endpoint);
        state.removals.insert(removal.endpoint, removal);
    }
    for record in namespaces {
        if let Some(warm) = &record.warm {
            state.slots.adopt(warm.endpoint);
        }
        state.namespaces.insert(record.path.clone(), record);
    }
    let mut unfinished = Vec::new();
    for sandbox in sandboxes {
        adopt_resources(state, &sandbox);
        if sandbox.phase != Phase::Ready {
            unfinished.push(sandbox.clone());
        }
        state.sandboxes.insert(sandbox.id.clone(), Arc::new(sandbox));
    }
    state.adopt_rests(rests);
    adopt_networks(state, networks);
    unfinished
}

fn adopt_resources(state: &mut State, sandbox: &Sandbox) {
    let owner = lease_owner(&sandbox.pod, &sandbox.id);
    for attachment in &sandbox.attachments {
        state.slots.adopt(attachment.endpoint);
        if !attachment.kind.is_leased() {
            continue;
        }
        let ipam = &mut state.ipam;
        let adopted = ipam.adopt(&attachment.network, &owner, attachment.ipv4, attachment.ipv6);
        if let Err(error) = adopted {
            tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, %error, "recorded address is not unique");
        }
    }
}

/// Adopts the recorded networks until the manifests change them: networks with attached pods do not vanish with their
/// manifests.
fn adopt_networks(state: &mut State, networks: Vec<Network>) {
    for network in networks {
        let name = network.spec.name.clone();
        if state.attachments_of(&name) > 0 {
            let known = KnownNetwork {
                network,
                origin: "an earlier agent".to_owned(),
                orphaned: true,
                rank: usize::MAX,
                number_problem: None,
            };
            state.networks.insert(name, known);
        }
    }
}
