//! Owns the pods, and computes the policies of each pod.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use kni_model::{
    EndpointId, SandboxId,
    policy::{Labels, PolicyInterface, PolicyPod, PolicyRef},
};

use super::{
    catalog::{Catalog, Replaced, egress_addresses},
    changes::Changes,
    identity::PodAddress,
    peer::Peer,
    set::{PolicySet, SetContent},
    stable::Interner,
};

/// The label that every namespace has; its value is the name of the namespace.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// The policy sets in use.
#[derive(Debug)]
pub(super) struct Sets {
    pub(super) contents: Interner<SetContent>,
    by_number: HashMap<u32, Arc<PolicySet>>,
}

impl Default for Sets {
    fn default() -> Self {
        Self {
            contents: Interner::new(1),
            by_number: HashMap::new(),
        }
    }
}

impl Sets {
    fn intern(&mut self, content: SetContent) -> Arc<PolicySet> {
        let number = self.contents.intern(content.clone());
        let set = self
            .by_number
            .entry(number)
            .or_insert_with(|| Arc::new(PolicySet::new(number, &Arc::new(content))));
        Arc::clone(set)
    }

    /// Retires sets that neither a pod nor a row uses.
    pub(super) fn retain(&mut self, used: impl Fn(u32) -> bool) {
        self.by_number
            .retain(|number, set| Arc::strong_count(set) > 1 || used(*number));
        self.contents.retain(|number| self.by_number.contains_key(&number));
    }
}

/// A pod.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) object: PolicyPod,
    /// The peers that its labels match, sorted.
    pub(super) peers: Vec<Arc<Peer>>,
    /// The enforced policies, by position of the interface.
    pub(super) selected: Vec<Selected>,
}

/// The policies of an interface.
#[derive(Debug, Clone, Default)]
pub(super) struct Selected {
    /// `None`: no policy selects it.
    pub(super) set: Option<Arc<PolicySet>>,
    /// The set that replaces it while the pod's namespace exceeds its quota.
    closed: Option<Arc<PolicySet>>,
    pub(super) egress_addresses: Vec<(IpAddr, PolicyRef)>,
}

impl Selected {
    /// The enforced policies; `closed`: the pod's namespace exceeds its quota.
    pub(super) fn enforced(&self, closed: bool) -> Option<&Arc<PolicySet>> {
        if closed {
            self.closed.as_ref()
        } else {
            self.set.as_ref()
        }
    }
}

impl Pod {
    /// One of its addresses, as the key of an identity lookup.
    pub(super) fn at(&self, address: IpAddr) -> PodAddress<'_> {
        PodAddress {
            address,
            peers: &self.peers,
            ports: &self.object.ports,
        }
    }

    /// Its interfaces on this node.
    pub(super) fn local(&self) -> impl Iterator<Item = (EndpointId, &PolicyInterface, &Selected)> {
        let interfaces = self.object.interfaces.iter().zip(&self.selected);
        interfaces.filter_map(|(interface, selected)| Some((interface.endpoint?, interface, selected)))
    }

    /// The networks and addresses of its interfaces on other nodes.
    fn remote(&self) -> BTreeSet<(u32, IpAddr)> {
        let interfaces = self.object.interfaces.iter();
        let remote = interfaces.filter(|interface| interface.endpoint.is_none());
        let addresses = remote.flat_map(|interface| {
            let addresses = [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)];
            let of_network = addresses.into_iter().flatten();
            of_network.map(|address| (interface.network_id.get(), address))
        });
        addresses.collect()
    }

    /// Whether its addresses have the same identities as those of the other one.
    fn is_alike(&self, other: &Self) -> bool {
        self.peers == other.peers && self.object.ports == other.object.ports
    }
}

/// All pods.
#[derive(Debug, Default)]
pub(super) struct Pods {
    pub(super) by_sandbox: BTreeMap<SandboxId, Pod>,
    namespaces: BTreeMap<String, Labels>,
    owners: HashMap<EndpointId, SandboxId>,
    /// The pods with interfaces on this node.
    own: BTreeSet<SandboxId>,
    /// The pods of other nodes by network and address.
    remote: BTreeMap<u32, BTreeMap<IpAddr, Vec<SandboxId>>>,
    /// The changes since they were taken last.
    changes: Changes,
}

