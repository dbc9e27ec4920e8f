//! Defines `NodeEndpoint`: where other nodes send the packets for one node's pods.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{self, NodeAddress},
};

/// Default UDP port of tunnels: that of VXLAN.
pub const DEFAULT_PORT: u16 = 4789;

/// The tunnel of a node as the node reports it. Other nodes use the addresses of the status only.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "NodeEndpoint",
    plural = "nodeendpoints",
    singular = "nodeendpoint",
    shortname = "nep",
    category = "kni",
    status = "NodeEndpointStatus",
    validation = rules::endpoint::name(),
    printcolumn(
        name = "Confirmed",
        type_ = "string",
        json_path = r#".status.addresses"#,
        description = "The addresses that other nodes send to."
    ),
    printcolumn(
        name = "Port",
        type_ = "integer",
        json_path = r#".spec.port"#,
        description = "UDP port of the tunnel."
    ),
    printcolumn(
        name = "MTU",
        type_ = "integer",
        json_path = r#".spec.mtu"#,
        description = "The largest IP packet between the nodes."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "Reported",
        type_ = "string",
        json_path = r#".spec.addresses"#,
        description = "The addresses that the node reports.",
        priority = 1
    ),
    printcolumn(
        name = "Refused",
        type_ = "string",
        json_path = r#".status.refused[*].reason"#,
        description = "Why addresses are not confirmed.",
        priority = 1
    ),
    printcolumn(
        name = "Epoch",
        type_ = "integer",
        json_path = r#".spec.epoch"#,
        description = "Changes with the contents.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "Where other nodes send the packets for a node's pods: reported by the node's agent, confirmed by kni-controller."
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules::endpoint::spec()), transform = schema::plain)]
pub struct NodeEndpointSpec {
    /// The node; also the name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// UID of the node: the endpoint of an earlier node of the same name is gone.
    #[serde(rename = "nodeUID")]
    #[schemars(length(min = 1, max = 128))]
    pub node_uid: String,
    /// Addresses of the node, at most one of each family. The first is of the family that the node prefers.
    #[schemars(
        with = "Vec<NodeAddress>",
        length(min = 1, max = 2),
        extend("x-kubernetes-list-type" = "atomic", "x-kubernetes-validations" = rules::endpoint::addresses())
    )]
    pub addresses: Vec<String>,
    /// UDP port of its tunnel.
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// The largest IP packet, in bytes, that the interfaces with the addresses send and receive.
    #[schemars(range(min = 1280, max = 65535))]
    pub mtu: u32,
    /// Changes with the other fields: other nodes evaluate their flows to this node again.
    #[schemars(range(min = 1))]
    pub epoch: u32,
}

/// The confirmed endpoint. Written by kni-controller alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct NodeEndpointStatus {
    /// The confirmed addresses, in the order of the spec. Another node uses one only while the spec has it, too.
    #[serde(default)]
    #[schemars(length(max = 2), inner(length(max = 45)), extend("x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<String>,
    /// The reported addresses that are not confirmed.
    #[serde(default)]
    #[schemars(length(max = 2), extend("x-kubernetes-list-type" = "atomic"))]
    pub refused: Vec<RefusedAddress>,
}

/// An address that is not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedAddress {
    /// The address, as reported.
    pub address: String,
    /// Why it is not confirmed.
    pub reason: String,
}

impl NodeEndpoint {
    /// The addresses that other nodes may use, in the order of preference: confirmed, and still reported.
    pub fn confirmed(&self) -> impl Iterator<Item = &str> {
        let confirmed = self.status.iter().flat_map(|status| &status.addresses);
        let reported = confirmed.filter(|address| self.spec.addresses.contains(address));
        reported.map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, Resource as _};
    use serde_json::json;

    use super::*;

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = NodeEndpoint::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("nodeendpoints.kni.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        assert_eq!(crd.spec.names.short_names, Some(vec!["nep".to_owned()]));
        assert_eq!(NodeEndpoint::api_version(&()), "kni.dev/v1alpha1");
        assert!(crd.spec.versions[0].subresources.as_ref().unwrap().status.is_some());
    }

    #[test]
    fn an_address_counts_while_it_is_both_reported_and_confirmed() {
        let spec = json!({
            "nodeName": "n1", "nodeUID": "u", "addresses": ["192.0.2.2", "2001:db8::1"], "port": 4789, "mtu": 1500, "epoch": 1,
        });
        let mut object = NodeEndpoint::new("n1", serde_json::from_value(spec.clone()).unwrap());
        assert_eq!(serde_json::to_value(&object.spec).unwrap(), spec);
        assert_eq!(object.confirmed().count(), 0);
        object.status = Some(NodeEndpointStatus {
            addresses: vec!["192.0.2.1".into(), "2001:db8::1".into()],
            refused: Vec::new(),
        });
        assert_eq!(object.confirmed().collect::<Vec<_>>(), ["2001:db8::1"]);
    }
}
