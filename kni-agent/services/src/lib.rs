//! What stands behind each virtual address: Services and their endpoints become rows of the service tables.
//! Layer: engine.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{address::from_ip, service::ServiceKey};
use kni_model::{
    NetworkId, NetworkName, ServiceStep, ServiceTables,
    service::{EndpointSlice, NodePlace, Service, ServicePort, ServiceRef},
};

mod choose;
mod known;
mod plan;
mod resolve;
#[cfg(test)]
mod tests;
mod view;

pub use choose::WhyEmpty;
use known::Known;
use resolve::{Inputs, Wanted};
pub use view::FrontendView;

/// Turns Services, their endpoints and the networks into steps that bring the dataplane's service tables there.
///
/// The owner says what there is (`set_*`), asks for a [plan](Self::plan), carries its steps out in order, and
/// [confirms](Self::confirm) when all have succeeded. A plan that is not confirmed may have been carried out in part: the
/// next one writes every row again that it was about. So writing a row replaces it, and removing a row that is not there
/// is no error.
///
/// A row of `SERVICES` names a list of `BACKENDS` that was complete before and never changes; a list is removed no
/// sooner than one whole second after the last row that named it was replaced.
#[derive(Debug)]
pub struct ServiceEngine {
    inputs: Inputs,
    /// Whether an input changed since `wanted` was made.
    changed: bool,
    wanted: Wanted,
    known: Known,
    /// Steps that were given out and not confirmed.
    pending: Vec<ServiceStep>,
    /// Frontends of the last plan, by id.
    ids: BTreeMap<u32, ServiceKey>,
    /// jiffies per second.
    hz: u32,
}

impl ServiceEngine {
    /// An engine without Services. `adopted` is what lies in the dataplane's maps now: ids found there are kept, lists
    /// that stand for what is wanted are used as they are, and everything else is removed by later plans. So the first
    /// plan must wait until all inputs have been set. `place` is this node, `hz` the kernel's jiffies per second.
    pub fn new(adopted: ServiceTables, place: NodePlace, hz: u32) -> Self {
        Self {
            inputs: Inputs {
                place,
                ..Inputs::default()
            },
            changed: true,
            wanted: Wanted::default(),
            known: Known::adopt(adopted),
            pending: Vec::new(),
            ids: BTreeMap::new(),
            hz,
        }
    }

    /// Replaces the Services, all of them. Headless ones must not be among them. Those of another proxy have no rows:
    /// they are told by [`left_addresses`](Self::left_addresses).
    pub fn set_services(&mut self, mut services: Vec<Service>) {
        services.sort_by(|a, b| a.reference.cmp(&b.reference));
        self.changed |= self.inputs.services != services;
        self.inputs.services = services;
    }

    /// Replaces the `EndpointSlice`s, all of them.
    pub fn set_slices(&mut self, mut slices: Vec<EndpointSlice>) {
        slices.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        self.changed |= self.inputs.slices != slices;
        self.inputs.slices = slices;
    }

    /// Says which number each network has, and which is the default one. Services of other networks are not in force.
    pub fn set_networks(&mut self, networks: BTreeMap<NetworkName, NetworkId>, default: Option<NetworkName>) {
        self.changed |= self.inputs.networks != networks || self.inputs.default_network != default;
        self.inputs.networks = networks;
        self.inputs.default_network = default;
    }

    /// A second has passed. Lists that no row names any more are removed by the first plan after the second tick.
    pub fn tick(&mut self) {
        self.known.tick();
    }

    /// The steps from what is known to be in the maps to what is wanted now; empty when nothing is to be done. Cheap when
    /// no input changed, so it may follow every [`tick`](Self::tick).
    pub fn plan(&mut self) -> Vec<ServiceStep> {
        if !self.pending.is_empty() {
            self.known.doubt(&self.pending);
            self.pending.clear();
        }
        if !self.changed && !self.known.has_work() {
            return Vec::new();
        }
        if self.changed {
            self.wanted = resolve::resolve(&self.inputs);
            self.changed = false;
        }
        let plan = plan::plan(&mut self.known, &self.wanted, self.hz);
        self.ids = plan.ids;
        if plan.steps.is_empty() {
            self.known.settle();
        }
        self.pending.clone_from(&plan.steps);
        plan.steps
    }

    /// All steps of the last plan have been carried out.
    pub fn confirm(&mut self) {
        for step in std::mem::take(&mut self.pending) {
            self.known.apply(step);
        }
        self.known.settle();
    }

    /// What is in the maps according to what was adopted and confirmed, lists included that are about to be removed.
    pub fn tables(&self) -> &ServiceTables {
        self.known.tables()
    }

    /// Virtual addresses of Services that another proxy serves, as of the last plan. They have no rows, and packets to
    /// them are to find that proxy. Networks without such Services are left out.
    pub fn left_addresses(&self) -> &BTreeMap<NetworkId, BTreeSet<IpAddr>> {
        &self.wanted.left
    }

    /// The service port with this id, as of the last plan.
    pub fn name(&self, service: u32) -> Option<(ServiceRef, ServicePort)> {
        let frontend = self.wanted.frontends.get(self.ids.get(&service)?)?;
        Some((frontend.service.clone(), frontend.port.clone()))
    }

    /// The frontend at an address and port, as of the last plan.
    pub fn lookup(&self, network: NetworkId, address: IpAddr, protocol: u8, port: u16) -> Option<FrontendView> {
        let key = service_key(network, address, protocol, port);
        let frontend = self.wanted.frontends.get(&key)?;
        Some(FrontendView::new(&key, frontend))
    }

    /// All frontends as of the last plan, by network, address and port.
    pub fn frontends(&self) -> Vec<FrontendView> {
        let frontends = self.wanted.frontends.iter();
        frontends
            .map(|(key, frontend)| FrontendView::new(key, frontend))
            .collect()
    }

    /// What of the Services is not in force and why, as of the last plan: a port that another Service has at the same
    /// address (the first by namespace and name wins), a network that is not known.
    pub fn refused(&self) -> Vec<String> {
        self.wanted.refused.clone()
    }
}

/// The key of a frontend.
fn service_key(network: NetworkId, address: IpAddr, protocol: u8, port: u16) -> ServiceKey {
    ServiceKey {
        network: network.get(),
        address: from_ip(address),
        port: port.to_be_bytes(),
        protocol: u16::from(protocol),
    }
}
