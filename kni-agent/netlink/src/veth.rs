//! Creates veth pairs with the pod end directly inside the pod's namespace.

use std::os::fd::{AsFd, AsRawFd};

use kni_model::{IfName, MacAddr};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{
        AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
    },
};

use super::{
    DirectNetlink, Netlink, Netns, Result,
    connection::Request,
    error::{Error, Existing, Place},
    link::{Link, LinkKey},
};

/// A veth pair to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VethSpec {
    /// Name of the host end.
    pub host_name: IfName,
    /// Index of the host end; none for the next free one.
    pub host_ifindex: Option<u32>,
    /// Address of the host end.
    pub host_mac: MacAddr,
    /// Alias of the host end (at most 255 bytes).
    pub alias: String,
    /// Name of the pod end.
    pub pod_name: IfName,
    /// Address of the pod end.
    pub pod_mac: MacAddr,
    /// MTU of both ends in bytes.
    pub mtu: u32,
}

/// Indexes of a veth pair, each in its own namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VethIndexes {
    /// The host end.
    pub host: u32,
    /// The pod end.
    pub pod: u32,
}

impl Netlink {
    /// Creates a pair, both ends down, the host end without IPv6 link-local address; about 0.7 ms. An error
    /// leaves nothing behind. [`Error::Exists`] names the taken name or index.
    ///
    /// Completes even if the returned future is dropped: the pair then exists, with its alias.
    pub async fn create_veth(&self, spec: &VethSpec, netns: &Netns) -> Result<VethIndexes> {
        let place = spec.place(self);
        // The message holds the number of a descriptor: the task keeps that open until the kernel has read it.
        let task = tokio::spawn(create(self.clone(), spec.clone(), netns.clone()));
        task.await.map_err(|_ended| Error::Ended {
            place,
            what: "the task",
        })?
    }
}

impl DirectNetlink {
    /// As [`Netlink::create_veth`].
    pub fn create_veth(&mut self, spec: &VethSpec, netns: &Netns) -> Result<VethIndexes> {
        let place = spec.place_at(self.places()("create veth".into()));
        let pair = RouteNetlinkMessage::NewLink(spec.pair(netns));
        let created = self.apply(vec![Request::new(place.clone(), pair, NLM_F_CREATE | NLM_F_EXCL)]);
        if let Err(error) = created {
            return Err(match error.errno() {
                Some(libc::EEXIST | libc::EBUSY) => Error::Exists {
                    place,
                    what: self.existing(spec),
                },
                _ => error,
            });
        }
        let finished = self
            .ask(spec.finish(&place))
            .and_then(|answers| VethSpec::indexes(answers, &place));
        if finished.is_err() {
            // As in `create`.
            self.apply(vec![spec.undo(place)]).ok();
        }
        finished
    }

    fn existing(&mut self, spec: &VethSpec) -> Existing {
        let mut has = |key: LinkKey<'_>| {
            let place = key.place(self.places()("read link".into()));
            let request = Request::new(place, RouteNetlinkMessage::GetLink(key.message()), 0);
            self.ask(vec![request]).is_ok()
        };
        if has(LinkKey::from(&spec.host_name)) {
            return Existing::HostName(spec.host_name.to_string());
        }
        match spec.host_ifindex {
            Some(index) if has(LinkKey::Index(index)) => Existing::IfIndex(index),
            _ => Existing::PodName(spec.pod_name.to_string()),
        }
    }
}

async fn create(netlink: Netlink, spec: VethSpec, netns: Netns) -> Result<VethIndexes> {
    let place = spec.place(&netlink);
    let pair = RouteNetlinkMessage::NewLink(spec.pair(&netns));
    if let Err(error) = netlink
        .apply(vec![Request::new(place.clone(), pair, NLM_F_CREATE | NLM_F_EXCL)])
        .await
    {
        return Err(match error.errno() {
            Some(libc::EEXIST | libc::EBUSY) => Error::Exists {
                place,
                what: existing(&netlink, &spec).await,
            },
            _ => error,
        });
    }
    let answers = netlink.ask(spec.finish(&place)).await;
    let finished = answers.and_then(|answers| VethSpec::indexes(answers, &place));
    if finished.is_err() {
        // The first error is the one to report; the agent's cleanup recognises a leftover by its name.
        netlink.apply(vec![spec.undo(place)]).await.ok();
    }
    finished
}

/// The existing object that prevents a pair.
async fn existing(netlink: &Netlink, spec: &VethSpec) -> Existing {
    if matches!(netlink.get_link(&spec.host_name).await, Ok(Some(_))) {
        return Existing::HostName(spec.host_name.to_string());
    }
    if let Some(index) = spec.host_ifindex
        && matches!(netlink.get_link(index).await, Ok(Some(_)))
    {
        return Existing::IfIndex(index);
    }
    Existing::PodName(spec.pod_name.to_string())
}

impl VethSpec {
    fn place(&self, netlink: &Netlink) -> Place {
        self.place_at(netlink.place("create veth"))
    }

    fn place_at(&self, place: Place) -> Place {
        Place {
            operation: format!("create veth with pod end {}", self.pod_name).into(),
            ..place.interface(self.host_name.as_str())
        }
    }

    /// What the kernel ignores when it creates a link: alias and address generation mode. Asks for the link then.
    fn finish(&self, place: &Place) -> Vec<Request> {
        let key = self.host_ifindex.map_or(LinkKey::from(&self.host_name), LinkKey::Index);
        let set = |attribute| {
            let mut message = key.message();
            message.attributes.push(attribute);
            Request::new(place.clone(), RouteNetlinkMessage::SetLink(message), 0)
        };
        let inet6 = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
        vec![
            set(LinkAttribute::IfAlias(self.alias.clone())),
            // Refused where IPv6 is disabled.
            set(LinkAttribute::AfSpecUnspec(vec![inet6])).forgive(&[libc::EAFNOSUPPORT]),
            Request::new(place.clone(), RouteNetlinkMessage::GetLink(key.message()), 0),
        ]
    }

    fn indexes(answers: Vec<RouteNetlinkMessage>, place: &Place) -> Result<VethIndexes> {
        let host = answers.into_iter().find_map(Link::from_message);
        let host = Link::required(host, place.clone())?;
        let missing = || Error::Unexpected {
            place: place.clone(),
            missing: "the index of the pod end",
        };
        Ok(VethIndexes {
            host: host.ifindex,
            pod: host.peer_ifindex.filter(|index| *index > 0).ok_or_else(missing)?,
        })
    }

    fn undo(&self, place: Place) -> Request {
        let key = LinkKey::from(&self.host_name);
        Request::new(place, RouteNetlinkMessage::DelLink(key.message()), 0)
    }

    fn pair(&self, netns: &Netns) -> LinkMessage {
        let mut peer = LinkMessage::default();
        peer.attributes = end(&self.pod_name, self.pod_mac, self.mtu);
        peer.attributes.push(LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()));
        let mut pair = LinkMessage::default();
        pair.header.index = self.host_ifindex.unwrap_or(0);
        pair.attributes = end(&self.host_name, self.host_mac, self.mtu);
        pair.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        pair
    }
}

fn end(name: &IfName, mac: MacAddr, mtu: u32) -> Vec<LinkAttribute> {
    vec![
        LinkAttribute::IfName(name.to_string()),
        LinkAttribute::Address(mac.0.to_vec()),
        LinkAttribute::Mtu(mtu),
    ]
}
