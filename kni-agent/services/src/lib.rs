//! Compiles Services and their endpoints into rows of the service tables.
//! Layer: engine.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{
    address::from_ip,
    service::{BackendValue, ServiceKey},
};
use kni_model::{
    NetworkId, NetworkName, SandboxId, ServiceStep, ServiceTables,
    policy::PolicyPod,
    service::{EndpointSlice, NodePlace, Service, ServiceNetwork, ServicePort, ServiceRef},
};

mod changes;
mod choose;
mod external;
mod frontend;
mod map_state;
mod members;
mod plan;
mod quota;
mod resolve;
#[cfg(test)]
mod tests;
mod view;

pub use choose::NoBackendReason;
pub use external::{Unserved, UnservedReason};
use map_state::MapState;
pub use members::Strangers;
pub use quota::ServiceQuota;
use resolve::{Desired, Inputs};
pub use view::FrontendView;

/// Turns Services, their endpoints and the networks into steps that update the dataplane's service tables.
///
/// The owner sets the inputs (`set_*`), requests a [plan](Self::plan), carries its steps out in order, and
/// [confirms](Self::confirm) when all have succeeded. A plan that is not confirmed may have been carried out in part:
/// the next plan writes all of its rows again. So writing a row replaces it, and removing a missing row is no error.
///
/// A row of `SERVICES` names a list of `BACKENDS` that is complete before and never changes; a list is removed at least
/// one whole second after the last row that named it was replaced.
#[derive(Debug)]
pub struct ServiceEngine {
    inputs: Inputs,
    /// The addresses of all endpoints.
    named: BTreeSet<IpAddr>,
    /// Whether an input changed since `desired` was computed.
    changed: bool,
    desired: Desired,
    maps: MapState,
    quota: ServiceQuota,
    /// Steps that were handed out and not confirmed.
    pending: Vec<ServiceStep>,
    /// Frontends of the last plan, by id.
    ids: BTreeMap<u32, ServiceKey>,
    /// Jiffies per second.
    hz: u32,
}

impl ServiceEngine {
    /// An engine without Services. `adopted` holds the current rows of the dataplane's maps: their ids are retained,
    /// lists that match the desired ones are used as they are, and later plans remove everything else. So the first
    /// plan must wait until all inputs have been set. `place` is this node, `hz` the kernel's jiffies per second.
    pub fn new(adopted: ServiceTables, place: NodePlace, hz: u32) -> Self {
        Self {
            inputs: Inputs {
                place,
                ..Inputs::default()
            },
            named: BTreeSet::new(),
            changed: true,
            desired: Desired::default(),
            maps: MapState::adopt(adopted),
            quota: ServiceQuota::default(),
            pending: Vec::new(),
            ids: BTreeMap::new(),
            hz,
        }
    }

    /// Adds backends that clients of each frontend may still use, also where the adopted rows name none of them.
    #[must_use]
    pub fn with_uses(mut self, uses: BTreeMap<ServiceKey, BTreeSet<BackendValue>>) -> Self {
        self.maps.adopt_uses(uses);
        self
    }

    /// Limits the rows to the sizes of the tables.
    #[must_use]
    pub fn with_quota(mut self, quota: ServiceQuota) -> Self {
        self.quota = quota;
        self
    }

    /// Replaces all Services. They must not include headless ones. Those of another proxy have no rows;
    /// [`foreign_addresses`](Self::foreign_addresses) lists their addresses.
    pub fn set_services(&mut self, mut services: Vec<Service>) {
        services.sort_by(|a, b| a.reference.cmp(&b.reference));
        self.changed |= self.inputs.services != services;
        self.inputs.services = services;
    }

    /// Replaces all `EndpointSlice`s.
    pub fn set_slices(&mut self, mut slices: Vec<EndpointSlice>) {
        slices.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        if self.inputs.slices == slices {
            return;
        }
        self.changed = true;
        let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
        let addresses = endpoints.filter_map(|endpoint| endpoint.addresses.first());
        self.named = addresses.map(IpAddr::to_canonical).collect();
        self.inputs.slices = slices;
    }

    /// Adds or replaces a pod: one of this node, or a confirmed one of another node. Endpoints are checked again only
    /// if one has an address of the pod.
    pub fn put_pod(&mut self, pod: &PolicyPod) {
        self.changed |= self.inputs.members.put(pod, &self.named);
    }

