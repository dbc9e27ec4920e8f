//! Lists the addresses of interfaces; adds and removes the egress addresses of pods.

use std::net::IpAddr;

use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage, AddressProtocol, CacheInfo},
};

use super::{
    Netlink, Result,
    connection::Request,
    message::{self, PUT},
    own::ROUTE_PROTOCOL,
};

/// Lifetime without end (linux/in6.h, `INFINITY_LIFE_TIME`).
const FOREVER: u32 = u32::MAX;

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkAddress {
    /// The interface.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
    /// Length of the prefix that is on the link.
    pub prefix_len: u8,
    /// Whether it can be used: duplicate address detection has finished without a conflict.
    pub usable: bool,
    /// Whether new connections should not use it.
    pub deprecated: bool,
    /// Whether KNI created it. Kernels before 5.18 do not report this.
    pub ours: bool,
}

impl Netlink {
    /// All addresses of the namespace.
    pub async fn list_addresses(&self) -> Result<Vec<LinkAddress>> {
        let message = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let answers = self
            .dump(Request::new(self.place("list addresses"), message, 0))
            .await?;
        Ok(answers.iter().filter_map(LinkAddress::from_message).collect())
    }

    /// Adds an egress address of pods to an interface: /32 or /128, usable at once. The node itself does not choose it
    /// as a source (IPv6: deprecated from the beginning; IPv4: added after the existing ones). Idempotent.
    pub async fn add_egress_address(&self, ifindex: u32, address: IpAddr) -> Result<()> {
        let mut message = message::address(ifindex, address);
        message
            .attributes
            .push(AddressAttribute::Protocol(AddressProtocol::Other(ROUTE_PROTOCOL)));
        if address.is_ipv6() {
            let mut lifetimes = CacheInfo::default();
            lifetimes.ifa_preferred = 0;
            lifetimes.ifa_valid = FOREVER;
            message.attributes.push(AddressAttribute::CacheInfo(lifetimes));
        }
        let place = self
            .place(format!("add egress address {address}"))
            .interface(format!("#{ifindex}"));
        self.apply(vec![Request::new(place, RouteNetlinkMessage::NewAddress(message), PUT)])
            .await
    }

    /// Removes an egress address. Idempotent.
    pub async fn del_egress_address(&self, ifindex: u32, address: IpAddr) -> Result<()> {
        let mut message = message::address(ifindex, address);
        message
            .attributes
            .retain(|attribute| !matches!(attribute, AddressAttribute::Flags(_)));
        let place = self
            .place(format!("remove egress address {address}"))
            .interface(format!("#{ifindex}"));
        let request = Request::new(place, RouteNetlinkMessage::DelAddress(message), 0);
        let gone = &[libc::EADDRNOTAVAIL, libc::ENODEV, libc::ENXIO];
        self.apply(vec![request.forgive(gone)]).await
    }
}

impl LinkAddress {
    fn from_message(answer: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewAddress(message) = answer else {
            return None;
        };
        let (mut local, mut address, mut ours) = (None, None, false);
        let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
        for attribute in &message.attributes {
            if let AddressAttribute::Local(found) = attribute {
                local = Some(*found);
            } else if let AddressAttribute::Address(found) = attribute {
                // The peer's address of a point-to-point link, if the message also contains a local one.
                address = Some(*found);
            } else if let AddressAttribute::Flags(found) = attribute {
                flags = *found;
            } else if let AddressAttribute::Protocol(found) = attribute {
                ours = *found == AddressProtocol::Other(ROUTE_PROTOCOL);
            }
        }
        let unusable = AddressFlags::Tentative | AddressFlags::Dadfailed;
        // An optimistic address is tentative and usable (RFC 4429).
        let usable = !flags.intersects(unusable) || flags.contains(AddressFlags::Optimistic);
        Some(Self {
            ifindex: message.header.index,
            address: local.or(address)?,
            prefix_len: message.header.prefix_len,
            usable,
            deprecated: flags.contains(AddressFlags::Deprecated),
            ours,
        })
    }
}
