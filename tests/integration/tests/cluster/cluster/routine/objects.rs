//! Compares all objects of the cluster that the network runtime reads or writes, field by field.

use std::{collections::BTreeMap, fmt};

use anyhow::Result;
use kni_integration::{Cluster, cluster::objects::locate};
use kube::{
    Api,
    api::{DynamicObject, ListParams},
};
use serde_json::{Value, json};

const KINDS: [(&str, &str); 16] = [
    ("kni.dev/v1alpha1", "PodNetwork"),
    ("kni.dev/v1alpha1", "PodNetworkAttachment"),
    ("kni.dev/v1alpha1", "AddressBlock"),
    ("kni.dev/v1alpha1", "PodInterface"),
    ("kni.dev/v1alpha1", "NetworkMembers"),
    ("kni.dev/v1alpha1", "NetworkNumber"),
    ("kni.dev/v1alpha1", "NodeEndpoint"),
    ("kni.dev/v1alpha1", "NodeNetwork"),
    ("kni.dev/v1alpha1", "EgressAddressClaim"),
    ("v1", "Node"),
    ("v1", "Namespace"),
    ("v1", "Pod"),
    ("v1", "Service"),
    ("discovery.k8s.io/v1", "EndpointSlice"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("k8s.cni.cncf.io/v1beta1", "MultiNetworkPolicy"),
];

/// Fields that each write changes, and times, which end with `Time` or `Timestamp`.
const WRITES: [&str; 5] = [
    "resourceVersion",
    "resourceVersions",
    "generation",
    "managedFields",
    "observedGeneration",
];

/// Figures about other objects, by kind: they are written some 10 or 30 s after a change. The objects that they count
/// are compared themselves.
const FIGURES: [(&str, &str); 9] = [
    ("PodNetwork", "status.addresses."),
    ("PodNetwork", "status.interfaces"),
    ("PodNetwork", "status.nodes"),
    ("NodeNetwork", "status.interfaces"),
    ("NodeNetwork", "status.policies.known"),
    ("NodeNetwork", "status.summary"),
    ("NodeNetwork", "].used"),
    ("NodeNetwork", "].capacity"),
    ("NodeNetwork", "].blocks["),
];

/// Fields that name an entry of a list.
const NAMES: [&str; 7] = ["type", "podUid", "podName", "name", "ip", "hook", "destination"];

/// A field that is not the same before and after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) kind: String,
    /// Namespace and name.
    pub(super) object: String,
    /// The field; empty for the object itself.
    pub(super) path: String,
    pub(super) values: [Option<String>; 2],
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, after] = self.values.each_ref().map(|value| value.as_deref().unwrap_or("-"));
        write!(f, "{} {}: {} {before} > {after}", self.kind, self.object, self.path)
    }
}

/// The fields of all objects, by kind, object and path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Picture(BTreeMap<(String, String, String), String>);

impl Picture {
    pub(super) async fn take(cluster: &Cluster) -> Result<Self> {
        let mut fields = BTreeMap::new();
        for (version, kind) in KINDS {
            let any = json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "any" } });
            let (resource, ..) = locate(&any)?;
            let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
            for object in api.list(&ListParams::default()).await? {
                let object = serde_json::to_value(object)?;
                add(kind, &object, &mut fields);
            }
        }
        Ok(Self(fields))
    }

    pub(super) fn differences(&self, after: &Self) -> Vec<Difference> {
        let keys = self
            .0
            .keys()
            .chain(after.0.keys().filter(|key| !self.0.contains_key(*key)));
        let differences = keys.map(|key| {
            let (kind, object, path) = key.clone();
            let values = [self.0.get(key).cloned(), after.0.get(key).cloned()];
            Difference {
                kind,
                object,
                path,
                values,
            }
        });
        differences.filter(|found| found.values[0] != found.values[1]).collect()
    }
}

fn add(kind: &str, object: &Value, fields: &mut BTreeMap<(String, String, String), String>) {
    let metadata = &object["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let spec = |field: &str| text(&object["spec"][field]);
    // Their own names have the UID of the pod, and a number.
    let name = match kind {
        "PodInterface" => format!("{} {}", spec("podName"), spec("interfaceName")),
        "NetworkMembers" => format!("{} {}", spec("network"), spec("nodeName")),
        _ => text(&metadata["name"]),
    };
    let is_named = matches!(kind, "PodInterface" | "NetworkMembers");
    let namespace = text(&metadata["namespace"]);
    let mut leaves = Vec::new();
    flatten(object, String::new(), &mut leaves);
    let is_figure = |path: &str| FIGURES.iter().any(|(of, part)| *of == kind && path.contains(part));
    for (path, value) in leaves {
        let is_own_name = is_named && path == "metadata.name";
        if !is_figure(&path) && !is_own_name {
            fields.insert((kind.to_owned(), format!("{namespace}/{name}"), path), value);
        }
    }
}

fn flatten(value: &Value, path: String, leaves: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let is_time = key.ends_with("Time") || key.ends_with("Timestamp");
                if !is_time && !WRITES.contains(&&**key) {
                    let dot = if path.is_empty() { "" } else { "." };
                    flatten(value, format!("{path}{dot}{key}"), leaves);
                }
            }
        }
        Value::Array(entries) => {
            for (name, entry) in named(entries) {
                flatten(entry, format!("{path}[{name}]"), leaves);
            }
        }
        other => leaves.push((path, other.to_string())),
    }
}

/// The entries of a list by name, in no order: scalars by their value, objects by the field that names them.
fn named(entries: &[Value]) -> Vec<(String, &Value)> {
    let name_of = |entry: &Value| {
        let named = NAMES
            .iter()
            .filter_map(|field| entry.get(field))
            .map(ToString::to_string);
        if entry.is_object() {
            named.collect::<Vec<_>>().join(" ")
        } else {
            entry.to_string()
        }
    };
    let mut all: Vec<(String, &Value)> = entries.iter().map(|entry| (name_of(entry), entry)).collect();
    all.sort_by_key(|(name, entry)| (name.clone(), entry.to_string()));
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for (name, _) in &mut all {
        let count = seen.entry(name.clone()).or_default();
        *count += 1;
        if *count > 1 {
            *name = format!("{name} {count}");
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(object: &Value) -> Picture {
        let mut fields = BTreeMap::new();
        add("PodNetwork", object, &mut fields);
        Picture(fields)
    }

    #[test]
    fn a_changed_field_is_found_and_a_write_is_not() {
        let object = |uid: &str, version: &str, number: u32, order: [&str; 2]| {
            json!({
                "metadata": { "name": "red", "uid": uid, "resourceVersion": version },
                "spec": { "subnets": order },
                "status": { "conditions": [{ "type": "Ready", "lastTransitionTime": version, "reason": number }] },
            })
        };
        let before = picture(&object("1", "1", 7, ["10.0.0.0/16", "fd10::/64"]));
        let written = picture(&object("1", "2", 7, ["fd10::/64", "10.0.0.0/16"]));
        assert!(
            before.differences(&written).is_empty(),
            "{:?}",
            before.differences(&written)
        );
        let changed = picture(&object("2", "1", 8, ["10.0.0.0/16", "fd11::/64"]));
        let paths: Vec<String> = before
            .differences(&changed)
            .into_iter()
            .map(|difference| difference.path)
            .collect();
        let expected = [
            "metadata.uid",
            "spec.subnets[\"fd10::/64\"]",
            "status.conditions[\"Ready\"].reason",
            "spec.subnets[\"fd11::/64\"]",
        ];
        assert_eq!(paths, expected);
    }
}
