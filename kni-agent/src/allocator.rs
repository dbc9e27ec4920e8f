//! Keeps the allocator from holding much more memory than the agent uses.
//!
//! glibc gives each thread an arena of its own, up to eight for each CPU, and returns only the end of an arena to the
//! kernel. An agent parses the kernel's types and its programs once, and then answers calls on whichever thread is
//! free: most of such memory would be held for ever.

use std::time::Duration;

/// How often free pages are returned. Most of them come from the start and from changes of policies.
const INTERVAL: Duration = Duration::from_secs(10);
/// Blocks of this size and more are the kernel's again when they are freed, in bytes. glibc's own value, which
/// otherwise grows with the largest block that was ever freed.
#[cfg(target_env = "gnu")]
const LARGE: i32 = 128 * 1024;
/// Arenas of all threads together: two threads seldom allocate at the same time.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;

/// Bounds the allocator. Call it before the first thread starts.
pub fn bound() {
    #[cfg(target_env = "gnu")]
    for (setting, value) in [
        (libc::M_ARENA_MAX, ARENAS),
        (libc::M_MMAP_THRESHOLD, LARGE),
        (libc::M_TRIM_THRESHOLD, LARGE),
    ] {
        // SAFETY: changes a setting of the allocator. A value that it refuses leaves the setting as it is.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// Returns free pages to the kernel; some milliseconds for a heap of 100 MB, during which other threads wait to
/// allocate.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: gives up only pages that no allocation uses.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Trims again and again, the first time at once. Never ends.
pub async fn keep_trimmed() {
    let mut ticks = tokio::time::interval(INTERVAL);
    loop {
        kni_tasks::waiting(ticks.tick()).await;
        trim();
    }
}