impl Pods {
    /// Replaces the namespaces, and recomputes the matching peers of the pods in those that changed.
    pub(super) fn set_namespaces(&mut self, mut namespaces: BTreeMap<String, Labels>, catalog: &Catalog) {
        for (name, labels) in &mut namespaces {
            labels.insert(NAMESPACE_NAME.to_owned(), name.clone());
        }
        if namespaces == self.namespaces {
            return;
        }
        let before = std::mem::replace(&mut self.namespaces, namespaces);
        for pod in self.by_sandbox.values_mut() {
            let namespace = &pod.object.pod.namespace;
            if before.get(namespace) == self.namespaces.get(namespace) {
                continue;
            }
            let of_namespace = labels_of(&self.namespaces, namespace);
            let peers = catalog.peers.of_pod(namespace, &of_namespace, &pod.object.labels);
            if peers != pod.peers {
                pod.peers = peers;
                self.changes.local |= pod.local().next().is_some();
                self.changes.add(pod.remote());
            }
        }
    }

    /// The changes since the last call.
    pub(super) fn take_changes(&mut self) -> Changes {
        std::mem::take(&mut self.changes)
    }

    /// Adds or replaces a pod. Returns the endpoints that start anew: their rows in the tables belong to another pod.
    pub(super) fn put(&mut self, pod: PolicyPod, catalog: &Catalog, sets: &mut Sets) -> Vec<EndpointId> {
        let mut recreated = Vec::new();
        let before = self
            .by_sandbox
            .get(&pod.sandbox)
            .map(|known| known.object.interfaces.clone())
            .unwrap_or_default();
        for interface in &before {
            let stays =
                |now: &&PolicyInterface| now.endpoint == interface.endpoint && now.network_id == interface.network_id;
            if let Some(endpoint) = interface
                .endpoint
                .filter(|_| !pod.interfaces.iter().any(|now| stays(&now)))
            {
                self.owners.remove(&endpoint);
                recreated.push(endpoint);
            }
        }
        for endpoint in pod.interfaces.iter().filter_map(|interface| interface.endpoint) {
            let owner = self.owners.insert(endpoint, pod.sandbox.clone());
            if owner.is_some_and(|owner| owner != pod.sandbox) {
                recreated.push(endpoint);
            }
        }
        let sandbox = pod.sandbox.clone();
        let pod = self.evaluated(pod, catalog, sets);
        let before = self.by_sandbox.remove(&sandbox);
        self.note(&sandbox, before.as_ref(), Some(&pod));
        self.by_sandbox.insert(sandbox, pod);
        recreated
    }

