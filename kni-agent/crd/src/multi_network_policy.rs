//! Defines and reads `MultiNetworkPolicy`: a `NetworkPolicy` for the interfaces that pods have on named networks.

use std::collections::BTreeSet;

use k8s_openapi::{
    api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPort},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kni_model::{
    NetworkName,
    policy::{NamedNetwork, Policy, PolicyKind, PolicyRef, PolicyScope},
};

use super::{
    from_object::FromObject,
    invalid::{FieldError, InvalidObject, at, shown},
    names::{NameRule, of_object, read_names},
    network_policy::Rules,
};

/// The annotation that lists the networks, separated by commas. Each may be `namespace/name`, because definitions of
/// other tools have namespaces: by default that of the policy. A `PodNetwork` has none, whatever namespace is written.
pub const POLICY_FOR: &str = "k8s.v1.cni.cncf.io/policy-for";

macro_rules! version {
    ($module:ident, $version:literal) => {
        #[doc = concat!("k8s.cni.cncf.io/", $version, ".")]
        pub mod $module {
            use k8s_openapi::{
                api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule},
                apimachinery::pkg::apis::meta::v1::LabelSelector,
            };
            use kube::CustomResource;
            use serde::{Deserialize, Serialize};

            /// The schema of `NetworkPolicySpec`. The project that owns the kind provides its definition.
            #[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
            #[kube(group = "k8s.cni.cncf.io", version = $version, kind = "MultiNetworkPolicy", namespaced)]
            #[kube(plural = "multi-networkpolicies", singular = "multi-networkpolicy")]
            #[kube(shortname = "multi-policy", derive = "PartialEq", schema = "disabled")]
            #[kube(doc = "A network policy for the interfaces of pods on named networks.")]
            #[serde(rename_all = "camelCase")]
            pub struct MultiNetworkPolicySpec {
                /// Selects pods of the namespace.
                pub pod_selector: LabelSelector,
                /// Directions in which they are isolated.
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub policy_types: Option<Vec<String>>,
                /// Ingress rules.
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub ingress: Option<Vec<NetworkPolicyIngressRule>>,
                /// Egress rules.
                #[serde(default, skip_serializing_if = "Option::is_none")]
                pub egress: Option<Vec<NetworkPolicyEgressRule>>,
            }

            impl MultiNetworkPolicySpec {
                pub(super) fn rules(&self) -> super::Rules<'_> {
                    super::Rules {
                        pod_selector: Some(&self.pod_selector),
                        policy_types: self.policy_types.as_deref(),
                        ingress: self.ingress.as_deref(),
                        egress: self.egress.as_deref(),
                    }
                }
            }
        }
    };
}

version!(v1beta1, "v1beta1");
version!(v1beta2, "v1beta2");

impl FromObject<v1beta1::MultiNetworkPolicy> for Policy {
    type Error = InvalidObject;

    fn from_object(object: &v1beta1::MultiNetworkPolicy) -> Result<Self, InvalidObject> {
        let rules = object.spec.rules();
        refuse_end_ports(&rules)
            .and_then(|()| convert(&object.metadata, rules))
            .map_err(of_object(KIND.as_str(), &object.metadata))
    }
}

impl FromObject<v1beta2::MultiNetworkPolicy> for Policy {
    type Error = InvalidObject;

    fn from_object(object: &v1beta2::MultiNetworkPolicy) -> Result<Self, InvalidObject> {
        convert(&object.metadata, object.spec.rules()).map_err(of_object(KIND.as_str(), &object.metadata))
    }
}

const KIND: PolicyKind = PolicyKind::MultiNetworkPolicy;

fn convert(metadata: &ObjectMeta, rules: Rules<'_>) -> Result<Policy, FieldError> {
    let (namespace, name) = read_names(metadata, NameRule::Subdomain)?;
    let scope = PolicyScope::Named(read_networks(metadata, &namespace)?);
    let reference = PolicyRef {
        kind: KIND,
        namespace,
        name,
    };
    rules.into_policy(reference, scope)
}

/// The names in the annotation. `own` is the namespace of those without one: the policy's.
pub(super) fn read_networks(metadata: &ObjectMeta, own: &str) -> Result<BTreeSet<NamedNetwork>, FieldError> {
    let annotation = metadata.annotations.as_ref().and_then(|all| all.get(POLICY_FOR));
    let Some(list) = annotation else {
        let reason = format!("does not say which networks: write {POLICY_FOR}: \"network-a, network-b\"");
        return Err(at("metadata.annotations", reason));
    };
    list.split(',')
        .map(|item| {
            let item = item.trim();
            let (namespace, name) = item.split_once('/').unwrap_or((own, item));
            let name: Result<NetworkName, _> = name.parse();
            let name = name.map_err(|error| {
                let reason = format!("{:?} in the list of networks: {error}", shown(item));
                at(format!("metadata.annotations.{POLICY_FOR}"), reason)
            })?;
            Ok(NamedNetwork {
                namespace: namespace.to_owned(),
                name,
            })
        })
        .collect()
}

