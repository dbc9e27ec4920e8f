//! The state in memory: what the store holds, and what is derived from it.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use kni_ipam::Ipam;
use kni_model::{
    Attachment, EndpointId, NetnsIdentity, Network, NetworkId, NetworkName, Phase, Sandbox, SandboxId,
    view::{Owner, RefusedManifest},
};
use kni_store::{NamespaceRecord, NamespaceUse, Removal};

use super::slots::Slots;

/// A network in force.
#[derive(Debug, Clone)]
pub(super) struct KnownNetwork {
    pub(super) network: Network,
    pub(super) origin: String,
    /// Its manifest is gone, but attachments remain.
    pub(super) orphaned: bool,
}

/// Everything the service knows.
#[derive(Debug)]
pub(super) struct State {
    pub(super) in_sync: bool,
    /// When a client was last served.
    pub(super) last_call: Instant,
    /// Sandboxes with interfaces that were made in haste.
    pub(super) hasty: VecDeque<SandboxId>,
    pub(super) sandboxes: HashMap<SandboxId, Arc<Sandbox>>,
    pub(super) namespaces: BTreeMap<PathBuf, NamespaceRecord>,
    pub(super) removals: BTreeMap<EndpointId, Removal>,
    pub(super) networks: BTreeMap<NetworkName, KnownNetwork>,
    /// Numbers ever given, so that a network that comes back has its old one and no other network gets it.
    pub(super) network_ids: BTreeMap<NetworkName, NetworkId>,
    pub(super) refused: Vec<RefusedManifest>,
    pub(super) ipam: Ipam,
    pub(super) slots: Slots,
}

impl State {
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            in_sync: false,
            last_call: Instant::now(),
            hasty: VecDeque::new(),
            sandboxes: HashMap::new(),
            namespaces: BTreeMap::new(),
            removals: BTreeMap::new(),
            networks: BTreeMap::new(),
            network_ids: BTreeMap::new(),
            refused: Vec::new(),
            ipam: Ipam::new(),
            slots: Slots::new(capacity),
        }
    }

    pub(super) fn default_network(&self) -> Option<&KnownNetwork> {
        self.networks.values().find(|known| known.network.spec.default)
    }

    pub(super) fn attachments(&self) -> impl Iterator<Item = (&Arc<Sandbox>, &Attachment)> {
        self.sandboxes
            .values()
            .flat_map(|sandbox| sandbox.attachments.iter().map(move |a| (sandbox, a)))
    }

    pub(super) fn owner_of(&self, endpoint: EndpointId) -> Option<Owner> {
        let mut attachments = self.attachments();
        let (sandbox, attachment) = attachments.find(|(_, attachment)| attachment.endpoint == endpoint)?;
        Some(Owner {
            network: attachment.network.clone(),
            pod: sandbox.pod.clone(),
            ifname: attachment.ifname.to_string(),
            sandbox: sandbox.id.clone(),
        })
    }

    pub(super) fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        let has = |attachment: &Attachment| match address {
            IpAddr::V4(v4) => attachment.ipv4 == Some(v4),
            IpAddr::V6(v6) => attachment.ipv6 == Some(v6),
        };
        let mut attachments = self.attachments().map(|(_, attachment)| attachment);
        let found = attachments.find(|attachment| attachment.network_id == network && has(attachment));
        found.map(|attachment| attachment.endpoint)
    }

    /// While a pod is replaced there may be two sandboxes; the one on its way out is not ready.
    pub(super) fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        let of_pod = |sandbox: &&Arc<Sandbox>| sandbox.pod.namespace == namespace && sandbox.pod.name == name;
        let found = self.sandboxes.values().filter(of_pod);
        found
            .max_by_key(|sandbox| (sandbox.phase == Phase::Ready, sandbox.is_primary(), sandbox.id.clone()))
            .map(Arc::clone)
    }

    pub(super) fn attachments_of(&self, network: &NetworkName) -> usize {
        self.attachments()
            .filter(|(_, attachment)| attachment.network == *network)
            .count()
    }

    /// The namespace that the agent made and that is this one.
    pub(super) fn namespace_of(&self, identity: NetnsIdentity) -> Option<&NamespaceRecord> {
        self.namespaces
            .values()
            .find(|record| record.identity == Some(identity))
    }

    pub(super) fn namespaces_of(&self, sandbox: &SandboxId) -> Vec<NamespaceRecord> {
        let bound =
            |record: &&NamespaceRecord| matches!(&record.used_by, NamespaceUse::Bound { sandbox: id } if id == sandbox);
        self.namespaces.values().filter(bound).cloned().collect()
    }

    pub(super) fn namespace_at(&self, path: &Path) -> Option<NamespaceRecord> {
        self.namespaces.get(path).cloned()
    }

    pub(super) fn warm_count(&self) -> usize {
        self.namespaces
            .values()
            .filter(|record| record.used_by == NamespaceUse::Warm)
            .count()
    }
}
