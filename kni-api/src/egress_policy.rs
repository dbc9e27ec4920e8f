//! Defines `EgressPolicy`: which external destinations pods reach, and from which address.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Condition, EgressPolicySummary, rules,
    schema::{self, Cidr, HostAddress, NetworkName, Selector},
};

/// Which external destinations pods of the namespace reach. Every field takes effect; unknown fields are refused.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "EgressPolicy",
    plural = "egresspolicies",
    singular = "egresspolicy",
    shortname = "egp",
    category = "kni",
    namespaced,
    status = "EgressPolicyStatus",
    printcolumn(
        name = "Default-Action",
        type_ = "string",
        json_path = r#".spec.defaultAction"#,
        description = "What holds for destinations that no rule matches."
    ),
    printcolumn(
        name = "Programmed",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Programmed")].status"#,
        description = "Whether every node enforces it."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Accepted")].status"#,
        description = "Whether it is valid.",
        priority = 1
    ),
    printcolumn(
        name = "Networks",
        type_ = "string",
        json_path = r#".status.summary.networks"#,
        description = "Networks on which it holds.",
        priority = 1
    ),
    printcolumn(
        name = "Pods",
        type_ = "string",
        json_path = r#".status.summary.pods"#,
        description = "The pods that it is about.",
        priority = 1
    ),
    printcolumn(
        name = "Addresses",
        type_ = "string",
        json_path = r#".status.summary.addresses"#,
        description = "Addresses that packets leave with.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "Which destinations outside of the pod networks pods may reach, and from which address."
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::plain)]
pub struct EgressPolicySpec {
    /// The pods of the namespace that it is about; an empty selector means all of them.
    #[schemars(with = "Selector")]
    pub pod_selector: LabelSelector,
    /// Names of the `PodNetwork`s on which it holds. Without this list it holds on all interfaces of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        with = "Option<Vec<NetworkName>>",
        length(max = 64),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = rules::egress_policy::network_names())
    )]
    pub pod_network_names: Option<Vec<String>>,
    /// The first rule that matches a destination decides.
    #[serde(default)]
    #[schemars(length(max = 128), extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<EgressRule>,
    /// What holds for destinations that no rule matches.
    #[serde(default)]
    pub default_action: EgressAction,
    /// Addresses that the pods' packets leave the node with, at most one of each family. Without one of a family the
    /// network's own choice holds.
    #[serde(default)]
    #[schemars(
        with = "Vec<HostAddress>",
        length(max = 2),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::one_per_family()])
    )]
    pub egress_addresses: Vec<String>,
}

/// The status of an egress policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct EgressPolicyStatus {
    /// Accepted: the spec is valid. Programmed: every node enforces it.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Texts for the columns of `kubectl get`.
    #[serde(default)]
    pub summary: EgressPolicySummary,
}

/// Allow or deny.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EgressAction {
    /// The packet may go.
    #[default]
    Allow,
    /// The packet is dropped.
    Deny,
}

/// A rule about destinations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EgressRule {
    /// The action for packets to these destinations.
    pub action: EgressAction,
    /// Destinations; an empty list means every address.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub to: Vec<EgressDestination>,
    /// Ports of the destinations; an empty list means every port of every protocol.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub ports: Vec<EgressPort>,
}

/// A range of destinations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::egress_policy::destination()))]
pub struct EgressDestination {
    /// The range in CIDR notation, without host bits.
    #[schemars(with = "Cidr")]
    pub cidr: String,
    /// Ranges inside it that do not belong to it.
    #[serde(default)]
    #[schemars(with = "Vec<Cidr>", length(max = 8), extend("x-kubernetes-list-type" = "set"))]
    pub except: Vec<String>,
}

/// Ports of a protocol. Names are not possible: no pod that could resolve them is at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::egress_policy::port()))]
pub struct EgressPort {
    /// The transport.
    #[serde(default)]
    pub protocol: EgressProtocol,
    /// The port, as a number; absent means every port of the protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// The last port of a range that begins with `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub end_port: Option<i32>,
}

/// A transport.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum EgressProtocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl EgressPolicySummary {
    /// The texts for a policy.
    pub fn new(spec: &EgressPolicySpec) -> Self {
        let networks = spec.pod_network_names.as_ref();
        Self {
            networks: networks.map_or_else(|| "*".to_owned(), |names| names.join(",")),
            pods: crate::summary::selector(&spec.pod_selector),
            addresses: spec.egress_addresses.join(","),
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, Resource as _};

    use super::*;

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = EgressPolicy::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("egresspolicies.kni.dev"));
        assert_eq!(crd.spec.scope, "Namespaced");
        assert_eq!(crd.spec.names.short_names, Some(vec!["egp".to_owned()]));
        assert_eq!(crd.spec.names.categories, Some(vec!["kni".to_owned()]));
        assert_eq!(EgressPolicy::api_version(&()), "kni.dev/v1alpha1");
    }

    #[test]
    fn every_field_is_described() {
        let crd = serde_json::to_value(EgressPolicy::crd()).unwrap();
        let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let fields = spec["properties"].as_object().unwrap();
        let names: Vec<_> = fields.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "defaultAction",
                "egressAddresses",
                "podNetworkNames",
                "podSelector",
                "rules"
            ]
        );
        let rule = fields["rules"]["items"]["properties"].as_object().unwrap();
        let port = rule["ports"]["items"]["properties"].as_object().unwrap();
        for (name, field) in fields.iter().chain(rule).chain(port) {
            let described = field["description"].as_str().is_some_and(|text| text.len() > 10);
            assert!(described, "{name}: {field}");
        }
        assert_eq!(spec["required"], serde_json::json!(["podSelector"]));
    }

    #[test]
    fn defaults_apply_and_unknown_fields_are_refused() {
        let spec: EgressPolicySpec = serde_json::from_str(r#"{"podSelector":{}}"#).unwrap();
        assert_eq!(
            (spec.default_action, spec.rules, spec.pod_network_names),
            (EgressAction::Allow, vec![], None)
        );
        for bad in [
            "{}",
            r#"{"podSelector":{},"rule":[]}"#,
            r#"{"podSelector":{},"rules":[{}]}"#,
            r#"{"podSelector":{},"rules":[{"action":"allow"}]}"#,
            r#"{"podSelector":{},"rules":[{"action":"Deny","from":[]}]}"#,
            r#"{"podSelector":{},"rules":[{"action":"Deny","ports":[{"port":"http"}]}]}"#,
            r#"{"podSelector":{},"rules":[{"action":"Deny","ports":[{"protocol":"ICMP"}]}]}"#,
        ] {
            assert!(serde_json::from_str::<EgressPolicySpec>(bad).is_err(), "{bad}");
        }
    }
}
