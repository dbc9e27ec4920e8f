//! Turns the text of one file into networks and refusals.

use std::path::Path;

use kube::Resource as _;

use super::{
    ManifestSet, Origin, Refusal,
    document::{self, Document},
    node::Node,
    set::{Candidate, combine},
};
use crate::{crd::PodNetwork, model::NetworkSpec};

/// The fields of an object, beside `spec`, that may be given. What the API server adds is accepted, so that the output
/// of `kubectl get -o yaml` can be used; whatever would be meant to have an effect and has none is refused.
const OBJECT_FIELDS: [&str; 4] = ["apiVersion", "kind", "metadata", "spec"];
const METADATA_FIELDS: [&str; 9] = [
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

/// Reads one file, which may hold several documents. Pure: `path` only names the file in what is returned.
pub fn parse_file(path: &Path, text: &str) -> ManifestSet {
    combine(read_file(path, text))
}

/// Every document of a file, not yet compared with each other.
pub(super) fn read_file(path: &Path, text: &str) -> Vec<Result<Candidate, Box<Refusal>>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    document::split(text)
        .into_iter()
        .map(|document| read_document(path, document))
        .collect()
}

fn read_document(path: &Path, document: Document<'_>) -> Result<Candidate, Box<Refusal>> {
    let file = path.to_path_buf();
    let node = Node::parse(document).map_err(|error| {
        Box::new(Refusal {
            file: file.clone(),
            line: Some(error.line),
            kind: None,
            name: None,
            field: None,
            reason: error.reason,
        })
    })?;
    let read = read_network(&node);
    let text_of = |field: Option<&Node>| {
        field
            .and_then(Node::as_str)
            .map(|text| text.chars().take(253).collect())
    };
    let spec = read.map_err(|(field, reason)| {
        Box::new(Refusal {
            file: file.clone(),
            line: Some(node.line_of(&field)),
            kind: text_of(node.get("kind")),
            name: text_of(node.get("metadata").and_then(|metadata| metadata.get("name"))),
            field: (!field.is_empty()).then_some(field),
            reason,
        })
    })?;
    Ok(Candidate {
        spec,
        origin: Origin {
            file,
            line: node.line_of(""),
        },
        name_line: node.line_of("metadata.name"),
        default_line: node.line_of("spec.default"),
    })
}

/// A field's path, empty for the document as a whole, and what is wrong with it.
type FieldError = (String, String);

fn read_network(node: &Node) -> Result<NetworkSpec, FieldError> {
    check_fields(node, "", &OBJECT_FIELDS, check_kind)?;
    if let Some(metadata) = node.get("metadata") {
        check_fields(metadata, "metadata", &METADATA_FIELDS, |_| Ok(()))?;
    }
    let object: PodNetwork = serde_path_to_error::deserialize(node.to_value()).map_err(|error| {
        let path = error.path().to_string();
        (
            if path == "." { String::new() } else { path },
            error.inner().to_string(),
        )
    })?;
    NetworkSpec::try_from(&object).map_err(|invalid| (invalid.field, invalid.reason))
}

/// Checks that `node` is a mapping, then what `first` says of it, then that it has no unknown field: somebody else's
/// object shall be refused for its kind, not for its fields.
fn check_fields(
    node: &Node,
    path: &str,
    known: &[&str],
    first: fn(&Node) -> Result<(), FieldError>,
) -> Result<(), FieldError> {
    let Some(mut keys) = node.keys() else {
        return Err((path.to_owned(), "is not a mapping".to_owned()));
    };
    first(node)?;
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

fn check_kind(node: &Node) -> Result<(), FieldError> {
    let text = |field: &str| match node.get(field).map(Node::as_str) {
        None => Err((field.to_owned(), "is missing".to_owned())),
        Some(None) => Err((field.to_owned(), "is not a string".to_owned())),
        Some(Some(text)) => Ok(text.chars().take(253).collect::<String>()),
    };
    let (api_version, kind) = (text("apiVersion")?, text("kind")?);
    let (our_version, our_kind) = (PodNetwork::api_version(&()), PodNetwork::kind(&()));
    if kind == our_kind && api_version == our_version {
        return Ok(());
    }
    let field = if kind == our_kind { "apiVersion" } else { "kind" };
    let reason = format!("kind {kind} of apiVersion {api_version} is not served, {our_kind} of {our_version} is");
    Err((field.to_owned(), reason))
}
