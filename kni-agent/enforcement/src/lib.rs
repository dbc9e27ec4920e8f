//! Enforces policies and services: passes the inputs to the engines, carries out their plans, and retries failures.
//! Layer: service.
//!
//! ```text
//! inputs (manifests, networks, attached pods) -> engine.plan() -> dataplane -> engine.confirm()
//! ```
//!
//! Level-triggered: failed steps stay planned, and [`Enforcer::reconcile`] retries until they succeed. Nothing is
//! changed before all inputs are known: an agent that has just started removes nothing that is still in use (I3).

mod health;
mod names;
mod reconcile;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

pub use health::{PolicyCounts, SyncError};
use kni_dataplane::{Dataplane, DataplaneError};
use kni_model::{
    NetworkName, PolicyStep, SandboxId, ServiceStep,
    policy::{Labels, Policy, PolicyPod},
    service::{EndpointSlice, NodePlace, Service, ServiceNetwork},
};
use kni_policy::PolicyEngine;
pub use kni_policy::Quota;
use kni_services::ServiceEngine;
pub use kni_services::{ServiceQuota, Strangers, Unserved, UnservedReason};
pub use names::PolicySummary;
use tokio::sync::Notify;

use self::health::Health;

/// The result of one [`Enforcer::sync`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Rows of the policy tables that were written or removed, endpoints included.
    pub policy_rows: usize,
    /// Rows of the service tables, likewise.
    pub service_rows: usize,
    /// Duration, including the wait for other calls.
    pub took: Duration,
}

/// Connects the engines with the dataplane.
///
/// # Guarantees
/// - [`Self::admit`] returns after the policies of the pod, and those of all other pods, are in the dataplane's tables.
/// - An engine treats a plan as done only after the dataplane has carried it out.
pub struct Enforcer {
    dataplane: Arc<Dataplane>,
    policy: Mutex<PolicySide>,
    services: Mutex<ServiceSide>,
    /// Detached pods that the engine has not processed yet: detaching a pod waits for no other work.
    departed: Mutex<Vec<SandboxId>>,
    /// Changes of pods that the service engine has not processed yet, in their order: no pod waits for Services.
    members: Mutex<Vec<MemberChange>>,
    wake: Notify,
    health: Mutex<Health>,
}

struct PolicySide {
    engine: PolicyEngine,
    has_objects: bool,
    has_pods: bool,
    /// Sets with hits that were not in the tables at the last search.
    unused: BTreeSet<u32>,
}

struct ServiceSide {
    engine: ServiceEngine,
    has_objects: bool,
    has_networks: bool,
    has_pods: bool,
}