fn refuse_end_ports(rules: &Rules<'_>) -> Result<(), FieldError> {
    let ingress = rules
        .ingress
        .unwrap_or_default()
        .iter()
        .map(|rule: &NetworkPolicyIngressRule| &rule.ports);
    let egress = rules
        .egress
        .unwrap_or_default()
        .iter()
        .map(|rule: &NetworkPolicyEgressRule| &rule.ports);
    refuse_end_ports_of("spec.ingress", ingress)?;
    refuse_end_ports_of("spec.egress", egress)
}

fn refuse_end_ports_of<'a>(
    field: &str,
    rules: impl Iterator<Item = &'a Option<Vec<NetworkPolicyPort>>>,
) -> Result<(), FieldError> {
    for (rule, ports) in rules.enumerate() {
        let ports = ports.as_deref().unwrap_or_default();
        if let Some(port) = ports.iter().position(|port| port.end_port.is_some()) {
            let path = format!("{field}[{rule}].ports[{port}].endPort");
            return Err(at(
                path,
                "is not part of v1beta1; write apiVersion k8s.cni.cncf.io/v1beta2",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kube::CustomResourceExt as _;

    use super::*;

    fn json(version: &str, annotation: &str, spec: &str) -> String {
        format!(
            r#"{{"apiVersion":"k8s.cni.cncf.io/{version}","kind":"MultiNetworkPolicy",
            "metadata":{{"namespace":"x","name":"p","annotations":{{{annotation}}}}},"spec":{spec}}}"#
        )
    }

    fn read2(annotation: &str, spec: &str) -> Result<Policy, InvalidObject> {
        let object: v1beta2::MultiNetworkPolicy = serde_json::from_str(&json("v1beta2", annotation, spec)).unwrap();
        Policy::from_object(&object)
    }

    fn read1(annotation: &str, spec: &str) -> Result<Policy, InvalidObject> {
        let object: v1beta1::MultiNetworkPolicy = serde_json::from_str(&json("v1beta1", annotation, spec)).unwrap();
        Policy::from_object(&object)
    }

    const FOR_BLUE: &str = r#""k8s.v1.cni.cncf.io/policy-for":"blue""#;

    #[test]
    fn the_kind_is_the_one_that_others_define() {
        assert_eq!(
            v1beta1::MultiNetworkPolicy::crd_name(),
            "multi-networkpolicies.k8s.cni.cncf.io"
        );
        assert_eq!(
            v1beta2::MultiNetworkPolicy::api_resource().api_version,
            "k8s.cni.cncf.io/v1beta2"
        );
    }

    #[test]
    fn networks_come_from_the_annotation() {
        let networks = r#""k8s.v1.cni.cncf.io/policy-for":" default/blue,red , other/blue""#;
        let policy = read2(networks, r#"{"podSelector":{},"ingress":[{}]}"#).unwrap();
        let expect = [("default", "blue"), ("x", "red"), ("other", "blue")].map(|(namespace, name)| NamedNetwork {
            namespace: namespace.to_owned(),
            name: name.parse().unwrap(),
        });
        assert_eq!(policy.scope, PolicyScope::Named(expect.into()));
        assert_eq!(policy.reference.to_string(), "MultiNetworkPolicy x/p");
        assert_eq!(
            (policy.ingress.map(|rules| rules.len()), policy.egress),
            (Some(1), None)
        );
        let error = read2("", r#"{"podSelector":{}}"#).unwrap_err();
        assert_eq!(error.field, "metadata.annotations");
        assert!(
            error.reason.contains("write k8s.v1.cni.cncf.io/policy-for: \""),
            "{error}"
        );
        for bad in ["", "blue,", "a/b/c", "Blue", "x/"] {
            let error = read2(&format!(r#""{POLICY_FOR}":"{bad}""#), r#"{"podSelector":{}}"#).unwrap_err();
            assert_eq!(
                error.field, "metadata.annotations.k8s.v1.cni.cncf.io/policy-for",
                "{bad}"
            );
        }
    }

    #[test]
    fn ranges_of_ports_came_with_v1beta2() {
        for (spec, field) in [
            (
                r#"{"podSelector":{},"ingress":[{},{"ports":[{"port":1},{"port":1,"endPort":2}]}]}"#,
                "spec.ingress[1].ports[1].endPort",
            ),
            (
                r#"{"podSelector":{},"egress":[{"ports":[{"port":1,"endPort":2}]}]}"#,
                "spec.egress[0].ports[0].endPort",
            ),
        ] {
            read2(FOR_BLUE, spec).unwrap();
            let error = read1(FOR_BLUE, spec).unwrap_err();
            assert_eq!(error.field, field);
            assert!(error.reason.contains("v1beta2"), "{error}");
        }
        read1(FOR_BLUE, r#"{"podSelector":{},"ingress":[{"ports":[{"port":1}]}]}"#).unwrap();
    }

    #[test]
    fn rules_obey_those_of_network_policy() {
        let error = read1(FOR_BLUE, r#"{"podSelector":{},"ingress":[{"from":[{}]}]}"#).unwrap_err();
        assert_eq!(error.field, "spec.ingress[0].from[0]");
        let no_selector = json("v1beta1", FOR_BLUE, "{}");
        assert!(serde_json::from_str::<v1beta1::MultiNetworkPolicy>(&no_selector).is_err());
    }
}
