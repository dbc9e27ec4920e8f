//! Defines the node configuration row and the share of the flow tables that each endpoint has used.

use crate::map_types::map_types;

map_types! {
    /// Value of `CONFIG`, read for packets without a current flow. Times are in jiffies.
    pub struct Config {
        /// jiffies per second.
        pub hz: u32,
        /// Flow events that an endpoint may send per CPU and window, 0 for none.
        pub flow_events: u32,
        /// Maximum number of flows that an endpoint may open, and of those that may be opened to it from outside of the
        /// node, each; 0 for no limit. UDP and other protocols without connections have a share of their own, twice as
        /// large.
        pub flows_per_endpoint: u32,
        /// Lifetime of TCP until the opener continues after the reply: SYN, SYN-ACK.
        pub tcp_new: u32,
        /// Lifetime of established TCP.
        pub tcp_established: u32,
        /// Lifetime of TCP after FIN from both sides, or after an RST from outside of the node. Connections between
        /// endpoints of the node end with the last ACK or with RST: their rows are removed at once.
        pub tcp_closing: u32,
        /// Lifetime of UDP, SCTP, ICMP and other protocols until the first reply.
        pub other_new: u32,
        /// Lifetime of UDP after a reply.
        pub udp_replied: u32,
        /// Lifetime of a UDP stream ([`crate::flow::FLOW_AGED`]).
        pub udp_established: u32,
        /// Lifetime of SCTP once the opener continued after the reply.
        pub sctp_established: u32,
        /// Lifetime of ICMP and other protocols after the first reply.
        pub other_established: u32,
        /// Index of the interface for masqueraded packets, 0 for none.
        pub uplink: u32,
        /// Mark of a packet that has passed policy and is on its way through the host end of an endpoint with
        /// [`crate::endpoint::FLAG_SHAPED`]: random, the same until the next boot, 0 for none. No pod can set it, since
        /// a mark does not leave its network namespace, and nothing else on the node knows it.
        pub evaluated_mark: u32,
    }

    /// Flows of one class that count for an endpoint.
    pub struct FlowCount {
        /// At the agent's last count.
        pub counted: u32,
        /// Opened since then.
        pub opened: u32,
    }

    /// Value of `FLOW_SHARES`: the endpoint's use of the flow tables. What others open to it takes nothing of what it
    /// needs to open flows itself.
    pub struct FlowShare {
        /// Window of the agent's last count: `jiffies >> SHARE_WINDOW_SHIFT`, low 32 bits.
        pub window: u32,
        /// In place of [`Config::flows_per_endpoint`] while the endpoint's network has more than half of the tables, 0
        /// otherwise.
        pub limit: u32,
        /// Flows that the endpoint opened, of TCP and SCTP.
        pub connections: FlowCount,
        /// Flows that the endpoint opened, of other protocols.
        pub datagrams: FlowCount,
        /// Flows that were opened to the endpoint from outside of the node, or by the node itself.
        pub inbound: FlowCount,
    }
}

/// The agent counts every second. If it has not counted for two windows of 2^13 jiffies (33 s at HZ=250, 8 s at
/// HZ=1000), the programs start each window at zero: without the agent the limit bounds a pod's rate of new flows
/// instead of their number.
pub const SHARE_WINDOW_SHIFT: u32 = 13;
