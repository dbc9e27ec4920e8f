//! Names objects of other projects that have no effect here. Pure.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    ResourceExt as _,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::Finding;

/// What to use in place of policies of other projects.
const POLICIES: &str = "write NetworkPolicies, MultiNetworkPolicies or EgressPolicies in their place (docs/design/policy.md), \
                        and delete them";
/// What to do about a Gateway.
const GATEWAYS: &str =
    "install a controller for its GatewayClass, or use Services; kubectl describe gateway shows its conditions";
/// Objects of a kind that a finding names.
const NAMED: usize = 5;

/// Kinds that KNI does not implement, by group and plural, with the remedy.
const KINDS: [(&str, &str, &str); 8] = [
    ("policy.networking.k8s.io", "clusternetworkpolicies", POLICIES),
    ("policy.networking.k8s.io", "adminnetworkpolicies", POLICIES),
    ("policy.networking.k8s.io", "baselineadminnetworkpolicies", POLICIES),
    ("cilium.io", "ciliumnetworkpolicies", POLICIES),
    ("cilium.io", "ciliumclusterwidenetworkpolicies", POLICIES),
    ("crd.projectcalico.org", "networkpolicies", POLICIES),
    ("crd.projectcalico.org", "globalnetworkpolicies", POLICIES),
    ("gateway.networking.k8s.io", "gateways", GATEWAYS),
];

/// Some objects of a kind of [`KINDS`].
#[derive(Clone, Debug)]
pub(crate) struct ForeignObjects {
    pub(crate) resource: ApiResource,
    pub(crate) objects: Vec<DynamicObject>,
    /// How many there are besides.
    pub(crate) more: usize,
    /// Why they could not be listed.
    pub(crate) problem: Option<String>,
}

/// Those of [`KINDS`] that have a definition, in a version that is served.
pub(crate) fn served(definitions: &[CustomResourceDefinition]) -> Vec<ApiResource> {
    let mut found = Vec::new();
    for definition in definitions {
        let (spec, names) = (&definition.spec, &definition.spec.names);
        let is_known = KINDS
            .iter()
            .any(|(group, plural, _)| *group == spec.group && *plural == names.plural);
        let version = spec.versions.iter().find(|version| version.served);
        if let Some(version) = version.filter(|_| is_known) {
            found.push(ApiResource {
                group: spec.group.clone(),
                version: version.name.clone(),
                api_version: format!("{}/{}", spec.group, version.name),
                kind: names.kind.clone(),
                plural: names.plural.clone(),
            });
        }
    }
    found
}

/// A finding for each kind of which there are objects that nothing makes effective.
pub(super) fn without_effect(foreign: &[ForeignObjects]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for found in foreign {
        let ApiResource {
            group, plural, kind, ..
        } = &found.resource;
        let object = format!("{plural}.{group}");
        if let Some(problem) = &found.problem {
            let remedy = format!("run it as a user who may list them: kubectl auth can-i list {object} -A");
            findings.push(Finding::warning(
                object,
                format!("they cannot be listed: {problem}"),
                remedy,
            ));
            continue;
        }
        let idle: Vec<String> = found
            .objects
            .iter()
            .filter(|object| !is_programmed(object))
            .map(|object| match object.namespace() {
                Some(namespace) => format!("{namespace}/{}", object.name_any()),
                None => object.name_any(),
            })
            .collect();
        if idle.is_empty() {
            continue;
        }
        let more = match idle.len().saturating_sub(NAMED) + found.more {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let named: Vec<&str> = idle.iter().take(NAMED).map(String::as_str).collect();
        let named = named.join(", ");
        let problem = format!("KNI does not implement {kind}; without effect on its pods: {named}{more}");
        let row = KINDS.iter().find(|row| row.0 == group && row.1 == plural);
        findings.push(Finding::warning(object, problem, row.map_or("", |row| row.2)));
    }
    findings
}

/// Whether a controller reports that it makes the object effective, as one of a Gateway does. Agents of other projects
/// report nothing like it.
fn is_programmed(object: &DynamicObject) -> bool {
    let conditions = object.data.pointer("/status/conditions").and_then(Value::as_array);
    let has = |condition: &Value, field: &str, text: &str| condition.get(field).and_then(Value::as_str) == Some(text);
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| has(condition, "type", "Programmed") && has(condition, "status", "True"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn definition(group: &str, plural: &str, kind: &str) -> CustomResourceDefinition {
        serde_json::from_value(json!({
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {"group": group, "scope": "Cluster", "names": {"plural": plural, "kind": kind}, "versions": [
                {"name": "v1alpha1", "served": false, "storage": false}, {"name": "v1alpha2", "served": true, "storage": true},
            ]},
        }))
        .unwrap()
    }

    fn object(name: &str, status: &str) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "x/v1", "kind": "X", "metadata": {"name": name, "namespace": "shop"},
            "status": {"conditions": [{"type": "Programmed", "status": status}]},
        }))
        .unwrap()
    }

    fn of_kind(group: &str, plural: &str, objects: Vec<DynamicObject>) -> ForeignObjects {
        let mut resources = served(&[definition(group, plural, "Kind")]);
        ForeignObjects {
            resource: resources.remove(0),
            objects,
            more: 0,
            problem: None,
        }
    }

    #[test]
    fn only_served_kinds_of_the_list_are_asked_for() {
        for (group, plural, _) in KINDS {
            let found = served(&[definition(group, plural, "Kind")]);
            assert_eq!(found[0].api_version, format!("{group}/v1alpha2"));
        }
        assert_eq!(
            served(&[definition("kni.dev", "egresspolicies", "EgressPolicy")]).len(),
            0
        );
        let mut gone = definition("cilium.io", "ciliumnetworkpolicies", "CiliumNetworkPolicy");
        gone.spec.versions[1].served = false;
        assert_eq!(served(&[gone]).len(), 0);
    }

    #[test]
    fn objects_without_effect_are_named_with_what_to_do() {
        for (group, plural, remedy) in KINDS {
            assert_eq!(without_effect(&[of_kind(group, plural, vec![])]), []);
            let mut found = of_kind(group, plural, vec![object("a", "False"), object("b", "Unknown")]);
            let findings = without_effect(std::slice::from_ref(&found));
            assert_eq!(findings.len(), 1);
            assert_eq!(
                findings[0].problem,
                "KNI does not implement Kind; without effect on its pods: shop/a, shop/b"
            );
            assert_eq!(findings[0].remedy, remedy);
            found.problem = Some("forbidden".to_owned());
            assert_eq!(without_effect(&[found])[0].problem, "they cannot be listed: forbidden");
        }
    }

    #[test]
    fn what_another_controller_serves_is_not_named_and_a_long_list_is_cut() {
        let gateways = |objects| of_kind("gateway.networking.k8s.io", "gateways", objects);
        assert_eq!(without_effect(&[gateways(vec![object("a", "True")])]), []);
        let many = (0..7).map(|number| object(&format!("g{number}"), "False"));
        let mut many = gateways(many.collect());
        many.more = 10;
        let problem = &without_effect(&[many])[0].problem;
        assert!(problem.ends_with("shop/g4 and 12 more"), "{problem}");
    }
}
