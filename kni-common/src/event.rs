//! The record that a program sends to the agent when it drops a packet.

use crate::{flow::Ports, layout::map_types};

map_types! {
    /// A drop. Rate-limited per endpoint; the counters are exact.
    pub struct DropEvent {
        /// `CLOCK_MONOTONIC` in nanoseconds (`bpf_ktime_get_ns`).
        pub time_ns: u64,
        /// Version of this record.
        pub version: u16,
        /// A dropping [`crate::Verdict`].
        pub verdict: u16,
        /// A [`crate::Direction`].
        pub direction: u16,
        /// EtherType in host byte order.
        pub ethertype: u16,
        /// Endpoint id, 0 for none.
        pub endpoint: u32,
        /// Network id, 0 for none.
        pub network: u32,
        /// Generation of the endpoint's row, so that an event is not told of the row's next owner.
        pub generation: u32,
        /// Bytes from the Ethernet header on.
        pub length: u32,
        /// Source address, network byte order, IPv4 mapped; zero where it was not read.
        pub source: [u8; 16],
        /// Destination address, likewise.
        pub destination: [u8; 16],
        /// Ports.
        pub ports: Ports,
        /// Transport protocol number.
        pub protocol: u32,
    }
}

/// Version of [`DropEvent`].
pub const EVENT_VERSION: u16 = 1;
