//! Names the programs of the object. The TC programs have the names of their directions.

use kni_common::Direction;

/// TC programs of pod interfaces: those that dry runs need.
pub(super) const POD: [&str; 2] = [Direction::FromPod.as_str(), Direction::ToPod.as_str()];

/// TC programs of the uplink.
pub(super) const UPLINK: [&str; 2] = [Direction::FromUplink.as_str(), Direction::ToUplink.as_str()];

/// TC program that is attached nowhere and reports the kernel's time.
pub(super) const CLOCK: &str = "clock";

/// XDP program of the uplink.
pub(super) const XDP_UPLINK: &str = "xdp_uplink";

/// XDP program of pod interfaces, in networks that enable it.
pub(super) const XDP_POD: &str = "xdp_pod";

/// Programs of the node's own sockets, at the root of cgroup2.
pub(super) const NODE_SOCKETS: [&str; 6] = [
    "node_connect4",
    "node_connect6",
    "node_sendmsg4",
    "node_sendmsg6",
    "node_recvmsg4",
    "node_recvmsg6",
];
