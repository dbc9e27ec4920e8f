//! Owns the sandboxes: their order of steps, their locks and the undo of a failed attach.

mod access;
mod attach;
mod delete;
mod detach;
mod existing;
mod garbage;
mod gate;
mod host_ports;
mod lock;
mod relabel;
mod repair;
mod reserve;
mod source_routing;
mod upgrade;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use kni_model::durations::Durations;
use tokio::sync::Semaphore;

pub use self::access::LostRight;
pub(crate) use self::access::Namespaces as JoiningNamespaces;
pub(crate) use self::gate::Gate;
pub(crate) use self::lock::KeyedLocks;
pub use self::{
    delete::DeleteRequest,
    garbage::{Garbage, GarbageRequest},
};
use crate::{interfaces::Interfaces, kernel::Kernel, namespaces::NamespacePool, reaper::Reaper, registry::Registry};

/// So many attaches make interfaces of the agent at once. Each has a thread, and they wait for each other anyway, for
/// the kernel's one network lock.
const MOST_BUILDING: usize = 16;

/// The sandboxes of the node.
pub(crate) struct Sandboxes {
    registry: Arc<Registry>,
    kernel: Arc<Kernel>,
    interfaces: Arc<Interfaces>,
    namespaces: Arc<NamespacePool>,
    reaper: Arc<Reaper>,
    gate: Gate,
    access: Arc<JoiningNamespaces>,
    refusals: access::Refusals,
    locks: KeyedLocks,
    attach_times: Mutex<BTreeMap<&'static str, Durations>>,
    /// Attaches that make interfaces at once.
    building: Semaphore,
    overlay_port: Option<u16>,
}

impl Sandboxes {
    pub(crate) fn new(
        registry: &Arc<Registry>,
        kernel: &Arc<Kernel>,
        interfaces: &Arc<Interfaces>,
        namespaces: &Arc<NamespacePool>,
        reaper: &Arc<Reaper>,
        gate: Gate,
        access: &Arc<JoiningNamespaces>,
    ) -> Self {
        Self {
            registry: Arc::clone(registry),
            kernel: Arc::clone(kernel),
            interfaces: Arc::clone(interfaces),
            namespaces: Arc::clone(namespaces),
            reaper: Arc::clone(reaper),
            gate,
            access: Arc::clone(access),
            refusals: access::Refusals::default(),
            locks: KeyedLocks::default(),
            attach_times: Mutex::default(),
            building: Semaphore::new(MOST_BUILDING),
            overlay_port: None,
        }
    }

    /// Keeps host ports away from the UDP port of the tunnel, where there may be one.
    pub(crate) fn with_tunnel(self, overlay_port: Option<u16>) -> Self {
        Self { overlay_port, ..self }
    }

    /// How long attaching took, by step, successful or not, without repeated requests.
    pub(crate) fn attach_times(&self) -> Vec<(&'static str, Durations)> {
        let times = self.attach_times.lock().unwrap_or_else(PoisonError::into_inner);
        times.iter().map(|(step, durations)| (*step, *durations)).collect()
    }

    /// Notes that a step of an attach began then and has ended now.
    fn note_step(&self, step: &'static str, began: Instant) {
        let took = began.elapsed();
        let mut times = self.attach_times.lock().unwrap_or_else(PoisonError::into_inner);
        times.entry(step).or_default().observe(took);
    }

    /// Lets the policies of adopted pods take effect.
    pub(crate) async fn admit_adopted(
        &self,
        sandboxes: &[Arc<kni_model::Sandbox>],
    ) -> Result<(), crate::error::AttachError> {
        self.gate.adopt(sandboxes).await
    }
}
