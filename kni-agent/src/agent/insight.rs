//! Implements queries about flows, policy and services with the services of the agent.

use std::sync::Arc;

use kni_grpc::Insight;
use kni_model::{
    Attachment, PodRef,
    flow_view::{ExplainQuestion, ExplainView, FlowFilter, FlowView, PolicyOfInterface, QuestionError, ServiceView},
};
use tokio::sync::broadcast;

use super::Node;

impl Insight for Node {
    fn flows(&self, filter: &FlowFilter) -> Vec<Arc<FlowView>> {
        self.flows.history(filter)
    }

    fn subscribe_flows(&self) -> broadcast::Receiver<Arc<FlowView>> {
        self.flows.subscribe()
    }

    fn explain(&self, question: &ExplainQuestion) -> Result<ExplainView, QuestionError> {
        self.flows.explain(question)
    }

    fn policy(&self, pod: &PodRef) -> Result<Vec<PolicyOfInterface>, QuestionError> {
        let found = self.attacher.sandbox_of(&pod.namespace, &pod.name);
        let sandbox = found.ok_or_else(|| QuestionError::NotFound {
            what: format!("pod {pod}"),
        })?;
        sandbox
            .attachments
            .iter()
            .map(|attachment| self.policy_of(attachment))
            .collect()
    }

    fn services(&self) -> Vec<ServiceView> {
        self.sync.services()
    }
}

impl Node {
    fn policy_of(&self, attachment: &Attachment) -> Result<PolicyOfInterface, QuestionError> {
        let effective = self.sync.effective(attachment.endpoint);
        let (policy_set, rules) = effective.map_err(|error| QuestionError::Failed(error.to_string()))?;
        Ok(PolicyOfInterface {
            ifname: attachment.ifname.clone(),
            network: attachment.network.clone(),
            policy_set,
            rules,
        })
    }
}
