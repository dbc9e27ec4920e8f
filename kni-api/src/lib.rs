//! Defines the Kubernetes objects of group `kni.dev`: their fields, validation rules and printer columns.
//!
//! The definitions in `deploy/crds` are generated from these types. Everything that a field alone, or fields of one
//! object together, can get wrong is refused by the API server itself; problems that depend on other objects or on a
//! node are reported in conditions.

pub mod access;
pub mod address_block;
mod conditions;
pub mod egress_address_claim;
pub mod egress_address_pool;
pub mod egress_policy;
pub mod network_members;
pub mod network_number;
pub mod node_endpoint;
pub mod node_network;
pub mod pod_interface;
pub mod pod_network;
pub mod pod_network_attachment;
pub mod provider;
mod rules;
mod schema;
mod summary;

pub use access::{Access, NamespaceAccess, NamespacesFrom};
pub use address_block::{AddressBlock, AddressBlockSpec};
pub use conditions::{Condition, ConditionStatus, set_condition};
pub use egress_address_claim::{EgressAddressClaim, EgressAddressClaimSpec, EgressAddressClaimStatus};
pub use egress_address_pool::{
    EgressAddressPool, EgressAddressPoolSpec, EgressAddressPoolStatus, EgressAddressPoolSummary,
};
pub use egress_policy::{EgressPolicy, EgressPolicySpec, EgressPolicyStatus};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
pub use network_members::{NetworkMembers, NetworkMembersSpec, NetworkMembersStatus};
pub use network_number::{NetworkNumber, NetworkNumberSpec, NetworkNumberStatus};
pub use node_endpoint::{NodeEndpoint, NodeEndpointSpec, NodeEndpointStatus};
pub use node_network::{NodeNetwork, NodeNetworkSpec, NodeNetworkStatus};
pub use pod_interface::{PodInterface, PodInterfaceSpec, PodInterfaceStatus};
pub use pod_network::{Fabric, PodNetwork, PodNetworkSpec, PodNetworkStatus, Topology};
pub use pod_network_attachment::{PodNetworkAttachment, PodNetworkAttachmentSpec, PodNetworkAttachmentStatus};
pub use provider::ProviderSpec;
pub use summary::{AttachmentSummary, EgressPolicySummary, NodeNetworkSummary, PodNetworkSummary};

/// The definitions of all kinds, in the order of their names.
pub fn definitions() -> [CustomResourceDefinition; 11] {
    [
        AddressBlock::crd(),
        EgressAddressClaim::crd(),
        EgressAddressPool::crd(),
        EgressPolicy::crd(),
        NetworkMembers::crd(),
        NetworkNumber::crd(),
        NodeEndpoint::crd(),
        NodeNetwork::crd(),
        PodInterface::crd(),
        PodNetworkAttachment::crd(),
        PodNetwork::crd(),
    ]
}

/// The API group.
pub const GROUP: &str = "kni.dev";
/// Annotation of a pod: the network of its primary interface, or `none` for a pod without one.
pub const NETWORK_ANNOTATION: &str = "kni.dev/network";
/// Value of [`NETWORK_ANNOTATION`] for pods that get no primary interface.
pub const NO_NETWORK: &str = "none";
/// Finalizer that keeps a `PodNetwork` until its last attachment is gone.
pub const IN_USE_FINALIZER: &str = "kni.dev/in-use";
/// Finalizer that keeps an `AddressBlock` while its node may have assigned addresses of it.
pub const LEASES_FINALIZER: &str = "kni.dev/leases";
/// Taint of a node whose addresses of the default network are used up; effect `NoSchedule`.
pub const EXHAUSTED_TAINT: &str = "kni.dev/addresses-exhausted";
/// Label of a `PodInterface`: the network it is in. On a Service: the network whose pods it serves.
pub const NETWORK_LABEL: &str = "kni.dev/network";
/// Extended resources of nodes begin with this, the network's name follows: addresses of the network on the node.
pub const RESOURCE_PREFIX: &str = "kni.dev/network-";

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn visit(at: &str, value: &Value, see: &mut impl FnMut(&str, &Value)) {
        see(at, value);
        match value {
            Value::Object(fields) => fields
                .iter()
                .for_each(|(name, field)| visit(&format!("{at}.{name}"), field, see)),
            Value::Array(items) => items.iter().for_each(|item| visit(at, item, see)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    #[test]
    fn lists_say_how_they_merge_and_rules_say_what_to_change() {
        let (mut lists, mut rules) = (0, 0);
        for definition in definitions() {
            let kind = definition.spec.names.kind.clone();
            let value = serde_json::to_value(definition).unwrap();
            visit(&kind, &value, &mut |at, value| {
                if value["type"] == "array" && value.get("items").is_some() {
                    lists += 1;
                    assert!(value["x-kubernetes-list-type"].is_string(), "{at}: {value}");
                }
                for rule in value["x-kubernetes-validations"].as_array().into_iter().flatten() {
                    rules += 1;
                    assert!(
                        rule["message"].as_str().is_some_and(|text| text.len() > 20),
                        "{at}: {rule}"
                    );
                }
            });
        }
        assert!(lists > 20 && rules > 60, "{lists} lists, {rules} rules");
    }
}
