//! Reads and changes links.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{
    net::IpAddr,
    os::fd::{AsFd, AsRawFd},
    time::{Duration, Instant},
};

use kni_model::{IfName, MacAddr};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, State},
    nsid::{NsidAttribute, NsidMessage},
};

use super::{
    Netlink, Netns, Result,
    connection::Request,
    error::{Error, Place},
    message::{PUT, neighbour},
    own,
};

/// The kernel's link watch runs at least once a second.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(3);
const CARRIER_PAUSE: Duration = Duration::from_millis(1);

/// Identifies a link in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkKey<'a> {
    /// By interface index.
    Index(u32),
    /// By name.
    Name(&'a str),
}

impl From<u32> for LinkKey<'_> {
    fn from(index: u32) -> Self {
        Self::Index(index)
    }
}

impl<'a> From<&'a str> for LinkKey<'a> {
    fn from(name: &'a str) -> Self {
        Self::Name(name)
    }
}

impl<'a> From<&'a IfName> for LinkKey<'a> {
    fn from(name: &'a IfName) -> Self {
        Self::Name(name.as_str())
    }
}

/// A link as the kernel reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own that the kernel tells"
)]
pub struct Link {
    /// Interface index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
    /// Alias, if it has one.
    pub alias: Option<String>,
    /// Ethernet address; none for other link layers.
    pub mac: Option<MacAddr>,
    /// Whether its packets have Ethernet headers (`ARPHRD_ETHER`).
    pub ethernet: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it can transmit (operational state UP): for a veth, shortly after both ends are up; see
    /// [`Netlink::wait_for_carrier`].
    pub operational: bool,
    /// Whether it is one end of a veth pair.
    pub veth: bool,
    /// Index of the other end of a veth pair, in the other end's namespace.
    pub peer_ifindex: Option<u32>,
    /// Number by which this namespace knows the other end's namespace; see [`Netlink::netns_id`].
    pub peer_netnsid: Option<i32>,
    /// Link group.
    pub group: u32,
    /// The kernel's name of the virtual driver ("veth", "macvlan", "tun"); none for physical devices and loopback.
    pub kind: Option<String>,
    /// Index of the bridge, bond or VRF it is part of.
    pub controller: Option<u32>,
}

/// A host-side link of KNI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OurLink {
    /// Interface index.
    pub ifindex: u32,
    /// Name, beginning with [`own::HOST_IFNAME_PREFIX`].
    pub name: String,
    /// Alias, beginning with [`own::IFALIAS_PREFIX`].
    pub alias: String,
    /// Ethernet address of the host end.
    pub mac: Option<MacAddr>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Index of the pod end in the pod's namespace.
    pub peer_ifindex: Option<u32>,
    /// Number by which the host knows the pod's namespace; see [`Netlink::netns_id`].
    pub peer_netnsid: Option<i32>,
}

