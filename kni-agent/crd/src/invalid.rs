//! Defines the error of a refused object: its name, the field, and the violated rule.

/// An object that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {object}: {field}: {reason}")]
pub struct InvalidObject {
    /// Its kind.
    pub kind: &'static str,
    /// `namespace/name`, or the name alone for cluster-scoped objects; as given, so it may be invalid itself.
    pub object: String,
    /// Path of the field, such as `spec.ingress[0].from[1].ipBlock.cidr`.
    pub field: String,
    /// The violated rule.
    pub reason: String,
}

/// The path of a field and the error in it.
pub(super) type FieldError = (String, String);

/// Creates an error for a field.
pub(super) fn at(field: impl Into<String>, reason: impl Into<String>) -> FieldError {
    (field.into(), reason.into())
}

/// Text from an object, shortened for a message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Reads every item of a list; `read` receives the path of the item.
pub(super) fn read_each<T, U>(
    field: &str,
    list: &[T],
    read: impl Fn(&str, &T) -> Result<U, FieldError>,
) -> Result<Vec<U>, FieldError> {
    list.iter()
        .enumerate()
        .map(|(index, item)| read(&format!("{field}[{index}]"), item))
        .collect()
}
