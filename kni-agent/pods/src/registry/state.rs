//! Holds the state in memory: the contents of the store, and indexes derived from them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use super::slots::Slots;
use kni_ipam::Ipam;
use kni_model::{
    Attachment, EndpointId, NetnsIdentity, Network, NetworkId, NetworkName, NumberProblem, Phase, Sandbox, SandboxId,
    view::{Owner, RefusedManifest},
};
use kni_store::{AddressRest, NamespaceRecord, NamespaceUse, Removal};

/// An active network.
#[derive(Debug, Clone)]
pub(crate) struct KnownNetwork {
    pub(crate) network: Network,
    pub(crate) origin: String,
    /// Its manifest is gone, but attachments remain.
    pub(crate) orphaned: bool,
    /// Its position among the networks, the oldest first.
    pub(crate) rank: usize,
    /// Why it has no number in the cluster, or uses another one than the cluster has given it.
    pub(crate) number_problem: Option<NumberProblem>,
}

/// The state of the service.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) in_sync: bool,
    /// When a client was last served.
    pub(crate) last_call: Instant,
    /// Sandboxes with interfaces whose programs are attached provisionally.
    pub(crate) provisional: VecDeque<SandboxId>,
    pub(crate) sandboxes: HashMap<SandboxId, Arc<Sandbox>>,
    pub(crate) namespaces: BTreeMap<PathBuf, NamespaceRecord>,
    /// The prewarmed namespace whose programs are being replaced: no client gets it meanwhile.
    pub(crate) upgrading: Option<PathBuf>,
    pub(crate) removals: BTreeMap<EndpointId, Removal>,
    pub(crate) networks: BTreeMap<NetworkName, KnownNetwork>,
    /// Numbers ever assigned, so that a recreated network gets its old one and no other network does.
    pub(crate) network_ids: BTreeMap<NetworkName, NetworkId>,
    pub(crate) refused: Vec<RefusedManifest>,
    pub(crate) ipam: Ipam,
    /// Whether other nodes learn the addresses of pods.
    pub(crate) in_cluster: bool,
    /// Addresses whose last owner other nodes may know, as recorded.
    pub(crate) rests: BTreeMap<(NetworkName, IpAddr), AddressRest>,
    pub(crate) slots: Slots,
}

impl State {
    pub(crate) fn new(capacity: u32, in_cluster: bool) -> Self {
        Self {
            in_sync: false,
            last_call: Instant::now(),
            provisional: VecDeque::new(),
            sandboxes: HashMap::new(),
            namespaces: BTreeMap::new(),
            upgrading: None,
            removals: BTreeMap::new(),
            networks: BTreeMap::new(),
            network_ids: BTreeMap::new(),
            refused: Vec::new(),
            ipam: Ipam::new(),
            in_cluster,
            rests: BTreeMap::new(),
            slots: Slots::new(capacity),
        }
    }

    pub(crate) fn default_network(&self) -> Option<&KnownNetwork> {
        self.networks.values().find(|known| known.network.spec.default)
    }

    pub(crate) fn attachments(&self) -> impl Iterator<Item = (&Arc<Sandbox>, &Attachment)> {
        self.sandboxes
            .values()
            .flat_map(|sandbox| sandbox.attachments.iter().map(move |a| (sandbox, a)))
    }

    /// Completely attached sandboxes.
    pub(crate) fn ready(&self) -> impl Iterator<Item = &Arc<Sandbox>> {
        self.sandboxes.values().filter(|sandbox| sandbox.phase == Phase::Ready)
    }

    /// A completely attached sandbox, with the interfaces of its children.
    pub(crate) fn with_children(&self, id: &SandboxId) -> Option<Arc<Sandbox>> {
        let found = self.sandboxes.get(id).filter(|found| found.phase == Phase::Ready)?;
        let children = self.ready().filter(|child| child.parent.as_ref() == Some(id));
        let mut children: Vec<&Arc<Sandbox>> = children.collect();
        if children.is_empty() {
            return Some(Arc::clone(found));
        }
        children.sort_by_key(|child| &child.id);
        let mut whole = Sandbox::clone(found);
        let attachments = children.into_iter().flat_map(|child| child.attachments.iter().cloned());
        whole.attachments.extend(attachments);
        Some(Arc::new(whole))
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> Option<Arc<Sandbox>> {
        self.sandboxes.get(id).map(Arc::clone)
    }

    pub(crate) fn owner_of(&self, endpoint: EndpointId) -> Option<Owner> {
        let mut attachments = self.attachments();
        let (sandbox, attachment) = attachments.find(|(_, attachment)| attachment.endpoint == endpoint)?;
        Some(Owner {
            network: attachment.network.clone(),
            pod: sandbox.pod.clone(),
            ifname: attachment.ifname.to_string(),
            sandbox: sandbox.id.clone(),
        })
    }

    pub(crate) fn endpoint_at(&self, network: NetworkId, address: IpAddr) -> Option<EndpointId> {
        let has = |attachment: &Attachment| match address {
            IpAddr::V4(v4) => attachment.ipv4 == Some(v4),
            IpAddr::V6(v6) => attachment.ipv6 == Some(v6),
        };
        let mut attachments = self.attachments().map(|(_, attachment)| attachment);
        let found = attachments.find(|attachment| attachment.network_id == network && has(attachment));
        found.map(|attachment| attachment.endpoint)
    }

    /// While a pod is replaced there may be two sandboxes; the old one is not ready.
    pub(crate) fn sandbox_of(&self, namespace: &str, name: &str) -> Option<Arc<Sandbox>> {
        let of_pod = |sandbox: &&Arc<Sandbox>| sandbox.pod.namespace == namespace && sandbox.pod.name == name;
        let found = self.sandboxes.values().filter(of_pod);
        found
            .max_by_key(|sandbox| (sandbox.phase == Phase::Ready, sandbox.is_primary(), sandbox.id.clone()))
            .map(Arc::clone)
    }

    pub(crate) fn attachments_of(&self, network: &NetworkName) -> usize {
        self.attachments()
            .filter(|(_, attachment)| attachment.network == *network)
            .count()
    }

    /// The namespace that the agent made and that is this one.
    pub(crate) fn namespace_of(&self, identity: NetnsIdentity) -> Option<&NamespaceRecord> {
        self.namespaces
            .values()
            .find(|record| record.identity == Some(identity))
    }

    pub(crate) fn namespaces_of(&self, sandbox: &SandboxId) -> Vec<NamespaceRecord> {
        let bound =
            |record: &&NamespaceRecord| matches!(&record.used_by, NamespaceUse::Bound { sandbox: id } if id == sandbox);
        self.namespaces.values().filter(bound).cloned().collect()
    }

    pub(crate) fn namespace_at(&self, path: &Path) -> Option<NamespaceRecord> {
        self.namespaces.get(path).cloned()
    }

    pub(crate) fn warm_count(&self) -> usize {
        self.namespaces
            .values()
            .filter(|record| record.used_by == NamespaceUse::Warm)
            .count()
    }
}
