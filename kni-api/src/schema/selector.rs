//! The schema of a label selector: that of Kubernetes, with its rules.

use std::{borrow::Cow, collections::BTreeMap};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::{LabelKey, LabelValue};
use crate::rules::text;

/// Most labels, requirements or values; what a person writes is far below.
const MOST: usize = 64;

/// A label selector: nothing but its schema.
pub(crate) enum Selector {}

impl JsonSchema for Selector {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Selector".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let values = generator.subschema_for::<Vec<LabelValue>>();
        let mut labels = generator.subschema_for::<BTreeMap<String, LabelValue>>();
        labels.insert("maxProperties".into(), MOST.into());
        labels.insert(
            "description".into(),
            "Labels that have to be there, each with its value.".into(),
        );
        json_schema!({
            "type": "object",
            "description": "Objects that have all these labels and meet all these requirements; empty: all objects.",
            "x-kubernetes-map-type": "atomic",
            "properties": {
                "matchLabels": labels,
                "matchExpressions": {
                    "type": "array",
                    "description": "Requirements on labels, all of which have to be met.",
                    "maxItems": MOST,
                    "x-kubernetes-list-type": "atomic",
                    "items": requirement(&generator.subschema_for::<LabelKey>(), values),
                },
            },
        })
    }
}

fn requirement(key: &Schema, mut values: Schema) -> Schema {
    let mut key = key.clone();
    key.insert("description".into(), "The key of the label.".into());
    values.insert("maxItems".into(), MOST.into());
    values.insert("x-kubernetes-list-type".into(), "atomic".into());
    values.insert(
        "description".into(),
        "With In and NotIn: the values, at least one. With the others: none.".into(),
    );
    json_schema!({
        "type": "object",
        "required": ["key", "operator"],
        "properties": {
            "key": key,
            "operator": {
                "type": "string",
                "enum": ["In", "NotIn", "Exists", "DoesNotExist"],
                "description": "How the label relates to the values.",
            },
            "values": values,
        },
        "x-kubernetes-validations": text::requirement(),
    })
}
