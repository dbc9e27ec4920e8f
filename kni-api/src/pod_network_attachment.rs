//! Defines `PodNetworkAttachment`, which joins selected pods of a namespace to an additional network.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    AttachmentSummary, Condition, rules,
    schema::{self, HostAddress, MacAddress, NetworkName, SecondName, Selector},
};

/// Which pods get an additional interface, and its properties. Running pods get it without a restart, and lose it when
/// the selector no longer matches their labels.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "PodNetworkAttachment",
    plural = "podnetworkattachments",
    singular = "podnetworkattachment",
    shortname = "pna",
    category = "kni",
    namespaced,
    status = "PodNetworkAttachmentStatus",
    printcolumn(
        name = "Network",
        type_ = "string",
        json_path = r#".spec.podNetworkName"#,
        description = "The PodNetwork to join."
    ),
    printcolumn(
        name = "Interface",
        type_ = "string",
        json_path = r#".spec.interfaceName"#,
        description = "Name of the interface inside the pods."
    ),
    printcolumn(
        name = "Selected",
        type_ = "integer",
        json_path = r#".status.selected"#,
        description = "Pods that are selected and run."
    ),
    printcolumn(
        name = "Attached",
        type_ = "integer",
        json_path = r#".status.attached"#,
        description = "Pods of them that have the interface."
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        description = "Whether every selected pod that runs has the interface."
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
        description = "Whether the network exists and takes pods.",
        priority = 1
    ),
    printcolumn(
        name = "Addresses",
        type_ = "string",
        json_path = r#".status.summary.addresses"#,
        description = "Fixed addresses.",
        priority = 1
    ),
    printcolumn(
        name = "MAC",
        type_ = "string",
        json_path = r#".spec.mac"#,
        description = "Fixed MAC address.",
        priority = 1
    ),
    printcolumn(
        name = "Default-Route",
        type_ = "boolean",
        json_path = r#".spec.defaultRoute"#,
        description = "Whether the default routes of the pods leave through it.",
        priority = 1
    ),
    printcolumn(
        name = "Pods",
        type_ = "string",
        json_path = r#".status.summary.pods"#,
        description = "The pods that join.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "Joins selected pods of its namespace to a network, beside the one they are in."
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::attachment::spec()), transform = schema::plain)]
pub struct PodNetworkAttachmentSpec {
    /// The `PodNetwork` to join.
    #[schemars(with = "NetworkName")]
    pub pod_network_name: String,
    /// The pods of the namespace that join; an empty selector means all of them.
    #[schemars(with = "Selector")]
    pub pod_selector: LabelSelector,
    /// Name of the interface inside the pods.
    #[schemars(with = "SecondName")]
    pub interface_name: String,
    /// Addresses inside the network's subnets, at most one of each family, for selectors that match one pod at a time.
    /// Absent: the network hands one out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        with = "Vec<HostAddress>",
        length(max = 2),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::one_per_family()])
    )]
    pub addresses: Vec<String>,
    /// MAC address, such as 02:00:00:00:00:01, for selectors that match one pod at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<MacAddress>")]
    pub mac: Option<String>,
    /// Whether the default routes of the pods leave through this interface. Holds for pods that start from then on.
    #[serde(default)]
    pub default_route: bool,
}

/// The status of an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct PodNetworkAttachmentStatus {
    /// Accepted: the network exists and takes pods. Ready: every selected pod that runs has the interface.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Pods that are selected and run.
    #[serde(default)]
    pub selected: i64,
    /// Pods of them that have the interface.
    #[serde(default)]
    pub attached: i64,
    /// Texts for the columns of `kubectl get`.
    #[serde(default)]
    pub summary: AttachmentSummary,
}

impl AttachmentSummary {
    /// The texts for an attachment.
    pub fn new(spec: &PodNetworkAttachmentSpec) -> Self {
        Self {
            addresses: spec.addresses.join(","),
            pods: crate::summary::selector(&spec.pod_selector),
        }
    }
}
