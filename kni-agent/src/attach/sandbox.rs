//! One attach from request to answer: bind, plan, compare, reserve, build, promise.

use std::{
    path::Path,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use super::{
    AttachError, Inner,
    error::Subject,
    interface,
    plan::{self, PlannedInterface},
    provider::Offers,
};
use crate::{
    model::{AttachRequest, Attachment, CniAttachment, Phase, Sandbox, SandboxId},
    netlink::{self, Netlink, Netns},
    store::{Change, NamespaceRecord, NamespaceUse},
};

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

    /// The answer to a repeated request, or a conflict. What an interrupted call left is cleared away.
    async fn existing(
        &self,
        request: &AttachRequest,
        netns: &Netns,
        planned: &[PlannedInterface],
    ) -> Result<Option<Arc<Sandbox>>, AttachError> {
        let found = self.state().sandboxes.get(&request.sandbox).map(Arc::clone);
        let Some(sandbox) = found else {
            return self.refuse_occupied(request, netns).map(|()| None);
        };
        // An interface that is gone, whoever removed it, is made again.
        let whole = sandbox
            .attachments
            .iter()
            .all(|attachment| super::provider::exists(&sandbox, attachment));
        if sandbox.phase != Phase::Ready || !whole {
            self.detach_locked(&sandbox).await?;
            return Ok(None);
        }
        if !same_call(request.cni.as_ref(), sandbox.cni.as_ref()) {
            return Err(AttachError::Conflict {
                pod: request.pod.clone(),
                sandbox: request.sandbox.clone(),
                reason: "it is attached already, by an earlier call".to_owned(),
            });
        }
        let same_interfaces = sandbox.attachments.len() == planned.len()
            && sandbox
                .attachments
                .iter()
                .zip(planned)
                .all(|(attachment, plan)| satisfies(attachment, plan));
        if sandbox.netns_identity == netns.id() && same_interfaces {
            return Ok(Some(sandbox));
        }
        let reason = if same_interfaces {
            format!(
                "it is attached already, in another network namespace ({})",
                sandbox.netns.display()
            )
        } else {
            "it is attached already, with other networks, interfaces or addresses".to_owned()
        };
        Err(AttachError::Conflict {
            pod: request.pod.clone(),
            sandbox: request.sandbox.clone(),
            reason,
        })
    }

    fn refuse_occupied(&self, request: &AttachRequest, netns: &Netns) -> Result<(), AttachError> {
        let state = self.state();
        let mut holders = state
            .sandboxes
            .values()
            .filter(|other| other.netns_identity == netns.id() && !may_share(request, other));
        // The number of a dead namespace may be used again: its interfaces died with it.
        match holders.find(|other| {
            let mut there = other.attachments.iter();
            there.any(|attachment| super::provider::exists(other, attachment))
        }) {
            Some(other) => Err(AttachError::Conflict {
                pod: request.pod.clone(),
                sandbox: request.sandbox.clone(),
                reason: format!(
                    "network namespace {} belongs to sandbox {}",
                    request.netns.display(),
                    other.id
                ),
            }),
            None => Ok(()),
        }
    }

    /// A CNI runtime that asks for an interface which is there has mistaken the container for another.
    async fn refuse_present(
        &self,
        request: &AttachRequest,
        netns: &Netns,
        planned: &[PlannedInterface],
        subject: &Subject,
    ) -> Result<(), AttachError> {
        let made_here = self.state().namespace_of(netns.id()).is_some();
        if (request.cni.is_none() && request.parent.is_none()) || (made_here && request.parent.is_none()) {
            return Ok(());
        }
        let inside = Netlink::in_namespace(netns)
            .await
            .map_err(subject.failed("entering the network namespace"))?;
        for interface in planned {
            let present = inside.get_link(&interface.ifname).await;
            if present.map_err(subject.failed("looking for the interface"))?.is_some() {
                return Err(AttachError::Conflict {
                    pod: request.pod.clone(),
                    sandbox: request.sandbox.clone(),
                    reason: format!(
                        "network namespace {} has an interface {} already",
                        request.netns.display(),
                        interface.ifname
                    ),
                });
            }
        }
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

/// Whether an attachment is what the plan asks for; addresses and MAC count only where they were asked for.
fn satisfies(attachment: &Attachment, plan: &PlannedInterface) -> bool {
    attachment.ifname == plan.ifname
        && attachment.network_id == plan.network.id
        && attachment.default_route == plan.default_route
        && plan.mac.is_none_or(|mac| mac == attachment.mac)
        && plan.ips.iter().all(|ip| match ip {
            std::net::IpAddr::V4(v4) => attachment.ipv4 == Some(*v4),
            std::net::IpAddr::V6(v6) => attachment.ipv6 == Some(*v6),
        })
}

/// Whether both are one call, perhaps repeated. Clients of KNI repeat theirs as they like.
fn same_call(asked: Option<&CniAttachment>, attached: Option<&CniAttachment>) -> bool {
    let key = |cni: &CniAttachment| (cni.network.clone(), cni.invocation.clone());
    asked.map(key) == attached.map(key)
}

/// Whether a request may have a namespace together with a sandbox: both are interfaces of one container, by different
/// names, each added by a CNI call of its own.
fn may_share(request: &AttachRequest, other: &Sandbox) -> bool {
    if request.parent.is_some() && (request.parent.as_ref() == Some(&other.id) || request.parent == other.parent) {
        return true;
    }
    // A repeated call of the pod's own sandbox finds its further interfaces.
    if other.parent.as_ref() == Some(&request.sandbox) {
        return true;
    }
    match (&request.cni, &other.cni) {
        (Some(asked), Some(there)) => asked.container == there.container && asked.ifname != there.ifname,
        _ => false,
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
