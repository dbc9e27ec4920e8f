//! Matches label selectors, and indexes them by label.

use std::collections::HashMap;

use kni_model::policy::{Labels, Operator, Selector};

/// Whether all requirements hold. An empty selector matches everything.
pub fn matches(selector: &Selector, labels: &Labels) -> bool {
    selector.matches(labels)
}

/// Finds the selectors that may match without trying all: most require a label with one of a few values.
#[derive(Debug)]
pub(super) struct LabelIndex<T> {
    by_label: HashMap<String, HashMap<String, Vec<T>>>,
    others: Vec<T>,
}

impl<T> Default for LabelIndex<T> {
    fn default() -> Self {
        Self {
            by_label: HashMap::new(),
            others: Vec::new(),
        }
    }
}

impl<T: Copy> LabelIndex<T> {
    /// Adds a selector, known as `name`.
    pub(super) fn insert(&mut self, selector: &Selector, name: T) {
        let asked = selector.requirements.iter().filter_map(|r| match &r.operator {
            Operator::In(values) => Some((&r.key, values)),
            Operator::NotIn(_) | Operator::Exists | Operator::DoesNotExist => None,
        });
        let Some((key, values)) = asked.min_by_key(|(_, values)| values.len()) else {
            self.others.push(name);
            return;
        };
        let by_value = self.by_label.entry(key.clone()).or_default();
        for value in values {
            by_value.entry(value.clone()).or_default().push(name);
        }
    }

    /// The selectors that may match, without duplicates; includes every selector that matches.
    pub(super) fn candidates<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = T> + 'a {
        let found = labels
            .iter()
            .filter_map(|(key, value)| self.by_label.get(key)?.get(value));
        found.flatten().chain(&self.others).copied()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use kni_model::policy::Requirement;
    use proptest::prelude::*;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs
            .iter()
            .map(|(key, value)| ((*key).into(), (*value).into()))
            .collect()
    }

    fn require(key: &str, operator: Operator) -> Selector {
        Selector {
            requirements: vec![Requirement {
                key: key.into(),
                operator,
            }],
        }
    }

    #[test]
    fn operators_mean_what_kubernetes_says() {
        let of = |values: &[&str]| values.iter().map(|v| (*v).into()).collect();
        let cases = [
            (require("a", Operator::In(of(&["1", "2"]))), [true, false, false]),
            (require("a", Operator::In(of(&[]))), [false, false, false]),
            (require("a", Operator::NotIn(of(&["1"]))), [false, true, true]),
            (require("a", Operator::Exists), [true, true, false]),
            (require("a", Operator::DoesNotExist), [false, false, true]),
            (Selector::default(), [true, true, true]),
        ];
        let worlds = [labels(&[("a", "1")]), labels(&[("a", "3")]), labels(&[("b", "1")])];
        for (selector, expected) in cases {
            assert_eq!(
                worlds.each_ref().map(|l| matches(&selector, l)),
                expected,
                "{selector:?}"
            );
        }
    }

    pub(crate) fn any_selector() -> impl Strategy<Value = Selector> {
        let key = prop::sample::select(vec!["a", "b"]).prop_map(str::to_owned);
        let values =
            prop::collection::btree_set(prop::sample::select(vec!["1", "2", "3"]).prop_map(str::to_owned), 1..3);
        let operator = prop_oneof![
            4 => values.clone().prop_map(Operator::In),
            1 => values.prop_map(Operator::NotIn),
            1 => Just(Operator::Exists),
            1 => Just(Operator::DoesNotExist),
        ];
        let requirement = (key, operator).prop_map(|(key, operator)| Requirement { key, operator });
        prop::collection::vec(requirement, 0..3).prop_map(|requirements| Selector { requirements })
    }

    proptest! {
        #[test]
        fn the_index_misses_no_match(
            selectors in prop::collection::vec(any_selector(), 0..20),
            worlds in prop::collection::vec((0..4_u8, 0..4_u8), 1..5),
        ) {
            let mut index = LabelIndex::default();
            for (name, selector) in selectors.iter().enumerate() {
                index.insert(selector, name);
            }
            for (a, b) in worlds {
                let labels: Labels = [("a", a), ("b", b)]
                    .into_iter()
                    .filter(|(_, value)| *value > 0)
                    .map(|(key, value)| (key.into(), value.to_string()))
                    .collect();
                let mut found: Vec<usize> = index.candidates(&labels).collect();
                let all = found.len();
                found.sort_unstable();
                found.dedup();
                prop_assert_eq!(found.len(), all, "one came twice");
                for (name, selector) in selectors.iter().enumerate() {
                    prop_assert!(!matches(selector, &labels) || found.contains(&name));
                }
            }
        }
    }
}
