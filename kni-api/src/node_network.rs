//! Defines `NodeNetwork`: the state of the networks on one node.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, NodeNetworkSummary, schema};

/// Empty: the object has the node's name and only a status.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "NodeNetwork",
    plural = "nodenetworks",
    singular = "nodenetwork",
    shortname = "nnw",
    category = "kni",
    status = "NodeNetworkStatus",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        description = "Whether the agent attaches pods."
    ),
    printcolumn(
        name = "Networks",
        type_ = "string",
        json_path = r#".status.summary.networks"#,
        description = "The networks that the node has applied."
    ),
    printcolumn(
        name = "Interfaces",
        type_ = "integer",
        json_path = r#".status.interfaces"#,
        description = "Interfaces of pods."
    ),
    printcolumn(
        name = "Hook",
        type_ = "string",
        json_path = r#".status.features.hook"#,
        description = "Where programs are attached."
    ),
    printcolumn(
        name = "Version",
        type_ = "string",
        json_path = r#".status.agentVersion"#,
        description = "Version of the agent."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "Degraded",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Degraded")].status"#,
        description = "Whether something does not work as it should.",
        priority = 1
    ),
    printcolumn(
        name = "Policies",
        type_ = "integer",
        json_path = r#".status.policies.known"#,
        description = "Policies that are known.",
        priority = 1
    ),
    printcolumn(
        name = "Programmed",
        type_ = "boolean",
        json_path = r#".status.policies.programmed"#,
        description = "Whether the node enforces all valid policies.",
        priority = 1
    ),
    printcolumn(
        name = "Tunnel-Endpoints",
        type_ = "string",
        json_path = r#".status.summary.tunnelEndpoints"#,
        description = "Where tunnels of other nodes may end.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "The state of the networks on one node: readiness, address blocks, usage. Written by the node's agent."
)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct NodeNetworkSpec {}

/// The status of a node and its networks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct NodeNetworkStatus {
    /// Ready: the agent attaches pods. Degraded: something does not work as it should; the message describes it.
    /// `AddressesAvailable`: every network has an address for another pod. `StateLost`: the agent rebuilt its state at
    /// its start. `AddressConflict`: a pod has an address of another node's block. `NumberConflict`: the number of a
    /// network has changed while pods of the node are in it, or is that of two networks.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Version of the agent.
    #[serde(default)]
    pub agent_version: String,
    /// Where tunnels of other nodes may end: the node's addresses, at most one of each family.
    #[serde(default)]
    #[schemars(length(max = 2), extend("x-kubernetes-list-type" = "set"))]
    pub tunnel_endpoints: Vec<String>,
    /// What the node's kernel and the agent can do, such as hook: tcx.
    #[serde(default)]
    pub features: BTreeMap<String, String>,
    /// The networks that the node has applied.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub networks: Vec<NodeNetworkEntry>,
    /// Their names, for lists.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub network_names: Vec<String>,
    /// Policies on the node.
    #[serde(default)]
    pub policies: PolicySummary,
    /// Interfaces of pods.
    #[serde(default)]
    pub interfaces: i64,
    /// Texts for the columns of `kubectl get`.
    #[serde(default)]
    pub summary: NodeNetworkSummary,
}

/// One network on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeNetworkEntry {
    /// Name of the `PodNetwork`.
    pub name: String,
    /// Its applied generation.
    #[serde(default)]
    pub generation: i64,
    /// Whether pods can join it here. Not lowered by exhaustion.
    #[serde(default)]
    pub ready: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Address blocks of the node, in CIDR notation.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub blocks: Vec<String>,
    /// Pods that fit into the blocks: the smaller count of the two families.
    #[serde(default)]
    pub capacity: i64,
    /// Pods that have addresses.
    #[serde(default)]
    pub used: i64,
    /// The count of the network's extended resource: pods that have addresses, plus those that still fit. Absent where
    /// the network has no extended resource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocatable: Option<i64>,
    /// Whether no address is left, and no additional block is available.
    #[serde(default)]
    pub exhausted: bool,
    /// The network's number in the keys of the node's pinned maps.
    #[serde(default)]
    pub network_id: u32,
    /// The number of the network in the whole cluster, as the node uses it. Absent while it uses none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_215))]
    pub number: Option<u32>,
    /// Why the node uses none, or another one than that of the `NetworkNumber`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub number_problem: String,
}

/// The state of the cluster's policies on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicySummary {
    /// Policies that are known.
    #[serde(default)]
    pub known: i64,
    /// Whether the node enforces all valid policies.
    #[serde(default)]
    pub programmed: bool,
    /// By kind, the resource version up to which all changes are enforced, deletions included: policies that are not newer
    /// and not in `refused` are enforced.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub resource_versions: BTreeMap<String, String>,
    /// Policies that are refused, why, and what is enforced instead; the first 64.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub refused: Vec<RefusedPolicy>,
    /// Namespaces whose policies need more rows than their quota: until they have fewer rules, their policies allow nothing
    /// to the pods that they select; the first 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["namespace"]))]
    pub closed: Vec<ClosedNamespace>,
}

/// A namespace whose policies exceed its quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClosedNamespace {
    /// Its name.
    pub namespace: String,
    /// The figures, and the policy with the most peers.
    pub reason: String,
}

/// A policy that is not enforced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedPolicy {
    /// Kind of the object.
    pub kind: String,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// The field and its problem.
    pub reason: String,
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
