//! Defines the counters of packets, drops and policy hits, and the rate limit of events.

use crate::{
    map_types::map_types,
    verdict::{Direction, Verdict},
};

map_types! {
    /// Packets and bytes. Packets are counted as the stack hands them over: a GSO packet of 64 KiB is one packet.
    pub struct Counter {
        /// Packets.
        pub packets: u64,
        /// Bytes, including the Ethernet header.
        pub bytes: u64,
    }

    /// Key of `DROPS`.
    pub struct DropKey {
        /// Endpoint id, 0 where no endpoint was found.
        pub endpoint: u32,
        /// Code of a [`Verdict`] that drops.
        pub verdict: u16,
        /// A [`Direction`].
        pub direction: u16,
    }

    /// Value of `EVENT_GATES`: events that an endpoint has sent on this CPU in the current window.
    pub struct EventGate {
        /// Number of the window: `jiffies >> EVENT_WINDOW_SHIFT`, low 32 bits.
        pub window: u32,
        /// Drop events in it.
        pub drops: u32,
        /// Flow events in it.
        pub flows: u32,
        /// Unused.
        pub reserved: u32,
        /// Events suppressed since the endpoint was created, because the limit was reached or the ring buffer was full.
        pub lost: u64,
    }

    /// Key of `HITS`: a rule of a policy set, or the set's default deny.
    pub struct HitKey {
        /// Policy set.
        pub set: u32,
        /// [`crate::policy::PolicyValue::rule`], 0 for the default deny.
        pub rule: u32,
        /// [`crate::policy::PortValue::ordinal`].
        pub ordinal: u16,
        /// [`crate::policy::EGRESS`], [`crate::policy::INGRESS`] or [`crate::policy::EXTERNAL`].
        pub direction: u16,
    }
}

/// Number of forwarding verdicts in `COUNTERS`.
pub const FORWARD_VERDICTS: u32 = 16;

/// Rows of `COUNTERS` per endpoint: two directions of [`FORWARD_VERDICTS`].
pub const COUNTERS_PER_ENDPOINT: u32 = 2 * FORWARD_VERDICTS;

/// A window is 2^6 jiffies: 256 ms at HZ=250, 64 ms at HZ=1000.
pub const EVENT_WINDOW_SHIFT: u32 = 6;

/// Drop events per endpoint, CPU and window; the counters stay exact over it.
pub const EVENTS_PER_WINDOW: u32 = 16;

/// Row of `COUNTERS` for a forwarding verdict.
#[inline(always)]
#[must_use]
pub const fn counter_index(endpoint: u32, direction: Direction, verdict: Verdict) -> u32 {
    endpoint * COUNTERS_PER_ENDPOINT + direction as u32 * FORWARD_VERDICTS + (verdict as u32 & (FORWARD_VERDICTS - 1))
}
