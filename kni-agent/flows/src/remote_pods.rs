//! Knows the pods of other nodes by their addresses, as far as they are confirmed members of networks.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, PoisonError, RwLock},
};

use kni_model::{IfName, NetworkId, PodRef, SandboxId, policy::PolicyPod};

/// An interface of a pod of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePod {
    /// The pod.
    pub pod: PodRef,
    /// Name of the interface in the pod.
    pub ifname: IfName,
    /// The network, by its id on this node.
    pub network: NetworkId,
    /// Its addresses, at most one of each family, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Name of the pod's node.
    pub node: String,
}

/// The pods of other nodes in the networks that this node follows; one entry for each interface and for each address.
/// Lookups by address do not depend on their number.
#[derive(Debug, Default)]
pub struct RemotePods(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    pods: BTreeMap<SandboxId, Vec<Arc<RemotePod>>>,
    /// Where two members have one address, the one that was learnt last.
    by_address: HashMap<(NetworkId, IpAddr), (SandboxId, Arc<RemotePod>)>,
}

impl RemotePods {
    /// Adds a pod of a node, or replaces it.
    pub fn put(&self, node: &str, pod: &PolicyPod) {
        let interfaces = pod.interfaces.iter().map(|interface| {
            let addresses = [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)];
            Arc::new(RemotePod {
                pod: pod.pod.clone(),
                ifname: interface.ifname.clone(),
                network: interface.network_id,
                addresses: addresses.into_iter().flatten().collect(),
                node: node.to_owned(),
            })
        });
        let interfaces: Vec<Arc<RemotePod>> = interfaces.collect();
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.remove(&pod.sandbox);
        for interface in &interfaces {
            for address in &interface.addresses {
                let owner = (pod.sandbox.clone(), Arc::clone(interface));
                known.by_address.insert((interface.network, *address), owner);
            }
        }
        known.pods.insert(pod.sandbox.clone(), interfaces);
    }

    /// Removes a pod.
    pub fn remove(&self, id: &SandboxId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// The pod of another node that has an address of a network.
    pub fn at(&self, network: NetworkId, address: IpAddr) -> Option<Arc<RemotePod>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (_, found) = known.by_address.get(&(network, address))?;
        Some(Arc::clone(found))
    }

    /// The interfaces of a pod of another node, by namespace and name. Looks at all pods.
    pub fn of_pod(&self, namespace: &str, name: &str) -> Vec<Arc<RemotePod>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let all = known.pods.values().flatten();
        let found = all.filter(|peer| peer.pod.namespace == namespace && peer.pod.name == name);
        found.map(Arc::clone).collect()
    }
}

impl Known {
    fn remove(&mut self, id: &SandboxId) {
        for interface in self.pods.remove(id).into_iter().flatten() {
            for address in &interface.addresses {
                let key = (interface.network, *address);
                if self.by_address.get(&key).is_some_and(|(owner, _)| owner == id) {
                    self.by_address.remove(&key);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kni_model::policy::PolicyInterface;

    use super::*;

    fn pod(sandbox: &str, name: &str, addresses: [&str; 2]) -> PolicyPod {
        let [ipv4, ipv6] = addresses;
        PolicyPod {
            sandbox: sandbox.parse().unwrap(),
            pod: PodRef {
                namespace: "shop".to_owned(),
                name: name.to_owned(),
                uid: sandbox.to_owned(),
            },
            labels: BTreeMap::new(),
            ports: Vec::new(),
            interfaces: vec![PolicyInterface {
                endpoint: None,
                primary: true,
                ifname: "eth0".parse().unwrap(),
                definition: None,
                network_id: NetworkId::try_from(7).unwrap(),
                network: "red".parse().unwrap(),
                ipv4: Some(ipv4.parse().unwrap()),
                ipv6: Some(ipv6.parse().unwrap()),
            }],
        }
    }

    #[test]
    fn a_pod_is_found_by_its_addresses_until_it_is_gone() {
        let pods = RemotePods::default();
        let network = NetworkId::try_from(7).unwrap();
        let named = |address: &str| {
            let found = pods.at(network, address.parse().unwrap());
            found.map(|found| format!("{} on {}", found.pod, found.node))
        };
        pods.put("n2", &pod("u1", "web", ["10.0.0.65", "fd00::65"]));
        assert_eq!(named("10.0.0.65").as_deref(), Some("shop/web on n2"));
        assert_eq!(named("fd00::65").as_deref(), Some("shop/web on n2"));
        assert_eq!(
            pods.at(NetworkId::try_from(8).unwrap(), "10.0.0.65".parse().unwrap()),
            None
        );
        assert_eq!(pods.of_pod("shop", "web").len(), 1);
        // Another pod gets the address before the end of the first one is known.
        pods.put("n3", &pod("u2", "db", ["10.0.0.65", "fd00::66"]));
        pods.remove(&"u1".parse().unwrap());
        assert_eq!(named("10.0.0.65").as_deref(), Some("shop/db on n3"));
        assert_eq!(named("fd00::65"), None);
        pods.put("n3", &pod("u2", "db", ["10.0.0.67", "fd00::66"]));
        assert_eq!((named("10.0.0.65"), named("10.0.0.67").is_some()), (None, true));
        pods.remove(&"u2".parse().unwrap());
        let known = pods.0.read().unwrap();
        assert!(known.pods.is_empty() && known.by_address.is_empty());
    }
}
