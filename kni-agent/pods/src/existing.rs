//! What a request finds attached already: its own answer, or what another call or sandbox has there.

use std::sync::Arc;

use kni_model::{AttachRequest, Attachment, CniAttachment, Phase, Sandbox};
use kni_netlink::{Netlink, Netns};

use super::{AttachError, Inner, error::Subject, plan::PlannedInterface, provider};

impl Inner {
    /// The answer to a repeated request, or a conflict. What an interrupted call left is cleared away.
    pub(super) async fn existing(
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
            .all(|attachment| provider::exists(&sandbox, attachment));
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
            there.any(|attachment| provider::exists(other, attachment))
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
    pub(super) async fn refuse_present(
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
