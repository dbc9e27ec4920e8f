//! Matches label selectors, operator by operator.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::Labels;

/// Whether every requirement is met. An empty selector has none.
pub(super) fn matches(selector: &LabelSelector, labels: &Labels) -> bool {
    let equal = selector.match_labels.iter().flatten();
    let mut equal = equal.map(|(key, value)| labels.get(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten();
    let mut expressions = expressions.map(|requirement| holds(requirement, labels));
    equal.all(|holds| holds) && expressions.all(|holds| holds)
}

fn holds(requirement: &LabelSelectorRequirement, labels: &Labels) -> bool {
    let value = labels.get(&requirement.key);
    let listed = || {
        let mut values = requirement.values.iter().flatten();
        values.any(|listed| Some(listed) == value)
    };
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        other => panic!("no operator {other:?}"),
    }
}
