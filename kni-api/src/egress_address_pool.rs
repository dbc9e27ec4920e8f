//! Defines `EgressAddressPool`: the addresses outside of the cluster that egress policies of some namespaces may use.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    Condition,
    access::NamespaceAccess,
    rules,
    schema::{self, Cidr},
};

/// Which addresses, and for whom. Unknown fields are refused.
#[expect(clippy::duplicated_attributes, reason = "every column has a type")]
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kni.dev",
    version = "v1alpha1",
    kind = "EgressAddressPool",
    plural = "egressaddresspools",
    singular = "egressaddresspool",
    shortname = "eap",
    category = "kni",
    status = "EgressAddressPoolStatus",
    printcolumn(
        name = "Ranges",
        type_ = "string",
        json_path = r#".status.summary.ranges"#,
        description = "The ranges of addresses."
    ),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Accepted")].status"#,
        description = "Whether it is valid and overlaps no older pool."
    ),
    printcolumn(
        name = "Used",
        type_ = "integer",
        json_path = r#".status.used"#,
        description = "Addresses that policies use."
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = r#".metadata.creationTimestamp"#,
        description = "When the object was made."
    ),
    printcolumn(
        name = "Namespaces",
        type_ = "string",
        json_path = r#".status.summary.namespaces"#,
        description = "The namespaces whose policies may use it.",
        priority = 1
    ),
    derive = "PartialEq",
    doc = "Addresses outside of the cluster that egress policies of some namespaces may use."
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(transform = schema::plain)]
pub struct EgressAddressPoolSpec {
    /// Ranges in CIDR notation, without host bits; a single address has the prefix length 32 or 128. They overlap
    /// neither each other nor those of an older pool. Addresses of nodes, gateways and Services inside them are never
    /// used.
    #[schemars(
        with = "Vec<Cidr>",
        length(min = 1, max = 64),
        extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = rules::egress_pool::ranges())
    )]
    pub ranges: Vec<String>,
    /// Who may use them.
    pub access: PoolAccess,
}

/// Who may use the addresses of a pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolAccess {
    /// The namespaces whose egress policies may use them.
    pub namespaces: NamespaceAccess,
}

/// The status of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = schema::plain)]
pub struct EgressAddressPoolStatus {
    /// Accepted: the spec is valid and overlaps no older pool.
    #[serde(default)]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Addresses that policies use.
    #[serde(default)]
    pub used: i64,
    /// Texts for the columns of `kubectl get`.
    #[serde(default)]
    pub summary: EgressAddressPoolSummary,
}

/// Texts for the columns of an `EgressAddressPool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressAddressPoolSummary {
    /// The ranges, separated by commas.
    #[serde(default)]
    pub ranges: String,
    /// The namespaces: "*" for all, "-" for none, or the selector in the syntax of `kubectl get --selector`.
    #[serde(default)]
    pub namespaces: String,
}

impl EgressAddressPoolSummary {
    /// The texts for a pool.
    pub fn new(spec: &EgressAddressPoolSpec) -> Self {
        use crate::access::NamespacesFrom;

        let NamespaceAccess { from, selector } = &spec.access.namespaces;
        Self {
            ranges: spec.ranges.join(","),
            namespaces: match (from, selector) {
                (NamespacesFrom::All, _) => "*".to_owned(),
                (NamespacesFrom::Selected, Some(selector)) => crate::summary::selector(selector),
                (NamespacesFrom::Selected, None) | (NamespacesFrom::None, _) => "-".to_owned(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_states_who_may_use_it() {
        let spec = |text: &str| serde_json::from_str::<EgressAddressPoolSpec>(text);
        let pool = spec(
            r#"{"ranges":["192.0.2.0/28"],"access":{"namespaces":{"from":"Selected","selector":{"matchLabels":{"a":"b"}}}}}"#,
        );
        let summary = EgressAddressPoolSummary::new(&pool.unwrap());
        assert_eq!(
            (summary.ranges.as_str(), summary.namespaces.as_str()),
            ("192.0.2.0/28", "a=b")
        );
        for bad in [
            r#"{"ranges":["192.0.2.0/28"]}"#,
            r#"{"ranges":["192.0.2.0/28"],"access":{}}"#,
            r#"{"ranges":["192.0.2.0/28"],"access":{"namespaces":{"from":"Any"}}}"#,
            r#"{"range":["192.0.2.0/28"],"access":{"namespaces":{"from":"All"}}}"#,
        ] {
            assert!(spec(bad).is_err(), "{bad}");
        }
    }
}
