//! Defines the records that only the store and the pods service use.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, time::Duration};

use kni_model::{EndpointId, IfName, MacAddr, NetnsIdentity, NetworkName, PodRef, SandboxId};
use serde::{Deserialize, Serialize};

/// An interface that was created before any attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmInterface {
    /// Its endpoint number.
    pub endpoint: EndpointId,
    /// Name inside the namespace.
    pub ifname: IfName,
    /// Index inside the namespace.
    pub ifindex: u32,
    /// Name of the host end.
    pub host_ifname: IfName,
    /// Index of the host end.
    pub host_ifindex: u32,
    /// MAC of the pod end.
    pub mac: MacAddr,
    /// MAC of the host end.
    pub host_mac: MacAddr,
}

/// The use of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceUse {
    /// Being created; a restarted agent removes it.
    Making,
    /// Waiting for a pod.
    Warm,
    /// Given to a client that has not attached it yet.
    Given {
        /// For this pod (may be unnamed).
        pod: PodRef,
        /// Seconds since the node's boot.
        since: u64,
    },
    /// Belongs to a sandbox.
    Bound {
        /// The sandbox.
        sandbox: SandboxId,
    },
}

/// A network namespace that the agent created and must remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRecord {
    /// Its mount point.
    pub path: PathBuf,
    /// Its identity; `None` while it is being created.
    pub identity: Option<NetnsIdentity>,
    /// Its use.
    pub used_by: NamespaceUse,
    /// A prewarmed interface that is not attached yet.
    pub warm: Option<WarmInterface>,
}

/// A host interface that is to be removed; its endpoint number is free only then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Its endpoint number.
    pub endpoint: EndpointId,
    /// Name of the host end.
    pub host_ifname: IfName,
    /// Index of the host end; an interface with another name is not removed.
    pub host_ifindex: u32,
    /// The namespace of the pod end, where no interface of that name can be created before this one is gone.
    pub netns: Option<NetnsIdentity>,
}

/// An address that no other pod may have yet, because other nodes may take it for its last owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressRest {
    /// The network.
    pub network: NetworkName,
    /// The address.
    pub address: IpAddr,
    /// The last owner, as the lease named it.
    pub owner: String,
    /// When no other node knew the owner any more, since the node's boot; `None` while one may.
    pub withdrawn: Option<Duration>,
}

/// The agent's configuration of the uplink, an interface that it does not own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkRecord {
    /// Name of the interface; empty for none.
    pub ifname: String,
    /// Its index.
    pub ifindex: u32,
    /// Addresses that the agent gave it, or was about to.
    pub addresses: BTreeSet<IpAddr>,
}
