//! Converts flows: from a row for each direction to today's rows.
//!
//! Generations keep their numbers, because the rows of endpoints keep theirs: a flow that was current is current, one
//! that had to be judged again is judged again. A far end has no generation in layout 2; it gets that of its flow's
//! local end, which is the epoch with which the endpoint's row begins.

use std::collections::HashMap;

use kni_common::{
    address::from_ip,
    flow::{
        END_LOCAL, END_OUTSIDE, END_STACK, FLOW_AGED, FLOW_CLOSED, FLOW_CONFIRMED, FLOW_FIN_FIRST, FLOW_FIN_SECOND,
        FLOW_FROM_SECOND, FLOW_HAIRPIN, FLOW_NODE, FLOW_OPENED_BY_SECOND, FLOW_REPLIED, FLOW_SERVICE, FLOW_TRANSLATED,
        FlowEnd, FlowValue, Ports,
    },
    uplink::OUTSIDE,
};

use super::rows::{self, KIND_FROM_STACK, KIND_LOCAL, KIND_TO_STACK, KIND_UPLINK, flags};
use crate::tuple::Tuple;

/// Why a flow is not taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LeftOut {
    /// Nothing was sent for longer than its lifetime.
    Expired,
    /// An endpoint of it is gone, or has another owner.
    OtherOwner,
    /// The row has a kind that layout 2 does not have.
    Unknown,
}

impl LeftOut {
    /// The reason in a log.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::OtherOwner => "of another owner",
            Self::Unknown => "of no known kind",
        }
    }
}

/// A key of a flow table of layout 2.
pub(super) trait OldKey: Copy {
    /// The packets of the row.
    fn tuple(&self) -> Tuple;
}

#[expect(clippy::cast_possible_truncation, reason = "a protocol number has eight bits")]
const fn protocol(word: u32) -> u8 {
    word as u8
}

impl OldKey for rows::FlowKey4 {
    fn tuple(&self) -> Tuple {
        Tuple {
            network: self.network,
            source: from_ip(self.source.into()),
            destination: from_ip(self.destination.into()),
            ports: self.ports,
            protocol: protocol(self.protocol),
        }
    }
}

impl OldKey for rows::FlowKey6 {
    fn tuple(&self) -> Tuple {
        Tuple {
            network: self.network,
            source: self.source,
            destination: self.destination,
            ports: self.ports,
            protocol: protocol(self.protocol),
        }
    }
}

/// The endpoints of layout 2, and the clock.
pub(super) struct Scene {
    endpoints: HashMap<u32, rows::Endpoint>,
    /// Endpoints by network and address.
    addresses: HashMap<(u32, [u8; 16]), u32>,
    /// Index of the uplink.
    uplink: u32,
    /// jiffies.
    now: u64,
}

impl Scene {
    pub(super) fn new(endpoints: &[(u32, rows::Endpoint)], uplink: u32, now: u64) -> Self {
        let published = || endpoints.iter().filter(|(_, row)| row.network != 0);
        let addresses = published().flat_map(|(endpoint, row)| {
            let all = [from_ip(row.ipv4.into()), row.ipv6];
            all.map(|address| ((row.network, address), *endpoint))
        });
        Self {
            addresses: addresses.collect(),
            endpoints: published().copied().collect(),
            uplink,
            now,
        }
    }

    /// The endpoint as an end of a flow of the network, unless the flow belonged to an earlier owner.
    fn local(&self, network: u32, id: u32, generation: u32) -> Option<End> {
        let row = self.endpoints.get(&id)?;
        let is_owner = generation >= row.incarnation && (network == OUTSIDE || row.network == network);
        is_owner.then_some(End {
            kind: END_LOCAL,
            id,
            generation,
        })
    }

    /// The endpoint with an address, likewise.
    fn at(&self, network: u32, address: [u8; 16], generation: u32) -> Option<End> {
        self.local(network, *self.addresses.get(&(network, address))?, generation)
    }

    const fn far(&self, kind: u8, generation: u32) -> End {
        let id = if kind == END_OUTSIDE { self.uplink } else { 0 };
        End { kind, id, generation }
    }

