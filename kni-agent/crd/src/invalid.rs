//! How an object is refused: by its name, the field and the rule that the field breaks.

/// An object that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {object}: {field}: {reason}")]
pub struct InvalidObject {
    /// Its kind.
    pub kind: &'static str,
    /// `namespace/name`, or the name alone where there is no namespace; as given, so it may be illegal itself.
    pub object: String,
    /// Path of the field, such as `spec.ingress[0].from[1].ipBlock.cidr`.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
}

/// A field's path and what is wrong with it.
pub(super) type FieldError = (String, String);

/// Names the field that breaks a rule.
pub(super) fn at(field: impl Into<String>, reason: impl Into<String>) -> FieldError {
    (field.into(), reason.into())
}

/// Text from an object, short enough for a message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Reads every item of a list; `read` gets the item's path.
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
