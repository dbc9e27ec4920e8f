//! Defines the errors of the node's egress.

use kni_dataplane::DataplaneError;
use kni_model::error_chain;
use kni_netlink as netlink;
use kni_store::StoreError;

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
    #[error(
        "{0} cannot be the uplink: its packets have no Ethernet headers (a tunnel without them, such as tun, WireGuard or IPIP); name another interface with --uplink"
    )]
    NotEthernet(String),
    /// An address that the kernel does not add.
    #[error("{0}")]
    Address(String),
}
