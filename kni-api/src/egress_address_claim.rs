//! Defines `EgressAddressClaim`: which node answers for an address outside of the cluster.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Condition, rules,
    schema::{self, HostAddress, NetworkName},
};

/// The units of an address.
pub const UNITS: std::ops::RangeInclusive<u8> = 1..=63;

/// Finalizer of a claim: it stays until its holder has released the address.
pub const HELD_FINALIZER: &str = "kni.dev/egress-address";

/// The desired owner of an address. Only kni-controller writes it.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "EgressAddressClaim",
    plural = "egressaddressclaims",
    singular = "egressaddressclaim",
    shortname = "eac",
    category = "kni",
    status = "EgressAddressClaimStatus",
    printcolumn(
        name = "Address",
        type_ = "string",
        json_path = r#".spec.address"#,
        description = "The address."
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = r#".spec.nodeName"#,
        description = "The node that is to answer for it."
    ),
    printcolumn(
        name = "Holder",
        type_ = "string",
        json_path = r#".status.holder.nodeName"#,
        description = "The node that answers for it, or may do so."
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        description = "Whether the holder has it on its uplink."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "Pool",
        type_ = "string",
        json_path = r#".spec.poolName"#,
        description = "The pool that it is from.",
        priority = 1
    ),
    printcolumn(
        name = "Policy",
        type_ = "string",
        json_path = r#".spec.egressPolicy.name"#,
        description = "The egress policy that uses it.",
        priority = 1
    ),
    derive = "PartialEq",
    derive = "Default",
    doc = "Which node answers for an address outside of the cluster. Written by kni-controller and the agents."
)]
#[serde(rename_all = "camelCase")]
#[schemars(
    extend("x-kubernetes-validations" = [rules::egress_pool::user(), rules::egress_pool::address()].concat()),
    transform = schema::plain
)]
pub struct EgressAddressClaimSpec {
    /// The address, in canonical form. The name of the object is made of it; see [`name_of`].
    #[schemars(with = "HostAddress")]
    pub address: String,
    /// The `EgressAddressPool` that it is from; absent for an address of a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pool_name: Option<String>,
    /// The egress policy that uses it. Other policies of the same namespace may use it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_policy: Option<PolicyReference>,
    /// The network that uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<NetworkName>")]
    pub pod_network_name: Option<String>,
    /// Name of the node that is to answer for it.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// UID of that node.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub node_uid: String,
    /// Increases whenever another node is chosen.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// The nodes whose pods leave with the address, each with a unit of 1024 of its ports. They send their packets to the
    /// node that answers for it. Pods of other nodes do not leave.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 63), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["unit"]))]
    pub shares: Vec<EgressShare>,
}

/// A node's part of the ports of an address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct EgressShare {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// UID of the node.
    #[schemars(length(max = 64))]
    pub node_uid: String,
    /// Its ports: 1024 from 1024 times this number on. Identifiers of ICMP echoes likewise.
    #[schemars(range(min = 1, max = 63))]
    pub unit: u8,
    /// When the node was last seen without pods that leave with the address. Another node gets the unit a minute later at
    /// the earliest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_since: Option<Time>,
}

/// Names an egress policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyReference {
    /// Its namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
}

/// Who answers for the address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct EgressAddressClaimStatus {
    /// The node that answers for the address, or may do so. Written by its agent before it adds the address, and removed
    /// by its agent after it has removed the address. kni-controller removes it only if the node is fenced: its object is
    /// gone, or has the taint node.kubernetes.io/out-of-service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// Ready: the holder has the address on its uplink.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A node that answers for an address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Its name.
    #[schemars(length(max = 253))]
    pub node_name: String,
    /// Its UID.
    #[schemars(length(max = 64))]
    pub node_uid: String,
    /// The epoch of the spec that it confirmed.
    #[schemars(range(min = 0))]
    pub epoch: i64,
}

/// The name of the claim of an address: an IPv4 address as it is, an IPv6 address with all eight groups of four digits,
/// separated by `-`. Equal for every way of writing the address, so that two claims of one address cannot exist.
pub fn name_of(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => v6.segments().map(|group| format!("{group:04x}")).join("-"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_has_one_name() {
        let name = |text: &str| name_of(text.parse().unwrap());
        assert_eq!(name("192.0.2.25"), "192.0.2.25");
        assert_eq!(name("2001:db8::25"), "2001-0db8-0000-0000-0000-0000-0000-0025");
        assert_eq!(name("2001:DB8:0:0::25"), name("2001:db8::25"));
    }
}
