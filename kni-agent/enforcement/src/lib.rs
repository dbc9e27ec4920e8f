//! Brings policies and services into force: tells the engines what there is, carries out what they plan, tries again.
//! Layer: service.
//!
//! ```text
//! inputs (manifests, networks, attached pods) -> engine.plan() -> dataplane -> engine.confirm()
//! ```
//!
//! Level-triggered: what failed stays planned, and [`PolicySync::keep_in_force`] tries again until it succeeds. Nothing is
//! changed before all inputs are known: an agent that has just started takes nothing from anybody (I3).

mod keep;
mod names;
mod standing;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kni_dataplane::{Dataplane, DataplaneError};
use kni_model::{
    NetworkId, NetworkName, PolicyStep, SandboxId, ServiceStep,
    policy::{Labels, Policy, PolicyPod},
    service::{EndpointSlice, NodePlace, Service},
};
use kni_policy::PolicyEngine;
use kni_services::ServiceEngine;
pub use names::PolicySummary;
pub use standing::{PolicyCounts, SyncError};
use tokio::sync::Notify;

use self::standing::Standing;

/// What one [`PolicySync::sync`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Rows of the policy tables that were written or removed, endpoints included.
    pub policy_rows: usize,
    /// Rows of the service tables, likewise.
    pub service_rows: usize,
    /// How long it took, waiting for others included.
    pub took: Duration,
}

/// The engines, and the way from them to the dataplane.
///
/// # Guarantees
/// - [`Self::admit`] answers when the pod's policies are in the dataplane's tables, and those of all others too.
/// - An engine believes in a plan only after the dataplane has carried it out.
pub struct PolicySync {
    dataplane: Arc<Dataplane>,
    policy: Mutex<PolicySide>,
    services: Mutex<ServiceSide>,
    /// Pods that have left and that the engine has not been told of yet: who detaches a pod waits for nobody.
    departed: Mutex<Vec<SandboxId>>,
    wanted: Notify,
    standing: Mutex<Standing>,
}

struct PolicySide {
    engine: PolicyEngine,
    has_objects: bool,
    has_pods: bool,
    /// Sets with hits that were in force nowhere when they were last looked for.
    unused: BTreeSet<u32>,
}

