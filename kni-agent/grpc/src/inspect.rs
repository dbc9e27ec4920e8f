//! Defines [`Inspect`], the queries of the runtime service about the node, so that tests can answer them.

use std::sync::Arc;

use kni_inspect::Inspector;
use kni_model::{
    PodRef,
    flow_view::{
        ExplainQuestion, ExplainView, FlowFilter, FlowView, PolicyOfInterface, QuestionError, ServiceView, TunnelProbe,
    },
    view::{
        DropEventView, DropView, InterfaceFilter, InterfaceView, MapView, NetworkView, RefusedManifest, StatusView,
    },
};
use tokio::sync::broadcast;

/// Reads the node. All methods are read-only. Those that do not say otherwise may block for some milliseconds.
pub trait Inspect: Send + Sync + 'static {
    /// The networks, the default one first. None of them is ready while the node is not.
    fn networks(&self) -> Vec<NetworkView>;

    /// The refused manifests.
    fn refused(&self) -> Vec<RefusedManifest>;

    /// The interfaces that the filter selects.
    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView>;

    /// Counted drops.
    fn drops(&self) -> Vec<DropView>;

    /// The pinned maps.
    fn maps(&self) -> Vec<MapView>;

    /// Health and status of the agent.
    fn status(&self) -> StatusView;

    /// The last flows and drops that the filter selects, oldest first.
    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>>;

    /// Subscribes to drop events. A receiver that lags receives the number of lost events. Does not block.
    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView>;

    /// Subscribes to flows and drops, unfiltered. A receiver that lags receives the number of lost events. Does not
    /// block.
    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>>;

    /// Explains the fate of a packet.
    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError>;

    /// Asks other nodes whether the tunnel's packets arrive. Blocks for a second or two.
    fn probe_tunnel(&self) -> Result<TunnelProbe, QuestionError>;

    /// The rules applied at the interfaces of a pod, by namespace and name; its uid is ignored.
    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError>;

    /// The applied services, and those that could not be applied, by name.
    fn services(&self) -> Vec<ServiceView>;
}

impl Inspect for Inspector {
    fn networks(&self) -> Vec<NetworkView> {
        Self::networks(self)
    }

    fn refused(&self) -> Vec<RefusedManifest> {
        Self::refused(self)
    }

    fn interfaces(&self, filter: &InterfaceFilter) -> Vec<InterfaceView> {
        Self::interfaces(self, filter)
    }

    fn drops(&self) -> Vec<DropView> {
        Self::drops(self)
    }

    fn maps(&self) -> Vec<MapView> {
        Self::maps(self)
    }

    fn status(&self) -> StatusView {
        Self::status(self)
    }

    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>> {
        Self::flows(self).history(filter)
    }

    fn subscribe_drops(&self) -> broadcast::Receiver<DropEventView> {
        Self::flows(self).subscribe_drops()
    }

    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>> {
        Self::flows(self).subscribe()
    }

    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        Self::flows(self).explain(question)
    }

    fn probe_tunnel(&self) -> Result<TunnelProbe, QuestionError> {
        Self::probe_tunnel(self)
    }

    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError> {
        Self::policy(self, pod)
    }

    fn services(&self) -> Vec<ServiceView> {
        Self::services(self)
    }
}
