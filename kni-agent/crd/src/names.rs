//! Validates names by the rules of Kubernetes: of objects, labels and ports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::invalid::{FieldError, InvalidObject, at, shown};

/// Namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

const LABEL_RULE: &str =
    "is not a DNS-1123 label: 1 to 63 of a-z, 0-9 and '-', beginning and ending with a letter or digit";
const SUBDOMAIN_RULE: &str = "is not a DNS-1123 subdomain: DNS labels separated by '.', at most 253 characters";

/// The rule for the name of an object.
#[derive(Clone, Copy)]
pub(super) enum NameRule {
    Label,
    Subdomain,
}

/// Reads the name of an object without a namespace.
pub(super) fn read_name(metadata: &ObjectMeta, rule: NameRule) -> Result<String, FieldError> {
    let Some(name) = metadata.name.as_deref().filter(|name| !name.is_empty()) else {
        return Err(at("metadata.name", "is missing"));
    };
    let (legal, why) = match rule {
        NameRule::Label => (is_dns_label(name), LABEL_RULE),
        NameRule::Subdomain => (is_dns_subdomain(name), SUBDOMAIN_RULE),
    };
    if legal {
        Ok(name.to_owned())
    } else {
        Err(at("metadata.name", format!("{:?} {why}", shown(name))))
    }
}

/// Reads namespace and name of an object that has both.
pub(super) fn read_names(metadata: &ObjectMeta, rule: NameRule) -> Result<(String, String), FieldError> {
    let namespace = metadata.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    if !is_dns_label(namespace) {
        let reason = format!("{:?} {LABEL_RULE}", shown(namespace));
        return Err(at("metadata.namespace", reason));
    }
    Ok((namespace.to_owned(), read_name(metadata, rule)?))
}

/// Adds the object to a field error.
pub(super) fn of_object(kind: &'static str, metadata: &ObjectMeta) -> impl FnOnce(FieldError) -> InvalidObject {
    let name = metadata.name.as_deref().unwrap_or("<unnamed>");
    let object = match metadata.namespace.as_deref() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    };
    move |(field, reason)| InvalidObject {
        kind,
        object,
        field,
        reason,
    }
}

pub(super) fn is_dns_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    (1..=63).contains(&text.len()) && is_framed(text, inner, |b| inner(b) || b == b'-')
}

pub(super) fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

/// `IANA_SVC_NAME` (RFC 6335, 5.1): at most 15 of a-z, 0-9 and single '-' in between, at least one letter.
pub(super) fn is_port_name(text: &str) -> bool {
    text.len() <= 15 && is_dns_label(text) && !text.contains("--") && text.bytes().any(|b| b.is_ascii_lowercase())
}

/// Whether the text is a label key: a name, after an optional DNS subdomain and '/'.
pub(super) fn is_label_key(text: &str) -> bool {
    let (prefix, name) = text
        .split_once('/')
        .map_or((None, text), |(prefix, name)| (Some(prefix), name));
    prefix.is_none_or(is_dns_subdomain) && !name.is_empty() && is_label_value(name)
}

/// Whether the text is a label value; the same rule holds for the name in a key, which must not be empty.
pub(super) fn is_label_value(text: &str) -> bool {
    let edge = |b: u8| b.is_ascii_alphanumeric();
    text.is_empty() || (text.len() <= 63 && is_framed(text, edge, |b| edge(b) || matches!(b, b'-' | b'_' | b'.')))
}

/// Whether the first and the last byte match `edge`, and all bytes match `inner`.
fn is_framed(text: &str, edge: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    bytes.iter().copied().all(inner)
        && bytes.first().copied().is_some_and(&edge)
        && bytes.last().copied().is_some_and(&edge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_obey_the_rules_of_kubernetes() {
        for (rule, good, bad) in [
            (
                is_dns_label as fn(&str) -> bool,
                vec!["a", "a-1", "0"],
                vec!["", "-a", "a-", "A", "a.b", "ä"],
            ),
            (is_dns_subdomain, vec!["a", "a.b-c.d"], vec!["", ".", "a..b", "a.B"]),
            (
                is_port_name,
                vec!["http", "serve-80-tcp", "a"],
                vec!["", "80", "a--b", "-a", "a-", "HTTP", "serve-8080-sctpx"],
            ),
            (
                is_label_key,
                vec!["app", "App.k_8-s", "app.kubernetes.io/name"],
                vec!["", "/a", "a/", "a/b/c", "-a", "A/b"],
            ),
            (is_label_value, vec!["", "v1.2_x-Y", "1"], vec!["-", "a-", "a b", "a/b"]),
        ] {
            for text in good {
                assert!(rule(text), "{text:?}");
            }
            for text in bad {
                assert!(!rule(text), "{text:?}");
            }
        }
        assert!(is_dns_label(&"a".repeat(63)) && !is_dns_label(&"a".repeat(64)));
        assert!(is_label_value(&"a".repeat(63)) && !is_label_value(&"a".repeat(64)));
    }

    #[test]
    fn objects_without_a_namespace_are_in_default() {
        let mut metadata = ObjectMeta {
            name: Some("a.b".to_owned()),
            ..ObjectMeta::default()
        };
        let names = read_names(&metadata, NameRule::Subdomain).unwrap();
        assert_eq!(names, ("default".to_owned(), "a.b".to_owned()));
        assert_eq!(read_names(&metadata, NameRule::Label).unwrap_err().0, "metadata.name");
        metadata.namespace = Some("Demo".to_owned());
        assert_eq!(
            read_names(&metadata, NameRule::Subdomain).unwrap_err().0,
            "metadata.namespace"
        );
        metadata.name = None;
        assert_eq!(read_name(&metadata, NameRule::Label).unwrap_err().1, "is missing");
    }
}
