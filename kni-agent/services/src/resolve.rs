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
    service::{EndpointSlice, ExternalAddresses, NodePlace, Service, ServiceNetwork, ServicePort, SliceEndpoint},
};

use super::{
    choose::{Candidate, NoBackendReason, choose},
    external::{Taken, Unserved, served},
    frontend::Frontend,
    members::{Members, Strangers},
    quota::{ServiceQuota, limit},
    service_key,
};

/// The inputs of the engine.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    /// Sorted by reference.
    pub(super) services: Vec<Service>,
    /// Sorted by namespace and name.
    pub(super) slices: Vec<EndpointSlice>,
    pub(super) networks: BTreeMap<NetworkName, ServiceNetwork>,
    pub(super) default_network: Option<NetworkName>,
    pub(super) place: NodePlace,
    pub(super) members: Members,
}

/// The desired state that follows from the inputs.
#[derive(Debug, Default)]
pub(super) struct Desired {
    pub(super) frontends: BTreeMap<ServiceKey, Frontend>,
    pub(super) addresses: BTreeSet<AddressKey>,
    /// Addresses of Services that another proxy serves.
    pub(super) foreign: BTreeMap<NetworkId, BTreeSet<IpAddr>>,
    pub(super) refused: Vec<String>,
    /// By Service, at most one for each network.
    pub(super) strangers: Vec<Strangers>,
    /// By Service, at most one for each network.
    pub(super) unserved: Vec<Unserved>,
    /// Namespaces over their share, with the reason.
    pub(super) overruns: BTreeMap<String, String>,
}

/// Slices by namespace and name of their Service.
type SlicesOf<'a> = BTreeMap<(&'a str, &'a str), Vec<&'a EndpointSlice>>;

