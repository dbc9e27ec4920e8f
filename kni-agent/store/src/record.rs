//! Records that only the store and the attach service know of.

use std::{collections::BTreeSet, net::IpAddr, path::PathBuf};

use kni_model::{EndpointId, IfName, MacAddr, NetnsIdentity, PodRef, SandboxId};
use serde::{Deserialize, Serialize};

/// An interface made ahead of any attachment.
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

/// Who a namespace is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceUse {
    /// Being made; a restarted agent removes it.
    Making,
    /// Waiting for a pod.
    Warm,
    /// Given to a client that has not attached it yet.
    Given {
        /// For this pod (may be unnamed).
        pod: PodRef,
        /// Seconds since the Unix epoch.
        since: u64,
    },
    /// Belongs to a sandbox.
    Bound {
        /// The sandbox.
        sandbox: SandboxId,
    },
}

/// A network namespace that the agent made and must remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRecord {
    /// Where it is mounted.
    pub path: PathBuf,
    /// Which it is; `None` while it is being made.
    pub identity: Option<NetnsIdentity>,
    /// Who it is for.
    pub used_by: NamespaceUse,
    /// An interface made ahead and not attached yet.
    pub warm: Option<WarmInterface>,
}

/// A host interface that has to go; its endpoint number is free only then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal {
    /// Its endpoint number.
    pub endpoint: EndpointId,
    /// Name of the host end.
    pub host_ifname: IfName,
    /// Index of the host end; nothing happens to an interface of another name.
    pub host_ifindex: u32,
    /// The namespace of the pod end: nothing new of that name can be made there before it is gone.
    pub netns: Option<NetnsIdentity>,
}

/// What the agent has put at the uplink, which is not its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkRecord {
    /// Name of the interface; empty for none.
    pub ifname: String,
    /// Its index.
    pub ifindex: u32,
    /// Addresses that the agent gave it, or was about to.
    pub addresses: BTreeSet<IpAddr>,
}
