//! Finds the comments of Rust source, and the prose of a Markdown page, with their lines.

/// A line of prose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prose {
    /// Without the comment markers.
    pub(super) text: String,
    /// Its line, from 1.
    pub(super) line: usize,
}

/// The comments of any kind in Rust source, one entry per line.
pub(super) fn of_rust(text: &str) -> Vec<Prose> {
    let mut scan = Scan {
        rest: text,
        line: 1,
        found: Vec::new(),
    };
    while scan.step() {}
    scan.found
}

/// The lines of a page outside of code blocks, without inline code.
pub(super) fn of_page(text: &str) -> Vec<Prose> {
    let mut is_code = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            let outside = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
            found.push(Prose {
                text: outside,
                line: index + 1,
            });
        }
    }
    found
}

struct Scan<'a> {
    rest: &'a str,
    line: usize,
    found: Vec<Prose>,
}

impl Scan<'_> {
    /// Processes the text at the current position; false at the end.
    fn step(&mut self) -> bool {
        let rest = self.rest;
        if let Some(comment) = rest.strip_prefix("//") {
            let end = comment.find('\n').unwrap_or(comment.len());
            let text = comment.get(..end).unwrap_or_default();
            self.prose(text.trim_start_matches(['/', '!']));
            self.skip(end + 2);
        } else if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            let block = rest.get(..end).unwrap_or_default().to_owned();
            for (index, text) in block.lines().enumerate() {
                let line = self.line + index;
                let text = text.trim_matches(['/', '*', ' ', '!']).to_owned();
                self.found.push(Prose { text, line });
            }
            self.skip(end);
        } else if let Some(length) = raw_string(rest) {
            self.skip(length);
        } else if rest.starts_with('"') {
            self.skip(quoted(rest, '"'));
        } else if let Some(length) = character(rest) {
            self.skip(length);
        } else if let Some(length) = name(rest) {
            self.skip(length);
        } else {
            let Some(first) = rest.chars().next() else { return false };
            self.skip(first.len_utf8());
        }
        true
    }

    fn prose(&mut self, text: &str) {
        let line = self.line;
        self.found.push(Prose {
            text: without_code(text),
            line,
        });
    }

    fn skip(&mut self, length: usize) {
        let (skipped, rest) = self.rest.split_at_checked(length).unwrap_or((self.rest, ""));
        self.line += skipped.bytes().filter(|byte| *byte == b'\n').count();
        self.rest = rest;
    }
}

/// The text outside of backquotes.
fn without_code(text: &str) -> String {
    text.trim().split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// The length of the raw string at the start of `text`, `r#"..."#`.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let inside = after.get(hashes..)?.strip_prefix('"')?;
    let closing = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - inside.len();
    Some(
        inside
            .find(&closing)
            .map_or(text.len(), |end| start + end + closing.len()),
    )
}

/// The length of the quoted text at the start of `text`, from `mark` to `mark`, with escapes.
fn quoted(text: &str, mark: char) -> usize {
    let mut is_escaped = false;
    for (index, char) in text.char_indices().skip(1) {
        if is_escaped {
            is_escaped = false;
        } else if char == '\\' {
            is_escaped = true;
        } else if char == mark {
            return index + 1;
        }
    }
    text.len()
}

/// The length of the character literal at the start of `text`; `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    let mut chars = inside.chars();
    let first = chars.next()?;
    if first == '\\' {
        return Some(quoted(text, '\''));
    }
    (chars.next()? == '\'').then(|| first.len_utf8() + 2)
}

/// The length of the name at the start of `text`; a `r` or `b` inside a name opens no string.
fn name(text: &str) -> Option<usize> {
    let end = text
        .find(|char: char| !char.is_alphanumeric() && char != '_')
        .unwrap_or(text.len());
    let is_name = end > 0;
    is_name.then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(found: &[Prose]) -> Vec<(usize, &str)> {
        found.iter().map(|prose| (prose.line, prose.text.as_str())).collect()
    }

    #[test]
    fn comments_of_every_kind_are_found() {
        let found = of_rust("//! Head\n/// Doc\nfn f() {} // tail\n/* one\n * two */\n");
        assert_eq!(
            lines(&found),
            [(1, "Head"), (2, "Doc"), (3, "tail"), (4, "one"), (5, "two")]
        );
    }

    #[test]
    fn text_of_the_program_is_no_comment() {
        let found = of_rust(
            "let a = \"// b \\\" // c\"; let d = r#\"\" // e\"#;\nlet f = '\"'; let g: &'static str = b\"//\"; let h = '\\''; // i\nlet bar\"//\";",
        );
        assert_eq!(lines(&found), [(2, "i")]);
    }

    #[test]
    fn code_in_backquotes_is_left_out() {
        assert_eq!(lines(&of_rust("// a `told` b")), [(1, "a   b")]);
        assert_eq!(
            lines(&of_page("a\n```sh\ntold\n```\nb `told`\n")),
            [(1, "a"), (5, "b  ")]
        );
    }
}