/// A change of the pods that may be endpoints of Services.
enum MemberChange {
    Put(PolicyPod),
    Remove(SandboxId),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held is a bug; the engines plan from their inputs, regardless of earlier calls.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Enforcer {
    /// Takes over the current content of the dataplane's tables. Changes nothing until all inputs are known: for
    /// policies after [`Self::set_objects`] and [`Self::adopted`], for services also after [`Self::set_networks`].
    /// Last the rows that policies and Services may need.
    pub fn new(
        dataplane: Arc<Dataplane>,
        place: NodePlace,
        (policies, services): (Quota, ServiceQuota),
    ) -> Result<Self, DataplaneError> {
        let policy = PolicyEngine::new(dataplane.policy_tables()?).with_quota(policies);
        let engine = ServiceEngine::new(dataplane.service_tables()?, place, dataplane.hz());
        let services = engine.with_uses(dataplane.service_uses()?).with_quota(services);
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
                has_pods: false,
            }),
            departed: Mutex::default(),
            members: Mutex::default(),
            wake: Notify::new(),
            health: Mutex::default(),
        })
    }

    /// Replaces all policies, namespaces, services and their endpoints. [`Self::sync`] applies them.
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

    /// Replaces the policies only. [`Self::sync`] applies them.
    pub fn set_policies(&self, policies: Vec<Arc<Policy>>) {
        lock(&self.policy).engine.set_policies(policies);
    }

    /// Replaces the labels of the namespaces only.
    pub fn set_namespaces(&self, namespaces: BTreeMap<String, Labels>) {
        lock(&self.policy).engine.set_namespaces(namespaces);
    }

    /// Replaces services and their endpoints only.
    pub fn set_services(&self, services: Vec<Service>, slices: Vec<EndpointSlice>) {
        let mut side = lock(&self.services);
        side.engine.set_services(services);
        side.engine.set_slices(slices);
    }

    /// Adds or replaces a pod of another node that policies may select and that may be an endpoint of Services.
    /// [`Self::sync`] applies the change.
    pub fn put_peer(&self, pod: PolicyPod) {
        lock(&self.members).push(MemberChange::Put(pod.clone()));
        lock(&self.policy).engine.put_pod(pod);
    }

    /// Replaces the networks and the default network.
    pub fn set_networks(&self, networks: BTreeMap<NetworkName, ServiceNetwork>, default: Option<NetworkName>) {
        let mut side = lock(&self.services);
        side.engine.set_networks(networks, default);
        side.has_networks = true;
    }

    /// Enforces the policies of a pod, together with all other planned changes. Before [`Self::adopted`] the pod is
    /// only recorded. As an endpoint of Services it is applied in the background. Blocking; [`Self::leave`] undoes a
    /// failed call.
    pub fn admit(&self, pod: &PolicyPod) -> Result<(), SyncError> {
        lock(&self.members).push(MemberChange::Put(pod.clone()));
        self.wake.notify_one();
        let mut side = lock(&self.policy);
        self.remove_departed(&mut side);
        side.engine.put_pod(pod.clone());
        self.sync_policy(&mut side).map(|_rows| ())
    }

    /// Marks all pods of earlier agents as admitted, and enforces the policies. Blocking.
    pub fn adopted(&self) -> Result<(), SyncError> {
        lock(&self.services).has_pods = true;
        let mut side = lock(&self.policy);
        side.has_pods = true;
        self.sync_policy(&mut side).map(|_rows| ())
    }

    /// Removes a pod. Its rows are removed in the background.
    pub fn leave(&self, sandbox: &SandboxId) {
        lock(&self.departed).push(sandbox.clone());
        lock(&self.members).push(MemberChange::Remove(sandbox.clone()));
        self.wake.notify_one();
    }

    /// Applies all desired changes. Blocking. A failure of the policies does not hold up services; failed changes are
    /// retried in the background.
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

    /// [`Self::sync`] for policies only; returns the number of rows that were written or removed. Blocking.
    pub fn sync_policies(&self) -> Result<usize, SyncError> {
        let mut side = lock(&self.policy);
        self.remove_departed(&mut side);
        self.sync_policy(&mut side)
    }

    fn remove_departed(&self, side: &mut PolicySide) {
        let departed = std::mem::take(&mut *lock(&self.departed));
        for sandbox in &departed {
            side.engine.remove_pod(sandbox);
        }
    }

    fn sync_policy(&self, side: &mut PolicySide) -> Result<usize, SyncError> {
        if !(side.has_objects && side.has_pods) {
            return Ok(0);
        }
        let mut rows = 0;
        let applied = loop {
            let started = Instant::now();
            let steps = side.engine.plan();
            let planned = started.elapsed();
            if steps.is_empty() {
                lock(&self.health).policy_ended(None, None);
                break Ok(rows);
            }
            let changed: usize = steps.iter().map(policy_rows).sum();
            let applied = self.dataplane.apply_policy(&steps);
            lock(&self.health).policy_ended(Some(started.elapsed()), applied.as_ref().err());
            if let Err(error) = applied {
                break Err(error);
            }
            side.engine.confirm();
            rows += changed;
            tracing::debug!(
                rows = changed,
                steps = steps.len(),
                ?planned,
                took = ?started.elapsed(),
                "policies are applied"
            );
            if !side.engine.has_postponed() {
                break Ok(rows);
            }
        };
        lock(&self.health).closed(side.engine.overruns(), side.engine.closed_endpoints());
        applied.map_err(SyncError::Policy)
    }

    fn sync_services(&self) -> Result<usize, SyncError> {
        let mut side = lock(&self.services);
        for change in std::mem::take(&mut *lock(&self.members)) {
            match change {
                MemberChange::Put(pod) => side.engine.put_pod(&pod),
                MemberChange::Remove(sandbox) => side.engine.remove_pod(&sandbox),
            }
        }
        if !(side.has_objects && side.has_networks && side.has_pods) {
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
            tracing::debug!(rows, steps = steps.len(), took = ?started.elapsed(), "services are applied");
        }
        // Rows of a service take precedence over a route: a service that moves to KNI has its rows by now. A service
        // that moves to another proxy has neither for a moment, and the sender retransmits.
        let applied = applied.and_then(|()| self.dataplane.set_foreign_services(side.engine.foreign_addresses()));
        {
            let mut health = lock(&self.health);
            health.services_ended(applied.as_ref().err());
            health.exceeding(side.engine.overruns());
        }
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
        ServiceStep::RemoveFlows(rows) => rows.len(),
        ServiceStep::RemoveBackends(rows) => rows.len(),
    }
}
