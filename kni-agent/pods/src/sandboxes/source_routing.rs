//! Decides which interfaces of a pod have rules by source address: all of a pod with more than one interface.
//!
//! Sandboxes that share a namespace are interfaces of one pod, each with a life cycle of its own. Beside an additional
//! one there is another interface, which may be that of another plugin and in no record.

use std::sync::Arc;

use kni_model::{Attachment, NetnsIdentity, Phase, Sandbox, SandboxId};
use kni_netlink::{self as netlink, SourceRouting};
use tokio::sync::OwnedMutexGuard;

use super::Sandboxes;
use crate::{
    error::AttachError,
    interfaces::{Attempt, exists, source_routing},
    registry::State,
};

impl Sandboxes {
    /// Adds the rules of a sandbox whose interfaces are made, and those of the interfaces that its pod had before. No
    /// request to the kernel for a pod with one interface.
    pub(super) async fn route_by_source(&self, sandbox: &Sandbox, attempt: Attempt<'_>) -> Result<(), AttachError> {
        let _one_at_a_time = self.rules_of(sandbox.netns_identity).await;
        let (present, new) = {
            let state = self.registry.lock();
            let others = others(&state, &sandbox.id, sandbox.netns_identity);
            let attachments = others.iter().flat_map(|other| &other.attachments);
            if sandbox.is_primary() && attachments.chain(&sandbox.attachments).count() < 2 {
                return Ok(());
            }
            // Those of an attach that has not ended add their own.
            let ready = others.iter().filter(|other| other.phase == Phase::Ready);
            let ready = ready.flat_map(|other| &other.attachments);
            (routings(&state, ready), routings(&state, &sandbox.attachments))
        };
        let added = source_routing::add(attempt.netns, present, new).await;
        added.map_err(attempt.subject.failed("adding routes by source address"))
    }

    /// Removes the rules of a sandbox whose traffic has stopped, and those of the one interface that its pod has left:
    /// unless the default routes went with the sandbox, so that replies depend on its table.
    pub(super) async fn unroute_by_source(&self, sandbox: &Sandbox) -> netlink::Result<()> {
        let _one_at_a_time = self.rules_of(sandbox.netns_identity).await;
        let gone = {
            let state = self.registry.lock();
            let others = others(&state, &sandbox.id, sandbox.netns_identity);
            let (gone, left) = (&sandbox.attachments, left(&others));
            if !has_rules(sandbox.is_primary(), gone, &left) {
                return Ok(());
            }
            let gone = gone.iter().chain(needs_none_now(&left));
            routings(&state, gone)
        };
        source_routing::remove(sandbox, gone).await
    }

    /// Waits until no other sandbox of the namespace changes rules: they are decided by the interfaces of all. The last
    /// lock that an attach or a detach takes; no sandbox has such a name.
    async fn rules_of(&self, netns: NetnsIdentity) -> OwnedMutexGuard<()> {
        self.locks.lock(&format!("rules of {netns:?}")).await
    }
}

/// An interface that stays, and whether it belongs to the pod's own sandbox.
type Left<'a> = (bool, &'a Attachment);

fn left(others: &[Arc<Sandbox>]) -> Vec<Left<'_>> {
    let all = others.iter().map(|other| (other.is_primary(), &other.attachments));
    all.flat_map(|(primary, made)| made.iter().map(move |made| (primary, made)))
        .collect()
}

/// Whether interfaces that go may have rules. An only one has them where it lost the default routes to another one.
fn has_rules(primary: bool, gone: &[Attachment], left: &[Left<'_>]) -> bool {
    !primary || gone.len() + left.len() > 1 || gone.iter().any(|only| !only.default_route)
}

/// The only interface of a pod, unless replies depend on its table.
fn needs_none_now<'a>(left: &[Left<'a>]) -> Option<&'a Attachment> {
    match left {
        [(true, only)] if only.default_route => Some(only),
        _ => None,
    }
}

/// The other sandboxes of a namespace that stay. Of a namespace that is gone the kernel may have given the identity to
/// a new one: only interfaces that exist count.
fn others(state: &State, id: &SandboxId, netns: NetnsIdentity) -> Vec<Arc<Sandbox>> {
    let others = state.sandboxes.values();
    let others = others.filter(|other| other.netns_identity == netns && other.id != *id);
    let others = others.filter(|other| other.phase != Phase::Deleting);
    let lives = |other: &&Arc<Sandbox>| {
        let mut made = other.attachments.iter();
        other.phase == Phase::Pending || made.any(|attachment| exists(other, attachment))
    };
    let mut others: Vec<Arc<Sandbox>> = others.filter(lives).map(Arc::clone).collect();
    // The primary interface has the better rule, as it has the better routes.
    others.sort_by(|a, b| (!a.is_primary(), &a.id).cmp(&(!b.is_primary(), &b.id)));
    others
}

fn routings<'a>(state: &State, attachments: impl IntoIterator<Item = &'a Attachment>) -> Vec<SourceRouting> {
    let of = |attachment: &Attachment| {
        let known = state.networks.get(&attachment.network);
        source_routing::source_routing(attachment, known.map(|known| &known.network.spec))
    };
    attachments.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use kni_model::InterfaceKind;

    use super::*;
    use crate::plan;

    fn attachment(default_route: bool) -> Attachment {
        Attachment {
            default_route,
            ..plan::tests::attachment(InterfaceKind::Veth)
        }
    }

    #[test]
    fn one_interface_with_the_default_routes_has_no_rules_and_costs_its_detach_nothing() {
        let (routed, other) = ([attachment(true)], [attachment(false)]);
        let beside = [(false, &other[0])];
        assert!(!has_rules(true, &routed, &[]));
        assert!(has_rules(true, &routed, &beside) && has_rules(false, &other, &[(true, &routed[0])]));
        assert!(has_rules(true, &[attachment(true), attachment(false)], &[]));
        // It may have kept them when the interface with the default routes went.
        assert!(has_rules(true, &other, &[]));
        // An additional one, beside the interface of another plugin.
        assert!(has_rules(false, &routed, &[]));
    }

    #[test]
    fn the_only_interface_that_is_left_keeps_rules_that_it_depends_on() {
        let (routed, other) = (attachment(true), attachment(false));
        assert_eq!(needs_none_now(&[(true, &routed)]), Some(&routed));
        assert_eq!(needs_none_now(&[(true, &other)]), None, "without the default routes");
        assert_eq!(needs_none_now(&[(false, &routed)]), None, "an additional one");
        assert_eq!(needs_none_now(&[(true, &routed), (false, &other)]), None);
        assert_eq!(needs_none_now(&[]), None);
    }
}
