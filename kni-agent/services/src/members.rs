//! Indexes the pods of networks by address, and decides which endpoints a network's connections may lead to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use kni_model::{
    NetworkId, NetworkName, PodRef, SandboxId,
    policy::PolicyPod,
    service::{ServiceNetwork, ServiceRef, SliceEndpoint},
};

/// The pods that are known: those of this node, and the confirmed ones of other nodes.
#[derive(Debug, Default)]
pub(super) struct Members {
    pods: BTreeMap<SandboxId, Member>,
    /// The next sandbox of a pod may overlap with the previous one.
    at: BTreeMap<(NetworkId, IpAddr), BTreeSet<SandboxId>>,
    /// The networks that pods of this node are in, with the number of their interfaces.
    joined: BTreeMap<NetworkId, usize>,
}

#[derive(Debug, PartialEq, Eq)]
struct Member {
    pod: PodRef,
    addresses: Vec<(NetworkId, IpAddr)>,
    /// The networks of its interfaces if it is on this node.
    joined: Vec<NetworkId>,
}

impl Member {
    fn new(pod: &PolicyPod) -> Self {
        let addresses = pod.interfaces.iter().flat_map(|interface| {
            let addresses = [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)];
            let addresses = addresses.into_iter().flatten();
            addresses.map(|address| (interface.network_id, address.to_canonical()))
        });
        let own = pod.interfaces.iter().filter(|interface| interface.endpoint.is_some());
        Self {
            pod: pod.pod.clone(),
            addresses: addresses.collect(),
            joined: own.map(|interface| interface.network_id).collect(),
        }
    }
}

impl Members {
    /// Adds or replaces a pod. Returns whether endpoints with the addresses in `named` have to be checked again. Takes
    /// a time that does not depend on the number of Services.
    pub(super) fn put(&mut self, pod: &PolicyPod, named: &BTreeSet<IpAddr>) -> bool {
        let member = Member::new(pod);
        if self.pods.get(&pod.sandbox) == Some(&member) {
            return false;
        }
        let mut matters = self.remove(&pod.sandbox, named);
        for place in &member.addresses {
            self.at.entry(*place).or_default().insert(pod.sandbox.clone());
            matters |= named.contains(&place.1);
        }
        for network in &member.joined {
            let count = self.joined.entry(*network).or_default();
            matters |= *count == 0;
            *count += 1;
        }
        self.pods.insert(pod.sandbox.clone(), member);
        matters
    }

    /// Removes a pod; as [`Self::put`].
    pub(super) fn remove(&mut self, sandbox: &SandboxId, named: &BTreeSet<IpAddr>) -> bool {
        let Some(member) = self.pods.remove(sandbox) else {
            return false;
        };
        let mut matters = false;
        for place in &member.addresses {
            if let Some(sandboxes) = self.at.get_mut(place) {
                sandboxes.remove(sandbox);
                if sandboxes.is_empty() {
                    self.at.remove(place);
                }
            }
            matters |= named.contains(&place.1);
        }
        for network in &member.joined {
            if let Some(count) = self.joined.get_mut(network) {
                *count = count.saturating_sub(1);
                matters |= *count == 0;
            }
        }
        self.joined.retain(|_, count| *count > 0);
        matters
    }

    /// Whether this node has a pod in the network. Otherwise it does not know the network's pods of other nodes.
    pub(super) fn are_known(&self, network: NetworkId) -> bool {
        self.joined.contains_key(&network)
    }

    /// Whether connections of a network may lead to an endpoint: to a pod of the network, or out of all networks.
    ///
    /// Addresses decide only where they cannot be mistaken: one in the network's own subnets is that of a pod or of
    /// nothing, and an endpoint that stands for a pod is no host outside while any network has its address. A pod is
    /// compared by name: a static pod has one UID at the API server and another one at the runtime.
    pub(super) fn admits(
        &self,
        network: &ServiceNetwork,
        all: &BTreeMap<NetworkName, ServiceNetwork>,
        (endpoint, address): (&SliceEndpoint, IpAddr),
    ) -> bool {
        let sandboxes = self.at.get(&(network.id, address)).into_iter().flatten();
        let mut pods = sandboxes.filter_map(|sandbox| Some(&self.pods.get(sandbox)?.pod));
        let contains = |network: &ServiceNetwork| network.subnets.iter().any(|subnet| subnet.contains(&address));
        match &endpoint.pod {
            Some(pod) => {
                pods.any(|member| (&member.namespace, &member.name) == (&pod.namespace, &pod.name))
                    || !contains(network) && !all.values().any(contains)
            }
            None => pods.next().is_some() || !contains(network),
        }
    }
}

/// The endpoints of a Service that are neither pods of its network nor hosts outside. They get no connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strangers {
    /// The Service.
    pub service: ServiceRef,
    /// Its network.
    pub network: NetworkName,
    /// The lowest of their addresses.
    pub address: IpAddr,
    /// The pod that the slice names there.
    pub pod: Option<PodRef>,
    /// The node that the slice names there.
    pub node: Option<String>,
    /// How many they are.
    pub count: usize,
}

impl fmt::Display for Strangers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "endpoint {}", self.address)?;
        if let Some(pod) = &self.pod {
            write!(f, " (pod {}/{})", pod.namespace, pod.name)?;
        }
        let network = &self.network;
        write!(
            f,
            " is neither a pod of network {network} nor a host outside, and gets no connections"
        )?;
        match self.count {
            0 | 1 => Ok(()),
            2 => f.write_str("; 1 more endpoint likewise"),
            count => write!(f, "; {} more endpoints likewise", count - 1),
        }
    }
}
