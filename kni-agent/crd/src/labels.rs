//! Reads labels and label selectors.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement, ObjectMeta};
use kni_model::policy::{Labels, Operator, Requirement, Selector};

use super::{
    invalid::{FieldError, at, read_each, shown},
    names::{is_label_key, is_label_value},
};

const KEY_RULE: &str = "is not a label key: a name of at most 63 letters, digits, '-', '_' and '.', after an optional \
                        DNS subdomain and '/'";
const VALUE_RULE: &str = "is not a label value: at most 63 letters, digits, '-', '_' and '.', beginning and ending \
                          with a letter or digit";

/// The labels of an object.
pub(super) fn read_labels(metadata: &ObjectMeta) -> Result<Labels, FieldError> {
    let labels = metadata.labels.clone().unwrap_or_default();
    check_labels("metadata.labels", &labels)?;
    Ok(labels)
}

/// Reads a selector; equivalent selectors become equal.
pub(super) fn read_selector(field: &str, selector: &LabelSelector) -> Result<Selector, FieldError> {
    let mut requirements = Vec::new();
    if let Some(labels) = &selector.match_labels {
        check_labels(&format!("{field}.matchLabels"), labels)?;
        requirements.extend(labels.iter().map(|(key, value)| Requirement {
            key: key.clone(),
            operator: Operator::In([value.clone()].into()),
        }));
    }
    let expressions = selector.match_expressions.as_deref().unwrap_or_default();
    requirements.extend(read_each(
        &format!("{field}.matchExpressions"),
        expressions,
        read_expression,
    )?);
    requirements.sort();
    requirements.dedup();
    Ok(Selector { requirements })
}

fn read_expression(field: &str, expression: &LabelSelectorRequirement) -> Result<Requirement, FieldError> {
    check_key(&format!("{field}.key"), &expression.key)?;
    let values = expression.values.as_deref().unwrap_or_default();
    let values_field = format!("{field}.values");
    let (operator, wants_values) = match expression.operator.as_str() {
        "In" => (Operator::In(values.iter().cloned().collect()), true),
        "NotIn" => (Operator::NotIn(values.iter().cloned().collect()), true),
        "Exists" => (Operator::Exists, false),
        "DoesNotExist" => (Operator::DoesNotExist, false),
        other => {
            let reason = format!("{:?} is not In, NotIn, Exists or DoesNotExist", shown(other));
            return Err(at(format!("{field}.operator"), reason));
        }
    };
    match (wants_values, values.is_empty()) {
        (true, true) => Err(at(values_field, format!("{} needs values", expression.operator))),
        (false, false) => Err(at(values_field, format!("{} takes no values", expression.operator))),
        (true, false) | (false, true) => {
            read_each(&values_field, values, |path, value| check_value(path, value))?;
            Ok(Requirement {
                key: expression.key.clone(),
                operator,
            })
        }
    }
}

fn check_labels(field: &str, labels: &Labels) -> Result<(), FieldError> {
    labels.iter().try_for_each(|(key, value)| {
        let path = format!("{field}.{key}");
        check_key(&path, key)?;
        check_value(&path, value)
    })
}

fn check_key(field: &str, key: &str) -> Result<(), FieldError> {
    if is_label_key(key) {
        Ok(())
    } else {
        Err(at(field, format!("{:?} {KEY_RULE}", shown(key))))
    }
}

fn check_value(field: &str, value: &str) -> Result<(), FieldError> {
    if is_label_value(value) {
        Ok(())
    } else {
        Err(at(field, format!("{:?} {VALUE_RULE}", shown(value))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Selector, FieldError> {
        read_selector("spec.podSelector", &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn every_form_is_read() {
        let selector = read(
            r#"{"matchLabels":{"ns":"x"},"matchExpressions":[{"key":"pod","operator":"NotIn","values":["b","a"]},
            {"key":"a/b","operator":"Exists"},{"key":"c","operator":"DoesNotExist","values":[]}]}"#,
        )
        .unwrap();
        let by_key = |key: &str| {
            selector
                .requirements
                .iter()
                .find(|r| r.key == key)
                .unwrap()
                .operator
                .clone()
        };
        assert_eq!(selector.requirements.len(), 4);
        assert_eq!(by_key("ns"), Operator::In(["x".to_owned()].into()));
        assert_eq!(by_key("pod"), Operator::NotIn(["a".to_owned(), "b".to_owned()].into()));
        assert_eq!(by_key("a/b"), Operator::Exists);
        assert_eq!(by_key("c"), Operator::DoesNotExist);
        assert_eq!(read("{}").unwrap(), Selector::default());
    }

    #[test]
    fn a_label_and_its_expression_are_the_same() {
        let expression = r#"{"matchExpressions":[{"key":"a","operator":"In","values":["b"]}]}"#;
        assert_eq!(read(r#"{"matchLabels":{"a":"b"}}"#).unwrap(), read(expression).unwrap());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (expression, field, why) in [
            (r#""operator":"In""#, "values", "needs values"),
            (r#""operator":"NotIn","values":[]"#, "values", "needs values"),
            (r#""operator":"Exists","values":["a"]"#, "values", "takes no values"),
            (
                r#""operator":"DoesNotExist","values":["a"]"#,
                "values",
                "takes no values",
            ),
            (r#""operator":"Gt","values":["1"]"#, "operator", "\"Gt\" is not In"),
            (
                r#""operator":"In","values":["a","b c"]"#,
                "values[1]",
                "not a label value",
            ),
        ] {
            let json = format!(r#"{{"matchExpressions":[{{"key":"a",{expression}}}]}}"#);
            let (at, reason) = read(&json).unwrap_err();
            assert_eq!(at, format!("spec.podSelector.matchExpressions[0].{field}"));
            assert!(reason.contains(why), "{reason}");
        }
        let (at, _) = read(r#"{"matchLabels":{"a b":"c"}}"#).unwrap_err();
        assert_eq!(at, "spec.podSelector.matchLabels.a b");
        let (at, _) = read(r#"{"matchLabels":{"a.b/c":"-"}}"#).unwrap_err();
        assert_eq!(at, "spec.podSelector.matchLabels.a.b/c");
        let (at, _) = read(r#"{"matchExpressions":[{"key":"","operator":"Exists"}]}"#).unwrap_err();
        assert_eq!(at, "spec.podSelector.matchExpressions[0].key");
    }
}
