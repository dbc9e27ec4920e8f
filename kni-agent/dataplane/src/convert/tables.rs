//! Converts everything but flows: endpoints, their policies, addresses, routes, services and the uplink's rows.

use std::time::Duration;

use kni_common::{
    address::{AddressKey, AddressValue},
    config::Config,
    endpoint::{EndpointPolicy, EndpointRow, MacPair},
    policy::{IdentityKey, IdentityValue, PolicyKey, PolicyValue, PortKey, PortValue},
    route::{RouteKey, RouteValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
    uplink::{HostPortKey, HostPortValue, Masquerade, SourceKey, SourceValue},
};

use super::{Predecessor, rows};
use crate::{
    DataplaneError, FlowLifetimes,
    clock::Ticks,
    pin::Pins,
    table::{Row, Table},
};

/// Fills new maps with the rows of the old ones. No program uses the new ones yet, so that their order is free.
///
/// Counters, events and shares of the flow tables begin anew: the next sweep counts the flows.
pub(super) fn convert(old: &Predecessor, pins: &Pins) -> Result<(), DataplaneError> {
    endpoints(&old.endpoints, pins)?;
    let config: Table<u32, Config> = Table::open("CONFIG", &pins.map("CONFIG"))?;
    config.put(&0, &today(&old.config, Ticks::of_kernel()?))?;
    let routes: Table<RouteKey, RouteValue> = Table::open("ROUTES", &pins.map("ROUTES"))?;
    let rows = old.open::<RouteKey, rows::Route>("ROUTES")?.rows()?;
    routes.put_all(&map(rows, |row| route(*row)))?;
    // The rows of these are today's.
    copy::<u32, u32>(old, pins, "INTERFACES")?;
    copy::<AddressKey, AddressValue>(old, pins, "ADDRESSES")?;
    copy::<PolicyKey, PolicyValue>(old, pins, "POLICY")?;
    copy::<PortKey, PortValue>(old, pins, "PORTS")?;
    copy::<IdentityKey, IdentityValue>(old, pins, "IDENTITIES")?;
    copy::<HostPortKey, HostPortValue>(old, pins, "HOST_PORTS")?;
    let services = old.open::<ServiceKey, rows::Service>("SERVICES")?.rows()?;
    Table::open("SERVICES", &pins.map("SERVICES"))?.put_all(&with_keys(services, service))?;
    let backends = old.open::<BackendKey, rows::Backend>("BACKENDS")?.rows()?;
    Table::open("BACKENDS", &pins.map("BACKENDS"))?.put_all(&with_keys(backends, |key, old| backend(*key, old)))?;
    let sources: Table<SourceKey, SourceValue> = Table::open("SOURCES", &pins.map("SOURCES"))?;
    sources.put_all(&map(old.open::<SourceKey, SourceValue>("SOURCES")?.rows()?, |old| {
        source(*old)
    }))?;
    let masquerade: Table<u32, Masquerade> = Table::open("MASQUERADE", &pins.map("MASQUERADE"))?;
    let rows = old.open::<u32, Masquerade>("MASQUERADE")?.rows()?;
    masquerade.put_all(&within(rows, masquerade.capacity()))?;
    // Traffic writes the next rows. Those of fragments count for seconds only.
    if let Err(error) = copy::<AffinityKey, AffinityValue>(old, pins, "AFFINITY") {
        tracing::warn!(%error, "a table of the former layout is ignored");
    }
    Ok(())
}

fn copy<K: Row, V: Row>(old: &Predecessor, pins: &Pins, name: &'static str) -> Result<(), DataplaneError> {
    let rows = old.open::<K, V>(name)?.rows()?;
    Table::open(name, &pins.map(name))?.put_all(&rows)
}

fn map<K, V, W>(rows: Vec<(K, V)>, value: impl Fn(&V) -> W) -> Vec<(K, W)> {
    rows.into_iter().map(|(key, old)| (key, value(&old))).collect()
}

fn with_keys<K, V, W>(rows: Vec<(K, V)>, value: impl Fn(&K, &V) -> W) -> Vec<(K, W)> {
    let convert = |(key, old): (K, V)| {
        let value = value(&key, &old);
        (key, value)
    };
    rows.into_iter().map(convert).collect()
}

fn service(key: &ServiceKey, old: &rows::Service) -> ServiceValue {
    let row = ServiceValue {
        service: old.id,
        backends: old.backends,
        count: old.count,
        flags: old.flags,
        affinity: old.affinity,
        check: 0,
    };
    ServiceValue {
        check: row.seal(key),
        ..row
    }
}

fn backend(key: BackendKey, old: &rows::Backend) -> BackendValue {
    let row = BackendValue {
        address: old.address,
        port: old.port,
        zero: old.zero,
        check: 0,
    };
    BackendValue {
        check: row.seal(&key),
        ..row
    }
}

/// The reasons got other numbers.
const fn source(old: SourceValue) -> SourceValue {
    let moved = if old.verdict < rows::FIRST_DROP {
        0
    } else {
        rows::DROPS_MOVED
    };
    SourceValue {
        verdict: old.verdict + moved,
    }
}

/// The rows of an array that fit into another one.
fn within<V>(rows: Vec<(u32, V)>, capacity: u32) -> Vec<(u32, V)> {
    rows.into_iter().filter(|(index, _)| *index < capacity).collect()
}

/// Free rows too: they keep the highest generation.
fn endpoints(old: &[(u32, rows::Endpoint)], pins: &Pins) -> Result<(), DataplaneError> {
    let endpoints: Table<u32, EndpointRow> = Table::open("ENDPOINTS", &pins.map("ENDPOINTS"))?;
    let policies: Table<u32, EndpointPolicy> = Table::open("ENDPOINT_POLICIES", &pins.map("ENDPOINT_POLICIES"))?;
    let fitting = within(old.to_vec(), endpoints.capacity());
    policies.put_all(&map(fitting.clone(), policy))?;
    endpoints.put_all(&map(fitting, endpoint))
}

/// The row keeps its generation and its incarnation, and the epoch begins with the generation: rows of flows and
/// addresses that name them stay right.
const fn endpoint(old: &rows::Endpoint) -> EndpointRow {
    EndpointRow {
        from_pod: MacPair {
            destination: old.host_mac,
            source: old.mac,
        },
        to_pod: MacPair {
            destination: old.mac,
            source: old.host_mac,
        },
        network: old.network,
        generation: old.generation,
        incarnation: old.incarnation,
        epoch: old.generation,
        flags: old.flags,
        ipv4: old.ipv4,
        ipv6: old.ipv6,
    }
}

const fn policy(old: &rows::Endpoint) -> EndpointPolicy {
    EndpointPolicy {
        policy: old.policy,
        identity4: old.identity4,
        identity6: old.identity6,
        ifindex: old.ifindex,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an action is a small number")]
const fn route(old: rows::Route) -> RouteValue {
    RouteValue {
        action: old.action as u16,
        flags: 0,
        node: 0,
    }
}

/// The settings until the agent writes its own.
fn today(old: &rows::Config, ticks: Ticks) -> Config {
    let udp_replied: Duration = FlowLifetimes::default().udp_replied;
    Config {
        hz: old.hz,
        flow_events: old.flow_events,
        flows_per_endpoint: old.flows_per_endpoint,
        tcp_new: old.tcp_new,
        tcp_established: old.tcp_established,
        tcp_closing: old.tcp_closing,
        other_new: old.other_new,
        udp_replied: ticks.count(udp_replied),
        udp_established: old.udp_established,
        sctp_established: old.sctp_established,
        other_established: old.other_established,
        uplink: old.uplink,
        // Programs of both layouts send packets to one another's host ends for a moment.
        judged_mark: rows::JUDGED_MARK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoints_row_keeps_all_that_rows_of_flows_and_addresses_name() {
        let old = rows::Endpoint {
            network: 5,
            generation: 12,
            incarnation: 9,
            flags: 0b101_0011,
            policy: 70,
            identity4: 71,
            identity6: 72,
            ipv4: [10, 0, 0, 1],
            ipv6: [7; 16],
            mac: [1; 6],
            host_mac: [2; 6],
            ifindex: 1_000_003,
        };
        let row = endpoint(&old);
        assert_eq!(
            (row.network, row.generation, row.incarnation, row.epoch),
            (5, 12, 9, 12)
        );
        assert_eq!((row.flags, row.ipv4, row.ipv6), (0b101_0011, [10, 0, 0, 1], [7; 16]));
        assert_eq!((row.from_pod.source, row.from_pod.destination), ([1; 6], [2; 6]));
        assert_eq!((row.to_pod.source, row.to_pod.destination), ([2; 6], [1; 6]));
        let words = policy(&old);
        assert_eq!(
            (words.policy, words.identity4, words.identity6, words.ifindex),
            (70, 71, 72, 1_000_003)
        );
        // A free row remembers the highest generation.
        let free = endpoint(&rows::Endpoint {
            generation: 40,
            ..rows::Endpoint::default()
        });
        assert_eq!((free.network, free.generation), (0, 40));
    }

    #[test]
    fn settings_and_routes_keep_their_meaning() {
        let old = rows::Config {
            hz: 250,
            flow_events: 1,
            flows_per_endpoint: 2,
            tcp_new: 3,
            tcp_established: 4,
            tcp_closing: 5,
            other_new: 6,
            udp_established: 7,
            sctp_established: 8,
            other_established: 9,
            uplink: 10,
        };
        let row = today(&old, Ticks::with_hz(250));
        assert_eq!((row.hz, row.flow_events, row.flows_per_endpoint), (250, 1, 2));
        assert_eq!((row.tcp_new, row.tcp_established, row.tcp_closing), (3, 4, 5));
        assert_eq!((row.other_new, row.udp_replied, row.udp_established), (6, 2500, 7));
        assert_eq!((row.sctp_established, row.other_established, row.uplink), (8, 9, 10));
        let row = route(rows::Route { action: 4 });
        assert_eq!((row.action, row.flags, row.node), (4, 0, 0));
    }
}
