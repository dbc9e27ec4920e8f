//! Defines `AddressBlock`: a range of a network's addresses that belongs to one node.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{self, Cidr, NetworkName},
};

/// Which range it is, and whose. The creation of the object is the claim; only the UID of its node can change.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "AddressBlock",
    plural = "addressblocks",
    singular = "addressblock",
    shortname = "abl",
    category = "kni",
    validation = rules::block::name(),
    selectable = ".spec.nodeName",
    selectable = ".spec.network",
    selectable = ".spec.networkUID",
    printcolumn(
        name = "Network",
        type_ = "string",
        json_path = r#".spec.network"#,
        description = "The PodNetwork."
    ),
    printcolumn(
        name = "CIDR",
        type_ = "string",
        json_path = r#".spec.cidr"#,
        description = "The range."
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = r#".spec.nodeName"#,
        description = "The node that assigns its addresses."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the node claimed it."
    ),
    printcolumn(
        name = "Network-UID",
        type_ = "string",
        json_path = r#".spec.networkUID"#,
        description = "UID of the PodNetwork.",
        priority = 1
    ),
    printcolumn(
        name = "Node-UID",
        type_ = "string",
        json_path = r#".spec.nodeUID"#,
        description = "UID of the node.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "A range of a network's addresses that belongs to one node, which alone assigns them. Written by the agents."
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules::block::spec()), transform = schema::plain)]
pub struct AddressBlockSpec {
    /// The `PodNetwork`.
    #[schemars(with = "NetworkName")]
    pub network: String,
    /// UID of the `PodNetwork`: a later network of the same name does not own the block.
    #[serde(rename = "networkUID")]
    #[schemars(length(min = 1, max = 128))]
    pub network_uid: String,
    /// The range in CIDR notation, without host bits, in the form that the API server prints.
    #[schemars(with = "Cidr")]
    pub cidr: String,
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node_name: String,
    /// UID of the node. One that is registered again under its name takes the block over, by writing its new UID.
    #[serde(rename = "nodeUID")]
    #[schemars(length(min = 1, max = 128))]
    pub node_uid: String,
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, Resource as _};

    use super::*;

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = AddressBlock::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("addressblocks.kni.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        assert_eq!(crd.spec.names.short_names, Some(vec!["abl".to_owned()]));
        assert_eq!(AddressBlock::api_version(&()), "kni.dev/v1alpha1");
        let selectable = crd.spec.versions[0].selectable_fields.clone().unwrap();
        let paths: Vec<String> = selectable.into_iter().map(|field| field.json_path).collect();
        assert_eq!(paths, [".spec.nodeName", ".spec.network", ".spec.networkUID"]);
    }

    #[test]
    fn uids_are_written_as_kubernetes_writes_them() {
        let spec = AddressBlockSpec {
            network: "blue".into(),
            network_uid: "u".into(),
            cidr: "10.0.0.0/26".into(),
            node_name: "n".into(),
            node_uid: "v".into(),
        };
        let text = serde_json::to_value(&spec).unwrap();
        let expected = serde_json::json!({
            "network": "blue", "networkUID": "u", "cidr": "10.0.0.0/26", "nodeName": "n", "nodeUID": "v",
        });
        assert_eq!(text, expected);
    }
}