    /// Sender and receiver of a row's packets.
    fn ends(&self, tuple: &Tuple, row: &rows::FlowValue) -> Result<[End; 2], LeftOut> {
        let network = tuple.network;
        let sender = || self.at(network, tuple.source, row.source_generation);
        let receiver = || self.local(network, row.destination, row.destination_generation);
        let ends = match row.kind {
            KIND_LOCAL => sender().zip(receiver()),
            KIND_TO_STACK => sender().map(|end| (end, self.far(END_STACK, end.generation))),
            KIND_FROM_STACK => receiver().map(|end| (self.far(END_STACK, end.generation), end)),
            KIND_UPLINK if network == OUTSIDE => receiver().map(|end| (self.far(END_OUTSIDE, end.generation), end)),
            KIND_UPLINK => sender().map(|end| (end, self.far(END_OUTSIDE, end.generation))),
            _ => return Err(LeftOut::Unknown),
        };
        ends.map(|(sender, receiver)| [sender, receiver])
            .ok_or(LeftOut::OtherOwner)
    }

    /// The network of the row of the other direction.
    fn network_of_other(&self, tuple: &Tuple, row: &rows::FlowValue) -> Option<u32> {
        match (row.kind, tuple.network) {
            (KIND_UPLINK, OUTSIDE) => Some(self.endpoints.get(&row.destination)?.network),
            (KIND_UPLINK, _) => Some(OUTSIDE),
            (_, network) => Some(network),
        }
    }

    fn is_live(&self, row: &rows::FlowValue) -> bool {
        self.now.saturating_sub(row.last_seen) <= u64::from(row.lifetime)
    }

    /// The packets of the row after translation; their network is that of the other direction's row.
    fn translated(&self, tuple: &Tuple, row: &rows::FlowValue) -> Option<Tuple> {
        let mut to = Tuple {
            network: self.network_of_other(tuple, row)?,
            ..*tuple
        };
        let translated = row.flags & (flags::TO | flags::FROM);
        if translated == 0 {
            return Some(to);
        }
        to.ports = row.ports;
        if translated == flags::FROM {
            to.source = row.address;
        } else if translated == flags::TO {
            to.destination = row.address;
        } else if row.kind == KIND_UPLINK {
            let ([source, destination], _zeros) = row.address.as_chunks::<4>().0.split_first_chunk()?;
            to.source = from_ip((*source).into());
            to.destination = from_ip((*destination).into());
        } else {
            to.source = tuple.destination;
            to.destination = row.address;
        }
        Some(to)
    }
}

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    kind: u8,
    id: u32,
    generation: u32,
}

impl End {
    /// The end as its two rows know it. Where they differ, a program was about to write both: the flow is judged again.
    fn older(self, other: Self) -> Self {
        Self {
            generation: self.generation.min(other.generation),
            ..self
        }
    }
}

/// A flow, from one of its rows or both.
struct Flow {
    /// Its first packet.
    original: Tuple,
    /// The same after translation; the network is that of the replies' row.
    to: Tuple,
    opener: End,
    receiver: End,
    /// The flags of either row.
    flags: u16,
    /// Whether the opener and the receiver have sent a FIN.
    fins: [bool; 2],
    last_seen: u64,
    lifetime: u32,
}

impl Flow {
    /// From the row of either direction.
    fn of_row(scene: &Scene, tuple: &Tuple, row: &rows::FlowValue) -> Result<Self, LeftOut> {
        let [sender, receiver] = scene.ends(tuple, row)?;
        let to = scene.translated(tuple, row).ok_or(LeftOut::OtherOwner)?;
        let is_reply = row.flags & flags::REPLY != 0;
        let fin = row.flags & flags::FIN != 0;
        let flow = Self {
            original: *tuple,
            to,
            opener: sender,
            receiver,
            flags: row.flags,
            fins: [fin, false],
            last_seen: row.last_seen,
            lifetime: row.lifetime,
        };
        Ok(if is_reply {
            Self {
                original: to.reversed(),
                to: tuple.reversed(),
                opener: receiver,
                receiver: sender,
                fins: [false, fin],
                ..flow
            }
        } else {
            flow
        })
    }

