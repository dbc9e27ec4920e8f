//! Defines `NetworkNumber`: the number of a network in the whole cluster.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{self, NetworkName},
};

/// The largest number: 24 bits.
pub const LARGEST: u32 = (1 << 24) - 1;

/// Whose number it is. Nothing of it can be changed: the creation of the object is the claim.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "NetworkNumber",
    plural = "networknumbers",
    singular = "networknumber",
    shortname = "nn",
    category = "kni",
    status = "NetworkNumberStatus",
    validation = rules::number::name(),
    printcolumn(
        name = "Network",
        type_ = "string",
        json_path = r#".spec.network"#,
        description = "The PodNetwork."
    ),
    printcolumn(
        name = "Released",
        type_ = "date",
        json_path = r#".status.releasedAt"#,
        description = "When the network was found to be gone; the object is deleted an hour later."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the network got it."
    ),
    printcolumn(
        name = "Network-UID",
        type_ = "string",
        json_path = r#".spec.networkUID"#,
        description = "UID of the PodNetwork.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "The number of a network in the whole cluster: the name of the object. Written by kni-controller."
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules::number::spec()), transform = schema::plain)]
pub struct NetworkNumberSpec {
    /// The `PodNetwork`.
    #[schemars(with = "NetworkName")]
    pub network: String,
    /// UID of the `PodNetwork`: a later network of the same name has another number.
    #[serde(rename = "networkUID")]
    #[schemars(length(min = 1, max = 128))]
    pub network_uid: String,
}

/// Whether the number is still that of its network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct NetworkNumberStatus {
    /// When kni-controller found that the network is gone, or that it has another number. Nodes do not use the number
    /// any more; it rests for an hour before another network may get it. Absent: it is the number of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released_at: Option<Time>,
}

impl NetworkNumber {
    /// The number; `None` for a name that the API server would refuse.
    pub fn number(&self) -> Option<u32> {
        let name = self.metadata.name.as_deref()?;
        let number: u32 = name.parse().ok()?;
        ((1..=LARGEST).contains(&number) && number.to_string() == name).then_some(number)
    }

    /// When it was released; `None` while it is the number of its network.
    pub fn released_at(&self) -> Option<&Time> {
        self.status.as_ref()?.released_at.as_ref()
    }

    /// Whether it names a network by name and UID.
    pub fn is_of(&self, network: &str, uid: &str) -> bool {
        self.spec.network == network && self.spec.network_uid == uid
    }
}

#[cfg(test)]
mod tests {
    use kube::{CustomResourceExt as _, Resource as _};

    use super::*;

    fn object(name: &str) -> NetworkNumber {
        let spec = NetworkNumberSpec {
            network: "blue".into(),
            network_uid: "u".into(),
        };
        NetworkNumber::new(name, spec)
    }

    #[test]
    fn the_definition_says_what_kubectl_needs() {
        let crd = NetworkNumber::crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("networknumbers.kni.dev"));
        assert_eq!(crd.spec.scope, "Cluster");
        assert_eq!(crd.spec.names.short_names, Some(vec!["nn".to_owned()]));
        assert_eq!(NetworkNumber::api_version(&()), "kni.dev/v1alpha1");
        let text = serde_json::to_value(&object("7").spec).unwrap();
        assert_eq!(text, serde_json::json!({"network": "blue", "networkUID": "u"}));
    }

    #[test]
    fn only_the_canonical_name_is_a_number() {
        for (name, number) in [
            ("1", Some(1)),
            ("16777215", Some(LARGEST)),
            ("16777216", None),
            ("0", None),
            ("07", None),
            ("+7", None),
            ("-7", None),
            ("blue", None),
            ("", None),
        ] {
            assert_eq!(object(name).number(), number, "{name:?}");
        }
    }

    #[test]
    fn a_number_is_of_a_network_by_name_and_uid() {
        let number = object("7");
        assert!(number.is_of("blue", "u"));
        assert!(!number.is_of("blue", "v") && !number.is_of("red", "u"));
    }
}
