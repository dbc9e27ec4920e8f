//! Summarizes objects for the columns of `kubectl get`, which shows lists as JSON and has no text for a saturated count.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

pub(crate) fn count(number: i64) -> String {
    if number == i64::MAX {
        SATURATED.to_owned()
    } else {
        number.to_string()
    }
}

pub(crate) fn selector(selector: &LabelSelector) -> String {
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