/// A slice with its endpoints that the Service's network admits.
type Admitted<'a> = (&'a EndpointSlice, Vec<(&'a SliceEndpoint, IpAddr)>);

/// A Service with addresses outside of the cluster, its network and its endpoints.
type WithExternal<'a> = (&'a Service, (&'a NetworkName, &'a ServiceNetwork), Vec<Admitted<'a>>);

pub(super) fn resolve(inputs: &Inputs, quota: ServiceQuota) -> Desired {
    let mut slices = SlicesOf::new();
    for slice in &inputs.slices {
        let service = (slice.namespace.as_str(), slice.service.as_str());
        slices.entry(service).or_default().push(slice);
    }
    let mut desired = Desired::default();
    let mut external = Vec::new();
    for service in &inputs.services {
        let Some((name, network)) = desired.network(inputs, service) else {
            continue;
        };
        let id = network.id;
        if service.foreign {
            let addresses = service.cluster_ips.iter().map(IpAddr::to_canonical);
            desired.foreign.entry(id).or_default().extend(addresses);
            continue;
        }
        let of_service = (service.reference.namespace.as_str(), service.reference.name.as_str());
        let slices = slices.get(&of_service).map_or([].as_slice(), Vec::as_slice);
        let slices = desired.admitted(inputs, service, (name, network), slices);
        for address in service.cluster_ips.iter().map(IpAddr::to_canonical) {
            desired.addresses.insert(AddressKey {
                network: id.get(),
                address: from_ip(address),
            });
            for port in &service.ports {
                desired.add(&inputs.place, service, port, (name, id), (address, false), &slices);
            }
        }
        if service.external != ExternalAddresses::default() {
            external.push((service, (name, network), slices));
        }
    }
    desired.add_external(inputs, &external);
    let limited = limit(quota, &mut desired.frontends, &mut desired.addresses);
    desired.refused.extend(limited.refused);
    desired.overruns = limited.overruns;
    desired
}

impl Desired {
    /// The network of a Service, if it is known. Without a default network the Services of the default network have
    /// none, which is not reported for each of them; neither are problems of another proxy's Services.
    fn network<'a>(
        &mut self,
        inputs: &'a Inputs,
        service: &'a Service,
    ) -> Option<(&'a NetworkName, &'a ServiceNetwork)> {
        let name = service.network.as_ref().or(inputs.default_network.as_ref())?;
        let network = inputs.networks.get(name);
        if network.is_none() && service.network.is_some() && !service.foreign {
            self.refused
                .push(format!("Service {}: network {name} is not known", service.reference));
        }
        Some((name, network?))
    }

    /// The slices with the endpoints that the network admits, each at its first address. Notes the others if the node
    /// knows them.
    fn admitted<'a>(
        &mut self,
        inputs: &Inputs,
        service: &Service,
        (name, network): (&NetworkName, &ServiceNetwork),
        slices: &[&'a EndpointSlice],
    ) -> Vec<Admitted<'a>> {
        let mut strangers = BTreeMap::new();
        let are_known = inputs.members.are_known(network.id);
        let mut admits = |endpoint: &'a SliceEndpoint| {
            let address = endpoint.addresses.first()?.to_canonical();
            if inputs.members.admits(network, &inputs.networks, (endpoint, address)) {
                return Some((endpoint, address));
            }
            if are_known || endpoint.node.as_ref() == Some(&inputs.place.name) {
                strangers.insert(address, endpoint);
            }
            None
        };
        let admitted = slices.iter().map(|slice| {
            let endpoints = slice.endpoints.iter().filter_map(&mut admits);
            (*slice, endpoints.collect())
        });
        let admitted = admitted.collect();
        let count = strangers.len();
        self.strangers
            .extend(strangers.into_iter().next().map(|(address, endpoint)| Strangers {
                service: service.reference.clone(),
                network: name.clone(),
                address,
                pod: endpoint.pod.clone(),
                node: endpoint.node.clone(),
                count,
            }));
        admitted
    }

    /// Adds the addresses outside of the cluster, after all virtual addresses.
    fn add_external(&mut self, inputs: &Inputs, services: &[WithExternal<'_>]) {
        if services.is_empty() {
            return;
        }
        let addresses = inputs.services.iter().flat_map(|service| &service.cluster_ips);
        let taken = Taken {
            networks: &inputs.networks,
            virtual_addresses: addresses.map(IpAddr::to_canonical).collect(),
        };
        for (service, (name, network), slices) in services {
            let (addresses, unserved) = served(service, network, &taken);
            for address in addresses {
                for port in &service.ports {
                    self.add(
                        &inputs.place,
                        service,
                        port,
                        (name, network.id),
                        (address, true),
                        slices,
                    );
                }
            }
            let count = unserved.len();
            let endpoints = slices.iter().flat_map(|(_, endpoints)| endpoints);
            let first = endpoints.min_by_key(|(_, address)| *address);
            self.unserved
                .extend(unserved.into_iter().next().map(|(address, reason)| Unserved {
                    service: service.reference.clone(),
                    network: (*name).clone(),
                    address,
                    reason,
                    count,
                    node: first.and_then(|(endpoint, _)| endpoint.node.clone()),
                }));
        }
    }

    /// Adds a port at an address, which is one outside of the cluster where `external` is set.
    fn add(
        &mut self,
        place: &NodePlace,
        service: &Service,
        port: &ServicePort,
        (network, id): (&NetworkName, NetworkId),
        (address, external): (IpAddr, bool),
        slices: &[Admitted<'_>],
    ) {
        match self.frontends.entry(service_key(id, address, port.protocol, port.port)) {
            Entry::Vacant(entry) => {
                let candidates = candidates(place, port, address, slices);
                // At an address outside neither policy holds for a pod, as if its packet went there and came back.
                let local_only = service.local_only && !external;
                let mut choice = choose(&candidates, local_only, service.distribution);
                let are_refused = |(slice, admitted): &Admitted<'_>| slice.endpoints.len() > admitted.len();
                if candidates.is_empty() && slices.iter().any(are_refused) {
                    choice.empty = Some(NoBackendReason::NoMember);
                }
                entry.insert(Frontend {
                    service: service.reference.clone(),
                    port: port.clone(),
                    network: network.clone(),
                    address,
                    external,
                    affinity_seconds: service.affinity_seconds,
                    choice,
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
    slices: &[Admitted<'_>],
) -> BTreeMap<BackendValue, Candidate> {
    let mut found = BTreeMap::<BackendValue, Candidate>::new();
    for (slice, endpoints) in slices {
        let numbers = slice.ports.iter();
        let numbers = numbers.filter(|p| p.name == port.name && p.protocol == port.protocol);
        for number in numbers.map(|p| p.port) {
            let of_family = |(_, address): &&(_, IpAddr)| address.is_ipv4() == family_of.is_ipv4();
            for (endpoint, address) in endpoints.iter().filter(of_family) {
                let candidate = Candidate::new(endpoint, place);
                found
                    .entry(backend(*address, number))
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
