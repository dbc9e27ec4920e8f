//! Creates macvlan interfaces inside a pod's namespace.

use std::os::fd::{AsFd, AsRawFd};

use kni_model::{IfName, MacAddr, provider::MacvlanMode as Mode};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoData, InfoKind, InfoMacVlan, LinkAttribute, LinkInfo, LinkMessage, MacVlanMode},
};

use super::{
    Netlink, Netns, Result,
    connection::Request,
    error::{Error, Existing},
};

/// A macvlan interface to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MacvlanSpec {
    /// Index of the parent.
    pub parent: u32,
    /// Name inside the pod.
    pub name: IfName,
    /// Its address.
    pub mac: MacAddr,
    /// MTU in bytes, at most the parent's.
    pub mtu: u32,
    /// Which interfaces of the parent reach each other.
    pub mode: Mode,
}

impl Netlink {
    /// Creates the interface, down, directly inside `netns`. An error leaves nothing behind. [`Error::Exists`] if the
    /// name is taken there, or if another interface has the parent in mode Passthru.
    ///
    /// Completes even if the returned future is dropped.
    pub async fn create_macvlan(&self, spec: &MacvlanSpec, netns: &Netns) -> Result<()> {
        let place = self
            .place(format!("create macvlan on #{}", spec.parent))
            .interface(spec.name.as_str());
        let (netlink, spec, netns, of_task) = (self.clone(), spec.clone(), netns.clone(), place.clone());
        // The message holds the number of a descriptor: the task keeps that open until the kernel has read it.
        let task = tokio::spawn(async move {
            let message = RouteNetlinkMessage::NewLink(spec.message(&netns));
            let request = Request::new(of_task.clone(), message, NLM_F_CREATE | NLM_F_EXCL);
            netlink.apply(vec![request]).await.map_err(|error| match error.errno() {
                Some(libc::EEXIST) => Error::Exists {
                    place: of_task,
                    what: Existing::PodName(spec.name.to_string()),
                },
                _ => error,
            })
        });
        task.await.map_err(|_ended| Error::Ended {
            place,
            what: "the task",
        })?
    }
}

impl MacvlanSpec {
    fn message(&self, netns: &Netns) -> LinkMessage {
        let mode = match self.mode {
            Mode::Bridge => MacVlanMode::Bridge,
            Mode::Private => MacVlanMode::Private,
            Mode::Vepa => MacVlanMode::Vepa,
            Mode::Passthru => MacVlanMode::Passthrough,
        };
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(self.name.to_string()),
            LinkAttribute::Link(self.parent),
            LinkAttribute::Mtu(self.mtu),
            LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::MacVlan),
                LinkInfo::Data(InfoData::MacVlan(vec![InfoMacVlan::Mode(mode)])),
            ]),
        ];
        // In mode Passthru it has the parent's address.
        if self.mode != Mode::Passthru {
            message.attributes.push(LinkAttribute::Address(self.mac.0.to_vec()));
        }
        message
    }
}
