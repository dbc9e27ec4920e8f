//! Answers queries about sandboxes, endpoints and networks from memory.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kni_model::{
    Attachment, EndpointId, NetworkId, NetworkName, Phase, PodRef, Sandbox, SandboxId,
    durations::Durations,
    view::{NetworkView, Owner, RefusedManifest},
};
use tokio::sync::watch;

use crate::{pods::Pods, recovery::Recovery};

/// Numbers of sandboxes, attachments and pending work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sandboxes, complete or not.
    pub sandboxes: usize,
    /// Their attachments.
    pub attachments: usize,
    /// Prewarmed namespaces.
    pub prewarmed: usize,
    /// Interfaces that still have to be removed.
    pub removals: usize,
}

impl Pods {
    /// Numbers of sandboxes, attachments and pending work.
    pub fn counts(&self) -> Counts {
        let state = self.service.registry.lock();
        Counts {
            sandboxes: state.sandboxes.len(),
            attachments: state.attachments().count(),
            prewarmed: state.warm_count(),
            removals: state.removals.len(),
        }
    }

    /// Why no pod can be attached to the default network, one sentence each; empty when they can. Exhausted addresses
    /// are no such reason.
    pub fn obstacles(&self) -> Vec<String> {
        let default = self.service.networks.default_problem();
        let default = default.map(|(network, reason)| format!("network {network}: {reason}"));
        let mut obstacles: Vec<String> = default.into_iter().collect();
        let unwritable = self.service.registry.store_problem();
        obstacles.extend(unwritable.map(|reason| format!("state cannot be written: {reason}")));
        let state = self.service.registry.lock();
        if !state.in_sync {
            obstacles.push("the agent has not applied its networks yet".to_owned());
        } else if state.default_network().is_none() {
            obstacles.push("no network is the default one (a PodNetwork with spec.default: true)".to_owned());
        }
        if self.service.registry.is_stopping() {
            obstacles.push("the agent is stopping".to_owned());
        }
        obstacles
    }

    /// Why the state cannot be written for now.
    pub fn state_problem(&self) -> Option<String> {
        self.service.registry.store_problem()
    }

    /// What the start found about lost or damaged state.
    pub fn recovery(&self) -> &Recovery {
        &self.service.recovery
    }

    /// Interfaces that are closed because their programs cannot be attached, one sentence each.
    pub fn closed_interfaces(&self) -> Vec<String> {
        self.service.repair.problems()
    }

    /// How often programs were attached again, and pins made again, that another process had removed.
    pub fn repairs(&self) -> (u64, u64) {
        self.service.repair.counts()
    }

    /// An attached sandbox, with its additional interfaces.
    pub fn query(&self, sandbox: &SandboxId) -> Option<Arc<Sandbox>> {
        self.service.query(sandbox)
    }

    /// The networks, the default one first, then by name, without what their plugins report. Does not block.
    pub fn networks(&self) -> Vec<NetworkView> {
        self.service.networks.views()
    }

    /// Every leased address, by network, including those of attachments that are being made or removed.
    pub fn leases(&self) -> BTreeMap<NetworkName, Vec<IpAddr>> {
        self.service.registry.lock().ipam.leases()
    }

    /// Every address that rests after its last pod, by network.
    pub fn resting(&self) -> BTreeMap<NetworkName, Vec<IpAddr>> {
        self.service.registry.lock().ipam.resting()
    }

    /// [`Self::networks`] with the readiness and the features of their plugins. Reads the files of plugins.
    pub fn networks_with_plugins(&self) -> Vec<NetworkView> {
        self.service.networks.views_with_plugins()
    }

    /// Manifests that were refused.
    pub fn refused(&self) -> Vec<RefusedManifest> {
        self.service.registry.lock().refused.clone()
    }

    /// The owner of an endpoint; `None` while it is free.
    pub fn owner(&self, endpoint: EndpointId) -> Option<Owner> {
        self.service.registry.lock().owner_of(endpoint)
    }

    /// An endpoint's attachment and its sandbox.
    pub fn attachment(&self, endpoint: EndpointId) -> Option<(Arc<Sandbox>, Attachment)> {
        let state = self.service.registry.lock();
        let mut attachments = state.attachments();
        let (sandbox, attachment) = attachments.find(|(_, attachment)| attachment.endpoint == endpoint)?;
        Some((Arc::clone(sandbox), attachment.clone()))
    }

    /// Every complete attachment, with its sandbox.
    pub fn attachments(&self) -> Vec<(Arc<Sandbox>, Attachment)> {
        let state = self.service.registry.lock();
        let ready = state.attachments().filter(|(sandbox, _)| sandbox.phase == Phase::Ready);
        ready
            .map(|(sandbox, attachment)| (Arc::clone(sandbox), attachment.clone()))
            .collect()
    }

    /// The interfaces that pods have or are getting: their pods and networks.
    pub fn interfaces(&self) -> Vec<(PodRef, NetworkName)> {
        let state = self.service.registry.lock();
        let living = state
            .attachments()
            .filter(|(sandbox, _)| sandbox.phase != Phase::Deleting);
        living
            .map(|(sandbox, attachment)| (sandbox.pod.clone(), attachment.network.clone()))
            .collect()
    }

    /// The endpoint that has an address of a network.
    pub fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        self.service.registry.lock().endpoint_at(network, address)
    }

    /// The sandbox of a pod, by namespace and name; one that is completely attached where there are several.
    pub fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        self.service.registry.lock().sandbox_of(namespace, name)
    }

    /// Why a network refused the last attach of a pod; `None` where none did.
    pub fn refusal_of(&self, namespace: &str, name: &str) -> Option<String> {
        self.service.sandboxes.refusal_of(namespace, name)
    }

    /// Every complete sandbox.
    pub fn sandboxes(&self) -> Vec<Arc<Sandbox>> {
        self.service.registry.lock().ready().map(Arc::clone).collect()
    }

    /// The name of a network's number.
    pub fn network_name(&self, id: NetworkId) -> Option<NetworkName> {
        let state = self.service.registry.lock();
        let known = state.network_ids.iter().find(|(_, known)| **known == id);
        known.map(|(name, _)| name.clone())
    }

    /// An address that this node may lease in a network, and that no pod has; it may be leased at any moment, but is
    /// the last one that is.
    pub fn spare_address(&self, network: NetworkId, ipv4: bool) -> Option<IpAddr> {
        let state = self.service.registry.lock();
        let known = state.networks.values().find(|known| known.network.id == network)?;
        state.ipam.spare(&known.network.spec.name, ipv4)
    }

    /// Whether an address is in the subnets of a network.
    pub fn is_inside(&self, network: NetworkId, address: IpAddr) -> bool {
        let state = self.service.registry.lock();
        let known = state.networks.values().find(|known| known.network.id == network);
        known.is_some_and(|known| {
            let mut subnets = known.network.spec.subnets.iter();
            subnets.any(|subnet| subnet.contains(&address))
        })
    }

    /// How long attaching took, by step, successful or not, without repeated requests.
    pub fn attach_times(&self) -> Vec<(&'static str, Durations)> {
        self.service.sandboxes.attach_times()
    }

    /// Notifies of every change of attachments and networks. Slow receivers see the last one only.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.service.registry.changes()
    }
}
