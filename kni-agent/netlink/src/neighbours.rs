//! Lists what the node knows of other hosts: the gateways of its routes, and its neighbour table.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "rtnetlink is open-ended: other messages are skipped"
)]

use std::{collections::BTreeSet, net::IpAddr};

use kni_model::MacAddr;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteVia},
};

use super::{Netlink, Result, connection::Request};

/// An entry of the neighbour table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// The interface.
    pub ifindex: u32,
    /// The address.
    pub address: IpAddr,
    /// The MAC address of the host that has it.
    pub mac: MacAddr,
    /// Whether the entry is fixed, or the host has answered within the last seconds (`REACHABLE`). The kernel itself
    /// asks again before it relies on any other entry.
    pub confirmed: bool,
    /// Whether the entry is fixed.
    pub fixed: bool,
}

impl Netlink {
    /// The gateways of all routes of the main table.
    pub async fn list_gateways(&self) -> Result<BTreeSet<IpAddr>> {
        let mut gateways = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let table = u32::from(RouteHeader::RT_TABLE_MAIN);
            for route in self.dump_routes(family, table, None).await? {
                for attribute in &route.attributes {
                    gateways.extend(gateway(attribute));
                    if let RouteAttribute::MultiPath(hops) = attribute {
                        gateways.extend(hops.iter().flat_map(|hop| &hop.attributes).filter_map(gateway));
                    }
                }
            }
        }
        Ok(gateways)
    }

    /// The neighbours of all interfaces whose MAC address is known.
    pub async fn list_neighbours(&self) -> Result<Vec<Neighbour>> {
        let message = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let answers = self
            .dump(Request::new(self.place("list neighbours"), message, 0))
            .await?;
        Ok(answers.iter().filter_map(Neighbour::from_message).collect())
    }
}

fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(v4)) | RouteAttribute::Via(RouteVia::Inet(v4)) => {
            Some(IpAddr::V4(*v4))
        }
        RouteAttribute::Gateway(RouteAddress::Inet6(v6)) | RouteAttribute::Via(RouteVia::Inet6(v6)) => {
            Some(IpAddr::V6(*v6))
        }
        _ => None,
    }
}

impl Neighbour {
    fn from_message(answer: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewNeighbour(message) = answer else {
            return None;
        };
        let (mut address, mut mac) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(IpAddr::V4(*v4)),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(IpAddr::V6(*v6)),
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok().map(MacAddr),
                _ => {}
            }
        }
        let confirmed = matches!(
            message.header.state,
            NeighbourState::Permanent | NeighbourState::Noarp | NeighbourState::Reachable
        );
        let failed = matches!(
            message.header.state,
            NeighbourState::Failed | NeighbourState::Incomplete
        );
        Some(Self {
            ifindex: message.header.ifindex,
            address: address?,
            mac: mac.filter(|_| !failed)?,
            confirmed,
            fixed: matches!(message.header.state, NeighbourState::Permanent | NeighbourState::Noarp),
        })
    }
}
