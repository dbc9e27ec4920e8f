//! Summarizes objects for the columns of `kubectl get`, which shows lists as JSON and has no text for a saturated count.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{EgressPolicySpec, NodeNetworkStatus, PodNetworkAttachmentSpec, PodNetworkSpec, PodNetworkStatus};

/// A saturated count. The API has signed numbers of 64 bits, and an IPv6 subnet of the usual size has more addresses.
const SATURATED: &str = ">9e18";

/// Texts for the columns of a `PodNetwork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodNetworkSummary {
    /// The subnets, separated by commas.
    #[serde(default)]
    pub subnets: String,
    /// Addresses that pods can have; ">9e18" for more than fit into `addresses.total`.
    #[serde(default)]
    pub total: String,
    /// The namespaces, separated by commas.
    #[serde(default)]
    pub namespaces: String,
}

impl PodNetworkSummary {
    /// The texts for a network.
    pub fn new(spec: &PodNetworkSpec, status: &PodNetworkStatus) -> Self {
        Self {
            subnets: spec.subnets.join(","),
            total: count(status.addresses.total),
            namespaces: status.namespaces.join(","),
        }
    }
}

/// Texts for the columns of a `NodeNetwork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkSummary {
    /// The networks, separated by commas.
    #[serde(default)]
    pub networks: String,
    /// The tunnel endpoints, separated by commas.
    #[serde(default)]
    pub tunnel_endpoints: String,
}

impl NodeNetworkSummary {
    /// The texts for a node.
    pub fn new(status: &NodeNetworkStatus) -> Self {
        Self {
            networks: status.network_names.join(","),
            tunnel_endpoints: status.tunnel_endpoints.join(","),
        }
    }
}

/// Texts for the columns of a `PodNetworkAttachment`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachmentSummary {
    /// The fixed addresses, separated by commas.
    #[serde(default)]
    pub addresses: String,
    /// The selector of pods, in the syntax of `kubectl get --selector`; "*" for all pods.
    #[serde(default)]
    pub pods: String,
}

impl AttachmentSummary {
    /// The texts for an attachment.
    pub fn new(spec: &PodNetworkAttachmentSpec) -> Self {
        Self {
            addresses: spec.addresses.join(","),
            pods: selector(&spec.pod_selector),
        }
    }
}

/// Texts for the columns of an `EgressPolicy`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressPolicySummary {
    /// The networks, separated by commas; "*" for all networks.
    #[serde(default)]
    pub networks: String,
    /// The selector of pods, in the syntax of `kubectl get --selector`; "*" for all pods.
    #[serde(default)]
    pub pods: String,
    /// The egress addresses, separated by commas.
    #[serde(default)]
    pub addresses: String,
}

impl EgressPolicySummary {
    /// The texts for a policy.
    pub fn new(spec: &EgressPolicySpec) -> Self {
        let networks = spec.pod_network_names.as_ref();
        Self {
            networks: networks.map_or_else(|| "*".to_owned(), |names| names.join(",")),
            pods: selector(&spec.pod_selector),
            addresses: spec.egress_addresses.join(","),
        }
    }
}

fn count(number: i64) -> String {
    if number == i64::MAX {
        SATURATED.to_owned()
    } else {
        number.to_string()
    }
}

fn selector(selector: &LabelSelector) -> String {
    let labels = selector.match_labels.iter().flatten();
    let labels = labels.map(|(key, value)| format!("{key}={value}"));
    let expressions = selector.match_expressions.iter().flatten().map(expression);
    let terms: Vec<String> = labels.chain(expressions).collect();
    if terms.is_empty() {
        "*".to_owned()
    } else {
        terms.join(",")
    }
}

fn expression(requirement: &LabelSelectorRequirement) -> String {
    let key = &requirement.key;
    let values = requirement.values.as_deref().unwrap_or_default().join(",");
    match requirement.operator.as_str() {
        "Exists" => key.clone(),
        "DoesNotExist" => format!("!{key}"),
        other => format!("{key} {} ({values})", other.to_lowercase()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_are_joined_and_saturated_counts_are_marked() {
        let spec = json!({ "subnets": ["10.10.0.0/16", "fd10::/64"] });
        let spec: PodNetworkSpec = serde_json::from_value(spec).unwrap();
        let mut status = PodNetworkStatus::default();
        status.addresses.total = i64::MAX;
        let summary = PodNetworkSummary::new(&spec, &status);
        assert_eq!(
            (summary.subnets.as_str(), summary.total.as_str()),
            ("10.10.0.0/16,fd10::/64", ">9e18")
        );
        status.addresses.total = 65_533;
        assert_eq!(PodNetworkSummary::new(&spec, &status).total, "65533");
    }

    #[test]
    fn selectors_have_the_syntax_of_kubectl() {
        for (given, text) in [
            (json!({}), "*"),
            (
                json!({ "matchLabels": { "app": "web", "tier": "front" } }),
                "app=web,tier=front",
            ),
            (
                json!({ "matchLabels": { "app": "web" }, "matchExpressions": [
                    { "key": "zone", "operator": "In", "values": ["a", "b"] },
                    { "key": "zone", "operator": "NotIn", "values": ["c"] },
                    { "key": "ready", "operator": "Exists" },
                    { "key": "old", "operator": "DoesNotExist" },
                ] }),
                "app=web,zone in (a,b),zone notin (c),ready,!old",
            ),
        ] {
            let given: LabelSelector = serde_json::from_value(given).unwrap();
            assert_eq!(selector(&given), text);
        }
    }
}
