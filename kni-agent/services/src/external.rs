//! Decides by which addresses outside of the cluster the pods of a network reach a Service.
//!
//! An address that only a load balancer's controller can write leads to the backends, one that a writer of Services
//! chooses does not: it would take the connections of all pods of the network to any host outside.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use kni_model::{
    NetworkName,
    service::{Service, ServiceNetwork, ServiceRef},
};

/// Addresses of a Service outside of the cluster at which the pods of its network do not reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unserved {
    /// The Service.
    pub service: ServiceRef,
    /// Its network.
    pub network: NetworkName,
    /// The lowest of the addresses.
    pub address: IpAddr,
    /// Why that one leads nowhere.
    pub reason: UnservedReason,
    /// How many they are.
    pub count: usize,
    /// The node of the first endpoint, one of those of the Service.
    pub node: Option<String>,
}

/// Why an address leads to no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnservedReason {
    /// `spec.externalIPs`, in a network that has no other proxy.
    #[error("spec.externalIPs is not served, because a writer of Services can take any address with it")]
    Chosen,
    /// `spec.loadBalancerSourceRanges` leaves out some of the network's pods, and the rows know no clients.
    #[error("spec.loadBalancerSourceRanges does not admit all pods of the network")]
    Clients,
    /// The address is in a subnet of a network, or the virtual address of a Service.
    #[error("it is in a subnet of a network, or the clusterIP of a Service")]
    InUse,
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            network,
            address,
            reason,
            ..
        } = self;
        write!(f, "pods of network {network} do not reach it at {address}: {reason}")?;
        match self.count {
            0 | 1 => Ok(()),
            2 => f.write_str("; they do not reach it at 1 more address"),
            count => write!(f, "; they do not reach it at {} more addresses", count - 1),
        }
    }
}

/// The addresses that lead to pods and Services already.
pub(super) struct Taken<'a> {
    /// Those of all networks.
    pub(super) networks: &'a BTreeMap<NetworkName, ServiceNetwork>,
    /// Those of all Services.
    pub(super) virtual_addresses: BTreeSet<IpAddr>,
}

impl Taken<'_> {
    fn contains(&self, address: IpAddr) -> bool {
        let mut subnets = self.networks.values().flat_map(|network| &network.subnets);
        self.virtual_addresses.contains(&address) || subnets.any(|subnet| subnet.contains(&address))
    }
}

/// The addresses that lead to the backends of the Service, and the others with the reasons. A network whose packets
/// take the node's stack leaves to the proxy there what it does not serve.
pub(super) fn served(
    service: &Service,
    network: &ServiceNetwork,
    taken: &Taken<'_>,
) -> (BTreeSet<IpAddr>, BTreeMap<IpAddr, UnservedReason>) {
    let external = &service.external;
    let (mut served, mut unserved) = (BTreeSet::new(), BTreeMap::new());
    for address in &external.balanced {
        if taken.contains(*address) {
            unserved.insert(*address, UnservedReason::InUse);
        } else if admits_all(service, network, *address) {
            served.insert(*address);
        } else if !network.routed {
            unserved.insert(*address, UnservedReason::Clients);
        }
    }
    if !network.routed {
        let others = external.chosen.difference(&external.balanced);
        unserved.extend(others.map(|address| (*address, UnservedReason::Chosen)));
    }
    (served, unserved)
}

/// Whether the load balancer admits all pods of the network that have an address of the family.
fn admits_all(service: &Service, network: &ServiceNetwork, family_of: IpAddr) -> bool {
    let Some(clients) = &service.external.clients else {
        return true;
    };
    let subnets = network.subnets.iter();
    let mut subnets = subnets
        .filter(|subnet| subnet.addr().is_ipv4() == family_of.is_ipv4())
        .peekable();
    subnets.peek().is_some() && subnets.all(|subnet| clients.iter().any(|range| range.contains(subnet)))
}