impl Netlink {
    /// The link, or none.
    pub async fn get_link<'a>(&self, key: impl Into<LinkKey<'a>> + Send) -> Result<Option<Link>> {
        let key = key.into();
        let place = key.place(self.place("read link"));
        let request = Request::new(place, RouteNetlinkMessage::GetLink(key.message()), 0).forgive(&[libc::ENODEV]);
        Ok(self.ask(vec![request]).await?.into_iter().find_map(Link::from_message))
    }

    /// All links of the namespace.
    pub async fn list_links(&self) -> Result<Vec<Link>> {
        let mut filter = LinkMessage::default();
        filter
            .attributes
            .push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let request = Request::new(self.place("list links"), RouteNetlinkMessage::GetLink(filter), 0);
        Ok(self
            .dump(request)
            .await?
            .into_iter()
            .filter_map(Link::from_message)
            .collect())
    }

    /// The host-side links of KNI, recognised by name, alias and kind together.
    pub async fn list_our_links(&self) -> Result<Vec<OurLink>> {
        Ok(self
            .list_links()
            .await?
            .into_iter()
            .filter_map(OurLink::recognise)
            .collect())
    }

    /// The number by which this namespace knows `netns`, as in [`Link::peer_netnsid`]; none if it has no number yet,
    /// and then no link of this namespace has its other end there.
    pub async fn netns_id(&self, netns: &Netns) -> Result<Option<i32>> {
        let mut message = NsidMessage::default();
        // A descriptor is never negative.
        message
            .attributes
            .push(NsidAttribute::Fd(netns.as_fd().as_raw_fd().cast_unsigned()));
        let request = Request::new(
            self.place("read namespace number"),
            RouteNetlinkMessage::GetNsId(message),
            0,
        );
        let id = self
            .ask(vec![request])
            .await?
            .into_iter()
            .find_map(|answer| match answer {
                RouteNetlinkMessage::NewNsId(message) => message.attributes.into_iter().find_map(|attribute| {
                    if let NsidAttribute::Id(id) = attribute {
                        Some(id)
                    } else {
                        None
                    }
                }),
                _ => None,
            });
        Ok(id.filter(|id| *id >= 0))
    }

    /// Sets the link administratively up. Idempotent.
    pub async fn set_up(&self, ifindex: u32) -> Result<()> {
        self.apply(vec![self.set_up_request(ifindex)]).await
    }

    /// Waits until a link that has a carrier can also transmit.
    ///
    /// The end of a veth pair that was set up first gets its carrier from the other one. Until the kernel's link watch
    /// has processed that, packets through it are silently dropped, and a first TCP handshake takes a second longer. So
    /// after both ends are up, call this for the one that was up first. From Linux 6.8 on the first query makes the
    /// kernel process it; before, it takes a few queries.
    pub async fn wait_for_carrier(&self, ifindex: u32) -> Result<()> {
        let place = || self.place("wait for carrier").interface(format!("#{ifindex}"));
        let deadline = Instant::now() + CARRIER_TIMEOUT;
        loop {
            let link = self
                .get_link(ifindex)
                .await?
                .ok_or_else(|| place().refused(nix::Error::ENODEV))?;
            if link.operational {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    place: place(),
                    seconds: CARRIER_TIMEOUT.as_secs(),
                });
            }
            tokio::time::sleep(CARRIER_PAUSE).await;
        }
    }

    /// Sets the link administratively down. Idempotent; waits for an RCU grace period, about 10 ms.
    pub async fn set_down(&self, ifindex: u32) -> Result<()> {
        let mut message = LinkMessage::default();
        message.header.change_mask = LinkFlags::Up;
        self.set("set link down", ifindex, message).await
    }

    /// Sets the MTU in bytes. Idempotent.
    pub async fn set_mtu(&self, ifindex: u32, mtu: u32) -> Result<()> {
        self.set("set MTU", ifindex, with(LinkAttribute::Mtu(mtu))).await
    }

    /// Sets the Ethernet address. Idempotent.
    pub async fn set_mac(&self, ifindex: u32, mac: MacAddr) -> Result<()> {
        self.set("set MAC address", ifindex, with(LinkAttribute::Address(mac.0.to_vec())))
            .await
    }

    /// Renames the link. Idempotent. Before Linux 6.2 the link has to be down.
    pub async fn set_name(&self, ifindex: u32, name: &IfName) -> Result<()> {
        self.set("rename link", ifindex, with(LinkAttribute::IfName(name.to_string())))
            .await
    }

    /// Sets the alias (at most 255 bytes). Idempotent.
    pub async fn set_alias(&self, ifindex: u32, alias: &str) -> Result<()> {
        self.set("set alias", ifindex, with(LinkAttribute::IfAlias(alias.to_owned())))
            .await
    }

    /// Adds a permanent neighbour: `address` is at `mac` on the link. Replaces an existing entry.
    pub async fn add_pod_neighbour(&self, host_ifindex: u32, address: IpAddr, mac: MacAddr) -> Result<()> {
        let place = self
            .place(format!("add neighbour {address}"))
            .interface(format!("#{host_ifindex}"));
        self.apply(vec![Request::new(place, neighbour(host_ifindex, address, mac), PUT)])
            .await
    }

    pub(super) fn set_up_request(&self, ifindex: u32) -> Request {
        set_up_request(self.place("set link up").interface(format!("#{ifindex}")), ifindex)
    }

    async fn set(&self, operation: &'static str, ifindex: u32, mut message: LinkMessage) -> Result<()> {
        message.header.index = ifindex;
        let place = self.place(operation).interface(format!("#{ifindex}"));
        self.apply(vec![Request::new(place, RouteNetlinkMessage::SetLink(message), 0)])
            .await
    }
}

pub(super) fn set_up_request(place: Place, ifindex: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    Request::new(place, RouteNetlinkMessage::SetLink(message), 0)
}

fn with(attribute: LinkAttribute) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(attribute);
    message
}

impl LinkKey<'_> {
    pub(super) fn place(&self, place: Place) -> Place {
        match self {
            Self::Index(index) => place.interface(format!("#{index}")),
            Self::Name(name) => place.interface(*name),
        }
    }

    /// A message that addresses the link.
    pub(super) fn message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        match self {
            Self::Index(index) => message.header.index = *index,
            Self::Name(name) => message.attributes.push(LinkAttribute::IfName((*name).to_owned())),
        }
        message
    }
}

impl Link {
    pub(super) fn from_message(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewLink(message) = message else {
            return None;
        };
        let flags = message.header.flags;
        let mut link = Self {
            ifindex: message.header.index,
            up: flags.contains(LinkFlags::Up),
            ethernet: message.header.link_layer_type == LinkLayerType::Ether,
            ..Self::default()
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Address(bytes) => link.mac = bytes.try_into().ok().map(MacAddr),
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::OperState(state) => link.operational = state == State::Up,
                LinkAttribute::Link(peer) => link.peer_ifindex = Some(peer),
                LinkAttribute::LinkNetNsId(id) => link.peer_netnsid = Some(id),
                LinkAttribute::Group(group) => link.group = group,
                LinkAttribute::Controller(index) => link.controller = Some(index).filter(|index| *index > 0),
                LinkAttribute::LinkInfo(info) => {
                    link.veth = info.contains(&LinkInfo::Kind(InfoKind::Veth));
                    link.kind = info.into_iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        Some(link)
    }

    /// The link, or the error that it is missing.
    pub(super) fn required(link: Option<Self>, place: Place) -> Result<Self> {
        link.ok_or(Error::Unexpected {
            place,
            missing: "the link",
        })
    }
}

impl OurLink {
    fn recognise(link: Link) -> Option<Self> {
        if !link.veth || !own::is_our_link(&link.name, link.alias.as_deref()) {
            return None;
        }
        Some(Self {
            ifindex: link.ifindex,
            name: link.name,
            alias: link.alias?,
            mac: link.mac,
            mtu: link.mtu,
            up: link.up,
            peer_ifindex: link.peer_ifindex,
            peer_netnsid: link.peer_netnsid,
        })
    }
}
