//! What the programs are told about the node: one row, read for packets of no current flow.

use crate::layout::map_types;

map_types! {
    /// Value of `CONFIG`. Times are in jiffies.
    pub struct Config {
        /// jiffies per second.
        pub hz: u32,
        /// Flow events that an endpoint may send per CPU and window; 0 for none.
        pub flow_events: u32,
        /// Flows (two rows each) that one endpoint may open and keep; 0 for no limit.
        pub flows_per_endpoint: u32,
        /// TCP: until the first answer.
        pub tcp_new: u32,
        /// TCP: from then on.
        pub tcp_established: u32,
        /// TCP: behind FIN of both sides. RST leaves no row.
        pub tcp_closing: u32,
        /// UDP, ICMP and all else: until the first answer.
        pub other_new: u32,
        /// UDP: from then on.
        pub udp_established: u32,
        /// SCTP: from the first answer on.
        pub sctp_established: u32,
        /// ICMP and all else: from then on.
        pub other_established: u32,
        /// Interface through which masqueraded packets leave, 0 for none.
        pub uplink: u32,
    }

    /// Value of `FLOW_SHARES`: how much of the flow tables an endpoint has.
    pub struct FlowShare {
        /// Flows that it had opened when the agent last counted.
        pub counted: u32,
        /// Flows that it has opened since.
        pub opened: u32,
        /// When the agent counted: `jiffies >> SHARE_WINDOW_SHIFT`, low 32 bits.
        pub window: u32,
    }
}

/// The agent counts every second. When it has not for two windows of 2^13 jiffies (33 s at HZ=250, 8 s at HZ=1000), the
/// programs begin each window at zero, so that a dead agent bounds a pod's rate instead of its number of flows.
pub const SHARE_WINDOW_SHIFT: u32 = 13;
