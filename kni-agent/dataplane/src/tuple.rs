//! Represents the addresses and ports of a flow in one form for both address families.

use kni_common::{
    address::words,
    flow::{
        EndPorts, FLOW_FROM_SECOND, FLOW_OPENED_BY_SECOND, FLOW_TRANSLATED, FlowKey4, FlowKey6, FlowValue, Ports,
        is_second, network_of, protocol_of, scope,
    },
};

/// The tuple of a flow's packets in one direction; addresses in network byte order, IPv4 as `::ffff:a.b.c.d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Tuple {
    pub(super) network: u32,
    pub(super) source: [u8; 16],
    pub(super) destination: [u8; 16],
    pub(super) ports: Ports,
    pub(super) protocol: u8,
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

    /// Whether its sender is the second end in the key.
    pub(super) const fn is_second(&self) -> bool {
        is_second(words(self.source), words(self.destination))
    }

    /// The ends in the order of the key.
    const fn sorted(self) -> Self {
        if self.is_second() { self.reversed() } else { self }
    }

    const fn end_ports(&self) -> EndPorts {
        EndPorts {
            first: self.ports.source,
            second: self.ports.destination,
        }
    }
}

/// Whether the second end sends the packets of the row: of a translated row its only ones, otherwise those of the
/// original direction.
pub(super) const fn sends_second(value: &FlowValue) -> bool {
    let flag = if value.flags & FLOW_TRANSLATED == 0 {
        FLOW_OPENED_BY_SECOND
    } else {
        FLOW_FROM_SECOND
    };
    value.flags & flag != 0
}

/// Whether the row is the reply direction of a translated flow, which has another row for the original one.
pub(super) const fn is_reply_row(value: &FlowValue) -> bool {
    value.flags & FLOW_TRANSLATED != 0 && value.is_reply(sends_second(value))
}

/// The tuple of a flow's packets after translation; `None` where they are not translated.
pub(super) fn translated(tuple: &Tuple, value: &FlowValue) -> Option<Tuple> {
    (value.flags & FLOW_TRANSLATED != 0).then_some(Tuple {
        source: value.source,
        destination: value.destination,
        ports: value.ports,
        ..*tuple
    })
}

/// A key of a flow table.
pub(super) trait FlowKey: Copy {
    /// Whether the key is of the IPv4 table.
    const IS_IPV4: bool;

    /// The key's ends, the first one as the sender.
    fn ends(&self) -> Tuple;

    /// The tuple of the row's packets ([`sends_second`]).
    fn tuple(&self, value: &FlowValue) -> Tuple {
        let ends = self.ends();
        if sends_second(value) { ends.reversed() } else { ends }
    }

    /// The key of a tuple, if it is of this family.
    fn from_tuple(tuple: &Tuple) -> Option<Self>;
}

const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

const fn in_order(ports: EndPorts) -> Ports {
    Ports {
        source: ports.first,
        destination: ports.second,
    }
}

impl FlowKey for FlowKey4 {
    const IS_IPV4: bool = true;

    fn ends(&self) -> Tuple {
        let mapped = |address: [u8; 4]| kni_common::address::from_ip(address.into());
        Tuple {
            network: network_of(self.scope),
            source: mapped(self.first),
            destination: mapped(self.second),
            ports: in_order(self.ports),
            protocol: protocol_of(self.scope),
        }
    }

    fn from_tuple(tuple: &Tuple) -> Option<Self> {
        let last = |address: &[u8; 16]| address.strip_prefix(&MAPPED)?.try_into().ok();
        let sorted = tuple.sorted();
        Some(Self {
            scope: scope(tuple.network, tuple.protocol),
            first: last(&sorted.source)?,
            second: last(&sorted.destination)?,
            ports: sorted.end_ports(),
        })
    }
}

impl FlowKey for FlowKey6 {
    const IS_IPV4: bool = false;

    fn ends(&self) -> Tuple {
        Tuple {
            network: network_of(self.scope),
            source: self.first,
            destination: self.second,
            ports: in_order(self.ports),
            protocol: protocol_of(self.scope),
        }
    }

    fn from_tuple(tuple: &Tuple) -> Option<Self> {
        let sorted = tuple.sorted();
        Some(Self {
            scope: scope(tuple.network, tuple.protocol),
            first: sorted.source,
            second: sorted.destination,
            ports: sorted.end_ports(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(source: &str, destination: &str) -> Tuple {
        let bytes = |ip: &str| kni_common::address::from_ip(ip.parse().unwrap());
        Tuple {
            network: 5,
            source: bytes(source),
            destination: bytes(destination),
            ports: Ports {
                source: [1, 2],
                destination: [3, 4],
            },
            protocol: 6,
        }
    }

    #[test]
    fn both_directions_have_one_key_and_the_row_names_its_sender() {
        for (one, another) in [("10.0.0.1", "10.0.0.2"), ("10.0.1.1", "10.0.0.2")] {
            let there = tuple(one, another);
            let key = FlowKey4::from_tuple(&there).unwrap();
            assert_eq!(Some(key), FlowKey4::from_tuple(&there.reversed()));
            for sender in [there, there.reversed()] {
                let flags = |second, flag| if second { flag } else { 0 };
                let opened = FlowValue {
                    flags: flags(sender.is_second(), FLOW_OPENED_BY_SECOND),
                    ..FlowValue::default()
                };
                assert_eq!(key.tuple(&opened), sender);
                let translated = FlowValue {
                    flags: FLOW_TRANSLATED | flags(sender.is_second(), FLOW_FROM_SECOND),
                    ..FlowValue::default()
                };
                assert_eq!(key.tuple(&translated), sender);
            }
        }
        let there = tuple("fd00::1:2", "fd00::2:1");
        let key = FlowKey6::from_tuple(&there).unwrap();
        assert_eq!(Some(key), FlowKey6::from_tuple(&there.reversed()));
        assert_eq!(key.ends(), there.sorted());
    }
}