    /// Notes what changes when a pod replaces itself.
    fn note(&mut self, sandbox: &SandboxId, before: Option<&Pod>, after: Option<&Pod>) {
        let is_local = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.local().next().is_some());
        self.changes.local |= is_local(before) || is_local(after);
        if is_local(after) {
            self.own.insert(sandbox.clone());
        } else {
            self.own.remove(sandbox);
        }
        let [old, new] = [before, after].map(|pod| pod.map(Pod::remote).unwrap_or_default());
        for (network, address) in old.difference(&new) {
            let Some(of_network) = self.remote.get_mut(network) else {
                continue;
            };
            if let Some(pods) = of_network.get_mut(address) {
                pods.retain(|known| known != sandbox);
                if pods.is_empty() {
                    of_network.remove(address);
                }
            }
            if of_network.is_empty() {
                self.remote.remove(network);
            }
        }
        for (network, address) in new.difference(&old) {
            let of_network = self.remote.entry(*network).or_default();
            of_network.entry(*address).or_default().push(sandbox.clone());
        }
        let is_alike = before.zip(after).is_some_and(|(before, after)| before.is_alike(after));
        if is_alike {
            self.changes.add(old.symmetric_difference(&new).copied());
        } else {
            self.changes.add(old.union(&new).copied());
        }
    }

    /// The addresses of pods of other nodes in a network, each with these pods.
    pub(super) fn remote(&self, network: u32) -> impl Iterator<Item = (IpAddr, impl Iterator<Item = PodAddress<'_>>)> {
        let addresses = self.remote.get(&network).into_iter().flatten();
        addresses.map(|(address, pods)| (*address, self.named(pods, *address)))
    }

    /// The pods of other nodes with an address; `None` if there are none.
    pub(super) fn remote_at(&self, network: u32, address: IpAddr) -> Option<impl Iterator<Item = PodAddress<'_>>> {
        let pods = self.remote.get(&network)?.get(&address)?;
        Some(self.named(pods, address))
    }

    fn named<'a>(&'a self, pods: &'a [SandboxId], address: IpAddr) -> impl Iterator<Item = PodAddress<'a>> {
        let pods = pods.iter().filter_map(|sandbox| self.by_sandbox.get(sandbox));
        pods.map(move |pod| pod.at(address))
    }

    /// Removes a pod and returns the endpoints that still belonged to it.
    pub(super) fn remove(&mut self, sandbox: &SandboxId) -> Vec<EndpointId> {
        let Some(gone) = self.by_sandbox.remove(sandbox) else {
            return Vec::new();
        };
        self.note(sandbox, Some(&gone), None);
        let endpoints = gone.object.interfaces.iter().filter_map(|interface| interface.endpoint);
        let own = endpoints.filter(|endpoint| self.owners.get(endpoint) == Some(sandbox));
        let own: Vec<EndpointId> = own.collect();
        for endpoint in &own {
            self.owners.remove(endpoint);
        }
        own
    }

    /// Recomputes the policies of the pods that the replacement may affect.
    pub(super) fn refresh(&mut self, replaced: &Replaced, catalog: &Catalog, sets: &mut Sets) {
        for pod in self.by_sandbox.values_mut() {
            if replaced.is_about(&pod.object) {
                pod.selected = selected(&pod.object, catalog, sets);
            }
            if !replaced.peers.is_empty() {
                let (namespace, labels) = (&pod.object.pod.namespace, &pod.object.labels);
                let of_namespace = labels_of(&self.namespaces, namespace);
                replaced.peers.update(&mut pod.peers, namespace, &of_namespace, labels);
            }
        }
    }

    /// The endpoints of this node with their pods. If two pods claim an endpoint, it belongs to the later one.
    pub(super) fn local(&self) -> impl Iterator<Item = (EndpointId, &Pod, &PolicyInterface, &Selected)> {
        let pods = self.own.iter().filter_map(|sandbox| self.by_sandbox.get(sandbox));
        pods.flat_map(move |pod| {
            let own = |endpoint: &EndpointId| self.owners.get(endpoint) == Some(&pod.object.sandbox);
            let local = pod.local().filter(move |(endpoint, ..)| own(endpoint));
            local.map(move |(endpoint, interface, selected)| (endpoint, pod, interface, selected))
        })
    }

    /// The enforced policies of an endpoint.
    pub(super) fn selected(&self, endpoint: EndpointId) -> Option<&Selected> {
        let pod = self.by_sandbox.get(self.owners.get(&endpoint)?)?;
        let mut local = pod.local();
        local.find(|(id, ..)| *id == endpoint).map(|(_, _, selected)| selected)
    }

    /// The namespace of an endpoint's pod.
    pub(super) fn namespace_of(&self, endpoint: EndpointId) -> Option<&str> {
        let pod = self.by_sandbox.get(self.owners.get(&endpoint)?)?;
        Some(&pod.object.pod.namespace)
    }

    fn evaluated(&self, pod: PolicyPod, catalog: &Catalog, sets: &mut Sets) -> Pod {
        let namespace = &pod.pod.namespace;
        let of_namespace = labels_of(&self.namespaces, namespace);
        Pod {
            selected: selected(&pod, catalog, sets),
            peers: catalog.peers.of_pod(namespace, &of_namespace, &pod.labels),
            object: pod,
        }
    }
}

/// Computes the policies of each interface of a pod.
fn selected(pod: &PolicyPod, catalog: &Catalog, sets: &mut Sets) -> Vec<Selected> {
    let selecting = catalog.selecting(&pod.pod.namespace, &pod.labels);
    let mut evaluate = |interface: &PolicyInterface| {
        if interface.endpoint.is_none() {
            return Selected::default();
        }
        let about = || selecting.iter().copied().filter(|listed| listed.is_about(interface));
        let content = SetContent::new(about().filter_map(|listed| listed.body.clone()).collect(), &pod.ports);
        let closed = content.closed();
        Selected {
            closed: (!closed.is_empty()).then(|| sets.intern(closed)),
            set: (!content.is_empty()).then(|| sets.intern(content)),
            egress_addresses: egress_addresses(about()),
        }
    };
    pod.interfaces.iter().map(&mut evaluate).collect()
}

/// The labels of a namespace, also of an unknown one.
pub(super) fn labels_of<'a>(namespaces: &'a BTreeMap<String, Labels>, namespace: &str) -> Cow<'a, Labels> {
    match namespaces.get(namespace) {
        Some(known) => Cow::Borrowed(known),
        None => Cow::Owned([(NAMESPACE_NAME.to_owned(), namespace.to_owned())].into()),
    }
}
