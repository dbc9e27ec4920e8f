//! Sweeps the flow tables: removes expired rows, counts flows by endpoint, removes flows whose destination has another
//! meaning by now.

mod bypass;
mod owners;
mod shares;

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use kni_common::{
    config::FlowShare,
    endpoint::EndpointRow,
    flow::{END_LOCAL, FLOW_SERVICE, FLOW_TRANSLATED, FlowKey4, FlowKey6, FlowValue, WINDOW_SHIFT},
    service::ServiceKey,
    uplink::{Masquerade, OUTSIDE},
};
use kni_model::{EndpointId, GoneBackend, NetworkId};

use super::{
    DataplaneError, FlowRecordView,
    clock::Ticks,
    flow_list, membarrier,
    pin::Pins,
    table::{Row, Table},
    tuple::{FlowKey, Tuple, is_reply_row, translated},
};
pub(super) use bypass::Taken;
use bypass::remove_bypasses;
use owners::{Owners, local_end};
use shares::shares;

/// The flows that count for an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowUse {
    /// Flows of TCP and SCTP that it opened.
    pub connections: u32,
    /// Flows of other protocols that it opened.
    pub datagrams: u32,
    /// Flows that were opened to it by the node or from outside of it.
    pub inbound: u32,
}

impl FlowUse {
    const fn total(self) -> u32 {
        self.connections
            .saturating_add(self.datagrams)
            .saturating_add(self.inbound)
    }
}

/// The result of one sweep of the flow tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FlowCensus {
    /// Rows that stay in `FLOWS4`.
    pub flows4: u32,
    /// Rows that stay in `FLOWS6`.
    pub flows6: u32,
    /// Rows that stay in `NAT4`.
    pub nat4: u32,
    /// Rows that stay in `NAT6`.
    pub nat6: u32,
    /// Removed rows of all of them.
    pub removed: u32,
    /// Flows (not rows) by the endpoint they count for: the sender of the first packet, or its receiver where the
    /// sender was no pod of this node. Closed ones count as long as they have rows. Endpoints without flows are
    /// omitted.
    pub per_endpoint: BTreeMap<EndpointId, FlowUse>,
    /// Ports that masquerading uses, each for one destination, by family (whether it is IPv4) and protocol number.
    pub masquerade: BTreeMap<(bool, u8), u32>,
    /// Duration of the sweep.
    pub duration: Duration,
}

/// The flow tables and the endpoints' shares of them. They need no lock: the programs write them at any time, and if a
/// row that has just changed is removed, the next packet is evaluated again, as after an eviction.
pub(super) struct FlowTables {
    flows4: Table<FlowKey4, FlowValue>,
    flows6: Table<FlowKey6, FlowValue>,
    nat4: Table<FlowKey4, FlowValue>,
    nat6: Table<FlowKey6, FlowValue>,
    shares: Table<u32, FlowShare>,
}

