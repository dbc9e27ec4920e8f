//! Represents the addresses and ports of a flow in one form for both address families.

use kni_common::flow::{FLOW_FROM, FLOW_TO, FlowKey4, FlowKey6, FlowValue, KIND_UPLINK, Ports};

/// A key of either flow table; addresses in network byte order, IPv4 as `::ffff:a.b.c.d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tuple {
    pub(super) network: u32,
    pub(super) source: [u8; 16],
    pub(super) destination: [u8; 16],
    pub(super) ports: Ports,
    pub(super) protocol: u32,
}

impl Tuple {
    /// The tuple of the other direction.
    pub(super) const fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            ports: Ports {
                source: self.ports.destination,
                destination: self.ports.source,
            },
            ..self
        }
    }
}

/// The tuple of a flow's packets after translation; `None` where they are not translated.
pub(super) fn translated(tuple: &Tuple, value: &FlowValue) -> Option<Tuple> {
    let (to, from) = (value.flags & FLOW_TO != 0, value.flags & FLOW_FROM != 0);
    if to && from && value.kind == KIND_UPLINK {
        let (source, rest) = value.address.split_first_chunk::<4>()?;
        let (destination, _) = rest.split_first_chunk::<4>()?;
        let mapped = |address: &[u8; 4]| kni_common::address::from_ip(std::net::IpAddr::from(*address));
        return Some(Tuple {
            source: mapped(source),
            destination: mapped(destination),
            ports: value.ports,
            ..*tuple
        });
    }
    let (source, destination) = match (from, to) {
        (false, false) => return None,
        (false, true) => (tuple.source, value.address),
        (true, false) => (value.address, tuple.destination),
        (true, true) => (tuple.destination, value.address),
    };
    Some(Tuple {
        source,
        destination,
        ports: value.ports,
        ..*tuple
    })
}

/// A key of a flow table.
pub(super) trait FlowKey: Copy {
    /// Whether the key is of the IPv4 table.
    const IS_IPV4: bool;

    fn tuple(&self) -> Tuple;

    /// The key of a tuple, if it is of this family.
    fn from_tuple(tuple: &Tuple) -> Option<Self>;
}

const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

impl FlowKey for FlowKey4 {
    const IS_IPV4: bool = true;

    fn tuple(&self) -> Tuple {
        let mapped = |address: [u8; 4]| kni_common::address::from_ip(address.into());
        Tuple {
            network: self.network,
            source: mapped(self.source),
            destination: mapped(self.destination),
            ports: self.ports,
            protocol: self.protocol,
        }
    }

    fn from_tuple(tuple: &Tuple) -> Option<Self> {
        let last = |address: &[u8; 16]| address.strip_prefix(&MAPPED)?.try_into().ok();
        Some(Self {
            network: tuple.network,
            source: last(&tuple.source)?,
            destination: last(&tuple.destination)?,
            ports: tuple.ports,
            protocol: tuple.protocol,
        })
    }
}

impl FlowKey for FlowKey6 {
    const IS_IPV4: bool = false;

    fn tuple(&self) -> Tuple {
        Tuple {
            network: self.network,
            source: self.source,
            destination: self.destination,
            ports: self.ports,
            protocol: self.protocol,
        }
    }

    fn from_tuple(tuple: &Tuple) -> Option<Self> {
        Some(Self {
            network: tuple.network,
            source: tuple.source,
            destination: tuple.destination,
            ports: tuple.ports,
            protocol: tuple.protocol,
        })
    }
}
