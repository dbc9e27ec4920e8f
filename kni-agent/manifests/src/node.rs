//! Represents a YAML document as a tree with the line of each field.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::{Number, Value};
use serde_saphyr::Spanned;

use super::document::Document;

/// A value and its position.
#[derive(Debug)]
pub(super) struct Node {
    /// Line in the file, from 1: of the key for the fields of a mapping, else of the value.
    line: u32,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Scalar(Value),
    Sequence(Vec<Node>),
    Mapping(Vec<(String, Node)>),
}

/// A document that is not valid YAML.
#[derive(Debug)]
pub(super) struct SyntaxError {
    pub(super) line: u32,
    pub(super) reason: String,
}

impl Node {
    /// Parses one document. Duplicate keys are errors, and so are documents larger or deeper than a manifest can be.
    pub(super) fn parse(document: Document<'_>) -> Result<Self, SyntaxError> {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! { max_depth: 32, max_nodes: 100_000, max_documents: 1 },
            duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
            strict_booleans: true,
            with_snippet: false,
        };
        let below = document.lines_before;
        match serde_saphyr::from_str_with_options::<Spanned<Raw>>(document.text, options) {
            Ok(root) => Ok(Self::new(root, below)),
            Err(error) => {
                let line = error.location().map_or(1, |at| to_line(at.line()));
                let shift = serde_saphyr::render_options! { line_offset: u64::from(below) };
                Err(SyntaxError {
                    line: line.saturating_add(below),
                    reason: error.render_with_options(shift),
                })
            }
        }
    }

    fn new(raw: Spanned<Raw>, below: u32) -> Self {
        let line = to_line(raw.referenced.line()).saturating_add(below);
        let content = match raw.value {
            Raw::Scalar(value) => Content::Scalar(value),
            Raw::Sequence(items) => Content::Sequence(items.into_iter().map(|item| Self::new(item, below)).collect()),
            Raw::Mapping(entries) => Content::Mapping(
                entries
                    .into_iter()
                    .map(|(key, value)| {
                        let line = to_line(key.referenced.line()).saturating_add(below);
                        (
                            key.value,
                            Self {
                                line,
                                ..Self::new(value, below)
                            },
                        )
                    })
                    .collect(),
            ),
        };
        Self { line, content }
    }

    /// The value without positions.
    pub(super) fn to_value(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::Sequence(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Content::Mapping(entries) => Value::Object(
                entries
                    .iter()
                    .map(|(key, node)| (key.clone(), node.to_value()))
                    .collect(),
            ),
        }
    }

    /// A field of a mapping.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        match &self.content {
            Content::Mapping(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, node)| node),
            Content::Scalar(_) | Content::Sequence(_) => None,
        }
    }

    /// The fields of a mapping; `None` if it is not one.
    pub(super) fn entries(&self) -> Option<impl Iterator<Item = (&str, &Self)>> {
        match &self.content {
            Content::Mapping(entries) => Some(entries.iter().map(|(key, node)| (key.as_str(), node))),
            Content::Scalar(_) | Content::Sequence(_) => None,
        }
    }

    /// The keys of a mapping; `None` if it is not one.
    pub(super) fn keys(&self) -> Option<impl Iterator<Item = &str>> {
        self.entries().map(|entries| entries.map(|(key, _)| key))
    }

    /// The items of a sequence; `None` if it is not one.
    pub(super) fn items(&self) -> Option<&[Self]> {
        match &self.content {
            Content::Sequence(items) => Some(items),
            Content::Scalar(_) | Content::Mapping(_) => None,
        }
    }

    /// Whether there is no value.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.content, Content::Scalar(Value::Null))
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match &self.content {
            Content::Scalar(value) => value.as_str(),
            Content::Sequence(_) | Content::Mapping(_) => None,
        }
    }

    /// The line of a field such as `spec.subnets[1]`, or of its innermost existing parent. The last key may contain
    /// dots, as those of labels do.
    pub(super) fn line_of(&self, path: &str) -> u32 {
        let (mut node, mut rest) = (self, path);
        while !rest.is_empty() {
            if let Some(last) = node.get(rest) {
                return last.line;
            }
            let (part, after) = rest.split_once(['.', '[']).unwrap_or((rest, ""));
            let next = match (&node.content, part.strip_suffix(']')) {
                (Content::Sequence(items), Some(index)) => index.parse().ok().and_then(|i: usize| items.get(i)),
                (_, _) => node.get(part),
            };
            match next {
                Some(next) => (node, rest) = (next, after),
                None => break,
            }
        }
        node.line
    }
}

fn to_line(line: u64) -> u32 {
    u32::try_from(line).unwrap_or(u32::MAX)
}

/// The values that serde reads, before positions are resolved.
enum Raw {
    Scalar(Value),
    Sequence(Vec<Spanned<Self>>),
    Mapping(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value that JSON can express")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Scalar(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Raw, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom(format!("{value} is not a number in JSON")))?;
        Ok(Raw::Scalar(Value::Number(number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Raw::Sequence(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Mapping(entries))
    }
}
