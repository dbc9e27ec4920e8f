//! Reads the clock of the node, which starts at its boot and is never set.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// The time since the node's boot, including suspend; all processes of the node share this clock. The wall clock may be
/// set at any time, and often is soon after the boot.
pub(crate) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}
