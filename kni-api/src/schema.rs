//! Converts the schemas of the types to the API server's dialect of JSON Schema.

mod selector;
mod strings;

use schemars::{Schema, transform::transform_subschemas};
pub(crate) use selector::Selector;
use serde_json::{Map, Value, json};
pub(crate) use strings::{
    Cidr, CniFile, CniName, HostAddress, InterfaceName, LabelKey, LabelValue, MacAddress, NetworkName, NodeAddress,
    SecondName, Subnet,
};

/// Before the values of an enumeration, in its description.
const POSSIBLE: &str = "\n\nPossible values:";

/// Brings the schema of a spec or a status to the API server's dialect:
///
/// - an optional field is not nullable: then `null` counts as absent, for every rule and for defaults;
/// - formats are those that the API server knows, and bounds replace other formats;
/// - the description of an enumeration lists its values;
/// - a description is plain text, of one line per paragraph.
pub(crate) fn plain(schema: &mut Schema) {
    transform_subschemas(&mut plain, schema);
    let Some(object) = schema.as_object_mut() else { return };
    refuse_null(object);
    name_values(object);
    know_format(object);
    join_lines(object);
}

fn refuse_null(object: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(values)) = object.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    let optional = match object.get("anyOf").and_then(Value::as_array).map(Vec::as_slice) {
        Some([Value::Object(some), none]) if none.get("type") == Some(&json!("null")) => some.clone(),
        _ => return,
    };
    object.remove("anyOf");
    let listed = listed_values(&optional).map(str::to_owned);
    for (name, value) in optional {
        // The description of the field precedes that of its type.
        object.entry(name).or_insert(value);
    }
    if let (Some(listed), Some(Value::String(own))) = (listed, object.get_mut("description"))
        && !own.contains(&listed)
    {
        *own = joined(own) + &listed;
    }
}

/// The part of a description that [`name_values`] wrote.
fn listed_values(object: &Map<String, Value>) -> Option<&str> {
    let description = object.get("description")?.as_str()?;
    description.get(description.find(POSSIBLE)?..)
}

/// Turns the described alternatives of an enumeration into its values, and lists them in the description.
fn name_values(object: &mut Map<String, Value>) {
    let Some(alternatives) = object.get("oneOf").and_then(Value::as_array) else {
        return;
    };
    let values: Option<Vec<(Value, String)>> = alternatives
        .iter()
        .map(|alternative| {
            let value = alternative.get("const")?.clone();
            let meaning = alternative
                .get("description")
                .and_then(Value::as_str)
                .unwrap_or_default();
            Some((value, joined(meaning)))
        })
        .collect();
    let Some(values) = values else { return };
    object.remove("oneOf");
    let described = values
        .iter()
        .filter_map(|(value, meaning)| Some(format!("\n - {}: {meaning}", value.as_str()?)));
    let described: String = described.collect();
    let own = object.get("description").and_then(Value::as_str).unwrap_or_default();
    let description = format!("{}{POSSIBLE}{described}", joined(own));
    object.insert("description".into(), description.into());
    object.insert("type".into(), "string".into());
    object.insert("enum".into(), values.into_iter().map(|(value, _)| value).collect());
}

fn know_format(object: &mut Map<String, Value>) {
    let (known, maximum) = match object.get("format").and_then(Value::as_str) {
        Some("uint8") => ("int32", u32::from(u8::MAX)),
        Some("uint16") => ("int32", u32::from(u16::MAX)),
        Some("uint32") => ("int64", u32::MAX),
        _ => return,
    };
    object.insert("format".into(), known.into());
    object.entry("maximum").or_insert(maximum.into());
}

fn join_lines(object: &mut Map<String, Value>) {
    let Some(Value::String(text)) = object.get_mut("description") else {
        return;
    };
    if !text.contains(POSSIBLE) {
        *text = joined(text);
    }
}

/// The lines of each paragraph in one, without the marks that Rust's documentation has.
fn joined(text: &str) -> String {
    let text = text.replace('`', "");
    let paragraphs = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use schemars::json_schema;

    use super::*;

    fn plained(mut schema: Schema) -> Value {
        plain(&mut schema);
        schema.to_value()
    }

    #[test]
    fn what_is_optional_may_be_absent_but_is_not_null() {
        let text = plained(json_schema!({"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}}));
        assert_eq!(text["properties"]["a"], json!({"type": "string", "maxLength": 3}));
        let object = plained(json_schema!({
            "description": "Of the\nfield.",
            "anyOf": [{"type": "object", "description": "Of the type."}, {"type": "null"}],
        }));
        assert_eq!(object, json!({"type": "object", "description": "Of the field."}));
    }

    #[test]
    fn values_are_told_also_where_they_are_optional() {
        let values = json!([
            {"const": "A", "description": "The first\nof two.", "type": "string"},
            {"const": "B", "description": "The second.", "type": "string"},
        ]);
        let listed = "Which.\n\nPossible values:\n - A: The first of two.\n - B: The second.";
        let expected = json!({"type": "string", "enum": ["A", "B"], "description": listed});
        assert_eq!(
            plained(json_schema!({"description": "Which.", "oneOf": values.clone()})),
            expected
        );
        let optional = json_schema!({
            "description": "Which.",
            "anyOf": [{"oneOf": values, "description": "Of the type."}, {"type": "null"}],
        });
        assert_eq!(plained(optional), expected);
    }

    #[test]
    fn formats_are_known_and_bounds_are_said() {
        let number = |schema| plained(schema)["maximum"].clone();
        assert_eq!(plained(json_schema!({"format": "uint8"}))["format"], "int32");
        assert_eq!(number(json_schema!({"format": "uint8", "maximum": 32})), 32);
        assert_eq!(number(json_schema!({"format": "uint16"})), u16::MAX);
        assert_eq!(number(json_schema!({"format": "uint32"})), u32::MAX);
        assert_eq!(plained(json_schema!({"format": "int64"})), json!({"format": "int64"}));
    }
}
