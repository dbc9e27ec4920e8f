//! Repairs what other processes take away while the agent runs: programs, pins, and the state's file.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kni_model::{Attachment, EndpointId, Phase, Sandbox, error_chain};
use kni_uplink::Uplink;
use tokio::{task::JoinSet, time::MissedTickBehavior};

use crate::{interfaces, kernel::Kernel, registry::Registry, sandboxes::Sandboxes};

/// How often programs and pins are checked: an interface without its program is closed within a second.
const ROUND: Duration = Duration::from_millis(400);

/// The background repair.
pub(crate) struct Repair {
    registry: Arc<Registry>,
    kernel: Arc<Kernel>,
    sandboxes: Arc<Sandboxes>,
    uplink: Arc<Uplink>,
    programs: AtomicU64,
    pins: AtomicU64,
}

impl Repair {
    pub(crate) fn new(
        registry: &Arc<Registry>,
        kernel: &Arc<Kernel>,
        sandboxes: &Arc<Sandboxes>,
        uplink: Arc<Uplink>,
    ) -> Self {
        Self {
            registry: Arc::clone(registry),
            kernel: Arc::clone(kernel),
            sandboxes: Arc::clone(sandboxes),
            uplink,
            programs: AtomicU64::new(0),
            pins: AtomicU64::new(0),
        }
    }

    /// Interfaces whose programs were attached again, and pins that were made again.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.programs.load(Ordering::Relaxed), self.pins.load(Ordering::Relaxed))
    }

    /// The interfaces that are closed, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let closed = self.kernel.closed();
        let state = self.registry.lock();
        let attached = state
            .attachments()
            .filter(|(_, found)| closed.contains(&found.endpoint));
        attached
            .map(|(sandbox, found)| {
                let (ifname, pod) = (&found.host_ifname, &sandbox.pod);
                format!("interface {ifname} of pod {pod} is closed: its programs cannot be attached")
            })
            .collect()
    }

    /// Runs until the agent stops.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut repairs = Repairs::default();
        while !self.registry.is_stopping() {
            kni_tasks::waiting(ticks.tick()).await;
            let this = Arc::clone(&self);
            match tokio::task::spawn_blocking(move || this.look()).await {
                Ok(damaged) => {
                    for (sandbox, attachment) in damaged {
                        repairs.begin(&self, sandbox, attachment);
                    }
                }
                Err(ended) => tracing::error!(%ended, "the check of programs and pins panicked"),
            }
            self.check_filters(&mut repairs).await;
        }
    }

    /// Looks after the file and the pins, and returns the interfaces that lack a program.
    fn look(&self) -> Vec<(Arc<Sandbox>, Attachment)> {
        self.registry.maintain_store();
        match self.kernel.dataplane.restore_pins() {
            Ok(0) => {}
            Ok(count) => {
                self.pins
                    .fetch_add(count.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
                tracing::warn!(count, "pins of maps and programs were removed; they are made again");
            }
            Err(error) => tracing::error!(error = error_chain(&error), "cannot pin maps and programs again"),
        }
        self.uplink.check_programs();
        let closed = self.kernel.closed();
        let mut attached = self.attached();
        attached.retain(|(_, found)| closed.contains(&found.endpoint) || self.lacks_program(found));
        attached
    }

    fn lacks_program(&self, found: &Attachment) -> bool {
        let dataplane = &self.kernel.dataplane;
        interfaces::host_end_exists(found)
            && !dataplane.is_attached(
                found.host_ifname.as_str(),
                found.host_ifindex,
                found.endpoint,
                found.xdp,
            )
    }

    fn attached(&self) -> Vec<(Arc<Sandbox>, Attachment)> {
        let state = self.registry.lock();
        let ready = state.attachments().filter(|(sandbox, _)| sandbox.phase == Phase::Ready);
        ready
            .filter(|(_, found)| found.kind.has_row())
            .map(|(sandbox, found)| (Arc::clone(sandbox), found.clone()))
            .collect()
    }

    /// Filters have no links that could be asked; the kernel lists them by interface.
    async fn check_filters(self: &Arc<Self>, repairs: &mut Repairs) {
        for (sandbox, attachment) in self.attached() {
            let ifindex = attachment.host_ifindex;
            if !self.kernel.dataplane.is_on_clsact(attachment.endpoint) || !interfaces::host_end_exists(&attachment) {
                continue;
            }
            match self
                .kernel
                .netlink
                .has_filters(ifindex, kni_dataplane::FILTER_PRIORITY)
                .await
            {
                Ok(true) => {}
                Ok(false) => repairs.begin(self, sandbox, attachment),
                Err(error) => tracing::debug!(error = error_chain(&error), "cannot list the filters of an interface"),
            }
        }
    }

    /// Under the sandbox's lock: it may be detached or upgraded meanwhile.
    async fn repair(&self, sandbox: &Sandbox, attachment: &Attachment) {
        let repaired = self.sandboxes.repair(sandbox, attachment).await;
        if repaired {
            self.programs.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The repairs that run: one that waits for the lock of its sandbox delays no other.
#[derive(Default)]
struct Repairs {
    running: JoinSet<EndpointId>,
    endpoints: BTreeSet<EndpointId>,
}

impl Repairs {
    /// Begins a repair, unless one of the interface runs.
    fn begin(&mut self, repair: &Arc<Repair>, sandbox: Arc<Sandbox>, attachment: Attachment) {
        while let Some(ended) = self.running.try_join_next() {
            match ended {
                Ok(endpoint) => drop(self.endpoints.remove(&endpoint)),
                Err(error) => {
                    tracing::error!(%error, "a repair panicked");
                    // Which one is not known.
                    self.endpoints.clear();
                }
            }
        }
        if self.endpoints.insert(attachment.endpoint) {
            let repair = Arc::clone(repair);
            self.running.spawn(async move {
                repair.repair(&sandbox, &attachment).await;
                attachment.endpoint
            });
        }
    }
}
