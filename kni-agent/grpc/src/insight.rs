//! What the runtime service tells of flows, policy and services: the seam to whoever knows.

use std::sync::Arc;

use kni_model::{
    PodRef,
    flow_view::{ExplainQuestion, ExplainView, FlowFilter, FlowView, PolicyOfInterface, QuestionError, ServiceView},
};
use tokio::sync::broadcast;

/// Answers questions about flows, policy and services. None of them changes anything.
pub trait Insight: Send + Sync + 'static {
    /// The last flows and drops that the filter selects, oldest first. Does not block.
    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>>;

    /// Flows and drops from now on, unfiltered. A receiver that lags is told how many it lost.
    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>>;

    /// What would become of a packet. May block for some milliseconds.
    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError>;

    /// The rules in force at the interfaces of a pod, by namespace and name; its uid is not looked at. May block for
    /// some milliseconds.
    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError>;

    /// The services in force, and those that could not be put into force, by name. May block for some milliseconds.
    fn services(&self) -> Vec<ServiceView>;
}
