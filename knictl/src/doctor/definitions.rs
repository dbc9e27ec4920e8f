//! Compares the installed definitions of kni.dev with those that this program was built with. Pure.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use serde_json::Value;

use super::Finding;

/// Maximum number of fields that a finding names.
const MOST_NAMED: usize = 4;

/// What is missing among `installed`, or differs from `expected`.
pub(super) fn compare(expected: &[CustomResourceDefinition], installed: &[CustomResourceDefinition]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for own in expected {
        let name = own.name_any();
        let object = format!("definition {name}");
        let Some(other) = installed.iter().find(|other| other.name_any() == name) else {
            let remedy = "kubectl apply --server-side -k deploy/crds";
            findings.push(Finding::failure(object, "it is not installed", remedy));
            continue;
        };
        if !is_established(other) {
            let remedy = "read its conditions: kubectl describe crd";
            findings.push(Finding::failure(&object, "the API server does not serve it", remedy));
        }
        let (own, other) = (fields_of(own), fields_of(other));
        let missing: Vec<&String> = own.difference(&other).collect();
        if !missing.is_empty() {
            let problem = format!("it is older than this program: it lacks {}", some_of(&missing));
            let remedy = "kubectl apply --server-side -k deploy/crds; helm upgrade does not update definitions";
            findings.push(Finding::failure(&object, problem, remedy));
        }
        let unknown: Vec<&String> = other.difference(&own).collect();
        if !unknown.is_empty() {
            let problem = format!("it is newer than this program: it also has {}", some_of(&unknown));
            findings.push(Finding::warning(
                &object,
                problem,
                "use the knictl and the agents of that version",
            ));
        }
    }
    findings
}

fn is_established(definition: &CustomResourceDefinition) -> bool {
    let conditions = definition
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut established = conditions.filter(|condition| condition.type_ == "Established");
    established.any(|condition| condition.status == "True")
}

/// Paths of the fields of all served versions, such as `v1alpha1: spec.subnets`.
fn fields_of(definition: &CustomResourceDefinition) -> BTreeSet<String> {
    let mut fields = BTreeSet::new();
    for version in definition.spec.versions.iter().filter(|version| version.served) {
        let schema = version
            .schema
            .as_ref()
            .and_then(|schema| schema.open_api_v3_schema.as_ref());
        // A schema that cannot be written as JSON does not come from an API server.
        let schema = schema
            .and_then(|schema| serde_json::to_value(schema).ok())
            .unwrap_or_default();
        for part in ["spec", "status"] {
            if let Some(part_schema) = schema.pointer(&format!("/properties/{part}")) {
                collect(part_schema, &format!("{}: {part}", version.name), &mut fields);
            }
        }
    }
    fields
}

fn collect(schema: &Value, path: &str, fields: &mut BTreeSet<String>) {
    if let Some(items) = schema.get("items") {
        collect(items, path, fields);
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let path = format!("{path}.{name}");
        collect(property, &path, fields);
        fields.insert(path);
    }
}

fn some_of(fields: &[&String]) -> String {
    let named: Vec<&str> = fields.iter().take(MOST_NAMED).map(|field| field.as_str()).collect();
    match fields.len().saturating_sub(MOST_NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Severity;

    /// As an API server has them.
    fn established() -> Vec<CustomResourceDefinition> {
        let conditions = serde_json::json!({
            "conditions": [{"type": "Established", "status": "True"}],
            "acceptedNames": {"kind": "x", "plural": "x"},
            "storedVersions": ["v1alpha1"],
        });
        let mut definitions = kni_api::definitions().to_vec();
        for definition in &mut definitions {
            definition.status = Some(serde_json::from_value(conditions.clone()).unwrap());
        }
        definitions
    }

    #[test]
    fn equal_definitions_pass() {
        assert_eq!(compare(&kni_api::definitions(), &established()), []);
    }

    #[test]
    fn missing_older_newer_and_unserved_definitions_are_named() {
        let expected = kni_api::definitions();
        let mut installed = established();
        let gone = installed.remove(0).name_any();
        installed[0].status = None;
        let findings = compare(&expected, &installed);
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert_eq!(findings[0].object, format!("definition {gone}"));
        assert!(findings[1].problem.contains("does not serve"), "{findings:?}");

        let mut older = established();
        let last = older.last_mut().unwrap();
        let schema = last.spec.versions[0].schema.as_mut().unwrap();
        let properties = schema.open_api_v3_schema.as_mut().unwrap().properties.as_mut().unwrap();
        properties
            .get_mut("spec")
            .unwrap()
            .properties
            .as_mut()
            .unwrap()
            .remove("mtu");
        let findings = compare(&expected, &older);
        assert!(
            findings[0].problem.ends_with("it lacks v1alpha1: spec.mtu"),
            "{findings:?}"
        );
        let findings = compare(&older, &established());
        assert_eq!(findings[0].severity, Severity::Warning);
        assert!(findings[0].problem.contains("newer"), "{findings:?}");
    }
}
