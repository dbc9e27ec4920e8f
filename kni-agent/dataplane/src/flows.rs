//! Sweeps the flow tables: removes expired rows, counts flows by endpoint, removes flows to deleted backends.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant},
};

use kni_common::{
    address::from_ip,
    config::{FlowShare, SHARE_WINDOW_SHIFT},
    endpoint::EndpointRow,
    flow::{
        FLOW_CLOSED, FLOW_REPLY, FLOW_TO, FlowKey4, FlowKey6, FlowValue, KIND_FROM_STACK, KIND_TO_STACK, KIND_UPLINK,
    },
    service::ServiceKey,
    uplink::OUTSIDE,
};
use kni_model::{EndpointId, GoneBackend, NetworkId};

use super::{
    DataplaneError, FlowRecordView,
    clock::Ticks,
    flow_list,
    pin::Pins,
    table::{Row, Table},
    tuple::{FlowKey, Tuple, translated},
};

/// The result of one sweep of the flow tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowCensus {
    /// Rows that stay in `FLOWS4`.
    pub flows4: u32,
    /// Rows that stay in `FLOWS6`.
    pub flows6: u32,
    /// Removed rows of both.
    pub removed: u32,
    /// Flows (not rows) by the endpoint they count for: the sender of the first packet, or its receiver where the
    /// sender was no pod of this node. Endpoints without flows are omitted.
    pub per_endpoint: BTreeMap<EndpointId, u32>,
    /// Ports that masquerading uses, each for one destination, by family (whether it is IPv4) and protocol number.
    pub masquerade: BTreeMap<(bool, u32), u32>,
    /// Duration of the sweep.
    pub duration: Duration,
}

/// The flow tables and the endpoints' shares of them. They need no lock: the programs write them at any time, and if a
/// row that has just changed is removed, the next packet is judged again, as after an eviction.
pub(super) struct FlowTables {
    flows4: Table<FlowKey4, FlowValue>,
    flows6: Table<FlowKey6, FlowValue>,
    shares: Table<u32, FlowShare>,
}

impl FlowTables {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            flows4: Table::open("FLOWS4", &pins.map("FLOWS4"))?,
            flows6: Table::open("FLOWS6", &pins.map("FLOWS6"))?,
            shares: Table::open("FLOW_SHARES", &pins.map("FLOW_SHARES"))?,
        })
    }

    /// Removes rows that are expired at `now` (jiffies), counts the others and publishes each endpoint's count to the
    /// programs. A flow that opens meanwhile may be missing from the count until the next sweep.
    pub(super) fn sweep(&self, now: u64, endpoints: &[(u32, EndpointRow)]) -> Result<FlowCensus, DataplaneError> {
        let begun = Instant::now();
        let owners = Owners::new(endpoints);
        let mut census = FlowCensus::default();
        census.flows4 = sweep(&self.flows4, now, &owners, &mut census)?;
        census.flows6 = sweep(&self.flows6, now, &owners, &mut census)?;
        let shares = shares(now, endpoints, &census.per_endpoint);
        self.shares.put_all(&shares)?;
        census.duration = begun.elapsed();
        Ok(census)
    }

    /// All rows of both tables at `now` (jiffies).
    pub(super) fn views(
        &self,
        now: u64,
        ticks: Ticks,
        endpoints: &[(u32, EndpointRow)],
    ) -> Result<Vec<FlowRecordView>, DataplaneError> {
        let owners = Owners::new(endpoints);
        let mut views = Vec::new();
        let mut show = |tuple: Tuple, value: &FlowValue| {
            let source = owners.sender(&tuple).map(EndpointId);
            views.push(flow_list::view(&tuple, value, now, ticks, source));
        };
        read(&self.flows4, &mut show)?;
        read(&self.flows6, &mut show)?;
        Ok(views)
    }

    /// Removes flows of a network that leave the node or pass its stack: the next packet of each is judged again.
    pub(super) fn remove_external(
        &self,
        network: NetworkId,
        endpoints: &[(u32, EndpointRow)],
    ) -> Result<(), DataplaneError> {
        let members = endpoints.iter().filter(|(_, row)| row.network == network.get());
        let members: HashSet<u32> = members.map(|(endpoint, _)| *endpoint).collect();
        remove_external(&self.flows4, network, &members)?;
        remove_external(&self.flows6, network, &members)
    }

    /// Removes UDP flows through a service to a deleted backend: their clients would send to it indefinitely. TCP and
    /// SCTP connections end by themselves.
    pub(super) fn remove_to_backends(&self, gone: &[GoneBackend]) -> Result<(), DataplaneError> {
        let gone: HashSet<ServiceBackend> = gone
            .iter()
            .filter(|gone| i32::from(gone.service.protocol) == libc::IPPROTO_UDP)
            .map(|gone| (gone.service, gone.backend.address, gone.backend.port))
            .collect();
        if gone.is_empty() {
            return Ok(());
        }
        remove_to_backends(&self.flows4, &gone)?;
        remove_to_backends(&self.flows6, &gone)
    }
}