    fn with(self, other: &Self) -> Self {
        Self {
            opener: self.opener.older(other.opener),
            receiver: self.receiver.older(other.receiver),
            flags: self.flags | other.flags,
            fins: [self.fins[0] || other.fins[0], self.fins[1] || other.fins[1]],
            last_seen: self.last_seen.max(other.last_seen),
            lifetime: self.lifetime.max(other.lifetime),
            ..self
        }
    }

    /// Whether the other one is the same flow, seen from its other row.
    fn is(&self, other: &Self) -> bool {
        self.original == other.original && self.to == other.to
    }

    /// The flags that do not depend on the order of the ends. A reply was all that layout 2 waited for. Lifetimes stay
    /// as they were granted, and so does the state that belongs to them: a connection that is idle must not expire
    /// earlier because it passed its handshake before the change.
    fn state(&self) -> u16 {
        let confirmed = match i32::from(self.original.protocol) {
            libc::IPPROTO_UDP => FLOW_REPLIED | FLOW_CONFIRMED | FLOW_AGED,
            _ => FLOW_REPLIED | FLOW_CONFIRMED,
        };
        [
            (flags::CONFIRMED, confirmed),
            (flags::CLOSED, FLOW_CLOSED),
            (flags::HAIRPIN, FLOW_HAIRPIN),
            (flags::NODE, FLOW_NODE),
        ]
        .into_iter()
        .filter(|(old, _)| self.flags & old != 0)
        .fold(0, |all, (_, new)| all | new)
    }

    fn is_translated(&self) -> bool {
        let here = Tuple {
            network: self.to.network,
            ..self.original
        };
        here != self.to
    }

    /// Whether the original destination is translated. The ports of a masqueraded flow always are.
    fn is_of_service(&self) -> bool {
        let is_masqueraded = self.receiver.kind == END_OUTSIDE;
        self.original.destination != self.to.destination || !is_masqueraded && self.original.ports != self.to.ports
    }

    /// Today's rows.
    fn rows(&self) -> Vec<(Tuple, FlowValue)> {
        let (opener, receiver) = ((self.opener, self.fins[0]), (self.receiver, self.fins[1]));
        let mut row = self.row(&self.original, opener, receiver);
        set(&mut row.flags, FLOW_OPENED_BY_SECOND, self.original.is_second());
        if !self.is_translated() {
            return vec![(self.original, row)];
        }
        let reply = self.to.reversed();
        let mut back = self.row(&reply, receiver, opener);
        set(&mut back.flags, FLOW_OPENED_BY_SECOND, !reply.is_second());
        for (tuple, to, row) in [
            (&self.original, &self.to, &mut row),
            (&reply, &self.original.reversed(), &mut back),
        ] {
            row.flags |= FLOW_TRANSLATED;
            set(&mut row.flags, FLOW_FROM_SECOND, tuple.is_second());
            set(&mut row.flags, FLOW_SERVICE, self.is_of_service());
            row.source = to.source;
            row.destination = to.destination;
            row.ports = to.ports;
        }
        vec![(reply, back), (self.original, row)]
    }

    /// The part of a row that knows the ends; each with whether it has sent a FIN.
    fn row(&self, tuple: &Tuple, sender: (End, bool), receiver: (End, bool)) -> FlowValue {
        let [(first, first_fin), (second, second_fin)] = if tuple.is_second() {
            [receiver, sender]
        } else {
            [sender, receiver]
        };
        let end = |end: End| FlowEnd {
            id: end.id,
            generation: end.generation,
        };
        let mut flags = self.state();
        set(&mut flags, FLOW_FIN_FIRST, first_fin);
        set(&mut flags, FLOW_FIN_SECOND, second_fin);
        FlowValue {
            last_seen: low(self.last_seen),
            lifetime: self.lifetime,
            first_kind: first.kind,
            second_kind: second.kind,
            flags,
            ports: Ports::default(),
            first: end(first),
            second: end(second),
            source: [0; 16],
            destination: [0; 16],
        }
    }
}

const fn set(flags: &mut u16, bit: u16, is_set: bool) {
    if is_set {
        *flags |= bit;
    }
}

/// The low 32 bits of a time in jiffies.
#[expect(clippy::cast_possible_truncation, reason = "the low 32 bits")]
const fn low(jiffies: u64) -> u32 {
    jiffies as u32
}

