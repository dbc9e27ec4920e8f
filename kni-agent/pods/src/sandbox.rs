//! One attach from request to answer: bind, plan, compare, reserve, build, promise.

use std::{
    path::Path,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use kni_model::{AttachRequest, Attachment, CniAttachment, Phase, Sandbox, SandboxId};
use kni_netlink as netlink;
use kni_netlink::Netns;
use kni_store::{Change, NamespaceRecord, NamespaceUse};

use super::{AttachError, Inner, error::Subject, interface, plan, provider::Offers};

/// The agent's own bound on one attach. Checked between steps, each of which is bounded by its driver, so that nothing
/// is abandoned half done.
const ATTACH_DEADLINE: Duration = Duration::from_secs(20);

/// How long an attach waits until an earlier interface of the same namespace is gone.
const REMOVAL_WAIT: Duration = Duration::from_secs(10);

impl Inner {
    pub(super) async fn attach(&self, request: AttachRequest) -> Result<Arc<Sandbox>, AttachError> {
        // A further interface of a pod neither comes nor stays while the pod's own sandbox goes.
        let _parent_stays = match &request.parent {
            Some(parent) => Some(self.locks.lock(parent.as_str()).await),
            None => None,
        };
        let _one_at_a_time = self.locks.lock(request.sandbox.as_str()).await;
        self.refuse_orphan(&request)?;
        let started = Instant::now();
        self.touch();
        let subject = Subject {
            pod: request.pod.clone(),
            sandbox: request.sandbox.to_string(),
        };
        let netns = self.open_netns(&request)?;
        self.bind(&request.sandbox, &netns)?;
        let planned = {
            let state = self.state();
            if !state.in_sync {
                return Err(AttachError::NotInSync);
            }
            plan::plan(&request, &state.networks)?
        };
        if let Some(answer) = self.existing(&request, &netns, &planned).await? {
            return Ok(answer);
        }
        self.discard_pair(&netns, &planned)?;
        self.wait_for_removals(&netns, &subject).await?;
        self.refuse_present(&request, &netns, &planned, &subject).await?;
        let offers = self.offers(&request, &planned, &netns, &subject).await?;
        let mut sandbox = self.reserve(&request, &netns, &offers)?;
        let built = self.build(&mut sandbox, &netns, &offers, &subject, started).await;
        let promised = built.and_then(|()| self.promise(&sandbox));
        self.attach_times
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .observe(started.elapsed());
        if let Err(error) = &promised {
            tracing::warn!(pod = %request.pod, sandbox = %request.sandbox, %error, "attach failed, undoing");
            self.undo(&sandbox).await;
        }
        promised
    }

    fn refuse_orphan(&self, request: &AttachRequest) -> Result<(), AttachError> {
        let Some(parent) = &request.parent else {
            return Ok(());
        };
        let state = self.state();
        match state.sandboxes.get(parent) {
            Some(found) if found.phase == Phase::Ready => Ok(()),
            Some(_) | None => Err(AttachError::NotReady {
                pod: request.pod.clone(),
                sandbox: request.sandbox.to_string(),
                reason: format!("sandbox {parent} is not attached"),
            }),
        }
    }

    /// The last step: from here on a restarted agent keeps the sandbox.
    fn promise(&self, sandbox: &Sandbox) -> Result<Arc<Sandbox>, AttachError> {
        let completed_ns = super::garbage::since_boot_ns();
        let sandbox = Sandbox {
            phase: Phase::Ready,
            cni: sandbox.cni.clone().map(|cni| CniAttachment { completed_ns, ..cni }),
            ..sandbox.clone()
        };
        let mut state = self.state();
        self.commit(Change::new().sandbox(&sandbox))?;
        let sandbox = Arc::new(sandbox);
        state.sandboxes.insert(sandbox.id.clone(), Arc::clone(&sandbox));
        self.changed();
        if sandbox
            .attachments
            .iter()
            .any(|attachment| self.dataplane.is_provisional(attachment.endpoint))
        {
            state.hasty.push_back(sandbox.id.clone());
        }
        drop(state);
        self.touch();
        self.warm_wanted.notify_one();
        Ok(sandbox)
    }

    fn open_netns(&self, request: &AttachRequest) -> Result<Netns, AttachError> {
        let invalid = |reason: String| AttachError::InvalidField {
            pod: request.pod.clone(),
            sandbox: request.sandbox.to_string(),
            field: "netns",
            reason,
        };
        let netns = netlink::netns::open(&request.netns).map_err(|error| {
            if error.errno() == Some(libc::ENOENT) {
                AttachError::NetnsNotFound {
                    pod: request.pod.clone(),
                    sandbox: request.sandbox.clone(),
                    path: request.netns.clone(),
                }
            } else {
                invalid(super::error::chain(&error))
            }
        })?;
        if netns.id() == self.node_netns {
            return Err(invalid(format!(
                "{} is the node's own network namespace",
                request.netns.display()
            )));
        }
        Ok(netns)
    }

    pub(super) async fn claim(&self, sandbox: &SandboxId, path: &Path) -> Result<(), AttachError> {
        let _one_at_a_time = self.locks.lock(sandbox.as_str()).await;
        match netlink::netns::open(path) {
            Ok(netns) => self.bind(sandbox, &netns),
            // What cannot be opened was not made here.
            Err(_not_ours) => Ok(()),
        }
    }

    /// Ties a namespace of ours to the sandbox before anything can fail, so that deleting the sandbox removes it. One
    /// whose sandbox was detached goes over to the new one: deleting the old sandbox must not touch it any more.
    fn bind(&self, sandbox: &SandboxId, netns: &Netns) -> Result<(), AttachError> {
        let mut state = self.state();
        let Some(record) = state.namespace_of(netns.id()) else {
            return Ok(());
        };
        if let NamespaceUse::Bound { sandbox: holder } = &record.used_by
            && (holder == sandbox || state.sandboxes.contains_key(holder))
        {
            return Ok(());
        }
        let bound = NamespaceRecord {
            used_by: NamespaceUse::Bound {
                sandbox: sandbox.clone(),
            },
            ..record.clone()
        };
        self.commit(Change::new().namespace(&bound))?;
        state.namespaces.insert(bound.path.clone(), bound);
        drop(state);
        self.warm_wanted.notify_one();
        Ok(())
    }

    async fn wait_for_removals(&self, netns: &Netns, subject: &Subject) -> Result<(), AttachError> {
        let deadline = Instant::now() + REMOVAL_WAIT;
        loop {
            let removed = self.removed.notified();
            if !self
                .state()
                .removals
                .values()
                .any(|removal| removal.netns == Some(netns.id()))
            {
                return Ok(());
            }
            self.reaper_wanted.notify_one();
            let left = deadline.saturating_duration_since(Instant::now());
            if tokio::time::timeout(left.min(Duration::from_millis(100)), removed)
                .await
                .is_err()
                && left.is_zero()
            {
                let Subject { pod, sandbox } = subject.clone();
                return Err(AttachError::Timeout {
                    pod,
                    sandbox,
                    step: "removing earlier interfaces",
                    seconds: REMOVAL_WAIT.as_secs(),
                });
            }
        }
    }

    async fn build(
        &self,
        sandbox: &mut Sandbox,
        netns: &Netns,
        offers: &Offers,
        subject: &Subject,
        started: Instant,
    ) -> Result<(), AttachError> {
        self.admit(sandbox, subject).await?;
        for index in 0..sandbox.attachments.len() {
            if started.elapsed() > ATTACH_DEADLINE {
                let Subject { pod, sandbox } = subject.clone();
                return Err(AttachError::Timeout {
                    pod,
                    sandbox,
                    step: "attaching interfaces",
                    seconds: ATTACH_DEADLINE.as_secs(),
                });
            }
            let alias = sandbox
                .attachments
                .get(index)
                .map(|attachment| alias(sandbox, attachment))
                .unwrap_or_default();
            let whole = sandbox.clone();
            let Some(attachment) = sandbox.attachments.get_mut(index) else {
                break;
            };
            if !attachment.kind.is_ebpf() {
                let metric = interface::metric(index);
                self.make(&whole, attachment, netns, offers, metric, subject).await?;
                continue;
            }
            self.build_interface(attachment, netns, &alias, index, subject).await?;
        }
        self.guard(sandbox, subject).await?;
        self.open_host_ports(sandbox, subject).await
    }

    /// Undoes a failed attach. What cannot be undone now stays recorded, and the next detach or start goes on with it.
    async fn undo(&self, sandbox: &Sandbox) {
        if let Err(error) = self.detach_locked(sandbox).await {
            tracing::error!(pod = %sandbox.pod, sandbox = %sandbox.id, %error, "undo is not complete, it stays recorded");
        }
    }
}

/// What `ip link` shows of the interface: whose it is (I4). At most 255 bytes (`IFALIASZ`).
pub(super) fn alias(sandbox: &Sandbox, attachment: &Attachment) -> String {
    let text = format!(
        "{}{}/{} {} {}",
        netlink::own::IFALIAS_PREFIX,
        sandbox.pod.namespace,
        sandbox.pod.name,
        attachment.ifname,
        attachment.network
    );
    text.chars()
        .filter(|c| !c.is_control())
        .scan(0, |bytes, c| {
            *bytes += c.len_utf8();
            (*bytes <= 255).then_some(c)
        })
        .collect()
}
