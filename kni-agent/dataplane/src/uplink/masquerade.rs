//! Replaces the source addresses of an endpoint in an order in which the programs never use half of one.

use std::net::{Ipv4Addr, Ipv6Addr};

use kni_common::uplink::{EGRESS_REFUSED, Masquerade, SHARED_V4, SHARED_V6};

/// Source addresses and ports of an endpoint's packets that leave the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressSource {
    /// IPv4 address; without one no IPv4 packet leaves.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address, likewise.
    pub ipv6: Option<Ipv6Addr>,
    /// First port.
    pub first: u16,
    /// Last port, not smaller, not 0.
    pub last: u16,
    /// Whether pods of several nodes leave with the IPv4 address: ports and way are those of `EgressShares`.
    pub shared_v4: bool,
    /// The same for the IPv6 address.
    pub shared_v6: bool,
}

/// What happens to packets of an endpoint that would leave the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EgressRow {
    /// They are dropped: the node has no address for them (`masquerade_address`).
    None,
    /// They are dropped: the address that they must have may not be used here (`egress_address`).
    Refused,
    /// They leave.
    From(EgressSource),
}

impl EgressRow {
    pub(super) fn row(&self) -> Masquerade {
        match self {
            Self::None => Masquerade::default(),
            Self::Refused => Masquerade {
                first: EGRESS_REFUSED,
                ..Masquerade::default()
            },
            Self::From(source) => source.row(),
        }
    }

    /// The families in which the address is one that several nodes share.
    pub(super) fn shared(&self) -> u32 {
        let Self::From(source) = self else { return 0 };
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        bit(source.shared_v4, SHARED_V4) | bit(source.shared_v6, SHARED_V6)
    }
}

impl EgressSource {
    fn row(&self) -> Masquerade {
        Masquerade {
            ipv4: self.ipv4.map_or([0; 4], |ip| ip.octets()),
            first: self.first,
            last: self.last,
            ipv6: self.ipv6.map_or([0; 16], |ip| ip.octets()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MasqueradeStep {
    Put(Masquerade),
    /// For programs that have seen a row in use.
    Wait,
}

/// How a row is replaced: the kernel copies into the row of an array, whose reader may find half of an address. So the
/// row is out of use (`last` is 0) while its addresses change. The first eight bytes change at once: a row needs no
/// wait if they alone differ.
pub(super) fn masquerade_steps(current: Masquerade, row: Masquerade) -> Vec<MasqueradeStep> {
    let mut steps = Vec::new();
    if current.last != 0 && current.ipv6 != row.ipv6 {
        steps.extend([
            MasqueradeStep::Put(Masquerade { last: 0, ..current }),
            MasqueradeStep::Wait,
        ]);
    }
    if row.last != 0 && current.ipv6 != row.ipv6 {
        steps.push(MasqueradeStep::Put(Masquerade { last: 0, ..row }));
    }
    steps.push(MasqueradeStep::Put(row));
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_change_while_no_program_uses_the_row() {
        use MasqueradeStep::{Put, Wait};
        let row = |last_byte, ports: [u16; 2]| {
            let [first, last] = ports;
            let mut ipv6 = [0; 16];
            ipv6[15] = last_byte;
            Masquerade {
                ipv4: [192, 0, 2, last_byte],
                first,
                last,
                ipv6,
            }
        };
        let range = [61_000, 65_535];
        let out_of_use = |row| Masquerade { last: 0, ..row };
        let (old, new) = (row(1, range), row(2, range));
        assert_eq!(
            masquerade_steps(old, new),
            [Put(out_of_use(old)), Wait, Put(out_of_use(new)), Put(new)]
        );
        // A new endpoint's row was not in use.
        assert_eq!(
            masquerade_steps(Masquerade::default(), new),
            [Put(out_of_use(new)), Put(new)]
        );
        // Refused: not in use afterwards.
        let refused = Masquerade {
            first: EGRESS_REFUSED,
            ..Masquerade::default()
        };
        assert_eq!(
            masquerade_steps(old, refused),
            [Put(out_of_use(old)), Wait, Put(refused)]
        );
        // The same addresses with other ports: one word.
        let narrow = row(1, [61_000, 62_000]);
        assert_eq!(masquerade_steps(old, narrow), [Put(narrow)]);
    }

    #[test]
    fn an_endpoint_without_a_source_has_no_last_port() {
        let source = EgressSource {
            ipv4: Some([192, 0, 2, 1].into()),
            ipv6: None,
            first: 61_000,
            last: 65_535,
            shared_v4: true,
            shared_v6: false,
        };
        assert_eq!(EgressRow::From(source.clone()).shared(), SHARED_V4);
        let row = source.row();
        assert_eq!((row.ipv4, row.ipv6, row.last), ([192, 0, 2, 1], [0; 16], 65_535));
        assert_eq!(Masquerade::default().last, 0);
    }
}
