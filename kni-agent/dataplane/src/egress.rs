//! Writes which nodes share an egress address: the rows by which packets leave by another node, and return from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{
    address::from_ip,
    uplink::{
        EgressShareData, EgressShareKey, EgressShareValue, SHARE_ADDRESS, SHARE_LEAVE, SHARE_OTHER, SHARE_OWN,
        SHARE_PREFIX, ports_of,
    },
};

use tokio::sync::watch;

use super::{Dataplane, DataplaneError, lock, membarrier, pin::Pins, table::Table, way::Way};

/// The node that answers for an egress address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answering {
    /// This node, while its uplink has the address or is about to get it ([`Dataplane::set_held_addresses`]).
    Here,
    /// The node at the end of a tunnel.
    There(Way),
}

/// An egress address that pods of several nodes leave with, as this node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressShares {
    /// The node that answers for it.
    pub answering: Answering,
    /// The unit of its ports that this node's pods leave with; none where they do not.
    pub unit: Option<u8>,
    /// Where this node answers for it: units of other nodes, and the tunnels to them. Without one their packets are
    /// dropped.
    pub others: BTreeMap<u8, Option<Way>>,
}

type Rows = BTreeMap<EgressShareKey, EgressShareValue>;

/// The table of shares.
pub(super) struct ShareMaps {
    table: Table<EgressShareKey, EgressShareValue>,
    /// `None` until they are known: what an earlier agent wrote stays.
    desired: Option<BTreeMap<IpAddr, EgressShares>>,
    /// The egress addresses that the uplink has, or is about to get; `None` until they are known.
    held: Option<BTreeSet<IpAddr>>,
    /// Whether the rows have `held`.
    held_is_written: bool,
    /// See [`Dataplane::answered_addresses`].
    answered: watch::Sender<BTreeSet<IpAddr>>,
}

impl ShareMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            table: Table::open("EGRESS_SHARES", &pins.map("EGRESS_SHARES"))?,
            desired: None,
            held: None,
            held_is_written: false,
            answered: watch::Sender::default(),
        })
    }

    /// The numbers of nodes that rows refer to.
    pub(super) fn nodes(&self) -> Result<BTreeSet<u32>, DataplaneError> {
        let rows = self.table.rows()?.into_iter();
        Ok(rows.map(|(_, row)| row.node).filter(|node| *node != 0).collect())
    }

    pub(super) fn set_desired(&mut self, desired: &BTreeMap<IpAddr, EgressShares>) {
        self.desired = Some(desired.clone());
        let here = desired.iter().filter(|(_, shares)| shares.answering == Answering::Here);
        let here = here.map(|(address, _)| *address).collect();
        self.answered.send_if_modified(|answered| {
            let is_changed = *answered != here;
            *answered = here;
            is_changed
        });
    }

    /// Has the next [`Dataplane::set_held_addresses`] write the rows, also with the same addresses.
    pub(super) fn unwritten(&mut self) {
        self.held_is_written = false;
    }

    /// Writes the rows. Returns whether this node forwards for others, and whether rows were removed or changed; `None`
    /// while not all is known.
    pub(super) fn write(&self, number: impl Fn(&Way) -> Option<u32>) -> Result<Option<(bool, bool)>, DataplaneError> {
        let (Some(desired), Some(held)) = (&self.desired, &self.held) else {
            return Ok(None);
        };
        let rows = rows(desired, held, number);
        let found: Rows = self.table.rows()?.into_iter().collect();
        let gone: Vec<_> = found.keys().filter(|key| !rows.contains_key(key)).copied().collect();
        let changed = rows.iter().filter(|(key, value)| found.get(key) != Some(value));
        let (replaced, added): (Vec<_>, Vec<_>) = changed
            .map(|(key, value)| (*key, *value))
            .partition(|(key, _)| found.contains_key(key));
        self.table.exchange(&replaced, &added, &gone)?;
        let replaced = !replaced.is_empty();
        let forwards = rows.values().any(|row| row.role == SHARE_OTHER);
        Ok(Some((forwards, replaced || !gone.is_empty())))
    }
}

fn rows(
    desired: &BTreeMap<IpAddr, EgressShares>,
    held: &BTreeSet<IpAddr>,
    number: impl Fn(&Way) -> Option<u32>,
) -> Rows {
    let mut rows = Rows::new();
    // Also where this node is no longer to answer for it: until the uplink has lost the address, the node's stack must
    // get no packet of others' connections.
    let is_answered = |address: &&IpAddr| desired.get(*address).is_some_and(|it| it.answering == Answering::Here);
    let remaining = held.iter().filter(|address| !is_answered(address));
    rows.extend(remaining.map(|address| (share_key(*address, SHARE_ADDRESS, 0), plain(SHARE_OTHER, 0))));
    for (address, shares) in desired {
        let key = |unit: u8| share_key(*address, SHARE_PREFIX, unit);
        let node = match shares.answering {
            Answering::Here => held.contains(address).then_some(0),
            Answering::There(way) => number(&way),
        };
        let Some(node) = node else { continue };
        if let Some(unit) = shares.unit {
            let (first, last) = ports_of(unit);
            let leave = EgressShareValue {
                role: SHARE_LEAVE,
                node,
                first,
                last,
            };
            rows.insert(key(0), leave);
            if node != 0 {
                rows.insert(key(unit), plain(SHARE_OWN, node));
            }
        }
        if node == 0 {
            let others = shares.others.iter();
            let node = |way: &Option<Way>| way.as_ref().and_then(&number).unwrap_or_default();
            rows.extend(others.map(|(unit, way)| (key(*unit), plain(SHARE_OTHER, node(way)))));
        }
    }
    rows
}

