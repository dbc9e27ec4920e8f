//! Defines [`Insight`], the interface through which the runtime service queries flows, policy and services.

use std::sync::Arc;

use kni_model::{
    PodRef,
    flow_view::{ExplainQuestion, ExplainView, FlowFilter, FlowView, PolicyOfInterface, QuestionError, ServiceView},
};
use tokio::sync::broadcast;

/// Answers queries about flows, policy and services. All methods are read-only.
pub trait Insight: Send + Sync + 'static {
    /// The last flows and drops that the filter selects, oldest first. Does not block.
    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>>;

    /// Subscribes to flows and drops, unfiltered. A receiver that lags receives the number of lost events.
    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>>;

    /// Explains the fate of a packet. May block for some milliseconds.
    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError>;

    /// The rules applied at the interfaces of a pod, by namespace and name; its uid is ignored. May block for some
    /// milliseconds.
    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError>;

    /// The applied services, and those that could not be applied, by name. May block for some milliseconds.
    fn services(&self) -> Vec<ServiceView>;
}
