//! Defines `NetworkMembers`: the pods that one node has in one network, and what kni-controller confirms of them.

use std::{collections::BTreeMap, hash::Hasher as _};

use fnv::FnvHasher;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{self, HostAddress, InterfaceName, NetworkName},
};

/// Maximum number of members of one object; a node with more has several objects.
pub const MAX_MEMBERS: usize = 64;

/// The members as their node reports them. Other nodes use the status, never this.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "NetworkMembers",
    plural = "networkmembers",
    singular = "networkmembers",
    shortname = "nmb",
    category = "kni",
    status = "NetworkMembersStatus",
    validation = rules::members::name(),
    selectable = ".spec.nodeName",
    selectable = ".spec.network",
    printcolumn(
        name = "Network",
        type_ = "string",
        json_path = r#".spec.network"#,
        description = "The PodNetwork."
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = r#".spec.nodeName"#,
        description = "The node of the members."
    ),
    printcolumn(
        name = "Confirmed",
        type_ = "string",
        json_path = r#".status.summary"#,
        description = "Confirmed members of reported ones."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    derive = "PartialEq",
    doc = "Pods of one network on one node: reported by the node's agent, confirmed by kni-controller with their labels. Policies of other nodes use the confirmed ones."
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules::members::spec()), transform = schema::plain)]
pub struct NetworkMembersSpec {
    /// The `PodNetwork`.
    #[schemars(with = "NetworkName")]
    pub network: String,
    /// UID of the `PodNetwork`.
    #[serde(rename = "networkUID")]
    #[schemars(length(min = 1, max = 128))]
    pub network_uid: String,
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// UID of the node: the members of an earlier node of the same name are gone.
    #[serde(rename = "nodeUID")]
    #[schemars(length(min = 1, max = 128))]
    pub node_uid: String,
    /// The interfaces of pods.
    // The list has one writer. As a map, each of its entries would be a field that the API server notes as managed: a third of
    // the object, in each event of a change.
    #[serde(default)]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "atomic", "x-kubernetes-validations" = vec![rules::members::distinct()])
    )]
    pub members: Vec<NetworkMember>,
}

/// An interface of a pod in the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkMember {
    /// Namespace of the pod.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the pod.
    #[schemars(length(min = 1, max = 253))]
    pub pod_name: String,
    /// UID of the pod.
    #[serde(rename = "podUID")]
    #[schemars(length(min = 1, max = 128))]
    pub pod_uid: String,
    /// Name of the interface inside the pod.
    #[schemars(with = "InterfaceName")]
    pub interface: String,
    /// Its addresses, at most one of each family.
    #[serde(default)]
    #[schemars(
        with = "Vec<HostAddress>",
        length(max = 2),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = vec![rules::one_per_family()])
    )]
    pub addresses: Vec<String>,
}

/// The confirmed members. Written by kni-controller alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct NetworkMembersStatus {
    /// Confirmed members of reported ones, such as 3/3.
    #[serde(default)]
    pub summary: String,
    /// What members have in common: pods of one Deployment usually share one entry.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub kinds: Vec<MemberKind>,
    /// The confirmed members.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub members: Vec<ConfirmedMember>,
    /// The reported members that are not confirmed.
    #[serde(default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub refused: Vec<RefusedMember>,
}

/// What the policies of other nodes need to know of a pod, from its `Pod` object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberKind {
    /// Labels of the pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Named ports of its containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub ports: Vec<MemberPort>,
}

/// A named port of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemberPort {
    /// Its name.
    pub name: String,
    /// IANA number of the transport: 6 is TCP, 17 UDP, 132 SCTP.
    pub protocol: u8,
    /// The port.
    pub port: u16,
}

/// A member, as confirmed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfirmedMember {
    /// The reported member.
    #[serde(flatten)]
    pub member: NetworkMember,
    /// Its entry in `kinds`, from 0.
    pub kind: u32,
}

/// A member that is not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedMember {
    /// UID of the pod, as reported.
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Name of the interface, as reported.
    pub interface: String,
    /// Why it is not confirmed.
    pub reason: String,
}

/// The name of an object: `NETWORK.HASH.NUMBER`, with a hash of the node's name, which may be too long.
pub fn name(network: &str, node: &str, number: usize) -> String {
    let mut hasher = FnvHasher::default();
    // Not by `Hash`, whose bytes may differ between compilers: agents and kni-controller must agree on the names.
    hasher.write(node.as_bytes());
    format!("{network}.{:016x}.{number}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt as _;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = NetworkMembers::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("networkmembers.kni.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        let selectable = crd.spec.versions[0].selectable_fields.clone().unwrap();
        let paths: Vec<String> = selectable.into_iter().map(|field| field.json_path).collect();
        assert_eq!(paths, [".spec.nodeName", ".spec.network"]);
        assert!(crd.spec.versions[0].subresources.as_ref().unwrap().status.is_some());
    }

    #[test]
    fn a_confirmed_member_has_the_fields_of_the_reported_one() {
        let member = NetworkMember {
            namespace: "shop".into(),
            pod_name: "web".into(),
            pod_uid: "u".into(),
            interface: "eth0".into(),
            addresses: vec!["10.0.0.1".into()],
        };
        let text = serde_json::to_value(ConfirmedMember { member, kind: 2 }).unwrap();
        let expected = json!({
            "namespace": "shop", "podName": "web", "podUID": "u", "interface": "eth0", "addresses": ["10.0.0.1"], "kind": 2,
        });
        assert_eq!(text, expected);
    }

    #[test]
    fn names_tell_nodes_and_numbers_apart() {
        let first = name("blue", "n1", 0);
        assert!(first.starts_with("blue.") && first.ends_with(".0"), "{first}");
        assert_ne!(first, name("blue", "n2", 0));
        // FNV-1a of "a", from its specification.
        assert_eq!(name("blue", "a", 0), "blue.af63dc4c8601ec8c.0");
        assert_ne!(first, name("blue", "n1", 1));
        assert!(name(&"b".repeat(50), &"n".repeat(253), 999).len() <= 253);
    }
}
