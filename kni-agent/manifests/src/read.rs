//! Converts the text of one file into objects and refusals.

use std::path::Path;

use super::{
    ManifestSet, Origin, Refusal,
    document::{self, Document},
    node::Node,
    object::{FieldError, Kind, check_fields, head, short},
    set::{Candidate, combine},
};

/// The result of reading one object.
pub(super) type Read = Result<Candidate, Box<Refusal>>;

/// Namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Reads one file, which may hold several documents. Pure: `path` only appears in the result.
pub fn parse_file(path: &Path, text: &str) -> ManifestSet {
    combine(read_file(path, text))
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
            Err(error) => vec![Err(Box::new(refuse(path, &node, error)))],
        },
        Ok(node) => vec![read_object(path, &node)],
        Err(error) => vec![Err(Box::new(Refusal {
            file: path.to_path_buf(),
            line: Some(error.line),
            kind: None,
            name: None,
            field: None,
            reason: error.reason,
        }))],
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
    let read = Kind::of(node).and_then(|kind| Ok((kind, kind.read(node)?)));
    let (kind, object) = read.map_err(|error| Box::new(refuse(path, node, error)))?;
    let namespace = kind
        .namespaced
        .then(|| metadata_text(node, "namespace").unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()));
    Ok(Candidate {
        object,
        kind: kind.name,
        namespace,
        // Present, because every kind requires a name.
        name: metadata_text(node, "name").unwrap_or_default(),
        origin: Origin {
            file: path.to_path_buf(),
            line: node.line_of(""),
        },
        name_line: node.line_of("metadata.name"),
        default_line: node.line_of("spec.default"),
        address_line: node.line_of("spec.clusterIP"),
        egress_lines: [0, 1].map(|index| node.line_of(&format!("spec.egressAddresses[{index}]"))),
    })
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
