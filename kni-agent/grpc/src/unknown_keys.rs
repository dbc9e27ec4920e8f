//! Counts keys of `extradata` that the agent does not know, and logs each of them once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use super::status::one_line;

/// Most keys that are remembered as logged. More are only counted: clients choose the keys, and the set must not grow
/// with what they send.
pub const MAX_LOGGED_KEYS: usize = 128;
/// Longest part of a key that is remembered and logged, in characters.
const MAX_KEY: usize = 64;

/// The keys of `extradata` that the agent did not know, since its start. Clones share the counts. No value of an entry
/// is stored or logged.
#[derive(Debug, Clone, Default)]
pub struct UnknownKeys {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    logged: BTreeSet<String>,
    is_full: bool,
}

impl UnknownKeys {
    /// How many entries had an unknown key, by method. Methods without one are absent.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.counts.iter().map(|(method, count)| (*method, *count)).collect()
    }

    /// Counts the keys of one request and logs the new ones.
    pub(super) fn note<'a>(&self, method: &'static str, keys: impl Iterator<Item = &'a str>) {
        let mut keys = keys.peekable();
        if keys.peek().is_none() {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for key in keys {
            let count = state.counts.entry(method).or_default();
            *count = count.saturating_add(1);
            state.log(method, key);
        }
    }
}

impl State {
    fn log(&mut self, method: &'static str, key: &str) {
        let key: String = key.chars().take(MAX_KEY).collect();
        if self.logged.contains(&key) {
            return;
        }
        if self.logged.len() < MAX_LOGGED_KEYS {
            let shown = one_line(&key);
            tracing::info!(
                method,
                key = shown,
                "this key of extradata is not known; its entry is ignored"
            );
            self.logged.insert(key);
        } else if !self.is_full {
            self.is_full = true;
            tracing::info!(
                method,
                logged = MAX_LOGGED_KEYS,
                "more keys of extradata that are not known: from here on they are only counted"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_counted_and_the_memory_is_bounded() {
        let keys = UnknownKeys::default();
        keys.note("AttachInterface", std::iter::empty());
        assert_eq!(keys.counts(), []);
        keys.note("AttachInterface", ["a", "b"].into_iter());
        keys.clone().note("AttachInterface", ["a"].into_iter());
        let long = "é\n".repeat(10_000);
        keys.note("DetachInterface", [long.as_str()].into_iter());
        assert_eq!(keys.counts(), [("AttachInterface", 3), ("DetachInterface", 1)]);
        let many: Vec<String> = (0..1000).map(|number| format!("key{number}")).collect();
        keys.note("CreateNetwork", many.iter().map(String::as_str));
        let state = keys.state.lock().unwrap();
        assert_eq!(state.counts["CreateNetwork"], 1000);
        assert_eq!(state.logged.len(), MAX_LOGGED_KEYS);
        assert!(state.is_full && state.logged.iter().all(|key| key.chars().count() <= MAX_KEY));
    }
}
