//! Limits the sizes and characters of request fields.

use std::{collections::BTreeMap, path::PathBuf};

use super::error::{MAX_NAME, Refusal};

/// Longest text that an error repeats, in characters.
pub(super) const MAX_QUOTE: usize = 64;
/// Longest path, in bytes (`PATH_MAX` with its final 0).
const MAX_PATH: usize = 4095;
/// Most entries of a map.
const MAX_ENTRIES: usize = 16 * 1024;
/// Most bytes of a map, keys and values. Kubernetes allows the annotations of a pod 256 KiB; the kubelet and the
/// runtime add some of their own.
const MAX_MAP_BYTES: usize = (256 + 16) * 1024;

/// Checks a name, which may be empty.
pub(super) fn name(field: &str, value: &str) -> Result<(), Refusal> {
    text(field, value, MAX_NAME)
}

/// Checks a label map, annotation map or `extradata`.
pub(super) fn map(field: &str, entries: &BTreeMap<String, String>) -> Result<(), Refusal> {
    if entries.len() > MAX_ENTRIES {
        return Err(Refusal::new(
            field,
            format!("{} entries, more than {MAX_ENTRIES}", entries.len()),
        ));
    }
    let bytes: usize = entries.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAX_MAP_BYTES {
        return Err(Refusal::new(field, format!("{bytes} bytes, more than {MAX_MAP_BYTES}")));
    }
    Ok(())
}

/// Checks a path prefix, which may be empty.
pub(super) fn path_prefix(field: &str, value: &str) -> Result<(), Refusal> {
    text(field, value, MAX_PATH)
}

/// An absolute path.
pub(super) fn path(field: &str, value: &str) -> Result<PathBuf, Refusal> {
    text(field, value, MAX_PATH)?;
    if !value.starts_with('/') {
        return Err(Refusal::new(field, format!("{value:?} is not an absolute path")));
    }
    Ok(PathBuf::from(value))
}

/// Checks a text of at most `max` bytes, which may be empty.
pub(super) fn text(field: &str, value: &str, max: usize) -> Result<(), Refusal> {
    if value.len() > max {
        return Err(Refusal::new(
            field,
            format!("{} bytes long, more than {max}", value.len()),
        ));
    }
    if value.chars().any(char::is_control) {
        return Err(Refusal::new(field, format!("{value:?} holds control characters")));
    }
    Ok(())
}
