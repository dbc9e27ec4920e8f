//! Checks the engine against simulated maps that refuse every illegal step; `choice` and `converge` use random inputs.

use std::collections::BTreeSet;

use kni_common::{
    address::AddressKey,
    service::{BackendValue, SERVICE_DROP_IF_EMPTY, ServiceValue},
};
use kni_model::{
    GoneBackend,
    service::{ExternalAddresses, SliceEndpoint, SlicePort, TrafficDistribution},
};
use maps::Maps;

use super::*;

mod choice;
mod converge;
mod external;
mod foreign;
mod maps;
mod members;
mod restart;
mod rows;
mod shares;
mod stale_flows;
mod steps;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

fn place() -> NodePlace {
    NodePlace {
        name: "here".to_owned(),
        zone: Some("east".to_owned()),
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn network(number: u32) -> NetworkId {
    number.try_into().unwrap()
}

fn network_name(text: &str) -> NetworkName {
    text.parse().unwrap()
}

/// A network. Without subnets, endpoints that name no pod are hosts outside.
fn of_subnets(name: &str, id: u32, subnets: &[&str]) -> (NetworkName, ServiceNetwork) {
    let subnets = subnets.iter().map(|subnet| subnet.parse().unwrap()).collect();
    let id = network(id);
    let network = ServiceNetwork {
        id,
        subnets,
        routed: false,
    };
    (network_name(name), network)
}

fn networks(engine: &mut ServiceEngine) {
    let networks = [("default", 1), ("blue", 2)].map(|(name, id)| of_subnets(name, id, &[]));
    engine.set_networks(networks.into(), Some(network_name("default")));
}

fn engine(adopted: ServiceTables) -> ServiceEngine {
    let mut engine = ServiceEngine::new(adopted, place(), 100);
    networks(&mut engine);
    engine
}

fn port(name: &str, protocol: u8, port: u16) -> ServicePort {
    ServicePort {
        name: name.to_owned(),
        protocol,
        port,
    }
}

/// A Service of the default network in namespace `x` with one port, 80/TCP without a name.
fn service(name: &str, cluster_ips: &[&str]) -> Service {
    Service {
        reference: ServiceRef {
            namespace: "x".to_owned(),
            name: name.to_owned(),
        },
        network: None,
        cluster_ips: cluster_ips.iter().map(|text| ip(text)).collect(),
        foreign: false,
        ports: vec![port("", TCP, 80)],
        affinity_seconds: None,
        local_only: false,
        distribution: TrafficDistribution::Any,
        external: ExternalAddresses::default(),
    }
}

/// A slice of a Service of namespace `x`, for port 8080/TCP without a name.
fn slice(service: &str, name: &str, endpoints: Vec<SliceEndpoint>) -> EndpointSlice {
    EndpointSlice {
        namespace: "x".to_owned(),
        name: name.to_owned(),
        service: service.to_owned(),
        ports: vec![SlicePort {
            name: String::new(),
            protocol: TCP,
            port: 8080,
        }],
        endpoints,
    }
}

/// A ready endpoint on another node, without hints.
fn ready(address: &str) -> SliceEndpoint {
    SliceEndpoint {
        addresses: vec![ip(address)],
        ready: true,
        serving: true,
        terminating: false,
        node: Some("there".to_owned()),
        pod: None,
        for_zones: BTreeSet::new(),
        for_nodes: BTreeSet::new(),
    }
}

fn here(endpoint: SliceEndpoint) -> SliceEndpoint {
    SliceEndpoint {
        node: Some("here".to_owned()),
        ..endpoint
    }
}

/// Serves and is terminating.
fn draining(address: &str) -> SliceEndpoint {
    SliceEndpoint {
        ready: false,
        terminating: true,
        ..ready(address)
    }
}

/// Neither takes new connections nor serves.
fn down(address: &str) -> SliceEndpoint {
    SliceEndpoint {
        ready: false,
        serving: false,
        ..ready(address)
    }
}

fn backend(address: &str, port: u16) -> BackendValue {
    BackendValue {
        address: from_ip(ip(address)),
        port: port.to_be_bytes(),
        zero: 0,
        check: 0,
    }
}

fn key(net: u32, address: &str, protocol: u8, port: u16) -> ServiceKey {
    ServiceKey {
        network: net,
        address: from_ip(ip(address)),
        port: port.to_be_bytes(),
        protocol: u16::from(protocol),
    }
}

fn address_key(net: u32, address: &str) -> AddressKey {
    AddressKey {
        network: net,
        address: from_ip(ip(address)),
    }
}

/// The engine together with its simulated maps.
struct World {
    engine: ServiceEngine,
    maps: Maps,
}

impl World {
    fn new(services: Vec<Service>, slices: Vec<EndpointSlice>) -> Self {
        let mut engine = engine(ServiceTables::default());
        engine.set_services(services);
        engine.set_slices(slices);
        let maps = Maps::default();
        let mut world = Self { engine, maps };
        world.reconcile();
        world
    }

    /// The world with tables of these sizes.
    fn sized(mut self, sizes: ServiceQuota) -> Self {
        self.engine = self.engine.with_quota(sizes);
        self.maps.sizes = sizes;
        self
    }

    /// Plans, carries out and confirms; returns the steps.
    fn reconcile(&mut self) -> Vec<ServiceStep> {
        let steps = self.engine.plan();
        self.maps.carry_out(&steps);
        self.confirm();
        steps
    }

    /// Afterwards the engine knows the content of the maps, except for rows of unreferenced lists that a failed plan
    /// did not write.
    fn confirm(&mut self) {
        self.engine.confirm();
        let mut known = self.engine.tables().clone();
        let there = self.maps.tables();
        if self.maps.failed {
            let named: BTreeSet<u32> = known.services.values().map(|row| row.backends).collect();
            known
                .backends
                .retain(|key, value| there.backends.get(key) == Some(value) || named.contains(&key.backends));
        }
        assert_eq!(known, there, "the engine knows the maps");
    }

    fn set_slices(&mut self, slices: Vec<EndpointSlice>) -> Vec<ServiceStep> {
        self.engine.set_slices(slices);
        self.reconcile()
    }

    fn set_services(&mut self, services: Vec<Service>) -> Vec<ServiceStep> {
        self.engine.set_services(services);
        self.reconcile()
    }

    fn tick(&mut self) {
        self.engine.tick();
        self.maps.now += 1;
    }

    fn row(&self, key: &ServiceKey) -> ServiceValue {
        self.maps.services[key]
    }

    /// The backends that a client of the frontend can reach, as `address:port`.
    fn reach(&self, key: &ServiceKey) -> Vec<String> {
        self.maps.reach(key)
    }
}

fn is_expired(steps: &[ServiceStep]) -> Vec<GoneBackend> {
    let gone = steps.iter().filter_map(|step| match step {
        ServiceStep::RemoveFlows(gone) => Some(gone.clone()),
        ServiceStep::PutBackends(_)
        | ServiceStep::PutServices(_)
        | ServiceStep::PutAddresses(_)
        | ServiceStep::RemoveAddresses(_)
        | ServiceStep::RemoveServices(_)
        | ServiceStep::RemoveBackends(_) => None,
    });
    gone.flatten().collect()
}