    /// Removes a pod.
    pub fn remove_pod(&mut self, sandbox: &SandboxId) {
        self.changed |= self.inputs.members.remove(sandbox, &self.named);
    }

    /// Replaces the networks and the default network. Services of other networks are not applied.
    pub fn set_networks(&mut self, networks: BTreeMap<NetworkName, ServiceNetwork>, default: Option<NetworkName>) {
        self.changed |= self.inputs.networks != networks || self.inputs.default_network != default;
        self.inputs.networks = networks;
        self.inputs.default_network = default;
    }

    /// Records that a second has passed. The first plan after the second tick removes unreferenced lists.
    pub fn tick(&mut self) {
        self.maps.tick();
    }

    /// The steps from the known state of the maps to the desired state; empty when nothing is to be done. Cheap when no
    /// input changed, so it may follow every [`tick`](Self::tick).
    pub fn plan(&mut self) -> Vec<ServiceStep> {
        if !self.pending.is_empty() {
            self.maps.mark_unconfirmed(&self.pending);
            self.pending.clear();
        }
        if !self.changed && !self.maps.has_work() {
            return Vec::new();
        }
        if self.changed {
            self.desired = resolve::resolve(&self.inputs, self.quota);
            self.changed = false;
        }
        let plan = plan::plan(&mut self.maps, &self.desired, self.hz, self.quota);
        self.ids = plan.ids;
        if plan.steps.is_empty() {
            self.maps.confirm_all();
        }
        self.pending.clone_from(&plan.steps);
        plan.steps
    }

    /// Marks all steps of the last plan as carried out.
    pub fn confirm(&mut self) {
        for step in std::mem::take(&mut self.pending) {
            self.maps.apply(step);
        }
        self.maps.confirm_all();
    }

    /// The adopted and confirmed content of the maps, including lists that are about to be removed.
    pub fn tables(&self) -> &ServiceTables {
        self.maps.tables()
    }

    /// Virtual addresses of Services that another proxy serves, as of the last plan. They have no rows, so that packets
    /// to them reach that proxy. Networks without such Services are left out.
    pub fn foreign_addresses(&self) -> &BTreeMap<NetworkId, BTreeSet<IpAddr>> {
        &self.desired.foreign
    }

    /// The service port with this id, as of the last plan.
    pub fn name(&self, service: u32) -> Option<(ServiceRef, ServicePort)> {
        let frontend = self.desired.frontends.get(self.ids.get(&service)?)?;
        Some((frontend.service.clone(), frontend.port.clone()))
    }

    /// The frontend at an address and port, as of the last plan.
    pub fn lookup(&self, network: NetworkId, address: IpAddr, protocol: u8, port: u16) -> Option<FrontendView> {
        let key = service_key(network, address, protocol, port);
        let frontend = self.desired.frontends.get(&key)?;
        Some(FrontendView::new(&key, frontend))
    }

    /// All frontends as of the last plan, by network, address and port.
    pub fn frontends(&self) -> Vec<FrontendView> {
        let frontends = self.desired.frontends.iter();
        frontends
            .map(|(key, frontend)| FrontendView::new(key, frontend))
            .collect()
    }

    /// The parts of Services that are not applied, with the reasons, as of the last plan: a port that another Service
    /// has at the same address (the first by namespace and name wins), an unknown
    /// network, a namespace over its share, [`Self::strangers`], or [`Self::unserved`].
    pub fn refused(&self) -> Vec<String> {
        let mut refused = self.desired.refused.clone();
        let strangers = self.desired.strangers.iter();
        refused.extend(strangers.map(|strangers| format!("Service {}: {strangers}", strangers.service)));
        let unserved = self.desired.unserved.iter();
        refused.extend(unserved.map(|unserved| format!("Service {}: {unserved}", unserved.service)));
        refused
    }

    /// Namespaces whose Services need more rows than their share, with the reason, as of the last plan.
    pub fn overruns(&self) -> &BTreeMap<String, String> {
        &self.desired.overruns
    }

    /// The endpoints that are neither pods of their Service's network nor hosts outside, as of the last plan. In a
    /// network without a pod of this node, only those that the slices place on this node.
    pub fn strangers(&self) -> &[Strangers] {
        &self.desired.strangers
    }

    /// Addresses outside of the cluster at which pods do not reach their Service, as of the last plan.
    pub fn unserved(&self) -> &[Unserved] {
        &self.desired.unserved
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
