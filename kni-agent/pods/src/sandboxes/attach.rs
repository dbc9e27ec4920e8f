//! Attaches one sandbox: bind, plan, compare, authorize, reserve, build, commit.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use kni_model::{AttachRequest, CniAttachment, Phase, Sandbox, SandboxId, error_chain};
use kni_netlink::{self as netlink, Netns};

use super::{Sandboxes, garbage::since_boot_ns};
use crate::{
    error::{AttachError, ErrorKind, Subject},
    interfaces::{Attempt, Build, Link, Offers},
    plan::{self, PlannedInterface},
};

/// The agent's own limit for one attach, waits for others included. Checked between steps, each of which is bounded by
/// its driver, so that no step is abandoned halfway. Shorter than the limits of kubelets (60 s), so that they get the
/// reason.
const ATTACH_DEADLINE: Duration = Duration::from_secs(45);

/// How long an attach for which no endpoint number is free waits until those of removed interfaces are.
const NUMBER_WAIT: Duration = Duration::from_secs(1);

/// What an attach finds or has reserved.
enum Begun {
    /// The sandbox is attached already.
    Attached(Arc<Sandbox>),
    /// The interfaces are to be made.
    Reserved(Box<Sandbox>, Offers),
}

impl Sandboxes {
    /// Idempotent by sandbox, all or nothing.
    pub(crate) async fn attach(&self, request: &AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        // The pod's own sandbox stays locked: it must not be detached while an additional interface is attached.
        let _parent_stays = match &request.parent {
            Some(parent) => Some(self.locks.lock(parent.as_str()).await),
            None => None,
        };
        let _one_at_a_time = self.locks.lock(request.sandbox.as_str()).await;
        let subject = &Subject::from(request);
        self.refuse_orphan(request, subject)?;
        let started = Instant::now();
        self.registry.note_activity();
        let netns = &self.open_netns(request, subject)?;
        let attempt = Attempt {
            request,
            netns,
            subject,
        };
        let (mut sandbox, offers) = match self.begin(attempt).await {
            Ok(Begun::Attached(attached)) => return Ok(attached),
            Ok(Begun::Reserved(sandbox, offers)) => (*sandbox, offers),
            Err(error) => {
                // So that deleting the sandbox removes the namespace.
                self.namespaces
                    .bind(&request.sandbox, netns)
                    .map_err(|error| error.about(subject))?;
                return Err(error);
            }
        };
        self.note_step("reserve", started);
        let built = self.build_in_turn(&mut sandbox, attempt, &offers, started).await;
        let began = Instant::now();
        let ready = built.and_then(|()| self.commit_ready(&sandbox));
        self.note_step("record", began);
        self.note_step("all", started);
        if let Err(error) = &ready {
            tracing::warn!(pod = %request.pod, sandbox = %request.sandbox, %error, "attach failed, undoing");
            self.undo(&sandbox).await;
            // The attach may have ended before it took the connection.
            self.kernel.disconnect(Some(netns.id()));
        }
        ready
    }

    /// Everything before the first effect. Its last step records the sandbox and binds the namespace to it.
    async fn begin(&self, attempt: Attempt<'_>) -> Result<Begun, AttachError> {
        let Attempt { request, subject, .. } = attempt;
        let planned = self.plan(request)?;
        if let Some(attached) = self.existing(attempt, &planned).await? {
            return Ok(Begun::Attached(attached));
        }
        let facts = self.joining_facts(request)?;
        self.authorize(&self.registry.lock(), &facts, request, &planned)?;
        let mut full_until = None;
        loop {
            // Again in each round: the namespace may have changed meanwhile.
            let offers = self.clear(attempt, &planned).await?;
            // Before the try, so that a removal that ends during it counts. After `clear`, which may wait for another
            // one.
            let removed = self.registry.removed.notified();
            let reserved = self.reserve(attempt, &offers);
            let is_full = |error: &AttachError| matches!(error.kind(), ErrorKind::EndpointsExhausted { .. });
            if reserved.as_ref().is_err_and(is_full) {
                let until = *full_until.get_or_insert_with(|| Instant::now() + NUMBER_WAIT);
                if self.reaper.wait_for_removal(removed, until).await {
                    continue;
                }
            }
            let sandbox = reserved.map_err(|error| {
                let found = |network: &_, address| self.access.holder(network, address);
                error.about(subject).with_holder(found)
            })?;
            return Ok(Begun::Reserved(Box::new(sandbox), offers));
        }
    }