impl FlowTables {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            flows4: Table::open("FLOWS4", &pins.map("FLOWS4"))?,
            flows6: Table::open("FLOWS6", &pins.map("FLOWS6"))?,
            nat4: Table::open("NAT4", &pins.map("NAT4"))?,
            nat6: Table::open("NAT6", &pins.map("NAT6"))?,
            shares: Table::open("FLOW_SHARES", &pins.map("FLOW_SHARES"))?,
        })
    }

    /// Removes rows that are expired at `now` (jiffies), counts the others and publishes each endpoint's count to the
    /// programs. A flow that opens meanwhile may be missing from the count until the next sweep. `egress` are the
    /// addresses that endpoints leave the node with.
    pub(super) fn sweep(
        &self,
        now: u64,
        endpoints: &[(u32, EndpointRow)],
        egress: &[(u32, Masquerade)],
    ) -> Result<FlowCensus, DataplaneError> {
        let begun = Instant::now();
        let owners = Owners::new(endpoints, egress);
        let mut census = FlowCensus::default();
        let ticks = low(now);
        census.flows4 = sweep(&self.flows4, ticks, &owners, &mut census)?;
        census.flows6 = sweep(&self.flows6, ticks, &owners, &mut census)?;
        census.nat4 = sweep_nat(&self.nat4, ticks, &owners, &mut census)?;
        census.nat6 = sweep_nat(&self.nat6, ticks, &owners, &mut census)?;
        let shares = shares(now, endpoints, &census.per_endpoint, self.flows4.capacity());
        self.shares.put_all(&shares)?;
        census.duration = begun.elapsed();
        Ok(census)
    }

    /// All rows of all tables at `now` (jiffies).
    pub(super) fn views(&self, now: u64, ticks: Ticks) -> Result<Vec<FlowRecordView>, DataplaneError> {
        let mut views = Vec::new();
        let mut show = |tuple: Tuple, value: &FlowValue| {
            views.push(flow_list::view(&tuple, value, low(now), ticks));
        };
        read(&self.flows4, &mut show)?;
        read(&self.flows6, &mut show)?;
        read(&self.nat4, &mut show)?;
        read(&self.nat6, &mut show)?;
        Ok(views)
    }

    /// Whether a flow of these packets has a row.
    pub(super) fn contains(&self, tuple: &Tuple) -> Result<bool, DataplaneError> {
        // Only IPv4 has a key of the first kind; as IPv6, a mapped address has no rows.
        match FlowKey4::from_tuple(tuple) {
            Some(key) => Ok(self.flows4.get(&key)?.is_some()),
            None => match FlowKey6::from_tuple(tuple) {
                Some(key) => Ok(self.flows6.get(&key)?.is_some()),
                None => Ok(false),
            },
        }
    }

    /// Removes flows of a network that leave the node or pass its stack: the next packet of each is evaluated again.
    pub(super) fn remove_external(
        &self,
        network: NetworkId,
        endpoints: &[(u32, EndpointRow)],
    ) -> Result<(), DataplaneError> {
        let members = endpoints.iter().filter(|(_, row)| row.network == network.get());
        let members: HashSet<u32> = members.map(|(endpoint, _)| *endpoint).collect();
        remove_external(&self.flows4, network, &members)?;
        remove_external(&self.flows6, network, &members)?;
        // After the pods' own rows, which write them again.
        remove_external(&self.nat4, network, &members)?;
        remove_external(&self.nat6, network, &members)
    }

    /// Removes UDP flows of pods to a port outside of the node: the port is that of tunnels by now, and no packet of a
    /// pod may go there.
    pub(super) fn remove_to_port(&self, port: u16) -> Result<(), DataplaneError> {
        remove_to_port(&self.flows4, port)?;
        remove_to_port(&self.flows6, port)
    }

    /// Removes flows that lead past a Service or a port of the node: the next packet of each is translated. The rows
    /// of what is taken are written before.
    pub(super) fn remove_bypasses(&self, taken: &Taken) -> Result<(), DataplaneError> {
        if taken.is_empty() {
            return Ok(());
        }
        // A program that found no row may write its flow a little later.
        membarrier::wait_for_programs();
        remove_bypasses(&self.flows4, taken)?;
        remove_bypasses(&self.flows6, taken)
    }

    /// The backends that UDP flows through Services have.
    pub(super) fn service_backends(&self) -> Result<HashSet<ServiceBackend>, DataplaneError> {
        let mut found = HashSet::new();
        let mut add = |tuple: Tuple, value: &FlowValue| {
            let is_udp = i32::from(tuple.protocol) == libc::IPPROTO_UDP;
            found.extend(service_backend(&tuple, value).filter(|_| is_udp));
        };
        read(&self.flows4, &mut add)?;
        read(&self.flows6, &mut add)?;
        Ok(found)
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
            show(key.tuple(value), value);
        }
        Ok(())
    })
}

