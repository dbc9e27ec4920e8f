//! Defines the errors of the node's egress.

use kni_dataplane::DataplaneError;
use kni_model::error_chain;
use kni_netlink as netlink;
use kni_store::StoreError;

/// The least MTU of an interface that carries packets of pods, in bytes of IP packet: IPv6 requires it of every link.
pub const LEAST_MTU: u32 = 1280;

/// Why egress could not be applied. It is retried in the background.
#[derive(Debug, thiserror::Error)]
pub enum UplinkError {
    /// The network of the node.
    #[error("{}", error_chain(.0))]
    Netlink(#[from] netlink::Error),
    /// Rows or programs.
    #[error("{}", error_chain(.0))]
    Dataplane(#[from] DataplaneError),
    /// The record of the changes to the uplink.
    #[error("{}", error_chain(.0))]
    Store(#[from] StoreError),
    /// The interface towards the outside cannot be the uplink.
    #[error(transparent)]
    Unusable(#[from] UnusableUplink),
    /// An address that the kernel does not add.
    #[error("{0}")]
    Address(String),
}

/// Why the interface towards the outside cannot be the uplink.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableUplink {
    /// The programs read Ethernet headers.
    #[error(
        "{0} cannot be the uplink: its packets have no Ethernet headers (a tunnel without them, such as tun, WireGuard or IPIP); name another interface with --uplink"
    )]
    NotEthernet(String),
    /// IPv6 requires a larger MTU of every link, and so do the networks of pods.
    #[error(
        "{ifname} cannot be the uplink: its MTU of {mtu} is below {}; raise it, or name another interface with --uplink",
        LEAST_MTU
    )]
    SmallMtu {
        /// The interface.
        ifname: String,
        /// Its MTU.
        mtu: u32,
    },
}
