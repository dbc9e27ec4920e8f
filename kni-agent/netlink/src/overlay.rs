//! Manages the tunnel device of the node, and the host's routes to pods of other nodes.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{
    collections::{BTreeMap, BTreeSet},
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
};

use ipnet::IpNet;
use kni_model::error_chain;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{
        AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo,
        LinkMessage,
    },
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteType},
};

use super::{
    Link, Netlink, Result,
    connection::Request,
    error::Error,
    host::{destination_of, oif_of},
    message::{self, PUT, RouteSpec},
    own::{OVERLAY_ALIAS, OVERLAY_NAME, REMOTE_ROUTE_PROTOCOL, ROUTE_TABLE},
};

/// The UDP port of a tunnel device, with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Vxlan {
    link: Link,
    port: u16,
    external: bool,
}

/// A route of the host to pods of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RemoteRoute {
    /// The pods' addresses.
    pub destination: IpNet,
    /// The interface.
    pub ifindex: u32,
    /// The node, as next hop; none through the tunnel.
    pub gateway: Option<IpAddr>,
    /// The source address of the node's own packets.
    pub source: IpAddr,
    /// The largest packet in bytes, 0 for what the interface takes.
    pub mtu: u32,
}

impl Netlink {
    /// Creates the tunnel device with this UDP port and MTU; returns its index. A device of KNI with another port is
    /// replaced, unless this port is not free; one that fits is kept, with its programs. Idempotent. Call it in the
    /// connection's network namespace.
    ///
    /// `attach` attaches the programs. It runs while a new device is down, and the device is up after it has succeeded.
    /// If it fails, the state of the programs is unknown, and the device is down.
    ///
    /// [`Error::Foreign`] if a device that is not KNI's has the name or the port: it is named, and not changed.
    pub async fn ensure_overlay<E: From<Error>>(
        &self,
        port: u16,
        mtu: u32,
        attach: impl Future<Output = Result<(), E>>,
    ) -> Result<u32, E> {
        let ifindex = self.find_or_create_overlay(port).await?;
        self.set_mtu(ifindex, mtu).await?;
        if let Err(error) = attach.await {
            if let Err(down) = self.set_down(ifindex).await {
                tracing::error!(error = error_chain(&down), "cannot set the tunnel device down");
            }
            return Err(error);
        }
        match self.set_up(ifindex).await {
            Err(error) if error.errno() == Some(libc::EADDRINUSE) => Err(self.taken_by_process(port)),
            other => other,
        }?;
        Ok(ifindex)
    }

    /// A new device is down. A device of KNI that does not fit is removed only when nothing else has the port: as it
    /// is, it still serves nodes with its port.
    async fn find_or_create_overlay(&self, port: u16) -> Result<u32> {
        let (ours, others): (Vec<Vxlan>, Vec<Vxlan>) = {
            let all = self.list_vxlans().await?.into_iter();
            all.partition(|device| is_ours(&device.link) || (is_unfinished(&device.link) && device.external))
        };
        if let Some(device) = others.iter().find(|device| device.port == port) {
            return Err(Error::Foreign {
                place: self.place("create the tunnel device").interface(OVERLAY_NAME),
                reason: format!(
                    "UDP port {port} is that of device {}; choose another one for all nodes with --overlay-port",
                    device.link.name
                ),
            });
        }
        let fits = |device: &Vxlan| is_ours(&device.link) && device.port == port && device.external;
        if let Some(device) = ours.iter().find(|device| fits(device)) {
            return Ok(device.link.ifindex);
        }
        for device in ours {
            if device.port != port && is_taken(port) {
                return Err(self.taken_by_process(port));
            }
            self.delete_overlay(device.link.ifindex).await?;
        }
        self.create_overlay(port).await
    }

    fn taken_by_process(&self, port: u16) -> Error {
        Error::Foreign {
            place: self.place("set the tunnel device up").interface(OVERLAY_NAME),
            reason: format!("a process has UDP port {port}; choose another one for all nodes with --overlay-port"),
        }
    }

