//! Takes over what an earlier agent left: adopts what is whole, finishes what was being removed, sweeps the rest.
//!
//! Order: records, then policies, then adoption, then the sweep; nothing is swept before every record was read (I3).
//! Traffic of adopted interfaces never stops: their rows stay as they are and their links move to the new programs in place.

use std::{collections::BTreeSet, sync::Arc};

use kni_dataplane::EndpointConfig;
use kni_model::{Attachment, EndpointId, Phase, Sandbox};
use kni_netlink as netlink;
use kni_netlink::Netns;
use kni_store::{Change, Contents, NamespaceRecord, NamespaceUse, Removal, WarmInterface};

use super::{
    AttachError, Inner,
    error::{Subject, chain, kernel_of_node},
    plan::PlannedInterface,
    provider,
    state::KnownNetwork,
};

impl Inner {
    pub(super) async fn restore(&self, contents: Contents) -> Result<(), AttachError> {
        let unfinished = self.read(contents);
        let (sandboxes, namespaces) = {
            let state = self.state();
            let ready = state
                .sandboxes
                .values()
                .filter(|sandbox| sandbox.phase == Phase::Ready)
                .map(Arc::clone);
            (
                ready.collect::<Vec<_>>(),
                state.namespaces.values().cloned().collect::<Vec<_>>(),
            )
        };
        self.admit_adopted(&sandboxes).await?;
        for sandbox in &sandboxes {
            for attachment in &sandbox.attachments {
                self.adopt(sandbox, attachment).await;
            }
        }
        for sandbox in unfinished {
            tracing::info!(pod = %sandbox.pod, sandbox = %sandbox.id, "finishing an interrupted call");
            if let Err(error) = self.detach_locked(&sandbox).await {
                // It stays recorded; the client's next call for it, or the next start, goes on with it.
                tracing::error!(%error, "cannot finish an interrupted call");
            }
        }
        for record in &namespaces {
            if let Err(error) = self.restore_namespace(record).await {
                tracing::error!(path = %record.path.display(), %error, "cannot restore a namespace");
            }
        }
        self.undo_forgotten().await;
        self.sweep().await?;
        self.return_strays()
            .await
            .map_err(|error| kernel_of_node("bringing devices back", &error))
    }

