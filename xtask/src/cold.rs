//! Remembers whether this command ignores what earlier ones have kept (`--cold`), for itself and for what it starts.

use std::{
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::cache::Cache;

/// The variable by which other programs of this project ignore the cache.
pub(crate) const VARIABLE: &str = "KNI_COLD";

static COLD: AtomicBool = AtomicBool::new(false);

/// From now on this process ignores the cache, if `cold`.
pub(crate) fn set(cold: bool) {
    COLD.fetch_or(cold, Ordering::Relaxed);
}

/// Whether the option was given.
pub(crate) fn is_set() -> bool {
    COLD.load(Ordering::Relaxed)
}

/// The cache of this command.
pub(crate) fn cache() -> Cache {
    Cache::open(is_set())
}

/// Makes `command` ignore the cache if this process does.
pub(crate) fn pass_on(command: &mut Command) -> &mut Command {
    if is_set() {
        command.env(VARIABLE, "1");
    }
    command
}
