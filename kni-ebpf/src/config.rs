//! Reads the node configuration and whether this copy of the programs runs dry.

use aya_ebpf::Global;
use kni_common::config::Config;

use crate::maps::CONFIG;

/// Set to 1 by the agent in the copy of the programs that it runs only on frames of its own (`BPF_PROG_TEST_RUN`): a
/// dry run decides like any other and publishes its decision, but changes no flow, counter or event.
///
/// VERIFIER: read-only data is constant to it, so that each copy loses the branches of the other.
// SAFETY: the loader looks for this name; nothing else defines it.
#[unsafe(no_mangle)]
static DRY_RUN: Global<u8> = Global::new(0);

/// Whether this is a dry run, which must not change any state.
#[inline(always)]
pub fn is_dry_run() -> bool {
    DRY_RUN.load() != 0
}

/// The mark of a packet that has passed policy, 0 for none.
#[inline(always)]
pub fn evaluated_mark() -> u32 {
    get().map_or(0, |config| config.evaluated_mark)
}

/// Whether the mark shows that the packet has passed policy.
#[inline(always)]
pub fn is_evaluated(mark: u32) -> bool {
    mark != 0 && mark == evaluated_mark()
}

/// Whether the interface is the uplink.
#[inline(always)]
pub fn is_uplink(ifindex: u32) -> bool {
    ifindex != 0 && get().is_some_and(|config| config.uplink == ifindex)
}

/// The configuration. The agent writes it before it publishes any endpoint.
#[inline(always)]
pub fn get() -> Option<&'static Config> {
    // The reference outlives the program's run: array map values are freed only with the map.
    CONFIG.get(0)
}
