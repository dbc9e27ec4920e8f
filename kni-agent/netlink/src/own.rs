//! Defines the marks by which a new process recognises KNI's kernel objects, and KNI's numbers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use kni_model::id::HOST_IFNAME_PREFIX;

/// Routing table with the host's routes to pods of the default network; it has no other routes.
pub const ROUTE_TABLE: u32 = 19278;
/// `rtm_protocol` of every route and `FRA_PROTOCOL` of every rule of KNI. 75 is not assigned in `rt_protos`.
pub const ROUTE_PROTOCOL: u8 = 75;
/// `rtm_protocol` of the host's routes to pods of other nodes.
pub const REMOTE_ROUTE_PROTOCOL: u8 = 76;
/// Name of the tunnel device.
pub const OVERLAY_NAME: &str = "kni-overlay";
/// Its `ifalias`: a device of that name without it is not KNI's.
pub const OVERLAY_ALIAS: &str = "kni:overlay";
/// Priority of the rules that lead to [`ROUTE_TABLE`]: behind the local table (0), before main (32766).
pub const RULE_PRIORITY: u32 = 1910;
/// Priority of the rules by source address inside a pod: right before main (32766), so that every rule which a process
/// of the pod adds comes first. The kernel gives a rule without a priority a smaller one.
pub const SOURCE_RULE_PRIORITY: u32 = 32_765;
/// The routing table of a pod's interface is this number plus the interface's index inside the pod.
pub const SOURCE_TABLE_BASE: u32 = 1_927_800_000;
/// Prefix of the `ifalias` of every host-side link; pod and interface follow.
pub const IFALIAS_PREFIX: &str = "kni:";
/// Link group for the deletion of many links at once ("kni" in ASCII).
pub const DELETE_GROUP: u32 = 0x006b_6e69;
/// The IPv4 gateway of every pod, independent of its addresses: a permanent neighbour entry, owned by no interface.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The IPv6 gateway of every pod.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// The routing table of an interface inside a pod. Indexes have 31 bits, so tables of two interfaces differ.
pub const fn source_table(ifindex: u32) -> u32 {
    SOURCE_TABLE_BASE.saturating_add(ifindex)
}

/// The gateway of the family of an address.
pub fn gateway_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => IpAddr::V4(GATEWAY_V4),
        IpAddr::V6(_) => IpAddr::V6(GATEWAY_V6),
    }
}

/// Whether a link of this name and alias is KNI's: both marks are required, so that neither a foreign link with the
/// name `kni0` nor one with only KNI's alias is ever changed.
pub fn is_our_link(name: &str, alias: Option<&str>) -> bool {
    name.starts_with(HOST_IFNAME_PREFIX) && alias.is_some_and(|alias| alias.starts_with(IFALIAS_PREFIX))
}