    /// The index of the tunnel device as it is, whatever its port and state; `None` without one.
    pub async fn find_overlay(&self) -> Result<Option<u32>> {
        let link = self.get_link(OVERLAY_NAME).await?;
        Ok(link.filter(is_ours).map(|link| link.ifindex))
    }

    /// Removes the tunnel device. Idempotent.
    pub async fn remove_overlay(&self) -> Result<()> {
        match self.find_overlay().await? {
            Some(ifindex) => self.delete_overlay(ifindex).await,
            None => Ok(()),
        }
    }

    async fn create_overlay(&self, port: u16) -> Result<u32> {
        let place = self.place("create the tunnel device").interface(OVERLAY_NAME);
        let mut message = LinkMessage::default();
        // No neighbours are resolved: the programs know where each packet goes.
        message.header.flags = LinkFlags::Noarp;
        message.header.change_mask = LinkFlags::Noarp;
        message.attributes = vec![
            LinkAttribute::IfName(OVERLAY_NAME.to_owned()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vxlan),
                LinkInfo::Data(InfoData::Vxlan(vec![
                    InfoVxlan::CollectMetadata(true),
                    InfoVxlan::Learning(false),
                    InfoVxlan::Port(port),
                    InfoVxlan::UDPCsum(true),
                ])),
            ]),
        ];
        let request = Request::new(
            place.clone(),
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        );
        match self.apply(vec![request]).await {
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                return Err(Error::Foreign {
                    place,
                    reason: format!("a device that is not KNI's has this name, or UDP port {port}"),
                });
            }
            other => other?,
        }
        let link = Link::required(self.get_link(OVERLAY_NAME).await?, place.clone())?;
        // With the alias a new process recognises it.
        let alias = LinkAttribute::IfAlias(OVERLAY_ALIAS.to_owned());
        // No link-local address: the stack sends nothing into the tunnel by itself.
        let inet6 = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
        let set = |attribute| {
            let mut message = LinkMessage::default();
            message.header.index = link.ifindex;
            message.attributes.push(attribute);
            Request::new(place.clone(), RouteNetlinkMessage::SetLink(message), 0)
        };
        let requests = vec![
            set(alias),
            // Refused where IPv6 is disabled.
            set(LinkAttribute::AfSpecUnspec(vec![inet6])).forgive(&[libc::EAFNOSUPPORT]),
        ];
        let done = self.apply(requests).await;
        if done.is_err() {
            self.delete_overlay(link.ifindex).await.ok();
        }
        done.map(|()| link.ifindex)
    }

    async fn delete_overlay(&self, ifindex: u32) -> Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = ifindex;
        let place = self.place("delete the tunnel device").interface(OVERLAY_NAME);
        let request = Request::new(place, RouteNetlinkMessage::DelLink(message), 0).forgive(&[libc::ENODEV]);
        self.apply(vec![request]).await
    }

    async fn list_vxlans(&self) -> Result<Vec<Vxlan>> {
        let mut filter = LinkMessage::default();
        filter
            .attributes
            .push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vxlan)]));
        let request = Request::new(self.place("list links"), RouteNetlinkMessage::GetLink(filter), 0);
        let answers = self.dump(request).await?.into_iter();
        Ok(answers.filter_map(Vxlan::recognise).collect())
    }

    /// The interface that leads to an address of another node, and the router on the way, if there is one. `None`
    /// without a route.
    pub async fn way_to(&self, address: IpAddr) -> Result<Option<(u32, Option<IpAddr>)>> {
        let mut message = RouteMessage::default();
        message.header.address_family = message::family_of(address);
        message.header.destination_prefix_length = message::host_net(address).prefix_len();
        message.attributes.push(RouteAttribute::Destination(address.into()));
        let place = self.place(format!("look for a route to {address}"));
        let request = Request::new(place, RouteNetlinkMessage::GetRoute(message), 0).forgive(&[
            libc::ENETUNREACH,
            libc::EHOSTUNREACH,
            libc::EACCES,
            libc::EINVAL,
            libc::EAFNOSUPPORT,
            libc::EOPNOTSUPP,
        ]);
        let answers = self.ask(vec![request]).await?;
        Ok(answers.iter().find_map(|answer| match answer {
            RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => {
                Some((oif_of(route)?, gateway_of(route)))
            }
            _ => None,
        }))
    }

    /// Reconciles the host's routes to pods of other nodes. Idempotent.
    pub async fn ensure_remote_routes(&self, desired: &BTreeSet<RemoteRoute>) -> Result<()> {
        let desired: BTreeMap<IpNet, RemoteRoute> = desired.iter().map(|route| (route.destination, *route)).collect();
        let mut present = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let answers = self.dump_routes(family, ROUTE_TABLE, None).await?;
            present.extend(answers.iter().filter_map(RemoteRoute::recognise));
        }
        let mut requests = Vec::new();
        for route in desired.values().filter(|route| !present.contains(route)) {
            let place = self.place(format!("add route to pods at {}", route.destination));
            requests.push(Request::new(place, RouteNetlinkMessage::NewRoute(route.message()), PUT));
        }
        for route in present.iter().filter(|route| !desired.contains_key(&route.destination)) {
            let place = self.place(format!("remove route to pods at {}", route.destination));
            let message = RouteNetlinkMessage::DelRoute(route.message());
            requests.push(Request::new(place, message, 0).forgive(&[libc::ESRCH, libc::ENODEV]));
        }
        self.apply(requests).await
    }
}

