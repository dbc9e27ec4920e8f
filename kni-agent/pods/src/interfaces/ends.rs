//! Names and numbers the ends of an interface before it is made.

use kni_common::IFINDEX_BASE;
use kni_model::{Attachment, EndpointId, IfName, InterfaceKind, MacAddr, Sandbox};
use kni_store::{Removal, WarmInterface};

/// The ends of an interface, as its record has them from the start.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    pub(crate) endpoint: EndpointId,
    /// Index of the pod end; 0 until it exists.
    pub(crate) ifindex: u32,
    pub(crate) mac: MacAddr,
    pub(crate) host_ifname: IfName,
    /// 0 for kinds without a host end of the agent.
    pub(crate) host_ifindex: u32,
    pub(crate) host_mac: MacAddr,
}

impl Ends {
    /// The ends of an interface that does not exist yet.
    pub(crate) fn of(kind: &InterfaceKind, ifname: &IfName, endpoint: EndpointId) -> Self {
        let (mac, host_ifname, host_ifindex) = match kind {
            // The random part of the name distinguishes the successive owners of an endpoint number.
            InterfaceKind::Veth => {
                let host_ifname = IfName::host_end(endpoint, fastrand::u16(..));
                (random_mac(), host_ifname, IFINDEX_BASE + endpoint.0)
            }
            InterfaceKind::Macvlan(macvlan) => (random_mac(), macvlan.parent.clone(), 0),
            InterfaceKind::HostDevice(moved) => (moved.mac, moved.device.clone(), 0),
            InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => (random_mac(), ifname.clone(), 0),
        };
        Self {
            endpoint,
            ifindex: 0,
            mac,
            host_ifname,
            host_ifindex,
            host_mac: random_mac(),
        }
    }
}

impl From<WarmInterface> for Ends {
    fn from(warm: WarmInterface) -> Self {
        Self {
            endpoint: warm.endpoint,
            ifindex: warm.ifindex,
            mac: warm.mac,
            host_ifname: warm.host_ifname,
            host_ifindex: warm.host_ifindex,
            host_mac: warm.host_mac,
        }
    }
}

/// The removal that remains after a detach: that of a veth pair of the agent. Other kinds are gone by then.
pub(crate) fn deferred_removal(sandbox: &Sandbox, attachment: &Attachment) -> Option<Removal> {
    match attachment.kind {
        InterfaceKind::Veth => Some(Removal {
            endpoint: attachment.endpoint,
            host_ifname: attachment.host_ifname.clone(),
            host_ifindex: attachment.host_ifindex,
            netns: Some(sandbox.netns_identity),
        }),
        InterfaceKind::Macvlan(_) | InterfaceKind::HostDevice(_) | InterfaceKind::Tap(_) | InterfaceKind::Cni(_) => {
            None
        }
    }
}

/// A random, locally administered unicast address.
fn random_mac() -> MacAddr {
    let mut bytes = [0_u8; 6];
    fastrand::fill(&mut bytes);
    let [first, ..] = &mut bytes;
    *first = *first & 0xfc | 0x02;
    MacAddr(bytes)
}
