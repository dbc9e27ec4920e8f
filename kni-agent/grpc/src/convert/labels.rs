//! Reads the pod's labels from an annotation where the runtime sends none.

use std::collections::BTreeMap;

use super::{bounds, error::Refusal};

/// Labels of the pod, a comma list of `key=value`. CNI carries annotations and no labels.
const ANNOTATION: &str = "kni.dev/labels";
/// Prefix of the labels that runtimes set on a sandbox themselves.
const RUNTIME_PREFIX: &str = "io.kubernetes.";
/// Kubernetes' limits of a label, in bytes.
const MAX_NAME: usize = 63;
const MAX_PREFIX: usize = 253;

type Entries = BTreeMap<String, String>;

/// The labels of the annotation, if the request has none of the pod's own.
pub(super) fn annotated(own: &Entries, annotations: &Entries) -> Result<Entries, Refusal> {
    let has_own = own.keys().any(|key| !key.starts_with(RUNTIME_PREFIX));
    let list = annotations.get(ANNOTATION).map(|list| list.trim()).unwrap_or_default();
    let mut labels = Entries::new();
    if has_own || list.is_empty() {
        return Ok(labels);
    }
    for entry in list.split(',') {
        let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
        let (key, value) = (key.trim(), value.trim());
        if !is_key(key) {
            return Err(refuse(key, "is no label key"));
        }
        if key.starts_with(RUNTIME_PREFIX) {
            return Err(refuse(key, "belongs to the runtime"));
        }
        if !value.is_empty() && !is_name(value) {
            return Err(refuse(value, "is no label value"));
        }
        if labels.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(refuse(key, "occurs twice"));
        }
    }
    Ok(labels)
}

fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name(name),
        None => is_name(key),
    }
}

/// At most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit.
fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let bytes = text.as_bytes();
    text.len() <= MAX_NAME
        && bytes.iter().copied().all(inner)
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
}

fn is_subdomain(text: &str) -> bool {
    let alnum = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let label = |label: &str| {
        label.bytes().all(|b| alnum(&b) || b == b'-')
            && label.as_bytes().first().is_some_and(alnum)
            && label.as_bytes().last().is_some_and(alnum)
    };
    text.len() <= MAX_PREFIX && text.split('.').all(label)
}

fn refuse(text: &str, reason: &str) -> Refusal {
    let quote: String = text.chars().take(bounds::MAX_QUOTE).collect();
    Refusal::new(format!("annotations[{ANNOTATION:?}]"), format!("{quote:?} {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotation(list: &str) -> Entries {
        [(ANNOTATION.to_owned(), list.to_owned())].into()
    }

    fn runtimes() -> Entries {
        [("io.kubernetes.pod.name".to_owned(), "web-0".to_owned())].into()
    }

    #[test]
    fn the_annotation_speaks_where_the_runtime_does_not() {
        let list = annotation(" app=web, example.com/tier = front ,empty=,bare");
        let labels = annotated(&runtimes(), &list).unwrap();
        assert_eq!(labels.len(), 4);
        assert_eq!(
            (labels["app"].as_str(), labels["example.com/tier"].as_str()),
            ("web", "front")
        );
        assert_eq!((labels["empty"].as_str(), labels["bare"].as_str()), ("", ""));
        for nothing in ["", "  "] {
            assert_eq!(annotated(&runtimes(), &annotation(nothing)).unwrap(), Entries::new());
        }
    }

    #[test]
    fn labels_of_the_request_come_first() {
        let own: Entries = [("app".to_owned(), "db".to_owned())].into();
        assert_eq!(annotated(&own, &annotation("app=web,more=1")).unwrap(), Entries::new());
    }

    #[test]
    fn what_kubernetes_would_refuse_is_refused() {
        let long = "x".repeat(64);
        for (list, reason) in [
            ("=web".to_owned(), "is no label key"),
            ("app=web,".to_owned(), "is no label key"),
            ("-app=web".to_owned(), "is no label key"),
            ("Example.com/app=web".to_owned(), "is no label key"),
            ("a/b/c=web".to_owned(), "is no label key"),
            (format!("{long}=web"), "is no label key"),
            ("app=we b".to_owned(), "is no label value"),
            ("app=a=b".to_owned(), "is no label value"),
            (format!("app={long}"), "is no label value"),
            ("app=web,app=db".to_owned(), "occurs twice"),
            ("io.kubernetes.pod.uid=1".to_owned(), "belongs to the runtime"),
        ] {
            let refusal = annotated(&runtimes(), &annotation(&list)).unwrap_err();
            assert!(refusal.reason.ends_with(reason), "{list}: {refusal:?}");
        }
    }
}
