//! Splits the output of cargo on standard error into its progress and the lines to show.

use std::io::{BufReader, Read};

use crate::progress;

/// Status messages of cargo; all other lines are warnings, errors and the output of programs that cargo runs.
const CHATTER: [&str; 16] = [
    "Adding",
    "Building",
    "Checking",
    "Compiling",
    "Doc-tests",
    "Downloaded",
    "Downloading",
    "Finished",
    "Fresh",
    "Ignored",
    "Installed",
    "Installing",
    "Locking",
    "Replaced",
    "Replacing",
    "Updating",
];

/// A piece of cargo's output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// Cargo's progress bar, as the state of a step.
    Progress(String),
    /// A line that is not shown.
    Chatter,
    /// A line to show.
    Line(&'a str),
}

/// Settings that make cargo draw its progress bar into a pipe.
pub(crate) const ENVIRONMENT: [(&str, &str); 2] = [
    ("CARGO_TERM_PROGRESS_WHEN", "always"),
    ("CARGO_TERM_PROGRESS_WIDTH", "120"),
];

/// Reads `stream` to its end: passes progress to the running step and every other line to `show`.
pub(crate) fn follow(stream: impl Read, mut show: impl FnMut(&str)) {
    let mut piece = Vec::new();
    for byte in BufReader::new(stream).bytes() {
        // The pipe of cargo breaks only when cargo exits.
        let Ok(byte) = byte else { break };
        if byte != b'\n' && byte != b'\r' {
            piece.push(byte);
            continue;
        }
        hand_on(&piece, &mut show);
        piece.clear();
    }
    hand_on(&piece, &mut show);
}

fn hand_on(piece: &[u8], show: &mut impl FnMut(&str)) {
    if piece.is_empty() {
        return;
    }
    match read(&String::from_utf8_lossy(piece)) {
        Piece::Progress(text) => progress::detail(&text),
        Piece::Chatter => {}
        Piece::Line(line) => show(line),
    }
}

/// Classifies one piece of output.
pub(crate) fn read(text: &str) -> Piece<'_> {
    let plain = without_colors(text);
    if plain.trim().is_empty() && plain.len() != text.len() {
        return Piece::Chatter;
    }
    let trimmed = plain.trim_start();
    // The bar of an update of the index: it counts no crates of the build.
    if trimmed.starts_with("Fetch [") {
        return Piece::Chatter;
    }
    if let Some(state) = bar(trimmed) {
        return Piece::Progress(state);
    }
    let first = trimmed.split(' ').next().unwrap_or_default();
    // Status words of cargo are right-aligned in a column of 12.
    let is_aligned = plain.len() - trimmed.len() + first.len() == 12;
    if is_aligned && CHATTER.contains(&first) {
        return Piece::Chatter;
    }
    Piece::Line(text)
}

/// The state that `Building [====>   ] 12/380: syn, serde` shows.
fn bar(text: &str) -> Option<String> {
    let (word, rest) = text.split_once(" [")?;
    if !matches!(word, "Building" | "Downloading" | "Updating") {
        return None;
    }
    let (_, state) = rest.split_once("] ")?;
    let (count, crates) = state.split_once(": ").unwrap_or((state, ""));
    let (done, total) = count.trim().split_once('/')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(done) || !is_number(total) {
        return None;
    }
    let crates = crates.trim();
    Some(if crates.is_empty() {
        format!("{done}/{total} crates")
    } else {
        format!("{done}/{total} crates: {crates}")
    })
}

fn without_colors(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        if char == '\x1b' {
            // A sequence ends with its first letter.
            chars.by_ref().find(char::is_ascii_alphabetic);
        } else {
            plain.push(char);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_becomes_a_count() {
        let bar = "    Building [=====>          ] 61/380: syn, tokio(build), ring...";
        assert_eq!(
            read(bar),
            Piece::Progress("61/380 crates: syn, tokio(build), ring...".into())
        );
        assert_eq!(
            read("\x1b[1m\x1b[96m    Building\x1b[0m [=>  ] 1/2: kni-agent(bin)"),
            Piece::Progress("1/2 crates: kni-agent(bin)".into())
        );
    }

    #[test]
    fn cargos_own_words_are_hidden_and_all_else_is_shown() {
        assert_eq!(read("   Compiling syn v3.0.9"), Piece::Chatter);
        assert_eq!(read("\x1b[K"), Piece::Chatter);
        assert_eq!(
            read("       Fetch [=====>      ] 138 complete; 5 pending    "),
            Piece::Chatter
        );
        for line in [
            "warning: unused import",
            "error[E0433]: no such crate",
            "Compiling is a word of a test",
            "    Blocking waiting for file lock on build directory",
            "   --> src/main.rs:1:1",
        ] {
            assert_eq!(read(line), Piece::Line(line));
        }
    }

    #[test]
    fn both_ends_of_lines_end_a_piece() {
        let mut shown = Vec::new();
        follow(
            &b"   Compiling a v1\n  Building [> ] 0/2: a\rwarning: x\nlast"[..],
            |line| {
                shown.push(line.to_owned());
            },
        );
        assert_eq!(shown, ["warning: x", "last"]);
    }
}