fn read<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    show: &mut dyn FnMut(Tuple, &FlowValue),
) -> Result<(), DataplaneError> {
    table.walk(|keys, values| {
        for (key, value) in keys.iter().zip(values) {
            show(key.tuple(), value);
        }
        Ok(())
    })
}

fn remove_external<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    network: NetworkId,
    members: &HashSet<u32>,
) -> Result<(), DataplaneError> {
    table.walk(|keys, values| {
        let is_members = |tuple: &Tuple, value: &FlowValue| match tuple.network {
            OUTSIDE => members.contains(&value.destination),
            other => other == network.get(),
        };
        let is_external = |value: &FlowValue| matches!(value.kind, KIND_TO_STACK | KIND_FROM_STACK | KIND_UPLINK);
        let rows = keys.iter().zip(values);
        let rows = rows.filter(|(key, value)| is_members(&key.tuple(), value) && is_external(value));
        table.remove_all(&rows.map(|(key, _)| *key).collect::<Vec<_>>())
    })
}

/// A service port and one of its backends: address and port.
type ServiceBackend = (ServiceKey, [u8; 16], [u8; 2]);

fn remove_to_backends<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    gone: &HashSet<ServiceBackend>,
) -> Result<(), DataplaneError> {
    table.walk(|keys, values| {
        let rows = keys.iter().map(FlowKey::tuple).zip(values);
        // The original direction first: without it the next packet chooses a backend, regardless of the reply's row.
        let stale: Vec<Tuple> = rows
            .filter(|(tuple, value)| service_backend(tuple, value).is_some_and(|backend| gone.contains(&backend)))
            .flat_map(|(tuple, value)| [tuple, reply(&tuple, value)])
            .collect();
        table.remove_all(&stale.iter().filter_map(K::from_tuple).collect::<Vec<_>>())
    })
}

/// The service port and the backend of a translated flow in its original direction.
fn service_backend(tuple: &Tuple, value: &FlowValue) -> Option<ServiceBackend> {
    let is_original = value.flags & FLOW_TO != 0 && value.flags & FLOW_REPLY == 0;
    let service = ServiceKey {
        network: tuple.network,
        address: tuple.destination,
        port: tuple.ports.destination,
        protocol: u16::try_from(tuple.protocol).ok()?,
    };
    is_original.then_some((service, value.address, value.ports.destination))
}

/// The tuple of a translated flow's replies, as the backend sends them.
fn reply(tuple: &Tuple, value: &FlowValue) -> Tuple {
    translated(tuple, value).unwrap_or(*tuple).reversed()
}

/// Maps flows to the endpoints they count for.
struct Owners<'a> {
    by_address: HashMap<(u32, [u8; 16]), u32>,
    rows: HashMap<u32, &'a EndpointRow>,
}

