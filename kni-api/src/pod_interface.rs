//! Defines `PodInterface`: one interface of one pod on its node.

use std::hash::{Hash as _, Hasher as _};

use fnv::FnvHasher;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Condition, rules,
    schema::{self, InterfaceName, NetworkName},
};

/// Which interface it is. Written by the agent of the node, which overwrites changes by others.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "PodInterface",
    plural = "podinterfaces",
    singular = "podinterface",
    shortname = "pif",
    category = "kni",
    namespaced,
    status = "PodInterfaceStatus",
    selectable = ".spec.podName",
    selectable = ".spec.nodeName",
    selectable = ".spec.podNetworkName",
    printcolumn(
        name = "Pod",
        type_ = "string",
        json_path = r#".spec.podName"#,
        description = "The pod."
    ),
    printcolumn(
        name = "Network",
        type_ = "string",
        json_path = r#".spec.podNetworkName"#,
        description = "The PodNetwork."
    ),
    printcolumn(
        name = "Interface",
        type_ = "string",
        json_path = r#".spec.interfaceName"#,
        description = "Name of the interface inside the pod."
    ),
    printcolumn(
        name = "IPv4",
        type_ = "string",
        json_path = r#".status.addresses[?(@.family=="IPv4")].ip"#,
        description = "IPv4 address."
    ),
    printcolumn(
        name = "IPv6",
        type_ = "string",
        json_path = r#".status.addresses[?(@.family=="IPv6")].ip"#,
        description = "IPv6 address."
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = r#".spec.nodeName"#,
        description = "The node."
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#,
        description = "Whether it is there and its programs run."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "MAC",
        type_ = "string",
        json_path = r#".status.mac"#,
        description = "MAC address inside the pod.",
        priority = 1
    ),
    printcolumn(
        name = "MTU",
        type_ = "integer",
        json_path = r#".status.mtu"#,
        description = "MTU in bytes of IP packet.",
        priority = 1
    ),
    printcolumn(
        name = "Host-Interface",
        type_ = "string",
        json_path = r#".status.hostInterfaceName"#,
        description = "Name of the host end.",
        priority = 1
    ),
    printcolumn(
        name = "Policy",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="PolicyEnforced")].status"#,
        description = "Whether the network policies that select the pod hold at it.",
        priority = 1
    ),
    printcolumn(
        name = "Sandbox",
        type_ = "string",
        json_path = r#".spec.sandboxId"#,
        description = "Id of the pod sandbox.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "One interface of one pod: both its ends, its addresses, its programs and its health. Written by the agents."
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules::interface::spec()), transform = schema::plain)]
pub struct PodInterfaceSpec {
    /// The pod, in the namespace of this object.
    #[schemars(length(min = 1, max = 253))]
    pub pod_name: String,
    /// UID of the pod.
    #[schemars(length(min = 1, max = 128))]
    pub pod_uid: String,
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// The `PodNetwork`.
    #[schemars(with = "NetworkName")]
    pub pod_network_name: String,
    /// Name of the interface inside the pod.
    #[schemars(with = "InterfaceName")]
    pub interface_name: String,
    /// The container runtime's id of the pod sandbox.
    #[schemars(length(min = 1, max = 253))]
    pub sandbox_id: String,
}

/// The status of an interface on its node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct PodInterfaceStatus {
    /// Ready: it is there and its programs run. `PolicyEnforced`: the network policies that select the pod hold at it.
    /// Authorized: the network would let the pod in again.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Interface index inside the pod.
    #[serde(default)]
    pub interface_index: u32,
    /// Name of the host end; of kinds without one, of the node's interface that it was made of.
    #[serde(default)]
    pub host_interface_name: String,
    /// Interface index of the host end; 0 for kinds without one.
    #[serde(default)]
    pub host_interface_index: u32,
    /// Inode of the network namespace, as `lsns` shows it.
    #[serde(default)]
    pub netns_inode: i64,
    /// MAC address inside the pod.
    #[serde(default)]
    pub mac: String,
    /// MTU in bytes of IP packet.
    #[serde(default)]
    pub mtu: u32,
    /// Addresses, IPv4 first.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["ip"]))]
    pub addresses: Vec<InterfaceAddress>,
    /// Routes inside the pod that lead through it.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub routes: Vec<InterfaceRoute>,
    /// Programs at its host end.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-list-type" = "atomic"))]
    pub programs: Vec<AttachedProgram>,
    /// The dataplane's number of it: its row in the pinned map `ENDPOINTS`.
    #[serde(default)]
    pub endpoint_id: u32,
    /// The dataplane's number of the network on this node, as in the keys of the pinned maps.
    #[serde(default)]
    pub network_id: u32,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceAddress {
    /// The address, without prefix length.
    pub ip: String,
    /// IPv4 or IPv6.
    pub family: String,
}

/// A route inside a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceRoute {
    /// The destination in CIDR notation.
    pub destination: String,
    /// The gateway; absent for destinations on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
}

/// A program at the host end of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachedProgram {
    /// Where it is attached, such as tcx/ingress.
    pub hook: String,
    /// Its name.
    pub name: String,
    /// The kernel's id of the program, as `bpftool prog` shows it.
    pub program_id: u32,
    /// The kernel's id of the link; 0 where the hook has none.
    pub link_id: u32,
}

/// Maximum length of an object's name.
const MAX_NAME: usize = 253;

/// The name of the object of an interface: `POD.IFNAME.` and the first 8 characters of the pod's UID, so that pods that
/// have a name one after the other, on any nodes, have different objects. Where such a name is too long or not valid,
/// a hash takes the place of what follows the pod's name.
pub fn name(pod: &str, uid: &str, ifname: &str) -> String {
    let is_plain = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let short = uid.get(..8).unwrap_or(uid);
    let name = format!("{pod}.{ifname}.{short}");
    if is_plain(ifname) && !short.is_empty() && is_plain(short) && name.len() <= MAX_NAME {
        return name;
    }
    let mut hasher = FnvHasher::default();
    (pod, uid, ifname).hash(&mut hasher);
    let pod: String = pod.chars().take(MAX_NAME - 18).collect();
    // An interface name has at most 15 characters, so this form is unambiguous.
    format!("{}.{:016x}", pod.trim_end_matches(['.', '-']), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_pods_and_interfaces_apart() {
        let (first, second) = (
            "1a2b3c4d-0000-4000-8000-000000000000",
            "5e6f7a8b-0000-4000-8000-000000000000",
        );
        assert_eq!(name("web-0", first, "eth0"), "web-0.eth0.1a2b3c4d");
        assert_ne!(name("web-0", first, "eth0"), name("web-0", second, "eth0"));
        let odd = name("web-0", first, "Net_1");
        assert!(
            odd.starts_with("web-0.") && odd != name("web-0", first, "net_1"),
            "{odd}"
        );
        assert_ne!(odd, name("web-0", second, "Net_1"));
        let long = "a".repeat(253);
        assert!(name(&long, first, "eth0").len() <= MAX_NAME);
        assert_ne!(name(&long, first, "eth0"), name(&long, first, "net1"));
        assert_ne!(name(&long, first, "eth0"), name(&long, second, "eth0"));
        for uid in ["", "A", "x/y", "static-pod"] {
            let name = name("web-0", uid, "eth0");
            assert!(
                name.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'.' || b == b'-'),
                "{name}"
            );
        }
    }
}
