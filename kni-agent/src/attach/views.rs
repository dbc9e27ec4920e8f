//! Answers questions about the state, compared with the kernel where that is cheap.

use std::sync::Arc;

use super::{Inner, state::State};
use crate::{
    dataplane::EndpointConfig,
    model::{
        Attachment, EndpointId, NetworkName, Phase, PodRef, Sandbox,
        view::{DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, StatusView},
    },
};

/// Whose an endpoint is.
pub(super) struct Owner {
    pub(super) network: Option<NetworkName>,
    pub(super) pod: PodRef,
    pub(super) ifname: String,
}

/// Whether the host end still exists under its own name and index. One system call, no netlink.
pub(super) fn host_link_exists(attachment: &Attachment) -> bool {
    nix::net::if_::if_nametoindex(attachment.host_ifname.as_str()).is_ok_and(|index| index == attachment.host_ifindex)
}

impl State {
    pub(super) fn owner_of(&self, endpoint: EndpointId) -> Owner {
        let found = self
            .attachments()
            .find(|(_, attachment)| attachment.endpoint == endpoint);
        match found {
            Some((sandbox, attachment)) => Owner {
                network: Some(attachment.network.clone()),
                pod: sandbox.pod.clone(),
                ifname: attachment.ifname.to_string(),
            },
            None => Owner {
                network: None,
                pod: PodRef::default(),
                ifname: String::new(),
            },
        }
    }
}

impl Inner {
    pub(super) fn network_views(&self) -> Vec<NetworkView> {
        let state = self.state();
        let mut views: Vec<NetworkView> = state
            .networks
            .values()
            .map(|known| {
                let spec = &known.network.spec;
                let usage = state.ipam.usage(&spec.name);
                let reason = match (state.in_sync, known.orphaned, spec.enabled) {
                    (false, _, _) => "the agent has not put its networks into force yet",
                    (true, true, _) => "its manifest is gone; it goes with its last attachment",
                    (true, false, false) => "disabled (spec.enabled: false)",
                    (true, false, true) => "",
                };
                NetworkView {
                    network: known.network.clone(),
                    ready: reason.is_empty(),
                    reason: reason.to_owned(),
                    attachments: u32::try_from(state.attachments_of(&spec.name)).unwrap_or(u32::MAX),
                    total_addresses: usage.as_ref().map_or(0, |usage| usage.total),
                    used_addresses: usage.as_ref().map_or(0, |usage| usage.used),
                    origin: known.origin.clone(),
                }
            })
            .collect();
        views.sort_by_key(|view| !view.network.spec.default);
        views
    }

    pub(super) fn interface_views(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        let mut wanted: Vec<(Arc<Sandbox>, Attachment)> = {
            let state = self.state();
            let attached = state.attachments().filter(|(sandbox, _)| sandbox.phase == Phase::Ready);
            attached
                .filter(|(sandbox, attachment)| matches(filter, sandbox, attachment))
                .map(|(sandbox, attachment)| (Arc::clone(sandbox), attachment.clone()))
                .collect()
        };
        wanted.sort_by(|(a, x), (b, y)| (&a.pod, &a.id, x.endpoint).cmp(&(&b.pod, &b.id, y.endpoint)));
        wanted
            .into_iter()
            .map(|(sandbox, attachment)| self.interface_view(sandbox, attachment))
            .collect()
    }

    fn interface_view(&self, sandbox: Arc<Sandbox>, attachment: Attachment) -> InterfaceView {
        let (programs, mut problems) = if host_link_exists(&attachment) {
            self.dataplane
                .programs(attachment.host_ifname.as_str(), attachment.endpoint)
        } else {
            (
                Vec::new(),
                vec![format!("host interface {} does not exist", attachment.host_ifname)],
            )
        };
        problems.extend(self.dataplane.verify(&EndpointConfig::from(&attachment)));
        let counts = self.dataplane.counts(attachment.endpoint).unwrap_or_else(|error| {
            problems.push(error.to_string());
            crate::model::view::EndpointCounts::default()
        });
        InterfaceView {
            sandbox,
            attachment,
            programs,
            counts,
            problems,
        }
    }

    pub(super) fn drop_views(&self) -> Vec<DropView> {
        let drops = self.dataplane.drops().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read drop counters");
            Vec::new()
        });
        let state = self.state();
        drops
            .into_iter()
            .map(|drop| {
                let Owner { network, pod, ifname } = state.owner_of(drop.endpoint);
                DropView {
                    network,
                    pod,
                    ifname,
                    direction: drop.direction,
                    reason: drop.reason,
                    count: drop.count,
                }
            })
            .collect()
    }

    pub(super) fn map_views(&self) -> Vec<MapView> {
        self.dataplane.maps().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the pinned maps");
            Vec::new()
        })
    }

    pub(super) fn status_view(&self) -> StatusView {
        let state = self.state();
        let mut reasons = Vec::new();
        if !state.in_sync {
            reasons.push("the agent has not put its networks into force yet".to_owned());
        } else if state.default_network().is_none() {
            reasons.push("no network is the default one (a PodNetwork with spec.default: true)".to_owned());
        }
        if self.is_stopping() {
            reasons.push("the agent is stopping".to_owned());
        }
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        StatusView {
            ready: reasons.is_empty(),
            reasons,
            hook: self.dataplane.hook().as_str().to_owned(),
            pin_path: self.dataplane.pin_path(),
            sandboxes: count(state.sandboxes.len()),
            attachments: count(state.attachments().count()),
            endpoints_capacity: self.dataplane.capacity(),
            warm_sandboxes: count(state.warm_count()),
            pending_removals: count(state.removals.len()),
        }
    }
}

fn matches(filter: &InterfaceFilter, sandbox: &Sandbox, attachment: &Attachment) -> bool {
    let InterfaceFilter {
        pod_namespace,
        pod_name,
        network,
        sandbox: id,
    } = filter;
    let selects = |wanted: &str, found: &str| wanted.is_empty() || wanted == found;
    selects(pod_namespace, &sandbox.pod.namespace)
        && selects(pod_name, &sandbox.pod.name)
        && selects(network, attachment.network.as_str())
        && selects(id, sandbox.id.as_str())
}
