//! Converts documents of the supported kinds into objects of the model.

use k8s_openapi::{
    api::{
        core::v1::{Namespace, Service as ServiceObject},
        discovery::v1::EndpointSlice as SliceObject,
        networking::v1::NetworkPolicy,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kni_crd::{
    EgressAddressPool, EgressPolicy, FromObject, InvalidObject, PodNetwork, closed_policy, read_endpoint_slice,
    read_namespace, read_service, v1beta1, v1beta2,
};
use kni_model::{
    NetworkSpec,
    egress::EgressPool,
    policy::{Labels, Policy, PolicyKind},
    service::{EndpointSlice, Service},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{fidelity::first_lost, node::Node};

/// The path of a field, empty for the document as a whole, and the error in it.
pub(super) type FieldError = (String, String);

/// The result of a document; `None` for a valid object that KNI does not serve.
#[derive(Debug)]
pub(super) enum Object {
    Network(Box<NetworkSpec>),
    Policy(Box<Policy>),
    Pool(Box<EgressPool>),
    Namespace(Labels),
    Service(Option<Box<Service>>),
    Slice(Option<Box<EndpointSlice>>),
}

/// A kind, as its documents name it.
pub(super) struct Kind {
    pub(super) api_version: &'static str,
    pub(super) name: &'static str,
    /// Whether its objects are namespaced.
    pub(super) namespaced: bool,
    read: fn(&Node) -> Result<Object, FieldError>,
}

const KINDS: [Kind; 9] = [
    kind("kni.dev/v1alpha1", "PodNetwork", false, read_network),
    kind("kni.dev/v1alpha1", "EgressPolicy", true, read_policy::<EgressPolicy>),
    kind("kni.dev/v1alpha1", "EgressAddressPool", false, read_pool),
    kind(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        true,
        read_policy::<NetworkPolicy>,
    ),
    kind(
        "k8s.cni.cncf.io/v1beta1",
        "MultiNetworkPolicy",
        true,
        read_policy::<v1beta1::MultiNetworkPolicy>,
    ),
    kind(
        "k8s.cni.cncf.io/v1beta2",
        "MultiNetworkPolicy",
        true,
        read_policy::<v1beta2::MultiNetworkPolicy>,
    ),
    kind("v1", "Namespace", false, read_namespace_labels),
    kind("v1", "Service", true, read_service_object),
    kind("discovery.k8s.io/v1", "EndpointSlice", true, read_slice),
];

const fn kind(
    api_version: &'static str,
    name: &'static str,
    namespaced: bool,
    read: fn(&Node) -> Result<Object, FieldError>,
) -> Kind {
    Kind {
        api_version,
        name,
        namespaced,
        read,
    }
}

impl Kind {
    /// The kind of a document, if it is supported.
    pub(super) fn of(node: &Node) -> Result<&'static Self, FieldError> {
        let api_version = head(node, "apiVersion")?;
        let name = head(node, "kind")?;
        if let Some(kind) = KINDS
            .iter()
            .find(|kind| kind.name == name && kind.api_version == api_version)
        {
            return Ok(kind);
        }
        let known = KINDS.iter().any(|kind| kind.name == name);
        let served: Vec<_> = KINDS
            .iter()
            .map(|kind| format!("{} of {}", kind.name, kind.api_version))
            .collect();
        let (api_version, name) = (short(api_version), short(name));
        let served = served.join(", ");
        let reason = format!("kind {name} of apiVersion {api_version} is not served; served are {served}");
        Err((if known { "apiVersion" } else { "kind" }.to_owned(), reason))
    }

    pub(super) fn read(&self, node: &Node) -> Result<Object, FieldError> {
        (self.read)(node)
    }

    /// The kind of policy, if it is one.
    pub(super) fn policy(&self) -> Option<PolicyKind> {
        let kinds = [
            PolicyKind::NetworkPolicy,
            PolicyKind::MultiNetworkPolicy,
            PolicyKind::EgressPolicy,
        ];
        kinds.into_iter().find(|kind| kind.as_str() == self.name)
    }
}

/// The policy that stands for a refused one: it isolates the pods that the document selects.
pub(super) fn closed(kind: PolicyKind, node: &Node, namespace: &str, name: &str) -> Option<Object> {
    let document = node.to_value();
    let metadata = document.get("metadata").cloned();
    let metadata = metadata.and_then(|metadata| serde_json::from_value::<ObjectMeta>(metadata).ok());
    let metadata = ObjectMeta {
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        ..metadata.unwrap_or_default()
    };
    let policy = closed_policy(kind, &metadata, document.get("spec"))?;
    Some(Object::Policy(Box::new(policy)))
}

/// Reads `apiVersion` or `kind`, the fields that identify the type of a document.
pub(super) fn head<'a>(node: &'a Node, field: &str) -> Result<&'a str, FieldError> {
    if node.keys().is_none() {
        return Err((String::new(), "is not a mapping".to_owned()));
    }
    match node.get(field).map(Node::as_str) {
        None => Err((field.to_owned(), "is missing".to_owned())),
        Some(None) => Err((field.to_owned(), "is not a string".to_owned())),
        Some(Some(text)) => Ok(text),
    }
}

