//! Finds every path in the tokens of a file, with `use` trees expanded.

use super::tokens::{Kind, Token};

/// A path as written, with its `use` groups expanded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Its names from left to right; a glob is `*`.
    pub(super) names: Vec<String>,
    /// The line of its last name.
    pub(super) line: usize,
    /// The number of inline `mod` blocks around it.
    pub(super) inline_depth: usize,
    /// Whether it belongs to a `use`.
    pub(super) is_import: bool,
    /// The name after `as`.
    pub(super) alias: Option<String>,
}

/// All names that are followed by `::` with the rest of their paths, and all names that `use` imports.
pub(super) fn find(tokens: &[Token]) -> Vec<Found> {
    let mut scan = Scan {
        tokens,
        found: Vec::new(),
        braces: Vec::new(),
        is_import: false,
    };
    let mut position = 0;
    while position < tokens.len() {
        position = scan.step(position);
    }
    scan.found
}

struct Scan<'a> {
    tokens: &'a [Token],
    found: Vec<Found>,
    /// One entry per open brace: whether it opened an inline module.
    braces: Vec<bool>,
    is_import: bool,
}

impl Scan<'_> {
    /// Processes the token at `position`, and returns the position after it.
    fn step(&mut self, position: usize) -> usize {
        match self.kind(position) {
            Some(Kind::Mark('{')) => self.braces.push(self.opens_module(position)),
            Some(Kind::Mark('}')) => {
                self.braces.pop();
            }
            Some(Kind::Word(word)) if word == "use" => {
                self.is_import = true;
                let end = self.tree(position + 1, &[]);
                self.is_import = false;
                return end;
            }
            Some(Kind::Word(_)) if self.kind(position + 1) == Some(&Kind::PathSep) => return self.tree(position, &[]),
            _ => {}
        }
        position + 1
    }

    /// Reads one branch of a `use` tree, or a plain path, that follows `prefix`.
    fn tree(&mut self, mut position: usize, prefix: &[String]) -> usize {
        let mut names = prefix.to_vec();
        let mut line = 0;
        loop {
            match self.kind(position) {
                Some(Kind::Word(word)) => names.push(word.clone()),
                Some(Kind::Mark('*')) => names.push("*".to_owned()),
                Some(Kind::Mark('{')) => return self.group(position + 1, &names),
                // A path that starts with `::`, such as `::name`.
                Some(Kind::PathSep) if names.len() == prefix.len() => {
                    position += 1;
                    continue;
                }
                // Generic arguments, `Vec::<T>`: their content is processed separately.
                _ => break,
            }
            line = self.tokens.get(position).map_or(line, |token| token.line);
            position += 1;
            if self.kind(position) != Some(&Kind::PathSep) {
                break;
            }
            position += 1;
        }
        if names.len() > prefix.len() {
            let inline_depth = self.braces.iter().filter(|module| **module).count();
            self.found.push(Found {
                names,
                line,
                inline_depth,
                is_import: self.is_import,
                alias: self.alias(position),
            });
        }
        position
    }

    /// Reads the branches of a group up to its closing brace.
    fn group(&mut self, mut position: usize, prefix: &[String]) -> usize {
        loop {
            match self.kind(position) {
                None => return position,
                Some(Kind::Mark('}')) => return position + 1,
                Some(Kind::Word(word)) if word == "as" => position += 2,
                Some(Kind::Word(_) | Kind::PathSep | Kind::Mark('{' | '*')) => position = self.tree(position, prefix),
                Some(Kind::Mark(_) | Kind::Literal) => position += 1,
            }
        }
    }

    /// The name after `as` at `position`, if there is one.
    fn alias(&self, position: usize) -> Option<String> {
        match (self.kind(position), self.kind(position + 1)) {
            (Some(Kind::Word(word)), Some(Kind::Word(name))) if self.is_import && word == "as" => Some(name.clone()),
            _ => None,
        }
    }

    /// Whether the brace at `position` follows `mod name`.
    fn opens_module(&self, position: usize) -> bool {
        let before = |distance: usize| position.checked_sub(distance).and_then(|at| self.kind(at));
        matches!(before(1), Some(Kind::Word(_))) && matches!(before(2), Some(Kind::Word(word)) if word == "mod")
    }

    fn kind(&self, position: usize) -> Option<&Kind> {
        self.tokens.get(position).map(|token| &token.kind)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tokens::cut, *};

    fn names(text: &str) -> Vec<String> {
        find(&cut(text).unwrap())
            .into_iter()
            .map(|found| found.names.join("::"))
            .collect()
    }

    #[test]
    fn use_trees_are_spread_out() {
        assert_eq!(
            names("use crate::{a, b::{self, c as d, E}, f::*}; use tokio;"),
            [
                "crate::a",
                "crate::b::self",
                "crate::b::c",
                "crate::b::E",
                "crate::f::*",
                "tokio"
            ]
        );
    }

    #[test]
    fn paths_in_code_types_and_macros_are_found() {
        assert_eq!(
            names("fn f(x: &crate::a::B) -> Vec<::c::D> { g::<crate::e::F>(); h!(\"{}\", crate::i::J); x.k }"),
            ["crate::a::B", "c::D", "g", "crate::e::F", "crate::i::J"]
        );
    }

    #[test]
    fn an_import_keeps_its_new_name_and_its_depth() {
        let found = find(&cut("use a::{b as c, d}; mod inner { use super::e; } f::g as u8;").unwrap());
        let seen: Vec<_> = found
            .iter()
            .map(|found| {
                (
                    found.names.join("::"),
                    found.alias.as_deref(),
                    found.inline_depth,
                    found.is_import,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("a::b".to_owned(), Some("c"), 0, true),
                ("a::d".to_owned(), None, 0, true),
                ("super::e".to_owned(), None, 1, true),
                ("f::g".to_owned(), None, 0, false),
            ]
        );
    }

    #[test]
    fn a_line_is_that_of_the_name_itself() {
        let found = find(&cut("use crate::{\n    a,\n    b::C,\n};").unwrap());
        assert_eq!(found.iter().map(|found| found.line).collect::<Vec<_>>(), [2, 3]);
    }
}
