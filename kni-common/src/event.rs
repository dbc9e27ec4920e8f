//! The record that a program sends to the agent: a new flow, a drop, or the answer to a question.

use crate::{flow::Ports, layout::map_types};

map_types! {
    /// What a policy set said, and by which of its rows.
    pub struct PolicyTrail {
        /// Policy set that was asked, 0 when none was.
        pub set: u32,
        /// Identity of the peer; [`crate::policy::IDENTITY_ANY`] when no row was for the peer's own.
        pub identity: u32,
        /// [`crate::policy::PolicyValue::rule`] that allowed it, 0 when nothing did.
        pub rule: u32,
        /// [`crate::policy::PortValue::ordinal`] of the port row, 0 when the row allows every port.
        pub ordinal: u32,
    }

    /// A new flow or a drop. Rate-limited per endpoint; the counters are exact.
    pub struct FlowEvent {
        /// `CLOCK_MONOTONIC` in nanoseconds (`bpf_ktime_get_ns`).
        pub time_ns: u64,
        /// Version of this record.
        pub version: u16,
        /// A [`crate::Verdict`]; a forwarding one tells of a new flow.
        pub verdict: u16,
        /// A [`crate::Direction`].
        pub direction: u16,
        /// EtherType in host byte order.
        pub ethertype: u16,
        /// Endpoint whose interface the program runs on, 0 for none.
        pub endpoint: u32,
        /// Network id, 0 for none.
        pub network: u32,
        /// Generation of the endpoint's row, so that an event is not told of the row's next owner.
        pub generation: u32,
        /// Bytes from the Ethernet header on.
        pub length: u32,
        /// Source address, network byte order, IPv4 mapped; zero where it was not read.
        pub source: [u8; 16],
        /// Destination address, likewise, before any translation.
        pub destination: [u8; 16],
        /// Ports, before any translation.
        pub ports: Ports,
        /// Transport protocol number.
        pub protocol: u32,
        /// The other local endpoint, 0 when there is none or it was not looked for.
        pub peer: u32,
        /// Id of the service whose address was asked for, 0 for none.
        pub service: u32,
        /// Source address behind the translation; as `source` when nothing was translated.
        pub translated_source: [u8; 16],
        /// Destination address behind the translation; as `destination` when nothing was translated.
        pub translated_destination: [u8; 16],
        /// Ports behind the translation.
        pub translated_ports: Ports,
        /// Unused.
        pub reserved: u32,
        /// What the sender's policy said about sending.
        pub egress: PolicyTrail,
        /// What the receiver's policy said about receiving.
        pub ingress: PolicyTrail,
        /// What the sender's egress policies said about leaving the pod networks.
        pub beyond: PolicyTrail,
    }

    /// Value of `EXPLANATION`: what a dry run decided.
    pub struct Explanation {
        /// The event that would have been sent.
        pub event: FlowEvent,
        /// jiffies of the run.
        pub jiffies: u64,
    }
}

/// Version of [`FlowEvent`].
pub const EVENT_VERSION: u16 = 2;
