//! Evaluates the license expressions of manifests (SPDX) against the allowed licenses.

/// Whether `allowed` licenses suffice to use what has this `expression`.
///
/// An expression that cannot be read allows nothing. `MIT/Apache-2.0` is an older form of `MIT OR Apache-2.0`.
pub(super) fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let text = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = text.split_whitespace().peekable();
    let verdict = any(&mut words, allowed);
    verdict == Some(true) && words.peek().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

/// One of several parts is enough; `None` if the text is no expression.
fn any(words: &mut Words<'_>, allowed: &[String]) -> Option<bool> {
    let mut verdict = all(words, allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        verdict |= all(words, allowed)?;
    }
    Some(verdict)
}

/// Every part is needed.
fn all(words: &mut Words<'_>, allowed: &[String]) -> Option<bool> {
    let mut verdict = one(words, allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        verdict &= one(words, allowed)?;
    }
    Some(verdict)
}

/// A license, with its exception as part of the name, or an expression in parentheses.
fn one(words: &mut Words<'_>, allowed: &[String]) -> Option<bool> {
    let word = words.next()?;
    if word == "(" {
        let verdict = any(words, allowed)?;
        return words.next_if_eq(&")").map(|_| verdict);
    }
    if matches!(word, ")" | "AND" | "OR" | "WITH") {
        return None;
    }
    let name = match words.next_if_eq(&"WITH") {
        Some(_) => format!("{word} WITH {}", words.next()?),
        None => word.to_owned(),
    };
    Some(allowed.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_is_allowed_if_enough_of_it_is() {
        let allowed = ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        for (expression, expected) in [
            ("MIT", true),
            ("GPL-2.0-only", false),
            ("Apache-2.0 OR MIT", true),
            ("GPL-2.0-only/MIT", true),
            ("MIT AND GPL-2.0-only", false),
            ("(MIT OR Apache-2.0) AND ISC", true),
            ("(MIT OR Apache-2.0) AND Zlib", false),
            ("MIT OR ISC AND Zlib", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("MIT WITH LLVM-exception", false),
            ("", false),
            ("MIT OR", false),
            ("MIT ISC", false),
            ("(MIT", false),
            ("MIT)", false),
            ("AND", false),
        ] {
            assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
        }
    }
}
