//! Defines the node configuration row and the share of the flow tables that each endpoint has used.

use crate::map_types::map_types;

map_types! {
    /// Value of `CONFIG`, read for packets without a current flow. Times are in jiffies.
    pub struct Config {
        /// jiffies per second.
        pub hz: u32,
        /// Flow events that an endpoint may send per CPU and window, 0 for none.
        pub flow_events: u32,
        /// Maximum number of open flows (two rows each) per endpoint, 0 for no limit.
        pub flows_per_endpoint: u32,
        /// Lifetime of TCP until the first reply.
        pub tcp_new: u32,
        /// Lifetime of TCP after the first reply.
        pub tcp_established: u32,
        /// Lifetime of TCP after FIN from both sides. RST removes the rows.
        pub tcp_closing: u32,
        /// Lifetime of UDP, ICMP and other protocols until the first reply.
        pub other_new: u32,
        /// Lifetime of UDP after the first reply.
        pub udp_established: u32,
        /// Lifetime of SCTP after the first reply.
        pub sctp_established: u32,
        /// Lifetime of ICMP and other protocols after the first reply.
        pub other_established: u32,
        /// Index of the interface for masqueraded packets, 0 for none.
        pub uplink: u32,
    }

    /// Value of `FLOW_SHARES`: the endpoint's use of the flow tables.
    pub struct FlowShare {
        /// Open flows at the agent's last count.
        pub counted: u32,
        /// Flows opened since then.
        pub opened: u32,
        /// Window of the agent's last count: `jiffies >> SHARE_WINDOW_SHIFT`, low 32 bits.
        pub window: u32,
    }
}

/// The agent counts every second. If it has not counted for two windows of 2^13 jiffies (33 s at HZ=250, 8 s at
/// HZ=1000), the programs start each window at zero: without the agent the limit bounds a pod's rate of new flows
/// instead of their number.
pub const SHARE_WINDOW_SHIFT: u32 = 13;