fn remove_external<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    network: NetworkId,
    members: &HashSet<u32>,
) -> Result<(), DataplaneError> {
    let network_id = network.get();
    table.walk(|keys, values| {
        let is_members = |network: u32, value: &FlowValue| match network {
            OUTSIDE => local_end(value).is_some_and(|end| members.contains(&end.id)),
            other => other == network_id,
        };
        let is_external = |value: &FlowValue| value.first_kind != END_LOCAL || value.second_kind != END_LOCAL;
        let rows = keys.iter().zip(values);
        let rows = rows.filter(|(key, value)| is_members(key.ends().network, value) && is_external(value));
        table.remove_all(&rows.map(|(key, _)| *key).collect::<Vec<_>>())
    })
}

fn remove_to_port<K: FlowKey + Row>(table: &Table<K, FlowValue>, port: u16) -> Result<(), DataplaneError> {
    let port = port.to_be_bytes();
    table.walk(|keys, values| {
        let is_to_port = |key: &K, value: &FlowValue| {
            let tuple = key.tuple(value);
            let last = translated(&tuple, value).unwrap_or(tuple);
            let is_external = value.first_kind != END_LOCAL || value.second_kind != END_LOCAL;
            i32::from(tuple.protocol) == libc::IPPROTO_UDP && is_external && last.ports.destination == port
        };
        let rows = keys.iter().zip(values).filter(|(key, value)| is_to_port(key, value));
        table.remove_all(&rows.map(|(key, _)| *key).collect::<Vec<_>>())
    })
}

/// A service port and one of its backends: address and port.
pub(super) type ServiceBackend = (ServiceKey, [u8; 16], [u8; 2]);