/// What has become of the flows of a table.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Converted {
    /// Today's rows, the one of the replies first: a reply follows a packet that the other row lets through.
    pub(super) rows: Vec<(Tuple, FlowValue)>,
    /// Flows (not rows) that are taken over.
    pub(super) flows: u32,
    /// Rows that are not, with the reason.
    pub(super) left_out: std::collections::BTreeMap<LeftOut, u32>,
}

/// Converts the rows of a table. `since`: only flows with a packet at that time (jiffies) or later.
pub(super) fn convert<K: OldKey>(scene: &Scene, rows: &[(K, rows::FlowValue)], since: u64) -> Converted {
    let by_tuple: HashMap<Tuple, &rows::FlowValue> = rows.iter().map(|(key, row)| (key.tuple(), row)).collect();
    let mut converted = Converted::default();
    for (key, row) in rows {
        let tuple = key.tuple();
        let flow = match Flow::of_row(scene, &tuple, row) {
            Ok(flow) => flow,
            Err(reason) => {
                *converted.left_out.entry(reason).or_default() += 1;
                continue;
            }
        };
        // The row of the other direction, unless it was evicted or belongs to another flow by now.
        let is_reply = row.flags & flags::REPLY != 0;
        let other_tuple = if is_reply { flow.original } else { flow.to.reversed() };
        let other_row = by_tuple
            .get(&other_tuple)
            .filter(|other| (other.flags & flags::REPLY != 0) != is_reply);
        let other = other_row.and_then(|row| {
            let other = Flow::of_row(scene, &other_tuple, row).ok()?;
            other.is(&flow).then_some((other, *row))
        });
        // A flow with both rows is converted once.
        if is_reply && other.is_some() {
            continue;
        }
        let lives = scene.is_live(row) || other.as_ref().is_some_and(|(_, row)| scene.is_live(row));
        let (flow, rows) = match other {
            Some((other, _)) => (flow.with(&other), 2),
            None => (flow, 1),
        };
        if !lives {
            *converted.left_out.entry(LeftOut::Expired).or_default() += rows;
        } else if flow.last_seen >= since {
            converted.flows += 1;
            converted.rows.extend(flow.rows());
        }
    }
    converted
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use kni_common::endpoint::is_older;

    use super::*;
    use crate::tuple::{is_reply_row, sends_second, translated};

    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 1;
    const NETWORK: u32 = 5;
    const NOW: u64 = (1 << 32) + 10_000;
    const SEEN: u64 = NOW - 50;
    const UPLINK: u32 = 77;
    /// Endpoints 1 and 2 of network 5; 2 has the larger address.
    const CLIENT: &str = "10.0.0.1";
    const SERVER: &str = "10.0.0.200";

    fn bytes(ip: &str) -> [u8; 16] {
        from_ip(ip.parse::<IpAddr>().unwrap())
    }

    fn tuple(network: u32, source: (&str, u16), destination: (&str, u16), protocol: u8) -> Tuple {
        Tuple {
            network,
            source: bytes(source.0),
            destination: bytes(destination.0),
            ports: Ports {
                source: source.1.to_be_bytes(),
                destination: destination.1.to_be_bytes(),
            },
            protocol,
        }
    }

    fn endpoint(ipv4: [u8; 4], ipv6: &str, generation: u32) -> rows::Endpoint {
        rows::Endpoint {
            network: NETWORK,
            generation,
            incarnation: 10,
            ipv4,
            ipv6: bytes(ipv6),
            ..rows::Endpoint::default()
        }
    }

    fn scene() -> Scene {
        let endpoints = [
            (1, endpoint([10, 0, 0, 1], "fd00::1", 20)),
            (2, endpoint([10, 0, 0, 200], "fd00::200", 30)),
            (
                3,
                rows::Endpoint {
                    network: 0,
                    generation: 40,
                    ..rows::Endpoint::default()
                },
            ),
        ];
        Scene::new(&endpoints, UPLINK, NOW)
    }

    /// A key of either family: the tests' own.
    #[derive(Clone, Copy)]
    struct Key(Tuple);

    impl OldKey for Key {
        fn tuple(&self) -> Tuple {
            self.0
        }
    }

    type OldRow = (Key, rows::FlowValue);

    /// The two rows of a flow as layout 2 writes them. `ends`: sender and receiver of the original direction, endpoint
    /// and generation.
    struct Old {
        original: Tuple,
        to: Tuple,
        kinds: [u16; 2],
        ends: [(u32, u32); 2],
        both: u16,
    }

    impl Old {
        fn plain(original: Tuple, kinds: [u16; 2], ends: [(u32, u32); 2]) -> Self {
            Self {
                original,
                to: original,
                kinds,
                ends,
                both: flags::CONFIRMED,
            }
        }

        fn rows(&self) -> [OldRow; 2] {
            let [(sender, sender_generation), (receiver, receiver_generation)] = self.ends;
            let [kind, reply_kind] = self.kinds;
            let (mut there, mut back) = (self.both, self.both | flags::REPLY);
            if self.original.destination != self.to.destination
                || kind != KIND_UPLINK && self.original.ports != self.to.ports
            {
                there |= flags::TO;
                back |= flags::FROM;
            }
            if self.original.source != self.to.source {
                there |= flags::FROM;
                back |= flags::TO;
            }
            let reply = self.to.reversed();
            let row = |flags, kind, [from, to]: [u32; 2], destination, target: &Tuple| rows::FlowValue {
                last_seen: SEEN,
                source_generation: from,
                destination_generation: to,
                destination,
                lifetime: 500,
                kind,
                flags,
                ports: target.ports,
                address: address(flags, kind, target),
            };
            let generations = [sender_generation, receiver_generation];
            let [one, two] = generations;
            [
                (Key(self.original), row(there, kind, generations, receiver, &self.to)),
                (
                    Key(reply),
                    row(back, reply_kind, [two, one], sender, &self.original.reversed()),
                ),
            ]
        }
    }

    /// The address in a row, by the rules of layout 2.
    fn address(flags: u16, kind: u16, target: &Tuple) -> [u8; 16] {
        let translated = flags & (flags::TO | flags::FROM);
        if translated == flags::FROM {
            return target.source;
        }
        if translated == flags::TO | flags::FROM && kind == KIND_UPLINK {
            let mut both = [0; 16];
            both[..4].copy_from_slice(&target.source[12..]);
            both[4..8].copy_from_slice(&target.destination[12..]);
            return both;
        }
        target.destination
    }

    fn converted(old: &[OldRow]) -> Vec<(Tuple, FlowValue)> {
        let converted = convert(&scene(), old, 0);
        assert_eq!((converted.flows, converted.left_out.len()), (1, 0));
        converted.rows
    }

    fn end(id: u32, generation: u32) -> FlowEnd {
        FlowEnd { id, generation }
    }

    /// Checks what every conversion keeps: tuples, ends, direction, time; and that either row alone has the same
    /// result.
    fn assert_flow(old: &Old, kinds: [u8; 2], ends: [FlowEnd; 2]) -> Vec<(Tuple, FlowValue)> {
        let all = old.rows();
        let rows = converted(&all);
        for one in all {
            assert_eq!(converted(&[one]), rows, "{:?}", one.1);
        }
        let [sender, receiver] = [0, 1].map(|index| (kinds[index], ends[index]));
        for (tuple, row) in &rows {
            let is_reply = is_reply_row(row);
            let second = sends_second(row);
            assert_eq!(second, tuple.is_second(), "the row is of its tuple's sender");
            assert_eq!(row.is_reply(second), is_reply);
            let expected = if is_reply {
                [receiver, sender]
            } else {
                [sender, receiver]
            };
            assert_eq!([row.sender(second), row.receiver(second)], expected, "{row:?}");
            assert_eq!((row.last_seen, row.lifetime), (9950, 500), "the low half of the time");
            let target = if is_reply { old.original.reversed() } else { old.to };
            let here = Tuple {
                network: tuple.network,
                ..target
            };
            assert_eq!(translated(tuple, row), (here != *tuple).then_some(here));
        }
        let tuples: Vec<Tuple> = rows.iter().map(|(tuple, _)| *tuple).collect();
        let untranslated = Tuple {
            network: old.original.network,
            ..old.to
        } == old.original;
        if untranslated {
            assert_eq!(tuples, [old.original]);
        } else {
            assert_eq!(tuples, [old.to.reversed(), old.original], "the replies' row first");
        }
        rows
    }

    #[test]
    fn two_rows_of_a_direct_flow_become_one() {
        let pairs = [
            ((CLIENT, SERVER), [1, 2]),
            ((SERVER, CLIENT), [2, 1]),
            (("fd00::1", "fd00::200"), [1, 2]),
            (("fd00::200", "fd00::1"), [2, 1]),
        ];
        for ((from, to), [one, two]) in pairs {
            let original = tuple(NETWORK, (from, 40_000), (to, 80), TCP);
            let old = Old::plain(original, [KIND_LOCAL; 2], [(one, 20), (two, 30)]);
            let rows = assert_flow(&old, [END_LOCAL; 2], [end(one, 20), end(two, 30)]);
            let (_, row) = rows[0];
            let opened = if original.is_second() { FLOW_OPENED_BY_SECOND } else { 0 };
            assert_eq!(row.flags, FLOW_REPLIED | FLOW_CONFIRMED | opened);
            assert_eq!(
                (row.source, row.destination, row.ports),
                ([0; 16], [0; 16], Ports::default())
            );
        }
    }

    #[test]
    fn flows_of_the_stack_have_a_far_end_with_the_epoch_of_the_local_one() {
        let outward = tuple(NETWORK, (CLIENT, 40_000), ("192.0.2.9", 443), TCP);
        let old = Old::plain(outward, [KIND_TO_STACK, KIND_FROM_STACK], [(1, 20), (0, 0)]);
        assert_flow(&old, [END_LOCAL, END_STACK], [end(1, 20), end(0, 20)]);
        let inward = tuple(NETWORK, ("192.0.2.9", 50_000), (SERVER, 80), TCP);
        let mut old = Old::plain(inward, [KIND_FROM_STACK, KIND_TO_STACK], [(0, 0), (2, 30)]);
        old.both |= flags::NODE;
        let rows = assert_flow(&old, [END_STACK, END_LOCAL], [end(0, 30), end(2, 30)]);
        assert_ne!(rows[0].1.flags & FLOW_NODE, 0);
    }

    #[test]
    fn flows_through_services_keep_both_rows_with_whole_tuples() {
        let original = tuple(NETWORK, (CLIENT, 40_000), ("10.96.0.1", 80), TCP);
        for (backend, port) in [(SERVER, 8080), (SERVER, 80), ("10.96.0.1", 8080)] {
            let to = tuple(NETWORK, (CLIENT, 40_000), (backend, port), TCP);
            let old = Old {
                to,
                ..Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (2, 30)])
            };
            if backend == SERVER {
                let rows = assert_flow(&old, [END_LOCAL; 2], [end(1, 20), end(2, 30)]);
                assert!(rows.iter().all(|(_, row)| row.flags & FLOW_SERVICE != 0));
            }
        }
        // To a backend outside, through the stack.
        let to = tuple(NETWORK, (CLIENT, 40_000), ("198.51.100.7", 80), TCP);
        let old = Old {
            to,
            ..Old::plain(original, [KIND_TO_STACK, KIND_FROM_STACK], [(1, 20), (0, 0)])
        };
        assert_flow(&old, [END_LOCAL, END_STACK], [end(1, 20), end(0, 20)]);
    }

    #[test]
    fn a_pod_that_reaches_itself_is_translated_at_both_ends() {
        for (pod, virtual_address) in [(CLIENT, "10.96.0.1"), ("fd00::1", "fd96::1")] {
            let original = tuple(NETWORK, (pod, 40_000), (virtual_address, 80), TCP);
            let to = tuple(NETWORK, (virtual_address, 40_000), (pod, 8080), TCP);
            let mut old = Old {
                to,
                ..Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (1, 20)])
            };
            old.both |= flags::HAIRPIN;
            let rows = assert_flow(&old, [END_LOCAL; 2], [end(1, 20), end(1, 20)]);
            assert!(rows.iter().all(|(_, row)| row.flags & FLOW_HAIRPIN != 0));
        }
    }

    #[test]
    fn masqueraded_flows_keep_their_row_outside() {
        let cases = [
            (CLIENT, "198.51.100.7", "192.0.2.1", "198.51.100.7", 0),
            (CLIENT, "10.96.0.1", "192.0.2.1", "198.51.100.7", FLOW_SERVICE),
            ("fd00::1", "2001:db8::7", "2001:db8:1::1", "2001:db8::7", 0),
        ];
        for (pod, destination, node, server, service) in cases {
            let original = tuple(NETWORK, (pod, 40_000), (destination, 443), UDP);
            let to = tuple(OUTSIDE, (node, 61_000), (server, 443), UDP);
            let old = Old {
                to,
                ..Old::plain(original, [KIND_UPLINK; 2], [(1, 20), (0, 0)])
            };
            let rows = assert_flow(&old, [END_LOCAL, END_OUTSIDE], [end(1, 20), end(UPLINK, 20)]);
            for (_, row) in &rows {
                assert_eq!(row.flags & FLOW_SERVICE, service, "masquerading alone is no service");
            }
            assert_eq!(rows[0].0.network, OUTSIDE);
        }
    }

    #[test]
    fn connections_to_host_ports_keep_their_row_outside() {
        for (peer, node, pod) in [
            ("198.51.100.7", "192.0.2.1", SERVER),
            ("2001:db8::7", "2001:db8:1::1", "fd00::200"),
        ] {
            let original = tuple(OUTSIDE, (peer, 50_000), (node, 18_080), TCP);
            let to = tuple(NETWORK, (peer, 50_000), (pod, 8080), TCP);
            let old = Old {
                to,
                ..Old::plain(original, [KIND_UPLINK; 2], [(0, 0), (2, 30)])
            };
            let rows = assert_flow(&old, [END_OUTSIDE, END_LOCAL], [end(UPLINK, 30), end(2, 30)]);
            assert!(rows.iter().all(|(_, row)| row.flags & FLOW_SERVICE != 0));
            assert_eq!((rows[0].0.network, rows[1].0.network), (NETWORK, OUTSIDE));
        }
    }

    #[test]
    fn a_reply_is_all_that_a_flow_had_to_wait_for() {
        let states = [
            (TCP, 0, 0),
            (TCP, flags::CONFIRMED, FLOW_REPLIED | FLOW_CONFIRMED),
            (
                TCP,
                flags::CONFIRMED | flags::CLOSED,
                FLOW_REPLIED | FLOW_CONFIRMED | FLOW_CLOSED,
            ),
            (UDP, flags::CONFIRMED, FLOW_REPLIED | FLOW_CONFIRMED | FLOW_AGED),
            (UDP, 0, 0),
            (ICMP, flags::CONFIRMED, FLOW_REPLIED | FLOW_CONFIRMED),
        ];
        for (protocol, old_flags, expected) in states {
            let original = tuple(NETWORK, (CLIENT, 40_000), (SERVER, 80), protocol);
            let mut old = Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (2, 30)]);
            old.both = old_flags;
            let rows = converted(&old.rows());
            assert_eq!(rows[0].1.flags, expected, "{protocol} {old_flags}");
        }
    }

    #[test]
    fn each_end_keeps_its_fin() {
        // In the second row of a service's flow the ends are sorted by other addresses.
        let original = tuple(NETWORK, (SERVER, 40_000), ("10.0.0.250", 80), TCP);
        let to = tuple(NETWORK, (SERVER, 40_000), (CLIENT, 8080), TCP);
        assert_ne!(original.is_second(), to.is_second());
        let old = Old {
            to,
            ..Old::plain(original, [KIND_LOCAL; 2], [(2, 30), (1, 20)])
        };
        for fins in [[true, false], [false, true], [true, true]] {
            let mut rows = old.rows();
            for (row, fin) in rows.iter_mut().zip(fins) {
                row.1.flags |= if fin { flags::FIN } else { 0 };
            }
            for (tuple, row) in converted(&rows) {
                let opener_is_second = row.flags & FLOW_OPENED_BY_SECOND != 0;
                let [of_opener, of_receiver] = if opener_is_second {
                    [FLOW_FIN_SECOND, FLOW_FIN_FIRST]
                } else {
                    [FLOW_FIN_FIRST, FLOW_FIN_SECOND]
                };
                let found = [row.flags & of_opener != 0, row.flags & of_receiver != 0];
                assert_eq!(found, fins, "{tuple:?}");
            }
        }
    }

    #[test]
    fn a_flow_that_had_to_be_judged_again_still_has() {
        let original = tuple(NETWORK, (CLIENT, 40_000), (SERVER, 80), TCP);
        let old = Old::plain(original, [KIND_LOCAL; 2], [(1, 19), (2, 30)]);
        let (_, row) = converted(&old.rows())[0];
        let (_, sender) = row.sender(sends_second(&row));
        assert_eq!(sender.generation, 19, "the endpoint's is 20");
        assert!(!is_older(sender.generation, 10), "its owner's");
        // A program was killed, or is at work, between the two rows.
        let mut rows = Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (2, 30)]).rows();
        rows[1].1.destination_generation = 19;
        let (_, row) = converted(&rows)[0];
        assert_eq!(row.sender(sends_second(&row)).1.generation, 19);
    }

    #[test]
    fn flows_of_others_and_expired_ones_are_left_out_with_the_reason() {
        let original = tuple(NETWORK, (CLIENT, 40_000), (SERVER, 80), TCP);
        let plain = || Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (2, 30)]);
        let reasons = |rows: &[OldRow]| {
            let converted = convert(&scene(), rows, 0);
            assert_eq!((converted.rows.len(), converted.flows), (0, 0));
            converted.left_out.into_iter().collect::<Vec<_>>()
        };
        let with = |change: &dyn Fn(&mut rows::FlowValue)| {
            let mut rows = plain().rows();
            for (_, row) in &mut rows {
                change(row);
            }
            rows
        };
        assert_eq!(
            reasons(&with(&|row| row.last_seen = NOW - 501)),
            [(LeftOut::Expired, 2)]
        );
        assert_eq!(reasons(&with(&|row| row.kind = 9)), [(LeftOut::Unknown, 2)]);
        let earlier = Old {
            ends: [(1, 9), (2, 30)],
            ..plain()
        };
        assert_eq!(reasons(&earlier.rows()), [(LeftOut::OtherOwner, 2)]);
        // The free row 3, and a row that does not exist.
        for id in [3, 4] {
            let gone = Old {
                ends: [(1, 20), (id, 30)],
                ..plain()
            };
            assert_eq!(reasons(&gone.rows()[..1]), [(LeftOut::OtherOwner, 1)]);
        }
        // Of another network with equal addresses.
        let other = Tuple { network: 6, ..original };
        let foreign = Old::plain(other, [KIND_LOCAL; 2], [(1, 20), (2, 30)]);
        assert_eq!(reasons(&foreign.rows()), [(LeftOut::OtherOwner, 2)]);
        // One side alone keeps a flow alive.
        let mut rows = plain().rows();
        rows[0].1.last_seen = NOW - 501;
        assert_eq!(converted(&rows)[0].1.last_seen, 9950);
    }

    #[test]
    fn a_later_copy_has_what_was_used_since() {
        let original = tuple(NETWORK, (CLIENT, 40_000), (SERVER, 80), TCP);
        let old = Old::plain(original, [KIND_LOCAL; 2], [(1, 20), (2, 30)]);
        assert_eq!(convert(&scene(), &old.rows(), SEEN).rows.len(), 1);
        assert_eq!(convert(&scene(), &old.rows(), SEEN + 1).rows.len(), 0);
    }

    #[test]
    fn keys_of_both_families_are_read() {
        let ports = Ports {
            source: [1, 2],
            destination: [3, 4],
        };
        let v4 = rows::FlowKey4 {
            network: 5,
            source: [10, 0, 0, 1],
            destination: [10, 0, 0, 2],
            ports,
            protocol: 17,
        };
        let v6 = rows::FlowKey6 {
            network: 5,
            source: bytes("10.0.0.1"),
            destination: bytes("10.0.0.2"),
            ports,
            protocol: 17,
        };
        assert_eq!(v4.tuple(), v6.tuple());
        assert_eq!(v4.tuple(), tuple(5, ("10.0.0.1", 0x102), ("10.0.0.2", 0x304), UDP));
    }
}