    /// Fills the state in memory. Returns the sandboxes whose call was interrupted.
    fn read(&self, contents: Contents) -> Vec<Sandbox> {
        let Contents {
            sandboxes,
            namespaces,
            removals,
            networks,
            uplink: _,
        } = contents;
        let mut state = self.state();
        let ids = networks.iter().map(|network| (network.spec.name.clone(), network.id));
        state.network_ids.extend(ids);
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
            for attachment in &sandbox.attachments {
                state.slots.adopt(attachment.endpoint);
                let owner = format!("pod {} (sandbox {})", sandbox.pod, sandbox.id);
                if !attachment.kind.is_leased() {
                    continue;
                }
                if let Err(error) = state
                    .ipam
                    .adopt(&attachment.network, &owner, attachment.ipv4, attachment.ipv6)
                {
                    tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, %error, "recorded address is not unique");
                }
            }
            if sandbox.phase != Phase::Ready {
                unfinished.push(sandbox.clone());
            }
            state.sandboxes.insert(sandbox.id.clone(), Arc::new(sandbox));
        }
        // As they were, until the manifests say otherwise: what pods are attached to does not vanish with a manifest.
        for network in networks {
            let name = network.spec.name.clone();
            if state.attachments_of(&name) > 0 {
                let origin = "an earlier agent".to_owned();
                state.networks.insert(
                    name,
                    KnownNetwork {
                        network,
                        origin,
                        orphaned: true,
                    },
                );
            }
        }
        unfinished
    }

    /// Problems of one interface do not stop the others: they stay visible in its health.
    async fn adopt(&self, sandbox: &Sandbox, attachment: &Attachment) {
        let subject = Subject {
            pod: sandbox.pod.clone(),
            sandbox: sandbox.id.to_string(),
        };
        if !provider::exists(sandbox, attachment) {
            tracing::warn!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.host_ifname,
                "its interface is gone; waiting for the client to detach it");
            if let Err(error) = self.stop_traffic(attachment) {
                tracing::warn!(sandbox = %sandbox.id, error, "cannot withdraw it");
            }
            return;
        }
        if attachment.kind.is_plugins()
            && let Err(error) = self.adopt_guard(attachment)
        {
            tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, ifname = %attachment.host_ifname,
                error = chain(&error), "cannot adopt the interface that a plugin made");
        }
        if !attachment.kind.is_ebpf() {
            // Nothing else of it depends on the agent.
            return;
        }
        // Rows first: in maps that are new, the programs would find none.
        let adopted = self
            .dataplane
            .republish(&EndpointConfig::from(attachment))
            .and_then(|()| {
                self.dataplane
                    .adopt(attachment.host_ifname.as_str(), attachment.endpoint)
            })
            .and_then(|()| self.adopt_xdp(attachment))
            .map_err(subject.failed("adopting the interface"));
        if adopted.is_err()
            && let Err(error) = self.netlink.set_down(attachment.host_ifindex).await
        {
            // Nobody knows what runs there now: better no traffic than unjudged traffic (I1).
            tracing::error!(ifname = %attachment.host_ifname, error = chain(&error), "cannot set it down either");
        }
        let routed = self.ensure_host_routes(attachment, &subject).await;
        for error in [adopted.err(), routed.err()].into_iter().flatten() {
            tracing::error!(%error, "cannot adopt an interface fully");
        }
    }

    /// Keeps what clients have, adopts what was made ahead, removes what was being made.
    async fn restore_namespace(&self, record: &NamespaceRecord) -> Result<(), AttachError> {
        let whole = netlink::netns::identity(&record.path).ok() == record.identity && record.identity.is_some();
        let wanted = match &record.used_by {
            NamespaceUse::Making => false,
            NamespaceUse::Warm | NamespaceUse::Given { .. } => whole,
            // Only the client's delete ends it.
            NamespaceUse::Bound { .. } => true,
        };
        if !wanted {
            return self.remove_namespace(record).await;
        }
        let Some(warm) = &record.warm else { return Ok(()) };
        match self.dataplane.adopt(warm.host_ifname.as_str(), warm.endpoint) {
            Ok(()) => Ok(()),
            Err(error) if record.used_by == NamespaceUse::Warm => {
                tracing::warn!(error = chain(&error), "cannot adopt a sandbox that was prepared ahead");
                self.remove_namespace(record).await
            }
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    "cannot adopt an interface that was prepared ahead"
                );
                self.discard_warm(record, warm)
            }
        }
    }

    /// An interface that somebody else will make has the name of the one that was made ahead: that one goes.
    pub(super) fn discard_pair(&self, netns: &Netns, planned: &[PlannedInterface]) -> Result<(), AttachError> {
        if planned.first().is_none_or(|plan| plan.network.spec.provider.is_ebpf()) {
            return Ok(());
        }
        let record = self.state().namespace_of(netns.id()).cloned();
        match record.as_ref().and_then(|record| Some((record, record.warm.as_ref()?))) {
            Some((record, warm)) => self.discard_warm(record, warm),
            None => Ok(()),
        }
    }

    /// The namespace stays, an attach in it will make a new interface.
    fn discard_warm(&self, record: &NamespaceRecord, warm: &WarmInterface) -> Result<(), AttachError> {
        let kept = NamespaceRecord {
            warm: None,
            ..record.clone()
        };
        let removal = Removal {
            endpoint: warm.endpoint,
            host_ifname: warm.host_ifname.clone(),
            host_ifindex: warm.host_ifindex,
            netns: record.identity,
        };
        let mut state = self.state();
        self.commit(Change::new().namespace(&kept).removal(&removal))?;
        state.namespaces.insert(kept.path.clone(), kept);
        state.removals.insert(removal.endpoint, removal);
        Ok(())
    }

    /// Removes what carries our marks and is in no record.
    async fn sweep(&self) -> Result<(), AttachError> {
        let known = self.known_endpoints();
        let links = self
            .teardown_netlink
            .list_our_links()
            .await
            .map_err(|error| kernel_of_node("listing interfaces", &error))?;
        for link in links {
            let endpoint = link.ifindex.checked_sub(kni_common::IFINDEX_BASE).map(EndpointId);
            if endpoint.is_some_and(|endpoint| known.contains(&endpoint)) {
                continue;
            }
            tracing::info!(ifname = %link.name, "removing an interface that is in no record");
            self.teardown_netlink
                .delete_link(link.ifindex, &link.name)
                .await
                .map_err(|error| kernel_of_node("removing an unknown interface", &error))?;
        }
        self.sweep_dataplane(&known)
            .and_then(|()| self.dataplane.remove_other_layouts())
            .map_err(|error| kernel_of_node("sweeping the dataplane", &error))?;
        self.sweep_routes().await
    }

    fn known_endpoints(&self) -> BTreeSet<EndpointId> {
        let state = self.state();
        let attached = state.attachments().map(|(_, attachment)| attachment.endpoint);
        let warm = state
            .namespaces
            .values()
            .filter_map(|record| record.warm.as_ref().map(|warm| warm.endpoint));
        attached.chain(warm).chain(state.removals.keys().copied()).collect()
    }

    fn sweep_dataplane(&self, known: &BTreeSet<EndpointId>) -> Result<(), kni_dataplane::DataplaneError> {
        for endpoint in self.dataplane.published_endpoints()? {
            if !known.contains(&endpoint) {
                self.dataplane.withdraw(endpoint)?;
            }
        }
        for endpoint in self.dataplane.pinned_endpoints()? {
            if !known.contains(&endpoint) {
                self.dataplane.unpin(endpoint)?;
            }
        }
        self.dataplane.remove_stale_addresses()
    }

    async fn sweep_routes(&self) -> Result<(), AttachError> {
        let routes = self
            .netlink
            .list_our_routes()
            .await
            .map_err(|error| kernel_of_node("listing routes", &error))?;
        for route in routes {
            let owned = self.state().attachments().any(|(_, attachment)| {
                attachment.host_access
                    && [attachment.ipv4.map(Into::into), attachment.ipv6.map(Into::into)]
                        .contains(&Some(route.destination.addr()))
            });
            if !owned
                && let Err(error) = self
                    .netlink
                    .del_pod_route(route.destination.addr(), route.ifindex)
                    .await
            {
                tracing::warn!(error = chain(&error), "cannot remove a route that is in no record");
            }
        }
        Ok(())
    }
}
