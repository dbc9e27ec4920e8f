//! Converts the text of one file into objects and refusals.

use std::path::Path;

use super::{
    ManifestSet, Origin, Refusal,
    document::{self, Document},
    node::Node,
    object::{FieldError, Kind, Object, check_fields, closed, head, short},
    set::{Candidate, Instead, Read, Refused, combine},
};

/// Namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Reads one file, which may hold several documents. Pure: `path` only appears in the result.
pub fn parse_file(path: &Path, text: &str) -> ManifestSet {
    combine(read_file(path, text), None)
}

/// Reads every object of a file; conflicts between them are checked later.
pub(super) fn read_file(path: &Path, text: &str) -> Vec<Read> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    document::split(text)
        .into_iter()
        .flat_map(|document| read_document(path, document))
        .collect()
}

fn read_document(path: &Path, document: Document<'_>) -> Vec<Read> {
    match Node::parse(document) {
        Ok(node) if is_list(&node) => match list_items(&node) {
            Ok(items) => items.iter().map(|item| read_object(path, item)).collect(),
            Err(error) => vec![Err(refuse(path, &node, error).into())],
        },
        Ok(node) => vec![read_object(path, &node)],
        Err(error) => vec![Err(Refusal {
            file: path.to_path_buf(),
            line: Some(error.line),
            kind: None,
            name: None,
            field: None,
            reason: error.reason,
        }
        .into())],
    }
}

/// Whether a document is the wrapper that `kubectl get -o yaml` puts around several objects.
fn is_list(node: &Node) -> bool {
    head(node, "apiVersion") == Ok("v1") && head(node, "kind") == Ok("List")
}

fn list_items(node: &Node) -> Result<&[Node], FieldError> {
    check_fields(node, "", &["apiVersion", "items", "kind", "metadata"])?;
    match node.get("items") {
        None => Err(("items".to_owned(), "is missing".to_owned())),
        Some(items) if items.is_null() => Ok(&[]),
        Some(items) => items
            .items()
            .ok_or_else(|| ("items".to_owned(), "is not a sequence".to_owned())),
    }
}

fn read_object(path: &Path, node: &Node) -> Read {
    let kind = Kind::of(node).map_err(|error| refuse(path, node, error))?;
    let namespace = metadata_text(node, "namespace").unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
    let name = metadata_text(node, "name");
    match kind.read(node) {
        // Every kind requires a name.
        Ok(object) => Ok(candidate(
            path,
            node,
            kind,
            (object, namespace, name.unwrap_or_default()),
        )),
        Err(error) => {
            let instead = match (kind.policy(), name) {
                (None, _) => Instead::Nothing,
                (Some(_), None) => Instead::Unread,
                (Some(policy), Some(name)) => match closed(policy, node, &namespace, &name) {
                    None => Instead::Unread,
                    Some(object) => Instead::Closed(Box::new(candidate(path, node, kind, (object, namespace, name)))),
                },
            };
            Err(Box::new(Refused {
                refusal: refuse(path, node, error),
                instead,
            }))
        }
    }
}

fn candidate(
    path: &Path,
    node: &Node,
    kind: &'static Kind,
    (object, namespace, name): (Object, String, String),
) -> Candidate {
    Candidate {
        object,
        kind: kind.name,
        namespace: kind.namespaced.then_some(namespace),
        name,
        origin: Origin {
            file: path.to_path_buf(),
            line: node.line_of(""),
        },
        name_line: node.line_of("metadata.name"),
        default_line: node.line_of("spec.default"),
        address_line: node.line_of("spec.clusterIP"),
        egress_lines: [0, 1].map(|index| node.line_of(&format!("spec.egressAddresses[{index}]"))),
    }
}

fn metadata_text(node: &Node, field: &str) -> Option<String> {
    let text = node.get("metadata").and_then(|metadata| metadata.get(field));
    text.and_then(Node::as_str).map(short)
}

fn refuse(path: &Path, node: &Node, (field, reason): FieldError) -> Refusal {
    let name = metadata_text(node, "name");
    let name = match metadata_text(node, "namespace") {
        Some(namespace) => name.map(|name| format!("{namespace}/{name}")),
        None => name,
    };
    Refusal {
        file: path.to_path_buf(),
        line: Some(node.line_of(&field)),
        kind: node.get("kind").and_then(Node::as_str).map(short),
        name,
        field: (!field.is_empty()).then_some(field),
        reason,
    }
}
