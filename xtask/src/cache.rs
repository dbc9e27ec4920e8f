//! Locates the folder outside the clone for what is expensive to make and the same for every clone.

use std::{env, path::PathBuf};

/// The folder: `$KNI_CACHE`, by default `~/.cache/kni`. It may be missing.
pub(crate) fn folder() -> PathBuf {
    if let Some(named) = env::var_os("KNI_CACHE") {
        return named.into();
    }
    let home = env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
    home.join(".cache/kni")
}
