//! Answers questions about the state, compared with the kernel where that is cheap.

use std::sync::Arc;

use kni_dataplane::EndpointConfig;
use kni_ipam::{FamilyUsage, Usage};
use kni_model::{
    Attachment, Feature, Phase, PodRef, Sandbox,
    view::{AddressUse, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, StatusView, UplinkView},
};

use super::Inner;

fn family(usage: &FamilyUsage) -> AddressUse {
    AddressUse {
        total: usage.total,
        used: usage.used,
        free: usage.free,
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
                    ipv4: usage.as_ref().map(|usage| family(&usage.ipv4)).unwrap_or_default(),
                    ipv6: usage.as_ref().map(|usage| family(&usage.ipv6)).unwrap_or_default(),
                    exhausted: usage.as_ref().map(exhausted).unwrap_or_default(),
                    origin: known.origin.clone(),
                    features: spec.provider.features(),
                }
            })
            .collect();
        drop(state);
        for view in &mut views {
            self.ask_plugins(view);
        }
        views.sort_by_key(|view| !view.network.spec.default);
        views
    }

    /// What only the plugins of a network know. Without the state's lock: it may read files.
    fn ask_plugins(&self, view: &mut NetworkView) {
        match self.plugin_readiness(&view.network.spec.provider) {
            Some(Ok(capabilities)) => view.features.retain(|feature| match feature {
                Feature::HostPorts => capabilities.contains("portMappings"),
                Feature::Bandwidth => capabilities.contains("bandwidth"),
                Feature::Addresses
                | Feature::Ipv4
                | Feature::Ipv6
                | Feature::Mtu
                | Feature::Mac
                | Feature::Status
                | Feature::DefaultNetwork
                | Feature::Policy
                | Feature::Services
                | Feature::Egress
                | Feature::Isolation
                | Feature::Xdp => true,
            }),
            Some(Err(reason)) if view.ready => {
                view.ready = false;
                view.reason = reason;
            }
            // Nobody to ask, or what the network says of itself comes before it.
            None | Some(Err(_)) => {}
        }
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
        // Who asks for one sandbox wants to know whether it is well; who asks for all does not wait for each.
        let thoroughly = !filter.sandbox.is_empty();
        let mut views = Vec::new();
        for (sandbox, attachment) in wanted {
            let mut view = self.interface_view(sandbox, attachment);
            if thoroughly {
                view.problems
                    .extend(self.problems_inside(&view.sandbox, &view.attachment));
            }
            views.push(view);
        }
        views
    }

    fn interface_view(&self, sandbox: Arc<Sandbox>, attachment: Attachment) -> InterfaceView {
        let mut elsewhere = Vec::new();
        if !attachment.kind.is_ebpf() {
            elsewhere = super::provider::problems(&sandbox, &attachment);
        }
        if !attachment.kind.has_row() {
            return InterfaceView {
                sandbox,
                attachment,
                programs: Vec::new(),
                counts: kni_model::view::EndpointCounts::default(),
                problems: elsewhere,
            };
        }
        let (mut programs, mut problems) =
            if kni_netlink::host_link_exists(&attachment.host_ifname, attachment.host_ifindex) {
                self.dataplane
                    .programs(attachment.host_ifname.as_str(), attachment.endpoint)
            } else {
                (
                    Vec::new(),
                    vec![format!("host interface {} does not exist", attachment.host_ifname)],
                )
            };
        if attachment.xdp {
            let Attachment {
                host_ifname,
                host_ifindex,
                endpoint,
                ..
            } = &attachment;
            match self
                .dataplane
                .xdp_program(host_ifname.as_str(), *host_ifindex, *endpoint)
            {
                Ok(program) => programs.push(program),
                Err(problem) => problems.push(problem.to_string()),
            }
        }
        problems.extend(self.dataplane.verify(&EndpointConfig::from(&attachment)));
        problems.extend(elsewhere);
        let counts = self.dataplane.counts(attachment.endpoint).unwrap_or_else(|error| {
            problems.push(error.to_string());
            kni_model::view::EndpointCounts::default()
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
                let owner = state.owner_of(drop.endpoint);
                let (network, pod, ifname) = owner.map_or_else(
                    || (None, PodRef::default(), String::new()),
                    |owner| (Some(owner.network), owner.pod, owner.ifname),
                );
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
        let default = self.state().default_network().map(|known| known.network.spec.clone());
        let plugins = default.and_then(|spec| Some((spec.name, self.plugin_readiness(&spec.provider)?.err()?)));
        let state = self.state();
        let mut reasons = Vec::new();
        if let Some((network, reason)) = plugins {
            reasons.push(format!("network {network}: {reason}"));
        }
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
            pending_links: count(self.dataplane.provisional_count()),
            // Told by who keeps it.
            uplink: UplinkView::default(),
        }
    }
}

/// Each family of a network gives an address to each pod, so one without any keeps pods away.
fn exhausted(usage: &Usage) -> String {
    let families = [("IPv4", &usage.ipv4), ("IPv6", &usage.ipv6)];
    let full = families
        .into_iter()
        .filter(|(_, family)| family.total > 0 && family.free == 0);
    full.map(|(name, _)| name).collect::<Vec<_>>().join(" and ")
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
