//! Reads and validates the Kubernetes objects that the agent uses.
//! Layer: model.

mod access;
mod cidr;
mod closed;
mod cluster;
mod egress_network;
mod egress_pool;
mod egress_rules;
mod endpoint_slice;
mod external_addresses;
mod from_object;
mod invalid;
mod labels;
mod multi_network_policy;
mod names;
mod namespace;
mod network_policy;
mod peers;
mod ports;
mod provider_rules;
mod service;
mod service_addresses;
mod validate;

pub use closed::closed_policy;
pub use cluster::{
    AttachmentFacts, Definition, PodFacts, read_attachment, read_attachment_definition, read_namespace_selector,
    read_pod, read_raw_namespace_selector,
};
pub use endpoint_slice::read_endpoint_slice;
pub use from_object::FromObject;
pub use invalid::InvalidObject;
pub use kni_api::{
    EgressAddressClaim, EgressAddressPool, EgressPolicy, EgressPolicySpec, NodeNetwork, PodInterface, PodNetwork,
    PodNetworkAttachment, PodNetworkSpec, ProviderSpec, Topology, egress_policy, pod_network, provider,
};
pub use multi_network_policy::{POLICY_FOR, v1beta1, v1beta2};
pub use namespace::read_namespace;
pub use service::read_service;
pub use service_addresses::read_service_addresses;
pub use validate::InvalidNetwork;
