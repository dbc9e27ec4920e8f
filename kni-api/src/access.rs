//! Defines who may use a cluster-scoped object: the namespaces, and for networks what their pods may choose.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    rules,
    schema::{Cidr, Selector},
};

/// The label that the API server gives every namespace: its name.
pub const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Who may join a network, and what pods that join may choose. A network without it takes the pods of the namespaces
/// that `namespaceSelector` selects, the default network those of all namespaces; none of them may choose anything.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a right of its own for who writes the object"
)]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::access::spec()))]
pub struct Access {
    /// The namespaces whose pods, attachments and Services may join, beside those that `namespaceSelector` selects.
    /// Absent: no others; for the default network all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<NamespaceAccess>,
    /// Whether pods may choose their addresses, by annotation or attachment.
    #[serde(default)]
    pub allow_addresses: bool,
    /// Ranges in CIDR notation, inside the subnets, that chosen addresses lie in. Empty: any address of the subnets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Cidr>", length(max = 64), extend("x-kubernetes-list-type" = "set"))]
    pub address_ranges: Vec<String>,
    /// Whether pods may choose their MAC addresses.
    #[serde(default)]
    pub allow_mac: bool,
    /// Whether an interface beside the primary one may take the default routes of its pod.
    #[serde(default)]
    pub allow_default_route: bool,
    /// Whether pods of the namespaces whose primary network this is may choose no other primary network.
    #[serde(default)]
    pub lock_namespaces: bool,
    /// Whether the service account of a pod also needs the RBAC verb `join` on this network.
    #[serde(default)]
    pub require_join: bool,
    /// Whether running pods that lose the right to join lose their traffic, and are detached if the right is not back
    /// within 60 s. Otherwise they keep their interfaces. The condition Authorized of their `PodInterface` is False.
    #[serde(default)]
    pub revoke: bool,
}

/// Namespaces that may use an object.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = rules::access::namespaces()))]
pub struct NamespaceAccess {
    /// Which namespaces.
    pub from: NamespacesFrom,
    /// With Selected: the namespaces, by their labels. The label kubernetes.io/metadata.name selects one by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Selector>")]
    pub selector: Option<LabelSelector>,
}

/// Which namespaces may use an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NamespacesFrom {
    /// Every namespace.
    All,
    /// The namespaces that the selector selects.
    Selected,
    /// No namespace.
    #[default]
    None,
}

impl NamespaceAccess {
    /// Namespaces with one of these names.
    pub fn of_names(names: impl IntoIterator<Item = String>) -> Self {
        let requirement = LabelSelectorRequirement {
            key: NAMESPACE_NAME_LABEL.to_owned(),
            operator: "In".to_owned(),
            values: Some(names.into_iter().collect()),
        };
        Self {
            from: NamespacesFrom::Selected,
            selector: Some(LabelSelector {
                match_expressions: Some(vec![requirement]),
                match_labels: None,
            }),
        }
    }

    /// Whether a namespace may use the object. `labels` are those of the namespace, with [`NAMESPACE_NAME_LABEL`], as the
    /// API server sets it. Without a selector, `Selected` selects none.
    pub fn admits(&self, labels: &BTreeMap<String, String>) -> bool {
        match (self.from, &self.selector) {
            (NamespacesFrom::All, _) => true,
            (NamespacesFrom::Selected, Some(selector)) => selects(selector, labels),
            (NamespacesFrom::Selected, None) | (NamespacesFrom::None, _) => false,
        }
    }
}

/// Whether a selector selects an object with these labels; an empty one selects every object. A requirement with an
/// operator that Kubernetes does not have selects none.
pub fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let mut pairs = selector.match_labels.iter().flatten();
    let mut requirements = selector.match_expressions.iter().flatten();
    pairs.all(|(key, value)| labels.get(key) == Some(value))
        && requirements.all(|requirement| holds(requirement, labels))
}

fn holds(requirement: &LabelSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&requirement.key);
    let listed = |value: &String| requirement.values.iter().flatten().any(|other| other == value);
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn namespaces_are_admitted_as_the_selector_selects() {
        let (red, blue, none) = (labels(&[("tenant", "red")]), labels(&[("tenant", "blue")]), labels(&[]));
        for (access, expected) in [
            (r#"{"from":"All"}"#, [true, true, true]),
            (r#"{"from":"None"}"#, [false, false, false]),
            (r#"{"from":"Selected"}"#, [false, false, false]),
            (r#"{"from":"Selected","selector":{}}"#, [true, true, true]),
            (
                r#"{"from":"Selected","selector":{"matchLabels":{"tenant":"red"}}}"#,
                [true, false, false],
            ),
            (
                r#"{"from":"Selected","selector":{"matchExpressions":[{"key":"tenant","operator":"In","values":["red","blue"]}]}}"#,
                [true, true, false],
            ),
            (
                r#"{"from":"Selected","selector":{"matchExpressions":[{"key":"tenant","operator":"NotIn","values":["red"]}]}}"#,
                [false, true, true],
            ),
            (
                r#"{"from":"Selected","selector":{"matchExpressions":[{"key":"tenant","operator":"Exists"}]}}"#,
                [true, true, false],
            ),
            (
                r#"{"from":"Selected","selector":{"matchExpressions":[{"key":"tenant","operator":"DoesNotExist"}]}}"#,
                [false, false, true],
            ),
            (
                r#"{"from":"Selected","selector":{"matchExpressions":[{"key":"tenant","operator":"Near"}]}}"#,
                [false, false, false],
            ),
            (
                r#"{"from":"Selected","selector":{"matchLabels":{"tenant":"red"},"matchExpressions":[{"key":"x","operator":"Exists"}]}}"#,
                [false, false, false],
            ),
        ] {
            let access: NamespaceAccess = serde_json::from_str(access).unwrap();
            let admitted = [&red, &blue, &none].map(|labels| access.admits(labels));
            assert_eq!(admitted, expected, "{access:?}");
        }
    }

    #[test]
    fn names_select_their_namespaces() {
        let access = NamespaceAccess::of_names(["a".to_owned(), "b".to_owned()]);
        for (name, expected) in [("a", true), ("b", true), ("c", false)] {
            assert_eq!(
                access.admits(&labels(&[(NAMESPACE_NAME_LABEL, name)])),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn nothing_is_granted_by_default() {
        let access: Access = serde_json::from_str("{}").unwrap();
        assert_eq!(access, Access::default());
        assert!(!NamespaceAccess::default().admits(&labels(&[])));
        for bad in [
            r#"{"namespace":{}}"#,
            r#"{"namespaces":{}}"#,
            r#"{"namespaces":{"from":"all"}}"#,
        ] {
            assert!(serde_json::from_str::<Access>(bad).is_err(), "{bad}");
        }
    }
}
