//! Checks that no declared name, comment or page contains a retired word.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{
    Violation,
    baseline::{Counted, crate_of},
    comments, declarations, tokens,
    words::{PHRASES, Phrase, WORDS, Word},
};
use crate::workspace::root;

/// Folders without source of this project.
const SKIPPED: [&str; 3] = ["target", "node_modules", "vendor"];
/// The list itself.
const LIST: &str = "xtask/src/arch/words.rs";

/// Every retired word of the repository, by file and line.
pub(super) fn violations() -> Result<Vec<Counted>> {
    let mut found = Vec::new();
    for path in files()? {
        let relative = path.strip_prefix(root()).unwrap_or(&path);
        if relative == Path::new(LIST) {
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        found.extend(check(relative, &text));
    }
    Ok(found)
}

/// The Rust files and pages of the repository, in a fixed order.
pub(super) fn files() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    list(root(), &mut files)?;
    files.sort();
    Ok(files)
}

/// The Rust files and pages below `folder`.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let kind = entry
            .file_type()
            .with_context(|| format!("cannot read {}", path.display()))?;
        if kind.is_dir() {
            if !name.starts_with('.') && !SKIPPED.contains(&name.as_ref()) {
                list(&path, files)?;
            }
        } else if path.extension().is_some_and(|kind| kind == "rs" || kind == "md") {
            files.push(path);
        }
    }
    Ok(())
}

/// The retired words of one file.
fn check(path: &Path, text: &str) -> Vec<Counted> {
    let is_page = path.extension().is_some_and(|kind| kind == "md");
    let at = |word: &str, line, rule| Counted {
        check: format!("word {word}"),
        area: crate_of(path),
        violation: Violation {
            path: path.to_owned(),
            line,
            rule,
        },
    };
    let prose = if is_page {
        comments::of_page(text)
    } else {
        comments::of_rust(text)
    };
    let mut found = Vec::new();
    for line in &prose {
        for phrase in retired_phrases(path, &line.text) {
            found.push(at(
                phrase.text,
                line.line,
                format!("\"{}\": write {}", phrase.text, phrase.instead),
            ));
        }
    }
    // Other checks report files that are not valid Rust.
    let tokens = if is_page {
        Vec::new()
    } else {
        tokens::cut(text).unwrap_or_default()
    };
    for declared in declarations::find(&tokens) {
        if let Some(word) = retired_word(path, &declared.name) {
            let rule = format!(
                "`{}` has \"{}\": write {}",
                declared.name,
                word.parts.join("_"),
                word.instead
            );
            found.push(at(&word.parts.join("_"), declared.line, rule));
        }
    }
    found
}

fn retired_phrases(path: &Path, text: &str) -> Vec<&'static Phrase> {
    let text = text.to_lowercase();
    let is_here = |phrase: &&Phrase| is_in(path, phrase.only_in);
    let retired = PHRASES
        .iter()
        .filter(is_here)
        .filter(|phrase| has_phrase(&text, phrase));
    retired.collect()
}

/// Whether the text contains the phrase as whole words outside of the allowed contexts.
fn has_phrase(text: &str, phrase: &Phrase) -> bool {
    let is_part = |char: Option<char>| char.is_some_and(|char| char.is_alphanumeric() || char == '_');
    text.match_indices(phrase.text).any(|(start, found)| {
        let (before, rest) = text.split_at(start);
        let after = rest.get(found.len()..).unwrap_or_default();
        let is_allowed = phrase.allowed.iter().any(|allowed| {
            let offset = allowed.find(phrase.text).unwrap_or_default();
            start
                .checked_sub(offset)
                .and_then(|from| text.get(from..))
                .is_some_and(|text| text.starts_with(allowed))
        });
        !is_part(before.chars().next_back()) && !is_part(after.chars().next()) && !is_allowed
    })
}

fn retired_word(path: &Path, name: &str) -> Option<&'static Word> {
    let parts = parts(name);
    WORDS.iter().find(|word| {
        is_in(path, word.only_in)
            && !word.allowed.contains(&name)
            && parts
                .windows(word.parts.len())
                .any(|window| window.iter().zip(word.parts).all(|(part, retired)| part == retired))
    })
}

/// Whether the file is below one of the folders, or there are none.
fn is_in(path: &Path, folders: &[&str]) -> bool {
    folders.is_empty() || folders.iter().any(|folder| path.starts_with(folder))
}

/// The words of a snake-case or camel-case name, in lower case.
fn parts(name: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut was_small = false;
    for char in name.chars() {
        if char == '_' || (char.is_uppercase() && was_small) {
            parts.push(std::mem::take(&mut part));
        }
        if char != '_' {
            part.extend(char.to_lowercase());
        }
        was_small = char.is_lowercase();
    }
    parts.push(part);
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::baseline;

    fn rules(path: &str, text: &str) -> Vec<String> {
        baseline::shown(&check(Path::new(path), text))
    }

    #[test]
    fn names_fall_into_words() {
        assert_eq!(parts("way_out"), ["way", "out"]);
        assert_eq!(parts("WayOutOf"), ["way", "out", "of"]);
        assert_eq!(parts("ALL_MAPS"), ["all", "maps"]);
        assert_eq!(parts("__x"), ["x"]);
    }

    #[test]
    fn a_retired_word_is_reported_where_it_is_declared() {
        assert_eq!(
            rules(
                "kni-agent/a.rs",
                "/// Good.\nfn ask_way_out() {}\nstruct FurtherOnes;\n"
            ),
            [
                "kni-agent/a.rs:2: `ask_way_out` has \"way_out\": write egress",
                "kni-agent/a.rs:3: `FurtherOnes` has \"further\": write additional"
            ]
        );
        assert_eq!(rules("kni-agent/a.rs", "enum A { Told }").len(), 1);
        assert_eq!(rules("kni-agent/a.rs", "struct A { told: u8 }").len(), 1);
    }

    #[test]
    fn items_of_others_and_longer_words_stay() {
        let text = "use tokio::sync::watch;\nfn f() { std::mem::forget(guard); ManuallyDrop::new(x); let told = 1; }\n\
                    struct Watches { seating: u8, history: u8, watch: watch::Receiver<u8>, foretold: u8 }\n";
        assert_eq!(rules("kni-agent/a.rs", text), Vec::<String>::new());
    }

    #[test]
    fn a_word_is_retired_only_in_its_folders() {
        assert_eq!(rules("kni-agent/a.rs", "fn touch() {}").len(), 1);
        assert_eq!(rules("tests/a.rs", "fn touch() {}").len(), 0);
    }

    #[test]
    fn a_retired_phrase_is_reported_in_comments_and_pages() {
        assert_eq!(
            rules("a.rs", "//! Nobody is told.\n"),
            [
                "a.rs:1: \"nobody\": write no process, no caller, nothing; or the passive",
                "a.rs:1: \"told\": write reported, notified, passed"
            ]
        );
        assert_eq!(rules("a.md", "It goes on.\n").len(), 1);
    }

    #[test]
    fn allowed_contexts_code_and_strings_stay() {
        for text in [
            "// HA stands for it\n",
            "// in-house\n",
            "// households\n",
            "// `told`\n",
            "const A: &str = \"told\";\n",
        ] {
            assert_eq!(rules("a.rs", text), Vec::<String>::new(), "{text}");
        }
        assert_eq!(rules("a.md", "```\ntold\n```\n"), Vec::<String>::new());
    }
}
