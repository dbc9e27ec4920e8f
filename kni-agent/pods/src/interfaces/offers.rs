//! Holds the providers' offers for one request.

use std::{collections::BTreeMap, net::IpAddr};

use kni_model::{IfName, error_chain, provider::MovedDevice};
use kni_netlink as netlink;
use kni_plugins::{Call, Configuration};

/// The resources that providers offer for a request: looked up before the state is locked, used under the lock and
/// after it.
#[derive(Debug, Default)]
pub(crate) struct Offers {
    /// Devices of the node, or why each cannot move into a pod.
    pub(super) devices: BTreeMap<IfName, Result<MovedDevice, DeviceRefusal>>,
    /// Plugin calls by interface.
    pub(super) calls: BTreeMap<IfName, (Configuration, Call)>,
}

/// Why a device of the node cannot move into a pod; continues a sentence that begins with its name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceRefusal {
    #[error("does not exist on the node")]
    Missing,
    #[error("is no Ethernet device")]
    NoEthernet,
    #[error("is a pod's interface")]
    PodInterface,
    #[error("is on its way back from a pod")]
    Returning,
    #[error("is part of another interface (#{0})")]
    Controlled(u32),
    #[error("is a macvlan interface of another one")]
    Stacked,
    #[error("has a default route of the node")]
    DefaultRoute,
    #[error("has the node's address {0}")]
    Address(IpAddr),
    #[error("{}", error_chain(.0))]
    Netlink(#[from] netlink::Error),
}
