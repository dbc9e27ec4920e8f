//! Detects content of a document that the parsed object has lost, mainly misspelled fields.

use serde_json::Value;

use super::node::Node;

/// Fields that the API server fills in and that have no effect here, whatever their value.
const SERVER_FIELDS: [&str; 2] = ["status", "metadata.managedFields"];

/// The first field of `document` that is missing in `held`, the object read from it and serialized again. Fields
/// without a value may be missing.
pub(super) fn first_lost(document: &Node, held: &Value) -> Option<String> {
    lost_below(document, held, "")
}

fn lost_below(node: &Node, held: &Value, path: &str) -> Option<String> {
    if let Some(mut entries) = node.entries() {
        return entries.find_map(|(key, value)| {
            let field = if path.is_empty() {
                key.to_owned()
            } else {
                format!("{path}.{key}")
            };
            if value.is_null() || SERVER_FIELDS.contains(&field.as_str()) {
                return None;
            }
            match held.get(key) {
                Some(held) => lost_below(value, held, &field),
                None => Some(field),
            }
        });
    }
    let items = node.items()?;
    items.iter().enumerate().find_map(|(index, item)| {
        let field = format!("{path}[{index}]");
        match held.get(index) {
            Some(held) => lost_below(item, held, &field),
            None => Some(field),
        }
    })
}
