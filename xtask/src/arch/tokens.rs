//! Splits Rust source into a flat list of names and punctuation with their lines, without comments and literals.

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// The kind of a token, as far as paths need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An identifier or keyword.
    Word(String),
    /// `::`
    PathSep,
    /// Any other single punctuation character, or the opening or closing bracket of a group.
    Mark(char),
    /// A number, string or character.
    Literal,
}

/// A token and its line.
#[derive(Clone, Debug)]
pub(super) struct Token {
    /// What it is.
    pub(super) kind: Kind,
    /// Its line, from 1.
    pub(super) line: usize,
}

/// The tokens of `text`, or the position of a syntax error.
pub(super) fn cut(text: &str) -> Result<Vec<Token>> {
    let stream: TokenStream = text
        .parse()
        .map_err(|error: proc_macro2::LexError| anyhow!("line {}: {error}", error.span().start().line))?;
    let mut tokens = Vec::new();
    flatten(stream, &mut tokens);
    Ok(tokens)
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    // The line of a `:` that is joined to the punctuation after it.
    let mut colon = None;
    for tree in stream {
        let line = tree.span().start().line;
        let first_colon = colon.take();
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ('(', ')'),
                    Delimiter::Brace => ('{', '}'),
                    Delimiter::Bracket => ('[', ']'),
                    Delimiter::None => (' ', ' '),
                };
                tokens.push(Token {
                    kind: Kind::Mark(open),
                    line,
                });
                flatten(group.stream(), tokens);
                tokens.push(Token {
                    kind: Kind::Mark(close),
                    line: group.span_close().start().line,
                });
            }
            TokenTree::Ident(name) => tokens.push(Token {
                kind: Kind::Word(name.to_string()),
                line,
            }),
            TokenTree::Punct(mark) if mark.as_char() == ':' && first_colon.is_some() => {
                tokens.push(Token {
                    kind: Kind::PathSep,
                    line,
                });
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' && mark.spacing() == Spacing::Joint => colon = Some(line),
            TokenTree::Punct(mark) => tokens.push(Token {
                kind: Kind::Mark(mark.as_char()),
                line,
            }),
            TokenTree::Literal(_) => tokens.push(Token {
                kind: Kind::Literal,
                line,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_hold_no_names() {
        let tokens = cut("// crate::a\nlet x = \"crate::b\"; /* crate::c */ f('d', r#\"crate::e\"#);").unwrap();
        let words: Vec<_> = tokens.iter().filter(|t| matches!(t.kind, Kind::Word(_))).collect();
        assert_eq!(words.len(), 3, "let, x and f: {words:?}");
        assert_eq!(words[0].line, 2);
    }

    #[test]
    fn a_path_separator_is_one_token() {
        let kinds: Vec<_> = cut("a::b: c").unwrap().into_iter().map(|t| t.kind).collect();
        let word = |name: &str| Kind::Word(name.into());
        assert_eq!(kinds, [word("a"), Kind::PathSep, word("b"), Kind::Mark(':'), word("c")]);
    }

    #[test]
    fn broken_source_is_an_error_with_its_line() {
        assert!(cut("fn f() {\n").unwrap_err().to_string().starts_with("line "));
    }
}