    fn refuse_orphan(&self, request: &AttachRequest, subject: &Subject) -> Result<(), AttachError> {
        let Some(parent) = &request.parent else {
            return Ok(());
        };
        match self.registry.lock().sandboxes.get(parent) {
            Some(found) if found.phase == Phase::Ready => Ok(()),
            Some(_) | None => Err(subject.not_ready(format!("sandbox {parent} is not attached"))),
        }
    }

    fn open_netns(&self, request: &AttachRequest, subject: &Subject) -> Result<Netns, AttachError> {
        let netns = netlink::netns::open(&request.netns).map_err(|error| {
            if error.errno() == Some(libc::ENOENT) {
                subject.error(ErrorKind::NetnsNotFound(request.netns.clone()))
            } else {
                subject.invalid("netns", error_chain(&error))
            }
        })?;
        if netns.id() == self.kernel.home_id() {
            let reason = format!("{} is the node's own network namespace", request.netns.display());
            return Err(subject.invalid("netns", reason));
        }
        Ok(netns)
    }

    fn plan(&self, request: &AttachRequest) -> Result<Vec<PlannedInterface>, AttachError> {
        let state = self.registry.lock();
        if !state.in_sync {
            return Err(Subject::node().error(ErrorKind::NotInSync));
        }
        plan::plan(request, &state.networks)
    }