fn share_key(address: IpAddr, prefix_length: u32, unit: u8) -> EgressShareKey {
    EgressShareKey {
        prefix_length,
        data: EgressShareData {
            address: from_ip(address),
            unit: u32::from(unit).to_be_bytes(),
        },
    }
}

const fn plain(role: u32, node: u32) -> EgressShareValue {
    EgressShareValue {
        role,
        node,
        first: 0,
        last: 0,
    }
}

impl Dataplane {
    /// The egress addresses that this node answers for, as of the last [`Self::set_fabric`]: with these it forwards for
    /// other nodes from [`Self::set_held_addresses`] on.
    pub fn answered_addresses(&self) -> watch::Receiver<BTreeSet<IpAddr>> {
        lock(&self.fabric).shares.answered.subscribe()
    }

    /// Sets which egress addresses the uplink has, or is about to get. When it returns, this node forwards for those of
    /// these addresses that it answers for, and nothing with others.
    ///
    /// Called before an address is added and after one was removed: in between, the node's stack would answer packets
    /// of connections that it does not have with resets. After a failure the next call writes the rows again.
    pub fn set_held_addresses(&self, held: &BTreeSet<IpAddr>) -> Result<(), DataplaneError> {
        let mut maps = lock(&self.fabric);
        if maps.shares.held_is_written && maps.shares.held.as_ref() == Some(held) {
            return Ok(());
        }
        maps.shares.held = Some(held.clone());
        maps.shares.held_is_written = false;
        let replaced = maps.write_shares();
        if !matches!(replaced, Ok(false)) {
            membarrier::wait_for_programs();
        }
        maps.shares.held_is_written = replaced.is_ok();
        replaced.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn way(text: &str) -> Way {
        Way {
            underlay: ip(text),
            overlay: true,
        }
    }

    /// Unit, role, node and ports of each row.
    fn shown(shares: &EgressShares, held: bool) -> Vec<(u8, u32, u32, u16, u16)> {
        let address = ip("203.0.113.9");
        let held = held.then_some(address).into_iter().collect();
        let numbers = [(way("192.0.2.2"), 2), (way("192.0.2.3"), 3)];
        let number = |way: &Way| numbers.iter().find(|(one, _)| one == way).map(|(_, number)| *number);
        let rows = rows(&[(address, shares.clone())].into(), &held, number);
        rows.iter()
            .map(|(key, row)| (key.data.unit[3], row.role, row.node, row.first, row.last))
            .collect()
    }

    #[test]
    fn a_node_forwards_only_with_an_address_on_its_uplink() {
        let shares = EgressShares {
            answering: Answering::Here,
            unit: Some(2),
            others: [
                (3, Some(way("192.0.2.3"))),
                (4, Some(way("192.0.2.4"))), // It leads nowhere yet.
                (5, None),
            ]
            .into(),
        };
        assert_eq!(
            shown(&shares, true),
            [
                (0, SHARE_LEAVE, 0, 2048, 3071),
                (3, SHARE_OTHER, 3, 0, 0),
                (4, SHARE_OTHER, 0, 0, 0),
                (5, SHARE_OTHER, 0, 0, 0)
            ]
        );
        assert_eq!(shown(&shares, false), []);
    }

    #[test]
    fn what_is_for_an_address_that_is_to_leave_the_uplink_is_dropped() {
        let there = EgressShares {
            answering: Answering::There(way("192.0.2.2")),
            unit: Some(2),
            others: BTreeMap::new(),
        };
        assert_eq!(
            shown(&there, true),
            [
                (0, SHARE_OTHER, 0, 0, 0),
                (0, SHARE_LEAVE, 2, 2048, 3071),
                (2, SHARE_OWN, 2, 0, 0)
            ]
        );
        let held = [ip("203.0.113.9")].into();
        let rows = rows(&BTreeMap::new(), &held, |_| None);
        let prefixes: Vec<u32> = rows.keys().map(|key| key.prefix_length).collect();
        assert_eq!(prefixes, [SHARE_ADDRESS], "no claim at all");
    }

    #[test]
    fn other_nodes_leave_from_their_unit_by_the_node_that_answers() {
        let of = |answering: &str, unit| EgressShares {
            answering: Answering::There(way(answering)),
            unit,
            others: BTreeMap::new(),
        };
        assert_eq!(
            shown(&of("192.0.2.2", Some(63)), false),
            [(0, SHARE_LEAVE, 2, 64_512, 65_535), (63, SHARE_OWN, 2, 0, 0)]
        );
        assert_eq!(shown(&of("192.0.2.9", Some(63)), false), [], "no way is known");
        assert_eq!(shown(&of("192.0.2.2", None), false), []);
    }
}
