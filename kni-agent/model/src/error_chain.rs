//! Formats an error and its causes as one line.

use std::error::Error;

/// The error and its causes, joined by `: `. A cause whose text the line contains already is left out, because many
/// errors quote their source.
pub fn error_chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        source = cause.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Self>>);

    #[test]
    fn causes_follow_and_quoted_ones_are_not_repeated() {
        let cause = Layer("permission denied", None);
        let quoting = Layer("reading x: permission denied", Some(Box::new(cause)));
        let error = Layer("loading the state", Some(Box::new(quoting)));
        assert_eq!(error_chain(&error), "loading the state: reading x: permission denied");
    }
}
