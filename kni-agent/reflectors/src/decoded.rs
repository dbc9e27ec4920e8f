//! Decodes the objects of a watch one by one, so that one object of a newer API version does not end the watch.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Deserializer, de::DeserializeOwned, de::Error as _};
use serde_json::Value;

/// An object, or its metadata and the reason why it cannot be decoded.
#[derive(Debug, Clone)]
pub(super) struct Decoded<K>(pub(super) Result<K, Undecoded>);

/// An object with a field or a value that this agent does not know.
#[derive(Debug, Clone)]
pub(super) struct Undecoded {
    pub(super) metadata: ObjectMeta,
    /// The field, and what is wrong with it.
    pub(super) reason: String,
    /// The object as the API server sent it, but for `managedFields`.
    pub(super) object: Value,
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Decoded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut object = Value::deserialize(deserializer)?;
        // Every watch drops them; they are up to half of an object.
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        if let Ok(known) = K::deserialize(&object) {
            return Ok(Self(Ok(known)));
        }
        // Only a failure needs the path, whose tracking costs more than the decoding.
        let error = match serde_path_to_error::deserialize::<_, K>(&object) {
            Ok(known) => return Ok(Self(Ok(known))),
            Err(error) => error,
        };
        let path = error.path().to_string();
        let reason = match path.as_str() {
            "" | "." => error.inner().to_string(),
            path => format!("{path}: {}", error.inner()),
        };
        let metadata = object.get("metadata").cloned().unwrap_or_default();
        Ok(Self(Err(Undecoded {
            metadata: serde_json::from_value(metadata).map_err(D::Error::custom)?,
            reason,
            object,
        })))
    }
}

impl<K: Resource> Resource for Decoded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(of: &K::DynamicType) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &K::DynamicType) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &K::DynamicType) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &K::DynamicType) -> Cow<'_, str> {
        K::plural(of)
    }

    fn metadata_api() -> bool {
        K::metadata_api()
    }

    fn meta(&self) -> &ObjectMeta {
        match &self.0 {
            Ok(object) => object.meta(),
            Err(undecoded) => &undecoded.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match &mut self.0 {
            Ok(object) => object.meta_mut(),
            Err(undecoded) => &mut undecoded.metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use kni_crd::PodNetwork;
    use kube::ResourceExt as _;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_unknown_field_is_named_and_concerns_its_object_only() {
        let network = |name: &str, spec: Value| {
            json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
                "metadata": {"name": name, "resourceVersion": "7", "managedFields": [{"manager": "a"}]}, "spec": spec,
            })
        };
        let newer = json!({"subnets": ["10.0.0.0/16"], "zzz": {"more": true}});
        let known = json!({"subnets": ["10.0.0.0/16"]});
        let list = json!([network("newer", newer), network("known", known)]);
        let list: Vec<Decoded<PodNetwork>> = serde_json::from_value(list).unwrap();
        let names: Vec<String> = list.iter().map(kube::ResourceExt::name_any).collect();
        assert_eq!(names, ["newer", "known"]);
        let undecoded = list[0].0.as_ref().unwrap_err();
        assert!(undecoded.reason.contains("zzz"), "{}", undecoded.reason);
        assert_eq!(list[0].resource_version().as_deref(), Some("7"));
        let known = list[1].0.as_ref().unwrap();
        assert_eq!(known.metadata.managed_fields, None);
    }

    #[test]
    fn an_unknown_value_is_named_with_its_field() {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": {"name": "a"},
            "spec": {"subnets": ["10.0.0.0/16"], "topology": "Layer9"},
        });
        let decoded: Decoded<PodNetwork> = serde_json::from_value(object).unwrap();
        let reason = decoded.0.unwrap_err().reason;
        assert!(
            reason.contains("spec.topology") && reason.contains("Layer9"),
            "{reason}"
        );
    }
}
