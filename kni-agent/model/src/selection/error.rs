//! Defines the error of a network selection, with its position in the annotation.

use std::fmt;

/// Maximum length of the quoted part of an annotation in an error, in characters.
const MAX_QUOTE: usize = 128;

/// A network selection that is refused. The caller names the pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct SelectionError {
    /// Key of the annotation; `None` if the selections did not come from one.
    pub annotation: Option<&'static str>,
    /// Position in the list, from 0; `None` if the value as a whole is wrong.
    pub index: Option<usize>,
    /// The item as written, or the whole value if the item is unknown, shortened.
    pub text: String,
    /// The field of the item in the annotation's own words ("ips", "interface"); empty if the item as a whole is wrong.
    pub field: String,
    /// The violated rule.
    pub reason: String,
}

impl SelectionError {
    pub(super) fn whole(annotation: &'static str, reason: impl Into<String>) -> Self {
        Self {
            annotation: Some(annotation),
            index: None,
            text: String::new(),
            field: String::new(),
            reason: reason.into(),
        }
    }

    /// Quotes the value of the annotation where no item is named.
    pub(super) fn quoting(self, value: &str) -> Self {
        if self.text.is_empty() {
            Self {
                text: value.chars().take(MAX_QUOTE).collect(),
                ..self
            }
        } else {
            self
        }
    }

    pub(super) fn item(
        annotation: &'static str,
        index: usize,
        text: &str,
        field: &str,
        reason: impl Into<String>,
    ) -> Self {
        Self {
            annotation: Some(annotation),
            index: Some(index),
            text: text.chars().take(MAX_QUOTE).collect(),
            field: field.to_owned(),
            reason: reason.into(),
        }
    }
}

impl fmt::Display for SelectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.annotation {
            Some(annotation) => write!(f, "annotation {annotation}")?,
            None => f.write_str("requested networks")?,
        }
        if let Some(index) = self.index {
            write!(f, ", item [{index}]")?;
        }
        if !self.text.is_empty() {
            write!(f, " {:?}", self.text)?;
        }
        if !self.field.is_empty() {
            write!(f, ", field {}", self.field)?;
        }
        write!(f, ": {}", self.reason)
    }
}