impl<'a> Owners<'a> {
    fn new(endpoints: &'a [(u32, EndpointRow)]) -> Self {
        let mut by_address = HashMap::new();
        let published = || endpoints.iter().filter(|(_, row)| row.network != 0);
        for (endpoint, row) in published() {
            if row.ipv4 != [0; 4] {
                by_address.insert((row.network, from_ip(row.ipv4.into())), *endpoint);
            }
            if row.ipv6 != [0; 16] {
                by_address.insert((row.network, row.ipv6), *endpoint);
            }
        }
        let rows = published().map(|(endpoint, row)| (*endpoint, row)).collect();
        Self { by_address, rows }
    }

    /// The endpoint of the source address.
    fn sender(&self, tuple: &Tuple) -> Option<u32> {
        self.by_address.get(&(tuple.network, tuple.source)).copied()
    }

    /// Whether a masqueraded row belonged to a deleted endpoint: it would block its port for the rest of its lifetime.
    /// An endpoint that was added after the rows were read has flows from `now` on only.
    fn is_orphan(&self, tuple: &Tuple, value: &FlowValue, now: u64) -> bool {
        let is_owner = |row: &&EndpointRow| value.destination_generation >= row.incarnation;
        let has_no_owner = || self.rows.get(&value.destination).is_none_or(|row| !is_owner(row));
        tuple.network == OUTSIDE && value.last_seen < now && has_no_owner()
    }

    /// The endpoint that a row of the original direction counts for, unless the flow is of an earlier owner of its number.
    fn of(&self, tuple: &Tuple, value: &FlowValue) -> Option<EndpointId> {
        // A flow out of the stack counts for its receiver, even if a pod sent it into the stack before.
        let sender = self.sender(tuple).filter(|_| value.kind != KIND_FROM_STACK);
        let (owner, generation) = match sender {
            Some(sender) => (sender, value.source_generation),
            None => (value.destination, value.destination_generation),
        };
        let row = self.rows.get(&owner)?;
        (generation >= row.incarnation).then_some(EndpointId(owner))
    }
}

/// Whether the row is the reply direction of a masqueraded flow, which holds a port.
const fn takes_port(tuple: &Tuple, value: &FlowValue) -> bool {
    tuple.network == OUTSIDE && value.kind == KIND_UPLINK && value.flags & FLOW_REPLY != 0
}

/// Removes expired and orphaned rows, adds the others to the census and returns how many rows stay.
fn sweep<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    now: u64,
    owners: &Owners<'_>,
    census: &mut FlowCensus,
) -> Result<u32, DataplaneError> {
    let mut kept = 0;
    table.walk(|keys, values| {
        let mut removed = Vec::new();
        for (key, value) in keys.iter().zip(values) {
            if is_expired(value, now) || owners.is_orphan(&key.tuple(), value, now) {
                removed.push(*key);
                continue;
            }
            kept += 1;
            if takes_port(&key.tuple(), value) {
                let family = K::IS_IPV4;
                *census.masquerade.entry((family, key.tuple().protocol)).or_default() += 1;
            }
            // A closed flow does not count, as in the programs.
            let is_open = value.flags & (FLOW_REPLY | FLOW_CLOSED) == 0;
            if let Some(owner) = is_open.then(|| owners.of(&key.tuple(), value)).flatten() {
                *census.per_endpoint.entry(owner).or_default() += 1;
            }
        }
        census.removed += u32::try_from(removed.len()).unwrap_or(u32::MAX);
        table.remove_all(&removed)
    })?;
    Ok(kept)
}

/// A program may have updated the row after `now` was read; its age is zero then.
const fn is_expired(value: &FlowValue, now: u64) -> bool {
    now.saturating_sub(value.last_seen) > value.lifetime as u64
}

