//! Writes an answer as a JSON or YAML document without raw terminal controls.

use serde::Serialize;

use crate::{
    error::Error,
    escape::{is_hidden, replace_hidden},
};

/// `value` as indented JSON, ended by a newline.
pub(crate) fn json(value: &impl Serialize) -> Result<String, Error> {
    Ok(visible_json(&serde_json::to_string_pretty(value)?) + "\n")
}

/// `value` as JSON on one line, ended by a newline.
pub(crate) fn json_line(value: &impl Serialize) -> Result<String, Error> {
    Ok(visible_json(&serde_json::to_string(value)?) + "\n")
}

/// `value` as YAML, ended by a newline.
pub(crate) fn yaml(value: &impl Serialize) -> Result<String, Error> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let block = serde_saphyr::to_string_with_options(value, options)?;
    if block.chars().any(|c| c != '\n' && is_hidden(c)) {
        // The serializer escapes the characters that YAML defines as unprintable; others can only be escaped inside
        // double quotes, and JSON, which is also YAML, has only double-quoted strings.
        let quoted = serde_json::to_string_pretty(value)?;
        return Ok(replace_json(&quoted, |c| format!("\\U{:08X}", u32::from(c))) + "\n");
    }
    Ok(block)
}

/// JSON text with hidden characters as `\uXXXX`: the same document, since they occur in strings only.
fn visible_json(text: &str) -> String {
    replace_json(text, |c| {
        c.encode_utf16(&mut [0; 2])
            .iter()
            .map(|unit| format!("\\u{unit:04x}"))
            .collect::<Vec<_>>()
            .concat()
    })
}

/// Replaces the hidden characters of JSON text, except the newlines of its layout: JSON strings contain no raw
/// newlines.
fn replace_json(text: &str, notation: impl Fn(char) -> String) -> String {
    replace_hidden(text, |c| if c == '\n' { c.to_string() } else { notation(c) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const HOSTILE: &str = "a\u{1b}[31m\nb\u{9b}2J\u{7f}\u{202e}c\u{e0041}";
    const CONTROLS: &str = "a\u{1b}[31m\nb\u{9b}2J\u{7f}";

    fn clean(text: &str) {
        assert!(!text.chars().any(|c| c != '\n' && is_hidden(c)), "{text:?}");
    }

    #[test]
    fn json_hides_nothing_and_keeps_the_value() {
        for write in [json, json_line] {
            let text = write(&BTreeMap::from([("pod", HOSTILE)])).unwrap();
            clean(&text);
            let back: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
            assert_eq!(back["pod"], HOSTILE);
        }
        assert_eq!(json_line(&BTreeMap::from([("a", "b")])).unwrap(), "{\"a\":\"b\"}\n");
    }

    #[test]
    fn yaml_hides_nothing_and_keeps_the_value() {
        for name in [HOSTILE, CONTROLS, "plain"] {
            let text = yaml(&BTreeMap::from([("pod", name)])).unwrap();
            clean(&text);
            let back: BTreeMap<String, String> = serde_saphyr::from_str(&text).unwrap();
            assert_eq!(back["pod"], name);
        }
    }

    #[test]
    fn yaml_is_block_style() {
        assert_eq!(
            yaml(&BTreeMap::from([("a", vec!["b", "true"])])).unwrap(),
            "a:\n- b\n- \"true\"\n"
        );
        assert_eq!(yaml(&BTreeMap::from([("a", Vec::<u8>::new())])).unwrap(), "a: []\n");
    }
}