fn is_ours(link: &Link) -> bool {
    link.name == OVERLAY_NAME && link.alias.as_deref() == Some(OVERLAY_ALIAS)
}

/// Whether a socket of the node has a UDP port, as the device would find when it is set up.
fn is_taken(port: u16) -> bool {
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let refused = |address| UdpSocket::bind((address, port)).is_err_and(|error| error.kind() == ErrorKind::AddrInUse);
    any.into_iter().any(refused)
}

/// Of an agent that ended between the creation and the alias. The kernel sets no alias at the creation.
fn is_unfinished(link: &Link) -> bool {
    link.name == OVERLAY_NAME && link.alias.is_none() && !link.up
}

impl Vxlan {
    fn recognise(message: RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewLink(link) = &message else {
            return None;
        };
        let data = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::LinkInfo(infos) => infos.iter().find_map(|info| match info {
                LinkInfo::Data(InfoData::Vxlan(data)) => Some(data),
                _ => None,
            }),
            _ => None,
        })?;
        let port = data.iter().find_map(|info| match info {
            InfoVxlan::Port(port) => Some(*port),
            _ => None,
        });
        let (port, external) = (port?, data.contains(&InfoVxlan::CollectMetadata(true)));
        Some(Self {
            link: Link::from_message(message)?,
            port,
            external,
        })
    }
}

impl RemoteRoute {
    fn message(&self) -> RouteMessage {
        let mut message = message::route(&RouteSpec {
            destination: self.destination,
            gateway: self.gateway,
            ifindex: self.ifindex,
            table: ROUTE_TABLE,
            metric: 0,
        });
        message.header.protocol = RouteProtocol::Other(REMOTE_ROUTE_PROTOCOL);
        message.attributes.push(RouteAttribute::PrefSource(self.source.into()));
        if self.mtu > 0 {
            let metrics = vec![RouteMetric::Mtu(self.mtu)];
            message.attributes.push(RouteAttribute::Metrics(metrics));
        }
        message
    }

    fn recognise(route: &RouteMessage) -> Option<Self> {
        if route.header.protocol != RouteProtocol::Other(REMOTE_ROUTE_PROTOCOL) {
            return None;
        }
        let source = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::PrefSource(address) => ip_of(address),
            _ => None,
        });
        let mtu = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Metrics(metrics) => metrics.iter().find_map(|metric| match metric {
                RouteMetric::Mtu(mtu) => Some(*mtu),
                _ => None,
            }),
            _ => None,
        });
        let unspecified = destination_of(route)?.addr();
        Some(Self {
            destination: destination_of(route)?,
            ifindex: oif_of(route)?,
            gateway: gateway_of(route),
            // Without one it is none that is desired, and is removed.
            source: source.unwrap_or(unspecified),
            mtu: mtu.unwrap_or(0),
        })
    }
}

fn gateway_of(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip_of(address),
        _ => None,
    })
}

fn ip_of(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}