    /// Binds a namespace to a sandbox whose attach was refused.
    pub(crate) async fn claim(&self, sandbox: &SandboxId, path: &Path) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(sandbox.as_str()).await;
        match netlink::netns::open(path) {
            Ok(netns) => self.namespaces.bind(sandbox, &netns),
            // A namespace that cannot be opened is none of the agent's.
            Err(_not_ours) => Ok(()),
        }
    }

    /// Clears the namespace of earlier interfaces and collects the providers' offers.
    async fn clear(&self, attempt: Attempt<'_>, planned: &[PlannedInterface]) -> Result<Offers, AttachError> {
        let netns = attempt.netns.id();
        if planned.first().is_none_or(|plan| !plan.fits_prewarmed()) {
            let discarded = self.namespaces.discard_prewarmed(netns);
            discarded.map_err(|error| error.about(attempt.subject))?;
        }
        if self.reaper.is_queued(netns) || !planned.iter().all(|plan| plan.network.spec.provider.is_ebpf()) {
            // What follows may take long, and a killed agent must find the namespace bound.
            let bound = self.namespaces.bind(&attempt.request.sandbox, attempt.netns);
            bound.map_err(|error| error.about(attempt.subject))?;
        }
        self.reaper.wait(netns, attempt.subject).await?;
        let all = self.may_be_occupied(attempt);
        // Interfaces of other providers are found by their names inside when they are undone.
        let checked = |plan: &PlannedInterface| all || !plan.fits_prewarmed();
        self.interfaces.refuse_taken_names(attempt, planned, checked).await?;
        self.interfaces.offers(attempt, planned).await
    }

    /// Builds interfaces of the agent on the calling thread: another one for each step that may block would cost more
    /// than most of them. Those of other providers may take long, and wait for other processes.
    async fn build_in_turn(
        &self,
        sandbox: &mut Sandbox,
        attempt: Attempt<'_>,
        offers: &Offers,
        started: Instant,
    ) -> Result<(), AttachError> {
        if !sandbox.attachments.iter().all(|made| made.kind.is_ebpf()) {
            return self.build(sandbox, attempt, offers, started).await;
        }
        let deadline = tokio::time::Instant::from_std(started + ATTACH_DEADLINE);
        let turn = tokio::time::timeout_at(deadline, self.building.acquire()).await;
        let _turn = turn.map_err(|_elapsed| attempt.subject.timeout("waiting for other attaches", ATTACH_DEADLINE))?;
        kni_tasks::in_place_until_done(self.build(sandbox, attempt, offers, started)).await
    }

    async fn build(
        &self,
        sandbox: &mut Sandbox,
        attempt: Attempt<'_>,
        offers: &Offers,
        started: Instant,
    ) -> Result<(), AttachError> {
        let subject = attempt.subject;
        let began = Instant::now();
        // First: interfaces of other providers may carry packets at once.
        let admitted = self.gate.admit(&sandbox.policy_pod(), subject);
        self.note_step("admit", began);
        admitted?;
        let began = Instant::now();
        self.make(sandbox, attempt, offers, started).await?;
        self.route_by_source(sandbox, attempt).await?;
        self.interfaces.publish(&sandbox.attachments, subject)?;
        self.note_step("interfaces", began);
        self.gate.open_host_ports(sandbox, subject)
    }

    async fn make(
        &self,
        sandbox: &mut Sandbox,
        attempt: Attempt<'_>,
        offers: &Offers,
        started: Instant,
    ) -> Result<(), AttachError> {
        let Attempt { netns, subject, .. } = attempt;
        if sandbox.attachments.is_empty() {
            // Those that make an interface set loopback up with it.
            self.interfaces.set_loopback_up(netns, subject).await?;
        }
        for (position, attachment) in sandbox.attachments.iter_mut().enumerate() {
            if started.elapsed() > ATTACH_DEADLINE {
                return Err(subject.timeout("attaching interfaces", ATTACH_DEADLINE));
            }
            let link = {
                let state = self.registry.lock();
                let known = state.networks.get(&attachment.network);
                known.map(|known| Link::from(&known.network.spec)).unwrap_or_default()
            };
            let build = Build {
                subject,
                netns,
                offers,
                position,
                link,
                cni: sandbox.cni.as_ref(),
            };
            self.interfaces.make(&build, attachment).await?;
        }
        self.attach_plugin_veths(sandbox, subject).await
    }

    /// Enforces policy at the host ends that plugins made: their addresses and host ends are known only now.
    async fn attach_plugin_veths(&self, sandbox: &Sandbox, subject: &Subject) -> Result<(), AttachError> {
        let made: Vec<_> = sandbox.attachments.iter().filter(|a| a.kind.is_plugins()).collect();
        if made.is_empty() {
            return Ok(());
        }
        self.gate.admit(&sandbox.policy_pod(), subject)?;
        for attachment in made {
            self.interfaces.attach_plugin_veth(attachment, subject).await?;
        }
        Ok(())
    }

    /// The last step: from here on a restarted agent keeps the sandbox.
    fn commit_ready(&self, sandbox: &Sandbox) -> Result<Arc<Sandbox>, AttachError> {
        let completed_ns = since_boot_ns();
        let sandbox = Sandbox {
            phase: Phase::Ready,
            cni: sandbox.cni.clone().map(|cni| CniAttachment { completed_ns, ..cni }),
            ..sandbox.clone()
        };
        let mut state = self.registry.lock();
        let sandbox = state.put_sandbox(sandbox)?;
        state.announce();
        let is_provisional = |endpoint| self.kernel.dataplane.is_provisional(endpoint);
        if sandbox.attachments.iter().any(|made| is_provisional(made.endpoint)) {
            state.provisional.push_back(sandbox.id.clone());
        }
        drop(state);
        self.registry.note_activity();
        self.registry.background.notify_one();
        Ok(sandbox)
    }

    /// Undoes a failed attach. Unfinished steps stay recorded, and the next detach or start continues with them.
    async fn undo(&self, sandbox: &Sandbox) {
        if let Err(error) = self.detach_locked(sandbox).await {
            tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, %error, "undo is not complete, it stays recorded");
        }
    }
}
