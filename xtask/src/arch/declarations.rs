//! Finds the names that a file declares: items, variants, fields.

use super::tokens::{Kind, Token};

/// A declared name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Declared {
    /// As written in the source.
    pub(super) name: String,
    /// Its line, from 1.
    pub(super) line: usize,
}

/// The kind of item that encloses a position.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Body {
    Struct,
    Enum,
    Other,
}

/// Keywords that are followed by a declared name.
const KEYWORDS: [&str; 9] = [
    "fn", "struct", "enum", "union", "const", "static", "type", "trait", "mod",
];

/// All names that `tokens` declare, except the names of tests, which are sentences.
pub(super) fn find(tokens: &[Token]) -> Vec<Declared> {
    let mut found = Vec::new();
    let mut bodies: Vec<Body> = Vec::new();
    // The kind of the body that the next brace opens.
    let mut next = Body::Other;
    let mut is_test = false;
    let mut position = 0;
    while let Some(token) = tokens.get(position) {
        match &token.kind {
            Kind::Mark('#') if mark(tokens, position + 1) == Some('[') => {
                let end = closing(tokens, position + 1);
                is_test |= names_a_test(tokens.get(position..end).unwrap_or_default());
                position = end;
            }
            Kind::Mark(open @ ('{' | '(' | '[')) => {
                bodies.push(if *open == '{' { next } else { Body::Other });
                next = Body::Other;
            }
            Kind::Mark('}' | ')' | ']') => {
                bodies.pop();
            }
            Kind::Mark(';') => next = Body::Other,
            Kind::Word(word) if KEYWORDS.contains(&word.as_str()) => {
                if let Some(declared) = after(tokens, position) {
                    // `const fn`, and `*const T` or `fn(T)` as types, declare nothing here.
                    if !(word == "fn" && is_test) && is_item(tokens, position, &declared) {
                        found.push(declared);
                    }
                    next = match word.as_str() {
                        "struct" | "union" => Body::Struct,
                        "enum" => Body::Enum,
                        _ => next,
                    };
                }
                is_test &= word != "fn" && word != "mod";
            }
            Kind::Word(name) if is_member(tokens, position, bodies.last().copied()) => found.push(Declared {
                name: name.clone(),
                line: token.line,
            }),
            Kind::Word(_) | Kind::PathSep | Kind::Mark(_) | Kind::Literal => {}
        }
        position += 1;
    }
    found
}

/// Whether a word inside a struct or enum is the name of a field or a variant.
fn is_member(tokens: &[Token], position: usize, body: Option<Body>) -> bool {
    let before = position.checked_sub(1).and_then(|before| tokens.get(before));
    let is_first = match before.map(|token| &token.kind) {
        Some(Kind::Mark('{' | ',' | ']' | ')')) => true,
        Some(Kind::Word(word)) => word == "pub",
        _ => false,
    };
    match body {
        Some(Body::Enum) => is_first,
        Some(Body::Struct) => is_first && mark(tokens, position + 1) == Some(':'),
        Some(Body::Other) | None => false,
    }
}

fn after(tokens: &[Token], position: usize) -> Option<Declared> {
    let token = tokens.get(position + 1)?;
    match &token.kind {
        Kind::Word(name) => Some(Declared {
            name: name.clone(),
            line: token.line,
        }),
        Kind::PathSep | Kind::Mark(_) | Kind::Literal => None,
    }
}

fn is_item(tokens: &[Token], position: usize, declared: &Declared) -> bool {
    let is_pointer = position.checked_sub(1).and_then(|before| mark(tokens, before)) == Some('*');
    !is_pointer && !KEYWORDS.contains(&declared.name.as_str()) && declared.name != "unsafe" && declared.name != "_"
}

fn names_a_test(attribute: &[Token]) -> bool {
    attribute
        .iter()
        .any(|token| matches!(&token.kind, Kind::Word(word) if word == "test" || word == "rstest"))
        && !attribute
            .iter()
            .any(|token| matches!(&token.kind, Kind::Word(word) if word == "cfg"))
}

/// The position of the bracket that closes the one at `open`.
fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0_usize;
    for (position, token) in tokens.iter().enumerate().skip(open) {
        match token.kind {
            Kind::Mark('[') => depth += 1,
            Kind::Mark(']') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return position;
                }
            }
            Kind::Word(_) | Kind::PathSep | Kind::Mark(_) | Kind::Literal => {}
        }
    }
    tokens.len()
}

fn mark(tokens: &[Token], position: usize) -> Option<char> {
    match tokens.get(position)?.kind {
        Kind::Mark(mark) => Some(mark),
        Kind::Word(_) | Kind::PathSep | Kind::Literal => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tokens::cut, *};

    fn names(text: &str) -> Vec<String> {
        find(&cut(text).unwrap())
            .into_iter()
            .map(|declared| declared.name)
            .collect()
    }

    #[test]
    fn items_variants_and_fields_are_declared() {
        assert_eq!(
            names(
                "pub struct A { pub b: u8, #[serde(default)] pub(crate) c: Vec<d::E>, f: [u8; 4] }\n\
                 enum G { #[default] H, I(J), K { l: M }, N = 3 }\n\
                 trait O { const P: u8; type Q; fn r(s: T) -> *const U; }\n\
                 mod v { static W: fn(u8) = x; const fn y() {} }"
            ),
            [
                "A", "b", "c", "f", "G", "H", "I", "K", "N", "O", "P", "Q", "r", "v", "W", "y"
            ]
        );
    }

    #[test]
    fn what_is_used_is_not_declared() {
        assert_eq!(
            names("fn f() { let told = std::mem::forget(x); tokio::sync::watch::channel(y).tell(); S { told: 1 } }"),
            ["f"]
        );
    }

    #[test]
    fn names_of_tests_are_sentences() {
        assert_eq!(
            names(
                "#[cfg(test)] mod tests { #[test] fn nobody_is_told() {} #[tokio::test(flavor = \"x\")] async fn b() {} fn c() {} }"
            ),
            ["tests", "c"]
        );
    }
}
