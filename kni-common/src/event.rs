//! Defines the record that programs send to the agent: a new flow, a drop, or the outcome of a dry run.

use crate::{flow::Ports, map_types::map_types};

map_types! {
    /// The rows of a policy set that decided about a packet.
    pub struct PolicyTrail {
        /// Evaluated policy set, 0 when none was.
        pub set: u32,
        /// Identity of the peer; [`crate::policy::IDENTITY_ANY`] when no row matched the peer's own.
        pub identity: u32,
        /// [`crate::policy::PolicyValue::rule`] that allowed it, 0 when none did.
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
        /// Code of a [`crate::Verdict`]; a forwarding one reports a new flow.
        pub verdict: u16,
        /// A [`crate::Direction`].
        pub direction: u16,
        /// EtherType in host byte order.
        pub ethertype: u16,
        /// Endpoint whose interface the program runs on, 0 for none.
        pub endpoint: u32,
        /// Network id, 0 for none.
        pub network: u32,
        /// Generation of the endpoint's row, so that an event is not attributed to the row's next owner.
        pub generation: u32,
        /// Bytes, including the Ethernet header.
        pub length: u32,
        /// Source address, network byte order, IPv4 mapped; zero where it was not read.
        pub source: [u8; 16],
        /// Destination address, likewise, before any translation.
        pub destination: [u8; 16],
        /// Ports, before any translation.
        pub ports: Ports,
        /// Transport protocol number.
        pub protocol: u32,
        /// The other local endpoint, 0 when there is none or it was not looked up.
        pub peer: u32,
        /// Id of the service that the packet is addressed to, 0 for none.
        pub service: u32,
        /// Source address after translation; equal to `source` when nothing was translated.
        pub translated_source: [u8; 16],
        /// Destination address after translation; equal to `destination` when nothing was translated.
        pub translated_destination: [u8; 16],
        /// Ports after translation.
        pub translated_ports: Ports,
        /// Unused.
        pub reserved: u32,
        /// Egress policy of the sender.
        pub egress: PolicyTrail,
        /// Ingress policy of the receiver.
        pub ingress: PolicyTrail,
        /// Egress policies of the sender for destinations outside the pod networks.
        pub beyond: PolicyTrail,
    }

    /// Value of `EXPLANATION`: the outcome of a dry run.
    pub struct Explanation {
        /// The event that would have been sent.
        pub event: FlowEvent,
        /// jiffies of the run.
        pub jiffies: u64,
    }
}

/// Version of [`FlowEvent`].
pub const EVENT_VERSION: u16 = 2;