pub(super) fn short(text: &str) -> String {
    text.chars().take(253).collect()
}

fn read_network(node: &Node) -> Result<Object, FieldError> {
    check_network_fields(node)?;
    let object: PodNetwork = read_typed(node)?;
    match NetworkSpec::from_object(&object) {
        Ok(spec) => Ok(Object::Network(Box::new(spec))),
        Err(invalid) => Err((invalid.field, invalid.reason)),
    }
}

fn read_policy<T>(node: &Node) -> Result<Object, FieldError>
where
    T: DeserializeOwned + Serialize,
    Policy: FromObject<T, Error = InvalidObject>,
{
    let object: T = read_faithful(node)?;
    Policy::from_object(&object)
        .map(|policy| Object::Policy(Box::new(policy)))
        .map_err(of_field)
}

fn read_pool(node: &Node) -> Result<Object, FieldError> {
    let object: EgressAddressPool = read_faithful(node)?;
    EgressPool::from_object(&object)
        .map(|pool| Object::Pool(Box::new(pool)))
        .map_err(of_field)
}

fn read_namespace_labels(node: &Node) -> Result<Object, FieldError> {
    let object: Namespace = read_faithful(node)?;
    read_namespace(&object)
        .map(|(_, labels)| Object::Namespace(labels))
        .map_err(of_field)
}

fn read_service_object(node: &Node) -> Result<Object, FieldError> {
    let object: ServiceObject = read_faithful(node)?;
    read_service(&object)
        .map(|service| Object::Service(service.map(Box::new)))
        .map_err(of_field)
}

fn read_slice(node: &Node) -> Result<Object, FieldError> {
    let object: SliceObject = read_faithful(node)?;
    read_endpoint_slice(&object)
        .map(|slice| Object::Slice(slice.map(Box::new)))
        .map_err(of_field)
}

fn of_field(invalid: InvalidObject) -> FieldError {
    (invalid.field, invalid.reason)
}

fn read_typed<T: DeserializeOwned>(node: &Node) -> Result<T, FieldError> {
    serde_path_to_error::deserialize(node.to_value()).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { path };
        (path, error.inner().to_string())
    })
}

/// Reads an object and refuses it if the document has fields that the object does not hold.
fn read_faithful<T: DeserializeOwned + Serialize>(node: &Node) -> Result<T, FieldError> {
    let object: T = read_typed(node)?;
    let held = serde_json::to_value(&object).map_err(|error| (String::new(), error.to_string()))?;
    match first_lost(node, &held) {
        Some(field) => Err((field, "is no field of this kind, or not supported here".to_owned())),
        None => Ok(object),
    }
}

/// The supported fields of a network beside `spec`. Fields that the API server adds are accepted, so that the output of
/// `kubectl get -o yaml` can be used; other fields, which would have no effect, are refused.
const NETWORK_FIELDS: [&str; 4] = ["apiVersion", "kind", "metadata", "spec"];
const NETWORK_METADATA: [&str; 9] = [
    "annotations",
    "creationTimestamp",
    "generation",
    "labels",
    "managedFields",
    "name",
    "resourceVersion",
    "selfLink",
    "uid",
];

fn check_network_fields(node: &Node) -> Result<(), FieldError> {
    check_fields(node, "", &NETWORK_FIELDS)?;
    node.get("metadata")
        .map_or(Ok(()), |metadata| check_fields(metadata, "metadata", &NETWORK_METADATA))
}

/// Checks that a mapping has known fields only.
pub(super) fn check_fields(node: &Node, path: &str, known: &[&str]) -> Result<(), FieldError> {
    let Some(mut keys) = node.keys() else {
        return Err((path.to_owned(), "is not a mapping".to_owned()));
    };
    match keys.find(|key| !known.contains(key)) {
        Some(key) => {
            let field = if path.is_empty() {
                key.to_owned()
            } else {
                format!("{path}.{key}")
            };
            Err((
                field,
                format!("unknown or not supported here; known are {}", known.join(", ")),
            ))
        }
        None => Ok(()),
    }
}
