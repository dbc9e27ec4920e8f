//! Combines Services, endpoints and networks into frontends.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
};

use kni_common::{
    address::{AddressKey, from_ip},
    service::{BackendValue, ServiceKey},
};
use kni_model::{
    NetworkId, NetworkName,
    service::{EndpointSlice, NodePlace, Service, ServicePort, ServiceRef},
};

use super::{
    choose::{Candidate, Choice, choose},
    service_key,
};

/// The inputs of the engine.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    /// Sorted by reference.
    pub(super) services: Vec<Service>,
    /// Sorted by namespace and name.
    pub(super) slices: Vec<EndpointSlice>,
    pub(super) networks: BTreeMap<NetworkName, NetworkId>,
    pub(super) default_network: Option<NetworkName>,
    pub(super) place: NodePlace,
}

/// The desired state that follows from the inputs.
#[derive(Debug, Default)]
pub(super) struct Desired {
    pub(super) frontends: BTreeMap<ServiceKey, Frontend>,
    pub(super) addresses: BTreeSet<AddressKey>,
    /// Addresses of Services that another proxy serves.
    pub(super) foreign: BTreeMap<NetworkId, BTreeSet<IpAddr>>,
    pub(super) refused: Vec<String>,
}

/// A service port at one virtual address.
#[derive(Debug)]
pub(super) struct Frontend {
    pub(super) service: ServiceRef,
    pub(super) port: ServicePort,
    pub(super) network: NetworkName,
    pub(super) address: IpAddr,
    pub(super) affinity_seconds: Option<u32>,
    pub(super) choice: Choice,
}

/// Slices by namespace and name of their Service.
type SlicesOf<'a> = BTreeMap<(&'a str, &'a str), Vec<&'a EndpointSlice>>;

pub(super) fn resolve(inputs: &Inputs) -> Desired {
    let mut slices = SlicesOf::new();
    for slice in &inputs.slices {
        let service = (slice.namespace.as_str(), slice.service.as_str());
        slices.entry(service).or_default().push(slice);
    }
    let mut desired = Desired::default();
    for service in &inputs.services {
        let Some((network, id)) = desired.network(inputs, service) else {
            continue;
        };
        if service.foreign {
            let addresses = service.cluster_ips.iter().map(IpAddr::to_canonical);
            desired.foreign.entry(id).or_default().extend(addresses);
            continue;
        }
        let of_service = (service.reference.namespace.as_str(), service.reference.name.as_str());
        let slices = slices.get(&of_service).map_or([].as_slice(), Vec::as_slice);
        for address in service.cluster_ips.iter().map(IpAddr::to_canonical) {
            desired.addresses.insert(AddressKey {
                network: id.get(),
                address: from_ip(address),
            });
            for port in &service.ports {
                desired.add(&inputs.place, service, port, (network, id), address, slices);
            }
        }
    }
    desired
}

impl Desired {
    /// The network of a Service, if it is known. Without a default network the Services of the default network have
    /// none, which is not reported for each of them; neither are problems of another proxy's Services.
    fn network<'a>(&mut self, inputs: &'a Inputs, service: &'a Service) -> Option<(&'a NetworkName, NetworkId)> {
        let name = service.network.as_ref().or(inputs.default_network.as_ref())?;
        let id = inputs.networks.get(name).copied();
        if id.is_none() && service.network.is_some() && !service.foreign {
            self.refused
                .push(format!("Service {}: network {name} is not known", service.reference));
        }
        Some((name, id?))
    }

    fn add(
        &mut self,
        place: &NodePlace,
        service: &Service,
        port: &ServicePort,
        (network, id): (&NetworkName, NetworkId),
        address: IpAddr,
        slices: &[&EndpointSlice],
    ) {
        match self.frontends.entry(service_key(id, address, port.protocol, port.port)) {
            Entry::Vacant(entry) => {
                let candidates = candidates(place, port, address, slices);
                entry.insert(Frontend {
                    service: service.reference.clone(),
                    port: port.clone(),
                    network: network.clone(),
                    address,
                    affinity_seconds: service.affinity_seconds,
                    choice: choose(&candidates, service.local_only, service.distribution),
                });
            }
            Entry::Occupied(entry) => self.refused.push(format!(
                "Service {}: port {:?}: {address} port {} protocol {} of network {network} belongs to Service {}",
                service.reference,
                port.name,
                port.port,
                port.protocol,
                entry.get().service,
            )),
        }
    }
}

/// The endpoints of a service port that have the family of its virtual address.
fn candidates(
    place: &NodePlace,
    port: &ServicePort,
    family_of: IpAddr,
    slices: &[&EndpointSlice],
) -> BTreeMap<BackendValue, Candidate> {
    let mut found = BTreeMap::<BackendValue, Candidate>::new();
    for slice in slices {
        let numbers = slice.ports.iter();
        let numbers = numbers.filter(|p| p.name == port.name && p.protocol == port.protocol);
        for number in numbers.map(|p| p.port) {
            for endpoint in &slice.endpoints {
                let address = endpoint.addresses.first().map(IpAddr::to_canonical);
                let Some(address) = address.filter(|a| a.is_ipv4() == family_of.is_ipv4()) else {
                    continue;
                };
                let candidate = Candidate::new(endpoint, place);
                found
                    .entry(backend(address, number))
                    .and_modify(|known| known.merge(candidate))
                    .or_insert(candidate);
            }
        }
    }
    found
}

fn backend(address: IpAddr, port: u16) -> BackendValue {
    BackendValue {
        address: from_ip(address),
        port: port.to_be_bytes(),
        zero: 0,
        check: 0,
    }
}
