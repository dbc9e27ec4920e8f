//! Escapes characters that must not reach a terminal: tenants choose the names that operators list.

/// Whether the character can control a terminal or hide text: controls (C0, DEL, C1), bidirectional overrides, and
/// characters without a glyph.
pub(crate) fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}'
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// `text` with hidden characters in Rust's notation (`\n`, `\u{1b}`).
pub(crate) fn escaped(text: &str) -> String {
    replace_hidden(text, |c| c.escape_default().collect())
}

/// `text` with `notation` in place of each hidden character.
pub(crate) fn replace_hidden(text: &str, notation: impl Fn(char) -> String) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) {
            visible.push_str(&notation(c));
        } else {
            visible.push(c);
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_become_readable() {
        assert_eq!(escaped("web-0 é 網"), "web-0 é 網");
        assert_eq!(escaped("a\u{1b}[2Jb\nc\u{7f}"), "a\\u{1b}[2Jb\\nc\\u{7f}");
        assert_eq!(escaped("\u{9b}31m\u{202e}x"), "\\u{9b}31m\\u{202e}x");
    }
}