fn remove_to_backends<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    gone: &HashSet<ServiceBackend>,
) -> Result<(), DataplaneError> {
    table.walk(|keys, values| {
        let rows = keys.iter().zip(values).map(|(key, value)| (key.tuple(value), value));
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
    let is_original =
        value.flags & (FLOW_TRANSLATED | FLOW_SERVICE) == FLOW_TRANSLATED | FLOW_SERVICE && !is_reply_row(value);
    is_original.then_some((service_key(tuple), value.destination, value.ports.destination))
}

/// The service port that the packets are for, if there is one.
fn service_key(tuple: &Tuple) -> ServiceKey {
    ServiceKey {
        network: tuple.network,
        address: tuple.destination,
        port: tuple.ports.destination,
        protocol: tuple.protocol.into(),
    }
}

/// The tuple of a translated flow's replies, as the backend sends them.
fn reply(tuple: &Tuple, value: &FlowValue) -> Tuple {
    translated(tuple, value).unwrap_or(*tuple).reversed()
}

/// The low 32 bits of a time in jiffies.
#[expect(clippy::cast_possible_truncation, reason = "the low 32 bits")]
const fn low(jiffies: u64) -> u32 {
    jiffies as u32
}

/// Removes expired rows, adds the others to the census and returns how many rows stay.
fn sweep<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    now: u32,
    owners: &Owners<'_>,
    census: &mut FlowCensus,
) -> Result<u32, DataplaneError> {
    let mut kept = 0;
    table.walk(|keys, values| {
        let mut removed = Vec::new();
        for (key, value) in keys.iter().zip(values) {
            let Tuple { protocol, .. } = key.ends();
            if !value.is_live(now) {
                removed.push(*key);
                continue;
            }
            kept += 1;
            count(protocol, value, owners, census);
        }
        census.removed += u32::try_from(removed.len()).unwrap_or(u32::MAX);
        table.remove_all(&removed)
    })?;
    Ok(kept)
}

/// Adds a flow to its endpoint's count, with the row of its original direction.
fn count(protocol: u8, value: &FlowValue, owners: &Owners<'_>, census: &mut FlowCensus) {
    if !is_reply_row(value)
        && let Some((owner, inbound)) = owners.of(value)
    {
        let used = census.per_endpoint.entry(owner).or_default();
        *class(used, protocol, inbound) += 1;
    }
}

/// [`sweep`] of flows across the uplink. A program may take over a dead row for another flow at any moment: rows stay
/// until they have been dead for a while, and are read again before they are removed.
fn sweep_nat<K: FlowKey + Row>(
    table: &Table<K, FlowValue>,
    now: u32,
    owners: &Owners<'_>,
    census: &mut FlowCensus,
) -> Result<u32, DataplaneError> {
    let is_dead = |value: &FlowValue| value.age(now) > value.lifetime.saturating_add(1 << WINDOW_SHIFT);
    let mut kept = 0;
    table.walk(|keys, values| {
        for (key, value) in keys.iter().zip(values) {
            let tuple = key.tuple(value);
            if is_dead(value) || owners.is_orphan(value, now) || owners.has_moved(&tuple, value) {
                if table.get(key)? == Some(*value) {
                    table.remove(key)?;
                    census.removed += 1;
                }
                continue;
            }
            kept += 1;
            if is_reply_row(value) && value.is_live(now) {
                *census.masquerade.entry((K::IS_IPV4, tuple.protocol)).or_default() += 1;
            }
            count(tuple.protocol, value, owners, census);
        }
        Ok(())
    })?;
    Ok(kept)
}

/// The count of a flow's class, as in the programs.
fn class(used: &mut FlowUse, protocol: u8, inbound: bool) -> &mut u32 {
    if inbound {
        &mut used.inbound
    } else if matches!(i32::from(protocol), libc::IPPROTO_TCP | libc::IPPROTO_SCTP) {
        &mut used.connections
    } else {
        &mut used.datagrams
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use kni_common::{
        address::{AddressKey, from_ip},
        config::{FlowCount, SHARE_WINDOW_SHIFT},
        flow::{
            END_OUTSIDE, END_STACK, FLOW_CLOSED, FLOW_FROM_SECOND, FLOW_HAIRPIN, FLOW_OPENED_BY_SECOND, FlowEnd, Ports,
        },
        service::BackendValue,
        uplink::HostPortKey,
    };

    use super::*;
    use crate::table::fixture;

    const TCP: u8 = 6;
    const UDP: u8 = 17;
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
                check: 0,
            },
        }
    }

    fn tables() -> FlowTables {
        FlowTables {
            flows4: fixture::hash(10_000),
            flows6: fixture::hash(10_000),
            nat4: fixture::hash(10_000),
            nat6: fixture::hash(10_000),
            shares: fixture::array(16),
        }
    }

    fn put(tables: &FlowTables, tuple: &Tuple, value: FlowValue) {
        let is_outside = tuple.network == OUTSIDE;
        let (of_v4, of_v6) = if is_outside {
            (&tables.nat4, &tables.nat6)
        } else {
            (&tables.flows4, &tables.flows6)
        };
        match FlowKey4::from_tuple(tuple) {
            Some(key) => of_v4.put(&key, &value).unwrap(),
            None => of_v6.put(&FlowKey6::from_tuple(tuple).unwrap(), &value).unwrap(),
        }
    }

    fn holds(tables: &FlowTables, tuple: &Tuple) -> bool {
        let is_outside = tuple.network == OUTSIDE;
        let (of_v4, of_v6) = if is_outside {
            (&tables.nat4, &tables.nat6)
        } else {
            (&tables.flows4, &tables.flows6)
        };
        match FlowKey4::from_tuple(tuple) {
            Some(key) => of_v4.get(&key).unwrap().is_some(),
            None => of_v6.get(&FlowKey6::from_tuple(tuple).unwrap()).unwrap().is_some(),
        }
    }

    /// The row of packets with that tuple, of a flow that their sender opened.
    fn opened(tuple: &Tuple, from: (u8, FlowEnd), to: (u8, FlowEnd)) -> FlowValue {
        let second = tuple.is_second();
        let (first, last) = if second { (to, from) } else { (from, to) };
        FlowValue {
            first_kind: first.0,
            second_kind: last.0,
            first: first.1,
            second: last.1,
            flags: if second { FLOW_OPENED_BY_SECOND } else { 0 },
            ..FlowValue::default()
        }
    }

    /// The row of packets of one direction, which become packets of another tuple.
    fn translated_row(tuple: &Tuple, to: &Tuple, flags: u16, is_reply: bool) -> FlowValue {
        let second = tuple.is_second();
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        FlowValue {
            flags: FLOW_TRANSLATED
                | flags
                | flag(second, FLOW_FROM_SECOND)
                | flag(second != is_reply, FLOW_OPENED_BY_SECOND),
            ports: to.ports,
            source: to.source,
            destination: to.destination,
            ..FlowValue::default()
        }
    }

    /// A flow from `question`, translated to `behind`: the tuples and rows of both directions.
    fn service(question: Tuple, behind: Tuple, flags: u16) -> [(Tuple, FlowValue); 2] {
        let flags = flags | FLOW_SERVICE;
        let (answer, told) = (behind.reversed(), question.reversed());
        [
            (question, translated_row(&question, &behind, flags, false)),
            (answer, translated_row(&answer, &told, flags, true)),
        ]
    }

    #[test]
    fn udp_flows_to_a_deleted_backend_are_removed_with_their_replies_and_no_others() {
        for (client, virtual_ip, backend, other) in [
            ("10.0.0.2", "10.96.0.10", "10.0.0.9", "10.0.0.8"),
            ("fd00::2", "fd96::10", "fd00::9", "fd00::8"),
        ] {
            let tables = tables();
            let question = tuple((client, 4000), (virtual_ip, 53));
            let through = |port, to| {
                let question = tuple((client, port), (virtual_ip, if port == 4004 { 54 } else { 53 }));
                service(question, tuple((client, port), to), 0)
            };
            let first = through(4000, (backend, 5353));
            // A pod that connects to itself: its replies go to the virtual address.
            let hairpin = service(
                tuple((backend, 4001), (virtual_ip, 53)),
                tuple((virtual_ip, 4001), (backend, 5353)),
                FLOW_HAIRPIN,
            );
            // Another backend, another port of the backend, another service, and the pod by its own address.
            let direct = tuple((client, 4005), (backend, 5353));
            let ends = ((END_LOCAL, FlowEnd::default()), (END_LOCAL, FlowEnd::default()));
            let kept: Vec<(Tuple, FlowValue)> = [
                through(4002, (other, 5353)),
                through(4003, (backend, 5354)),
                through(4004, (backend, 5353)),
            ]
            .into_iter()
            .flatten()
            .chain([(direct, opened(&direct, ends.0, ends.1))])
            .collect();
            for (tuple, value) in first.iter().chain(&hairpin).chain(&kept) {
                put(&tables, tuple, *value);
            }
            let elsewhere = Tuple { network: 6, ..question };
            put(&tables, &elsewhere, first[0].1);
            tables
                .remove_to_backends(&[gone(virtual_ip, 53, backend, 5353, 6)])
                .unwrap();
            assert!(holds(&tables, &question), "a TCP service's backend ends no UDP flow");
            tables
                .remove_to_backends(&[gone(virtual_ip, 53, backend, 5353, 17)])
                .unwrap();
            for (removed, _) in first.iter().chain(&hairpin) {
                assert!(!holds(&tables, removed), "{removed:?}");
            }
            assert!(kept.iter().all(|(tuple, _)| holds(&tables, tuple)));
            assert!(holds(&tables, &elsewhere), "another network's flow");
        }
    }

    #[test]
    fn flows_past_what_their_destination_is_by_now_are_removed() {
        for (client, host, backend) in [
            ("10.0.0.2", "192.0.2.1", "10.0.0.9"),
            ("fd00::2", "2001:db8::1", "fd00::9"),
            // The other order of the ends in the key.
            ("192.0.2.9", "10.0.0.1", "10.0.0.9"),
        ] {
            let tables = tables();
            let ends = ((END_LOCAL, FlowEnd::default()), (END_STACK, FlowEnd::default()));
            let direct = |tuple: Tuple| (tuple, opened(&tuple, ends.0, ends.1));
            let past = direct(tuple((client, 4000), (host, 53)));
            let masqueraded = tuple((client, 4001), (host, 53));
            let outside = tuple(("198.51.100.1", 4001), (host, 53));
            let leaving = (masqueraded, translated_row(&masqueraded, &outside, 0, false));
            let through = service(
                tuple((client, 4002), (host, 53)),
                tuple((client, 4002), (backend, 53)),
                0,
            );
            let connection = direct(Tuple {
                protocol: TCP,
                ..past.0
            });
            let elsewhere = direct(Tuple { network: 6, ..past.0 });
            let other_port = direct(tuple((client, 4000), (host, 54)));
            let from_there = direct(tuple((host, 53), (client, 4003)));
            let rows = [past, leaving, connection, elsewhere, other_port, from_there];
            for (tuple, value) in rows.iter().chain(&through) {
                put(&tables, tuple, *value);
            }
            let remain = |expected: &[bool]| {
                let found: Vec<bool> = rows.iter().map(|(tuple, _)| holds(&tables, tuple)).collect();
                assert_eq!(found, expected, "{client}");
                assert!(through.iter().all(|(tuple, _)| holds(&tables, tuple)), "{client}");
            };
            let mut ports = Taken::default();
            ports.add_ports(&[HostPortKey {
                address: bytes(host),
                port: 53_u16.to_be_bytes(),
                protocol: u16::from(UDP),
            }]);
            tables.remove_bypasses(&Taken::default()).unwrap();
            remain(&[true; 6]);
            tables.remove_bypasses(&ports).unwrap();
            remain(&[false, false, true, false, true, true]);
            put(&tables, &elsewhere.0, elsewhere.1);
            let mut addresses = Taken::default();
            addresses.add_addresses(&[AddressKey {
                network: NETWORK,
                address: bytes(host),
            }]);
            tables.remove_bypasses(&addresses).unwrap();
            remain(&[false, false, true, true, false, true]);
            put(&tables, &past.0, past.1);
            put(&tables, &other_port.0, other_port.1);
            let mut services = Taken::default();
            services.add_service_ports(&[service_key(&other_port.0)]);
            tables.remove_bypasses(&services).unwrap();
            remain(&[true, false, true, true, false, true]);
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

    const fn local(id: u32, generation: u32) -> (u8, FlowEnd) {
        (END_LOCAL, FlowEnd { id, generation })
    }

    const STACK: (u8, FlowEnd) = (END_STACK, FlowEnd { id: 0, generation: 12 });

    fn flow(tuple: &Tuple, from: (u8, FlowEnd), to: (u8, FlowEnd), last_seen: u32) -> FlowValue {
        FlowValue {
            last_seen,
            lifetime: 100,
            ..opened(tuple, from, to)
        }
    }

    /// 300 flows of endpoint 1 to endpoint 2, and other kinds of rows.
    fn fill(tables: &FlowTables, now: u32) {
        // A third of them is expired.
        for port in 0..300_u16 {
            let last_seen = if port % 3 == 0 { now - 101 } else { now - 100 };
            let question = tuple(("10.0.0.1", port), ("10.0.0.2", 80));
            put(
                tables,
                &question,
                flow(&question, local(1, 12), local(2, 20), last_seen),
            );
        }
        let connection = |port| Tuple {
            protocol: TCP,
            ..tuple(("10.0.0.1", port), ("10.0.0.2", 80))
        };
        let outside = tuple(("192.0.2.1", 1), ("10.0.0.2", 80));
        let through_stack = tuple(("10.0.0.1", 1002), ("10.0.0.2", 80));
        let former = tuple(("10.0.0.1", 1003), ("10.0.0.2", 80));
        let later = tuple(("fd00::2", 4), ("2001:db8::1", 80));
        let closed = FlowValue {
            flags: FLOW_CLOSED,
            ..flow(&connection(2), local(1, 12), local(2, 20), now)
        };
        let rows = [
            (connection(1), flow(&connection(1), local(1, 12), local(2, 20), now)),
            // Closed, but it still has a row.
            (connection(2), closed),
            // From outside, and from a pod by way of the stack: the receiver's.
            (outside, flow(&outside, STACK, local(2, 20), now)),
            (through_stack, flow(&through_stack, STACK, local(2, 21), now)),
            // Of an earlier owner of the same number: counts for no endpoint.
            (former, flow(&former, local(1, 9), local(2, 20), now)),
            // Seen after the clock was read.
            (later, flow(&later, local(2, 20), STACK, now + 3)),
        ];
        for (tuple, value) in rows {
            put(tables, &tuple, value);
        }
        // Two rows, one flow.
        let question = tuple(("10.0.0.2", 9), ("10.96.0.1", 53));
        for (tuple, row) in service(question, tuple(("10.0.0.2", 9), ("10.0.0.1", 53)), 0) {
            let is_question = tuple == question;
            let ends = if is_question {
                (local(2, 20), local(1, 12))
            } else {
                (local(1, 12), local(2, 20))
            };
            let sorted = flow(&tuple, ends.0, ends.1, now);
            put(
                tables,
                &tuple,
                FlowValue {
                    flags: row.flags,
                    ..sorted
                },
            );
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
        fill(&tables, low(now));
        let census = tables.sweep(now, &endpoints, &[]).unwrap();
        assert_eq!((census.flows4, census.flows6, census.removed), (207, 1, 100));
        let one = FlowUse {
            connections: 2,
            datagrams: 200,
            inbound: 0,
        };
        let two = FlowUse {
            connections: 0,
            datagrams: 2,
            inbound: 2,
        };
        let owners = [(EndpointId(1), one), (EndpointId(2), two)];
        assert_eq!(census.per_endpoint, owners.into_iter().collect());
        let share = |used: FlowUse| {
            let count = |counted| FlowCount { counted, opened: 0 };
            FlowShare {
                window: 5,
                limit: 0,
                connections: count(used.connections),
                datagrams: count(used.datagrams),
                inbound: count(used.inbound),
            }
        };
        assert_eq!(tables.shares.get(&1).unwrap(), Some(share(one)));
        assert_eq!(tables.shares.get(&2).unwrap(), Some(share(two)));
        assert_eq!(tables.shares.get(&3).unwrap(), Some(FlowShare::default()));
        let again = tables.sweep(now, &endpoints, &[]).unwrap();
        assert_eq!((again.removed, again.flows4), (0, 207));
        assert_eq!(tables.sweep(now + 4 + 100, &endpoints, &[]).unwrap().removed, 208);
    }

    #[test]
    fn ages_are_right_when_the_clock_wraps() {
        let tables = tables();
        let now = u64::from(u32::MAX) + 50;
        let endpoints = [
            (1, endpoint([10, 0, 0, 1], "fd00::1", 10)),
            (2, endpoint([10, 0, 0, 2], "fd00::2", 20)),
        ];
        for (port, age, stays) in [(1, 60_u32, true), (2, 100, true), (3, 101, false)] {
            let question = tuple(("10.0.0.1", port), ("10.0.0.2", 80));
            let row = flow(&question, local(1, 12), local(2, 20), low(now).wrapping_sub(age));
            put(&tables, &question, row);
            tables.sweep(now, &endpoints, &[]).unwrap();
            assert_eq!(holds(&tables, &question), stays, "{age}");
        }
    }

    /// The tuple of replies to port `port` of the node, and their row; the pod is endpoint 1.
    fn masqueraded(node: &str, port: u16, generation: u32, last_seen: u32) -> (Tuple, FlowValue) {
        let tuple = Tuple {
            network: OUTSIDE,
            ..tuple(("192.0.2.9", 53), (node, port))
        };
        let outside = (END_OUTSIDE, FlowEnd { id: 2, generation: 12 });
        let row = FlowValue {
            flags: translated_row(&tuple, &tuple, 0, true).flags,
            ..flow(&tuple, outside, local(1, generation), last_seen)
        };
        (tuple, row)
    }

    #[test]
    fn masqueraded_rows_of_deleted_endpoints_give_their_ports_back() {
        let tables = tables();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let rows =
            [(61_000, 12), (61_001, 9)].map(|(port, generation)| masqueraded("198.51.100.1", port, generation, 999));
        for (tuple, row) in &rows {
            put(&tables, tuple, *row);
        }
        let census = tables.sweep(1000, &endpoints, &[]).unwrap();
        assert!(holds(&tables, &rows[0].0));
        assert!(!holds(&tables, &rows[1].0), "of an earlier owner");
        assert_eq!(census.masquerade, [((true, UDP), 1)].into_iter().collect());
        assert_eq!((census.nat4, census.flows4, census.removed), (1, 0, 1));
    }

    #[test]
    fn masqueraded_rows_stay_for_a_while_after_their_death_and_take_no_port_then() {
        let tables = tables();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let (tuple, row) = masqueraded("198.51.100.1", 61_000, 12, 1000);
        put(&tables, &tuple, row);
        for (now, port, stays) in [(1100, 1, true), (1101, 0, true), (1356, 0, true), (1357, 0, false)] {
            let census = tables.sweep(now, &endpoints, &[]).unwrap();
            assert_eq!(census.masquerade.values().sum::<u32>(), port, "{now}");
            assert_eq!(holds(&tables, &tuple), stays, "{now}");
        }
    }

    #[test]
    fn masqueraded_rows_of_a_former_address_are_removed() {
        let tables = tables();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let (tuple, row) = masqueraded("198.51.100.1", 61_000, 12, 1000);
        put(&tables, &tuple, row);
        let leaves = |ipv4, last| Masquerade {
            ipv4,
            first: 61_000,
            last,
            ..Masquerade::default()
        };
        for (egress, stays) in [
            (leaves([198, 51, 100, 1], 65_535), true),
            // Nothing leaves for now: the address may come back.
            (leaves([0; 4], 0), true),
            (leaves([198, 51, 100, 2], 65_535), false),
        ] {
            tables.sweep(1000, &endpoints, &[(1, egress)]).unwrap();
            assert_eq!(holds(&tables, &tuple), stays, "{egress:?}");
        }
    }

    #[test]
    fn listed_flows_have_both_tuples_and_the_age() {
        let tables = tables();
        let question = tuple(("10.0.0.1", 4000), ("10.96.0.10", 53));
        let [(_, row), _] = service(question, tuple(("10.0.0.1", 4000), ("10.0.0.9", 5353)), 0);
        let value = FlowValue {
            flags: row.flags,
            ports: row.ports,
            source: row.source,
            destination: row.destination,
            lifetime: 250,
            ..flow(&question, local(1, 0), local(7, 0), 1000)
        };
        put(&tables, &question, value);
        let views = tables.views(1250, Ticks::with_hz(250)).unwrap();
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
        assert_eq!(view.lifetime, Duration::from_secs(1));
        assert_eq!((view.network, view.from, view.to), (NETWORK, END_LOCAL, END_LOCAL));
    }

    /// Prints the costs that the documents quote: `cargo test -p kni-dataplane --release
    /// costs_of_a_sweep -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn costs_of_a_sweep() {
        let tables = FlowTables {
            flows4: fixture::hash(131_072),
            flows6: fixture::hash(131_072),
            nat4: fixture::hash(65_536),
            nat6: fixture::hash(65_536),
            shares: fixture::array(16),
        };
        let mut rows = Vec::new();
        for number in 0..100_000_u32 {
            let question = Tuple {
                protocol: u8::try_from(number >> 16).unwrap(),
                ..tuple(("10.0.0.1", (number & 0xffff) as u16), ("10.0.0.2", 80))
            };
            rows.push((
                FlowKey4::from_tuple(&question).unwrap(),
                flow(&question, local(1, 12), local(2, 20), 1000),
            ));
        }
        tables.flows4.put_all(&rows).unwrap();
        let endpoints = [(1, endpoint([10, 0, 0, 1], "fd00::1", 10))];
        let begun = Instant::now();
        tables.flows4.walk(|_, _| Ok(())).unwrap();
        println!("walked: {:?}", begun.elapsed());
        for now in [1000, 1000, 1000, 2000] {
            println!("{:?}", tables.sweep(now, &endpoints, &[]).unwrap());
        }
    }
}
