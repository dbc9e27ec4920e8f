//! Compares a request with existing attachments: answers a repeated request, refuses a conflicting one.

use std::{net::IpAddr, sync::Arc};

use kni_model::{AttachRequest, Attachment, CniAttachment, Phase, Sandbox};

use super::Sandboxes;
use crate::{
    error::AttachError,
    interfaces::{Attempt, exists},
    plan::PlannedInterface,
};

impl Sandboxes {
    /// The answer to a repeated request, or a conflict. Removes the leftovers of an interrupted call.
    pub(super) async fn existing(
        &self,
        attempt: Attempt<'_>,
        planned: &[PlannedInterface],
    ) -> Result<Option<Arc<Sandbox>>, AttachError> {
        let Attempt {
            request,
            netns,
            subject,
        } = attempt;
        let found = self.registry.lock().sandbox(&request.sandbox);
        let Some(sandbox) = found else {
            return self.refuse_occupied(attempt).map(|()| None);
        };
        // A missing interface, whichever process removed it, is made again.
        let whole = sandbox.attachments.iter().all(|made| exists(&sandbox, made));
        if sandbox.phase != Phase::Ready || !whole {
            self.detach_locked(&sandbox).await?;
            return Ok(None);
        }
        if !same_call(request.cni.as_ref(), sandbox.cni.as_ref()) {
            return Err(subject.conflict("it is attached already, by an earlier call"));
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
        Err(subject.conflict(if same_interfaces {
            format!(
                "it is attached already, in another network namespace ({})",
                sandbox.netns.display()
            )
        } else {
            "it is attached already, with other networks, interfaces or addresses".to_owned()
        }))
    }

    fn refuse_occupied(&self, attempt: Attempt<'_>) -> Result<(), AttachError> {
        let Attempt {
            request,
            netns,
            subject,
        } = attempt;
        let state = self.registry.lock();
        let others = state.sandboxes.values();
        let mut holders = others.filter(|other| other.netns_identity == netns.id() && !may_share(request, other));
        // The number of a deleted namespace may be used again: its interfaces were deleted with it.
        let lives = |other: &&Arc<Sandbox>| other.attachments.iter().any(|made| exists(other, made));
        match holders.find(lives) {
            Some(other) => {
                let (path, holder) = (request.netns.display(), &other.id);
                Err(subject.conflict(format!("network namespace {path} belongs to sandbox {holder}")))
            }
            None => Ok(()),
        }
    }

    /// Whether the namespace may have interfaces of other origin: a CNI runtime that requests an existing interface has
    /// confused two containers.
    pub(super) fn may_be_occupied(&self, attempt: Attempt<'_>) -> bool {
        let Attempt { request, netns, .. } = attempt;
        request.parent.is_some() || (request.cni.is_some() && !self.namespaces.is_ours(netns.id()))
    }
}

/// Whether an attachment fulfils the plan; addresses and MAC count only where they were requested.
fn satisfies(attachment: &Attachment, plan: &PlannedInterface) -> bool {
    attachment.ifname == plan.ifname
        && attachment.network_id == plan.network.id
        && attachment.default_route == plan.default_route
        && plan.mac.is_none_or(|mac| mac == attachment.mac)
        && plan.ips.iter().all(|ip| match ip {
            IpAddr::V4(v4) => attachment.ipv4 == Some(*v4),
            IpAddr::V6(v6) => attachment.ipv6 == Some(*v6),
        })
}

/// Whether both belong to one call, perhaps repeated. Clients of KNI may repeat calls freely.
fn same_call(requested: Option<&CniAttachment>, attached: Option<&CniAttachment>) -> bool {
    let key = |cni: &CniAttachment| (cni.network.clone(), cni.invocation.clone());
    requested.map(key) == attached.map(key)
}

/// Whether a request may share a namespace with a sandbox: both are interfaces of one container, with different names,
/// each added by a separate CNI call.
fn may_share(request: &AttachRequest, other: &Sandbox) -> bool {
    if request.parent.is_some() && (request.parent.as_ref() == Some(&other.id) || request.parent == other.parent) {
        return true;
    }
    // A repeated call of the pod's own sandbox finds its additional interfaces.
    if other.parent.as_ref() == Some(&request.sandbox) {
        return true;
    }
    match (&request.cni, &other.cni) {
        (Some(requested), Some(there)) => requested.container == there.container && requested.ifname != there.ifname,
        _ => false,
    }
}