/// The rows of `FLOW_SHARES`, including those of endpoints without flows.
fn shares(now: u64, endpoints: &[(u32, EndpointRow)], counted: &BTreeMap<EndpointId, u32>) -> Vec<(u32, FlowShare)> {
    #[expect(clippy::cast_possible_truncation, reason = "the programs compare the low 32 bits")]
    let window = (now >> SHARE_WINDOW_SHIFT) as u32;
    let published = endpoints.iter().filter(|(_, row)| row.network != 0);
    published
        .map(|(endpoint, _)| {
            let share = FlowShare {
                counted: counted.get(&EndpointId(*endpoint)).copied().unwrap_or(0),
                opened: 0,
                window,
            };
            (*endpoint, share)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use kni_common::{
        flow::{FLOW_FROM, KIND_LOCAL, KIND_TO_STACK, Ports},
        service::BackendValue,
    };

    use super::*;
    use crate::table::fixture;

    const UDP: u32 = 17;
    const NETWORK: u32 = 5;

    fn bytes(ip: &str) -> [u8; 16] {
        from_ip(ip.parse::<IpAddr>().unwrap())
    }

    fn tuple(source: (&str, u16), destination: (&str, u16)) -> Tuple {
        Tuple {
            network: NETWORK,
            source: bytes(source.0),
            destination: bytes(destination.0),
            ports: Ports {
                source: source.1.to_be_bytes(),
                destination: destination.1.to_be_bytes(),
            },
            protocol: UDP,
        }
    }

    fn row(flags: u16, address: &str, ports: (u16, u16)) -> FlowValue {
        FlowValue {
            flags,
            address: bytes(address),
            ports: Ports {
                source: ports.0.to_be_bytes(),
                destination: ports.1.to_be_bytes(),
            },
            ..FlowValue::default()
        }
    }

    fn gone(ip: &str, port: u16, backend: &str, backend_port: u16, protocol: u16) -> GoneBackend {
        GoneBackend {
            service: ServiceKey {
                network: NETWORK,
                address: bytes(ip),
                port: port.to_be_bytes(),
                protocol,
            },
            id: 1,
            backend: BackendValue {
                address: bytes(backend),
                port: backend_port.to_be_bytes(),
                zero: 0,
            },
        }
    }

    fn tables() -> FlowTables {
        FlowTables {
            flows4: fixture::hash(10_000),
            flows6: fixture::hash(10_000),
            shares: fixture::array(16),
        }
    }

    fn put(tables: &FlowTables, tuple: &Tuple, value: FlowValue) {
        match FlowKey4::from_tuple(tuple) {
            Some(key) => tables.flows4.put(&key, &value).unwrap(),
            None => tables
                .flows6
                .put(&FlowKey6::from_tuple(tuple).unwrap(), &value)
                .unwrap(),
        }
    }

    fn holds(tables: &FlowTables, tuple: &Tuple) -> bool {
        match FlowKey4::from_tuple(tuple) {
            Some(key) => tables.flows4.get(&key).unwrap().is_some(),
            None => tables
                .flows6
                .get(&FlowKey6::from_tuple(tuple).unwrap())
                .unwrap()
                .is_some(),
        }
    }

    #[test]
    fn udp_flows_to_a_deleted_backend_are_removed_with_their_replies_and_no_others() {
        for (client, virtual_ip, backend, other) in [
            ("10.0.0.2", "10.96.0.10", "10.0.0.9", "10.0.0.8"),
            ("fd00::2", "fd96::10", "fd00::9", "fd00::8"),
        ] {
            let tables = tables();
            let question = tuple((client, 4000), (virtual_ip, 53));
            let answer = tuple((backend, 5353), (client, 4000));
            put(&tables, &question, row(FLOW_TO, backend, (4000, 5353)));
            put(&tables, &answer, row(FLOW_FROM | FLOW_REPLY, virtual_ip, (53, 4000)));
            // A pod that connects to itself: its replies go to the virtual address.
            let hairpin = tuple((backend, 4001), (virtual_ip, 53));
            let hairpin_answer = tuple((backend, 5353), (virtual_ip, 4001));
            put(&tables, &hairpin, row(FLOW_TO | FLOW_FROM, backend, (4001, 5353)));
            put(
                &tables,
                &hairpin_answer,
                row(FLOW_TO | FLOW_FROM | FLOW_REPLY, backend, (53, 4001)),
            );
            // Another backend, another port of the backend, another service, and the pod by its own address.
            let kept = [
                (
                    tuple((client, 4002), (virtual_ip, 53)),
                    row(FLOW_TO, other, (4002, 5353)),
                ),
                (
                    tuple((client, 4003), (virtual_ip, 53)),
                    row(FLOW_TO, backend, (4003, 5354)),
                ),
                (
                    tuple((client, 4004), (virtual_ip, 54)),
                    row(FLOW_TO, backend, (4004, 5353)),
                ),
                (tuple((client, 4005), (backend, 5353)), row(0, "::", (0, 0))),
            ];
            for (tuple, value) in kept {
                put(&tables, &tuple, value);
            }
            let elsewhere = Tuple { network: 6, ..question };
            put(&tables, &elsewhere, row(FLOW_TO, backend, (4000, 5353)));
            tables
                .remove_to_backends(&[gone(virtual_ip, 53, backend, 5353, 6)])
                .unwrap();
            assert!(holds(&tables, &question), "a TCP service's backend ends no UDP flow");
            tables
                .remove_to_backends(&[gone(virtual_ip, 53, backend, 5353, 17)])
                .unwrap();
            for removed in [question, answer, hairpin, hairpin_answer] {
                assert!(!holds(&tables, &removed), "{removed:?}");
            }
            assert!(kept.iter().all(|(tuple, _)| holds(&tables, tuple)));
            assert!(holds(&tables, &elsewhere), "another network's flow");
        }
    }

    fn endpoint(ipv4: [u8; 4], ipv6: &str, incarnation: u32) -> EndpointRow {
        EndpointRow {
            network: NETWORK,
            generation: incarnation + 5,
            incarnation,
            ipv4,
            ipv6: bytes(ipv6),
            ..EndpointRow::default()
        }
    }

    fn flow(kind: u16, flags: u16, generations: (u32, u32), destination: u32, last_seen: u64) -> FlowValue {
        FlowValue {
            last_seen,
            source_generation: generations.0,
            destination_generation: generations.1,
            destination,
            lifetime: 100,
            kind,
            flags,
            ..FlowValue::default()
        }
    }

    /// 300 flows of endpoint 1 to endpoint 2, and other kinds of rows.
    fn fill(tables: &FlowTables, now: u64) {
        // With their replies; a third of them is expired.
        for port in 0..300_u16 {
            let last_seen = if port % 3 == 0 { now - 101 } else { now - 100 };
            let question = tuple(("10.0.0.1", port), ("10.0.0.2", 80));
            put(tables, &question, flow(KIND_LOCAL, 0, (12, 20), 2, last_seen));
            put(
                tables,
                &question.reversed(),
                flow(KIND_LOCAL, FLOW_REPLY, (20, 12), 1, last_seen),
            );
        }
        let rows = [
            // From outside, and from a pod by way of the stack: the receiver's.
            (
                tuple(("192.0.2.1", 1), ("10.0.0.2", 80)),
                flow(KIND_FROM_STACK, 0, (0, 20), 2, now),
            ),
            (
                tuple(("10.0.0.1", 1002), ("10.0.0.2", 80)),
                flow(KIND_FROM_STACK, 0, (0, 21), 2, now),
            ),
            // Of an earlier owner of the same number: counts for no endpoint.
            (
                tuple(("10.0.0.1", 1003), ("10.0.0.2", 80)),
                flow(KIND_LOCAL, 0, (9, 20), 2, now),
            ),
            // Seen after the clock was read.
            (
                tuple(("fd00::2", 4), ("2001:db8::1", 80)),
                flow(KIND_TO_STACK, 0, (20, 0), 0, now + 3),
            ),
        ];
        for (tuple, value) in rows {
            put(tables, &tuple, value);
        }
    }

    #[test]
    fn a_sweep_removes_expired_rows_and_counts_flows_for_their_owners() {
        let tables = tables();
        let now = 5 << SHARE_WINDOW_SHIFT;
        let endpoints = [
            (1, endpoint([10, 0, 0, 1], "fd00::1", 10)),
            (2, endpoint([10, 0, 0, 2], "fd00::2", 20)),
            (3, EndpointRow::default()),
        ];
        tables
            .shares
            .put(
                &1,
                &FlowShare {
                    counted: 9,
                    opened: 9,
                    window: 1,
                },
            )
            .unwrap();
        fill(&tables, now);
        let census = tables.sweep(now, &endpoints).unwrap();
        assert_eq!((census.flows4, census.flows6, census.removed), (403, 1, 200));
        let owners = [(EndpointId(1), 200), (EndpointId(2), 3)];
        assert_eq!(census.per_endpoint, owners.into_iter().collect());
        let share = |counted| FlowShare {
            counted,
            opened: 0,
            window: 5,
        };
        assert_eq!(tables.shares.get(&1).unwrap(), Some(share(200)));
        assert_eq!(tables.shares.get(&2).unwrap(), Some(share(3)));
        assert_eq!(tables.shares.get(&3).unwrap(), Some(FlowShare::default()));
        let again = tables.sweep(now, &endpoints).unwrap();
        assert_eq!((again.removed, again.flows4), (0, 403));
        assert_eq!(tables.sweep(now + 4 + 100, &endpoints).unwrap().removed, 404);
    }

    #[test]
    fn listed_flows_have_both_tuples_and_the_age() {
        let tables = tables();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let value = FlowValue {
            last_seen: 1000,
            destination: 7,
            lifetime: 250,
            kind: KIND_LOCAL,
            ..row(FLOW_TO, "10.0.0.9", (4000, 5353))
        };
        put(&tables, &tuple(("10.0.0.1", 4000), ("10.96.0.10", 53)), value);
        let views = tables.views(1250, Ticks::with_hz(250), &endpoints).unwrap();
        let [view] = views.try_into().unwrap();
        let before = flow_list::FlowTuple {
            source: "10.0.0.1".parse().unwrap(),
            destination: "10.96.0.10".parse().unwrap(),
            source_port: 4000,
            destination_port: 53,
            protocol: 17,
        };
        assert_eq!(view.tuple, before);
        let behind = flow_list::FlowTuple {
            destination: "10.0.0.9".parse().unwrap(),
            destination_port: 5353,
            ..before
        };
        assert_eq!(view.translated, Some(behind));
        assert_eq!(
            (view.source, view.destination),
            (Some(EndpointId(1)), Some(EndpointId(7)))
        );
        assert_eq!(
            (view.age, view.lifetime),
            (Duration::from_secs(1), Duration::from_secs(1))
        );
        assert_eq!((view.network, view.kind, view.flags), (NETWORK, KIND_LOCAL, FLOW_TO));
    }

    /// Prints the costs that the documents quote: `cargo test -p kni-dataplane --release costs_of_a_sweep -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn costs_of_a_sweep() {
        let tables = FlowTables {
            flows4: fixture::hash(131_072),
            flows6: fixture::hash(131_072),
            shares: fixture::array(16),
        };
        let mut rows = Vec::new();
        for number in 0..100_000_u32 {
            let question = Tuple {
                protocol: number >> 16,
                ..tuple(("10.0.0.1", (number & 0xffff) as u16), ("10.0.0.2", 80))
            };
            rows.push((
                FlowKey4::from_tuple(&question).unwrap(),
                flow(KIND_LOCAL, 0, (12, 20), 2, 1000),
            ));
        }
        tables.flows4.put_all(&rows).unwrap();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let begun = Instant::now();
        tables.flows4.walk(|_, _| Ok(())).unwrap();
        println!("walked: {:?}", begun.elapsed());
        for now in [1000, 1000, 1000, 2000] {
            println!("{:?}", tables.sweep(now, &endpoints).unwrap());
        }
    }
}