struct ServiceSide {
    engine: ServiceEngine,
    has_objects: bool,
    has_networks: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held is a bug; the engines plan from their inputs, whatever was done last.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PolicySync {
    /// Takes over what lies in the dataplane's tables. Changes nothing: that begins when all inputs are known, policy
    /// with [`Self::set_objects`] and [`Self::adopted`], services with [`Self::set_objects`] and [`Self::set_networks`].
    pub fn new(dataplane: Arc<Dataplane>, place: NodePlace) -> Result<Self, DataplaneError> {
        let policy = PolicyEngine::new(dataplane.policy_tables()?);
        let services = ServiceEngine::new(dataplane.service_tables()?, place, dataplane.hz());
        Ok(Self {
            dataplane,
            policy: Mutex::new(PolicySide {
                engine: policy,
                has_objects: false,
                has_pods: false,
                unused: BTreeSet::new(),
            }),
            services: Mutex::new(ServiceSide {
                engine: services,
                has_objects: false,
                has_networks: false,
            }),
            departed: Mutex::default(),
            wanted: Notify::new(),
            standing: Mutex::default(),
        })
    }

    /// Replaces policies, namespaces, services and their endpoints, all of them. [`Self::sync`] puts them into force.
    pub fn set_objects<P: Into<Arc<Policy>>>(
        &self,
        policies: Vec<P>,
        namespaces: BTreeMap<String, Labels>,
        services: Vec<Service>,
        slices: Vec<EndpointSlice>,
    ) {
        {
            let mut side = lock(&self.policy);
            side.engine.set_namespaces(namespaces);
            side.engine.set_policies(policies);
            side.has_objects = true;
        }
        let mut side = lock(&self.services);
        side.engine.set_services(services);
        side.engine.set_slices(slices);
        side.has_objects = true;
    }

    /// Replaces the policies alone. [`Self::sync`] puts them into force.
    pub fn set_policies(&self, policies: Vec<Arc<Policy>>) {
        lock(&self.policy).engine.set_policies(policies);
    }

    /// Replaces the labels of the namespaces alone.
    pub fn set_namespaces(&self, namespaces: BTreeMap<String, Labels>) {
        lock(&self.policy).engine.set_namespaces(namespaces);
    }

    /// Replaces services and their endpoints alone.
    pub fn set_services(&self, services: Vec<Service>, slices: Vec<EndpointSlice>) {
        let mut side = lock(&self.services);
        side.engine.set_services(services);
        side.engine.set_slices(slices);
    }

    /// A pod of another node, which policies may name. [`Self::sync`] puts into force what follows from it.
    pub fn put_peer(&self, pod: PolicyPod) {
        lock(&self.policy).engine.put_pod(pod);
    }

    /// Says which number each network has, and which is the default one.
    pub fn set_networks(&self, networks: BTreeMap<NetworkName, NetworkId>, default: Option<NetworkName>) {
        let mut side = lock(&self.services);
        side.engine.set_networks(networks, default);
        side.has_networks = true;
    }

    /// Puts the policies of a pod into force, with everything else that is planned. Before [`Self::adopted`] it is only
    /// noted. Blocking; a failed one is undone by [`Self::leave`].
    pub fn admit(&self, pod: &PolicyPod) -> Result<(), SyncError> {
        let mut side = lock(&self.policy);
        self.forget_departed(&mut side);
        side.engine.put_pod(pod.clone());
        self.sync_policy(&mut side).map(|_rows| ())
    }

    /// Every pod that was there before this agent has been admitted: policy may come into force. Blocking.
    pub fn adopted(&self) -> Result<(), SyncError> {
        let mut side = lock(&self.policy);
        side.has_pods = true;
        self.sync_policy(&mut side).map(|_rows| ())
    }

    /// A pod is no longer there. Its rows go in the background.
    pub fn leave(&self, sandbox: &SandboxId) {
        lock(&self.departed).push(sandbox.clone());
        self.wanted.notify_one();
    }

    /// Puts everything into force that is known to be wanted. Blocking. A failure in policy does not keep services
    /// back; what failed is tried again in the background.
    pub fn sync(&self) -> Result<SyncReport, SyncError> {
        let started = Instant::now();
        let policy = self.sync_policies();
        let services = self.sync_services();
        Ok(SyncReport {
            policy_rows: policy?,
            service_rows: services?,
            took: started.elapsed(),
        })
    }

    /// [`Self::sync`] for policies alone: the rows that were written or removed. Blocking.
    pub fn sync_policies(&self) -> Result<usize, SyncError> {
        let mut side = lock(&self.policy);
        self.forget_departed(&mut side);
        self.sync_policy(&mut side)
    }

    fn forget_departed(&self, side: &mut PolicySide) {
        let departed = std::mem::take(&mut *lock(&self.departed));
        for sandbox in &departed {
            side.engine.remove_pod(sandbox);
        }
    }

    fn sync_policy(&self, side: &mut PolicySide) -> Result<usize, SyncError> {
        if !(side.has_objects && side.has_pods) {
            return Ok(0);
        }
        let started = Instant::now();
        let steps = side.engine.plan();
        let rows = steps.iter().map(policy_rows).sum();
        let planned = started.elapsed();
        let applied = if steps.is_empty() {
            Ok(())
        } else {
            self.dataplane.apply_policy(&steps)
        };
        if applied.is_ok() && !steps.is_empty() {
            side.engine.confirm();
            tracing::debug!(rows, steps = steps.len(), ?planned, took = ?started.elapsed(), "policies are in force");
        }
        let took = (!steps.is_empty()).then(|| started.elapsed());
        lock(&self.standing).policy_ended(took, applied.as_ref().err());
        applied.map(|()| rows).map_err(SyncError::Policy)
    }

    fn sync_services(&self) -> Result<usize, SyncError> {
        let mut side = lock(&self.services);
        if !(side.has_objects && side.has_networks) {
            return Ok(0);
        }
        let started = Instant::now();
        let steps = side.engine.plan();
        let rows = steps.iter().map(service_rows).sum();
        let applied = if steps.is_empty() {
            Ok(())
        } else {
            self.dataplane.apply_services(&steps)
        };
        if applied.is_ok() && !steps.is_empty() {
            side.engine.confirm();
            tracing::debug!(rows, steps = steps.len(), took = ?started.elapsed(), "services are in force");
        }
        // A service's rows are stronger than a route: one that comes to us has them by now. One that leaves us has neither
        // for a moment, and the sender repeats.
        let applied = applied.and_then(|()| self.dataplane.set_foreign_services(side.engine.left_addresses()));
        lock(&self.standing).services_ended(applied.as_ref().err());
        applied.map(|()| rows).map_err(SyncError::Services)
    }
}

const fn policy_rows(step: &PolicyStep) -> usize {
    match step {
        PolicyStep::PutPorts(rows) => rows.len(),
        PolicyStep::PutPolicy(rows) => rows.len(),
        PolicyStep::PutIdentities(rows) => rows.len(),
        PolicyStep::Enforce(rows) => rows.len(),
        PolicyStep::RemoveIdentities(rows) => rows.len(),
        PolicyStep::RemovePolicy(rows) => rows.len(),
        PolicyStep::RemovePorts(rows) => rows.len(),
    }
}

const fn service_rows(step: &ServiceStep) -> usize {
    match step {
        ServiceStep::PutBackends(rows) => rows.len(),
        ServiceStep::PutServices(rows) => rows.len(),
        ServiceStep::PutAddresses(rows) | ServiceStep::RemoveAddresses(rows) => rows.len(),
        ServiceStep::RemoveServices(rows) => rows.len(),
        ServiceStep::Forget(rows) => rows.len(),
        ServiceStep::RemoveBackends(rows) => rows.len(),
    }
}
