//! Reads the node for operators and controllers: interfaces, drops, maps and status, compared with the kernel.
//! Layer: service.

mod inside;
mod interfaces;
mod tunnel;

use std::sync::Arc;

use kni_cluster::ClusterCache;
use kni_dataplane::Dataplane;
use kni_enforcement::Enforcer;
use kni_fabric::Fabric;
use kni_flows::Flows;
use kni_model::{
    Attachment, PodRef,
    flow_view::{PolicyOfInterface, QuestionError, ServiceView},
    view::{DropView, MapView, NetworkView, RefusedManifest, StatusView},
};
use kni_netlink::Netlink;
use kni_pods::Pods;
use kni_uplink::Uplink;

/// Reads the node. Clones share it. Every method may block for some milliseconds.
#[derive(Clone)]
pub struct Inspector {
    pods: Pods,
    dataplane: Arc<Dataplane>,
    policies: Arc<Enforcer>,
    uplink: Arc<Uplink>,
    flows: Arc<Flows>,
    fabric: Arc<Fabric>,
    cluster: Option<ClusterCache>,
    netlink: Netlink,
}

impl Inspector {
    /// Must be called inside a tokio runtime, in the node's network namespace.
    pub fn new(
        pods: Pods,
        dataplane: Arc<Dataplane>,
        policies: Arc<Enforcer>,
        (uplink, fabric): (Arc<Uplink>, Arc<Fabric>),
        flows: Arc<Flows>,
        cluster: Option<ClusterCache>,
    ) -> Result<Self, kni_netlink::Error> {
        Ok(Self {
            pods,
            dataplane,
            policies,
            uplink,
            flows,
            fabric,
            cluster,
            netlink: Netlink::new()?,
        })
    }

    /// Counted drops.
    pub fn drops(&self) -> Vec<DropView> {
        let drops = self.dataplane.drops().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read drop counters");
            Vec::new()
        });
        drops
            .into_iter()
            .map(|drop| {
                let owner = self.pods.owner(drop.endpoint);
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

    /// The flows of the node.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// The rules applied at the interfaces of a pod, by namespace and name; its uid is ignored.
    pub fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError> {
        let found = self.pods.sandbox_of(&pod.namespace, &pod.name);
        let sandbox = found.ok_or_else(|| QuestionError::NotFound {
            what: format!("pod {pod}"),
        })?;
        let attachments = sandbox.attachments.iter();
        attachments.map(|attachment| self.policy_of(attachment)).collect()
    }

    fn policy_of(&self, attachment: &Attachment) -> Result<PolicyOfInterface, QuestionError> {
        let effective = self.policies.effective(attachment.endpoint);
        let (policy_set, rules) = effective.map_err(|error| QuestionError::Failed(error.to_string()))?;
        Ok(PolicyOfInterface {
            ifname: attachment.ifname.clone(),
            network: attachment.network.clone(),
            policy_set,
            rules,
        })
    }

    /// The applied services, and those that could not be applied, by name.
    pub fn services(&self) -> Vec<ServiceView> {
        self.policies.services()
    }

    /// The refused manifests.
    pub fn refused(&self) -> Vec<RefusedManifest> {
        self.pods.refused()
    }

    /// The pinned maps.
    pub fn maps(&self) -> Vec<MapView> {
        self.dataplane.maps().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the pinned maps");
            Vec::new()
        })
    }

    /// Why the node is not ready, one sentence each; empty while it is. Every report of readiness derives from this
    /// one: `GetStatus`, `QueryNodeNetworks`, STATUS of CNI, health checks, `/readyz` and `NodeNetwork`.
    ///
    /// Only faults of the whole node count. A network without addresses does not, because running pods are healthy, and
    /// nodes that are not ready evict them.
    pub fn obstacles(&self) -> Vec<String> {
        let mut obstacles = self.pods.obstacles();
        let policies = self.policies.policy_problem();
        obstacles.extend(policies.map(|reason| format!("policies are not enforced: {reason}")));
        let missing = self.cluster.as_ref().map(|cluster| cluster.tables().missing());
        let missing = missing.filter(|missing| !missing.is_empty());
        obstacles.extend(missing.map(|missing| format!("waiting for the API server: {}", missing.join(", "))));
        obstacles
    }

    /// The networks, the default one first. None of them is ready while the node is not.
    pub fn networks(&self) -> Vec<NetworkView> {
        let obstacles = self.obstacles();
        let mut views = self.pods.networks_with_plugins();
        for view in views.iter_mut().filter(|view| view.ready && !obstacles.is_empty()) {
            view.ready = false;
            view.reason = obstacles.join("; ");
        }
        views
    }

    /// The state of the agent.
    pub fn status(&self) -> StatusView {
        let mut reasons = self.obstacles();
        let ready = reasons.is_empty();
        reasons.extend(self.policies.other_problems());
        reasons.extend(self.uplink.problem());
        reasons.extend(self.pods.closed_interfaces());
        let recovery = self.pods.recovery();
        reasons.extend(recovery.reports());
        reasons.extend(self.cluster.iter().flat_map(|cluster| cluster.tables().problems()));
        let counts = self.pods.counts();
        StatusView {
            ready,
            reasons,
            state_lost: recovery
                .lost
                .as_ref()
                .and_then(|_| recovery.reports().into_iter().next()),
            hook: self.dataplane.hook().as_str().to_owned(),
            pin_path: self.dataplane.pin_path(),
            sandboxes: count(counts.sandboxes),
            attachments: count(counts.attachments),
            endpoints_capacity: self.dataplane.capacity(),
            warm_sandboxes: count(counts.prewarmed),
            pending_removals: count(counts.removals),
            pending_links: count(self.dataplane.provisional_count()),
            uplink: self.uplink.view(),
        }
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
