//! Reads and writes the pinned maps, bypassing the agent.

use std::{collections::HashMap as Table, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, PerCpuValues},
    util::nr_cpus,
};
use kni_common::{
    Direction,
    address::{from_ip, to_ip},
    config::{Config, FlowShare},
    counter::EventGate,
    endpoint::{EndpointRow, FLAG_READY},
    flow::{
        EndPorts, FLOW_AGED, FLOW_CONFIRMED, FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue, Ports,
        network_of, protocol_of, scope,
    },
    service::{AffinityKey, AffinityValue, ServiceKey, ServiceValue},
    uplink::OUTSIDE,
};

use crate::model::{Backend, Datagram, Flow, Front, Last, key_of};

/// Rows of fragments: protocol and ports of the first one.
type Fragments = Table<Datagram, (u8, (u16, u16))>;

/// Handles of the maps that tests access.
pub(super) struct Tables {
    endpoints: Array<MapData, EndpointRow>,
    flows4: HashMap<MapData, FlowKey4, FlowValue>,
    flows6: HashMap<MapData, FlowKey6, FlowValue>,
    fragments: HashMap<MapData, FragmentKey, FragmentValue>,
    fragments_outside: HashMap<MapData, FragmentKey, FragmentValue>,
    services: HashMap<MapData, ServiceKey, ServiceValue>,
    gates: PerCpuArray<MapData, EventGate>,
    affinity: HashMap<MapData, AffinityKey, AffinityValue>,
    config: Array<MapData, Config>,
    shares: Array<MapData, FlowShare>,
}

pub(super) fn map<T: TryFrom<Map, Error = MapError>>(
    folder: &std::path::Path,
    name: &str,
    of: fn(MapData) -> Map,
) -> Result<T> {
    let path: PathBuf = folder.join(name);
    let data = MapData::from_pin(&path).with_context(|| path.display().to_string())?;
    T::try_from(of(data)).with_context(|| path.display().to_string())
}

impl Tables {
    pub(super) fn open(folder: &std::path::Path) -> Result<Self> {
        Ok(Self {
            endpoints: map(folder, "ENDPOINTS", Map::Array)?,
            flows4: map(folder, "FLOWS4", Map::LruHashMap)?,
            flows6: map(folder, "FLOWS6", Map::LruHashMap)?,
            fragments: map(folder, "FRAGMENTS", Map::LruHashMap)?,
            fragments_outside: map(folder, "FRAGMENTS_OUTSIDE", Map::LruHashMap)?,
            services: map(folder, "SERVICES", Map::HashMap)?,
            gates: map(folder, "EVENT_GATES", Map::PerCpuArray)?,
            affinity: map(folder, "AFFINITY", Map::LruHashMap)?,
            config: map(folder, "CONFIG", Map::Array)?,
            shares: map(folder, "FLOW_SHARES", Map::Array)?,
        })
    }

    /// The generation and the epoch of an endpoint.
    pub(super) fn generations(&self, endpoint: u32) -> Result<(u32, u32)> {
        let row = self.endpoints.get(&endpoint, 0)?;
        Ok((row.generation, row.epoch))
    }

    /// Whether the row with the key of a flow is aged and confirmed, if there is one.
    pub(super) fn stream(&self, flow: &Flow) -> Option<(bool, bool)> {
        let row = self.row(flow).ok()?;
        Some((row.flags & FLOW_AGED != 0, row.flags & FLOW_CONFIRMED != 0))
    }

    fn row(&self, flow: &Flow) -> Result<FlowValue, MapError> {
        match key(flow) {
            Key::V4(key) => self.flows4.get(&key, 0),
            Key::V6(key) => self.flows6.get(&key, 0),
        }
    }

    /// Sets the ready flag as the agent does during a publication, without any other change of the row.
    pub(super) fn set_ready(&mut self, endpoint: u32, ready: bool) -> Result<()> {
        let mut row = self.endpoints.get(&endpoint, 0)?;
        row.flags = row.flags & !FLAG_READY | if ready { FLAG_READY } else { 0 };
        Ok(self.endpoints.set(endpoint, row, 0)?)
    }

    pub(super) fn flows(&self) -> Result<Table<Flow, FlowValue>> {
        let mut flows = Table::new();
        for row in &self.flows4 {
            let (key, value) = row?;
            let ends = (IpAddr::from(key.first), IpAddr::from(key.second));
            flows.insert(flow(key.scope, ends, key.ports), value);
        }
        for row in &self.flows6 {
            let (key, value) = row?;
            let ends = (IpAddr::from(key.first), IpAddr::from(key.second));
            flows.insert(flow(key.scope, ends, key.ports), value);
        }
        Ok(flows)
    }

    pub(super) fn fragments(&self) -> Result<Fragments> {
        let mut fragments = Table::new();
        for row in self.fragments.iter().chain(self.fragments_outside.iter()) {
            let (key, value) = row?;
            let direction = Direction::from_code(key.direction - 1).context("a direction")?;
            let datagram = Datagram {
                network: key.network,
                direction,
                protocol: u8::try_from(key.protocol)?,
                identification: u32::from_be_bytes(key.identification),
                source: to_ip(key.source),
                destination: to_ip(key.destination),
            };
            fragments.insert(datagram, (u8::try_from(value.protocol)?, ports(value.ports)));
        }
        Ok(fragments)
    }

    pub(super) fn fragments_from_outside(&self) -> Result<usize> {
        let keys = self.fragments_outside.keys().collect::<Result<Vec<_>, _>>()?;
        Ok(keys.iter().filter(|key| key.network == OUTSIDE).count())
    }

    pub(super) fn tear_service(&mut self, key: &ServiceKey, other: &ServiceKey) -> Result<()> {
        let row = self.services.get(key, 0)?;
        let other = self.services.get(other, 0)?;
        let torn = ServiceValue {
            backends: other.backends,
            ..row
        };
        Ok(self.services.insert(key, torn, 0)?)
    }

    pub(super) fn open_event_gates(&mut self) -> Result<()> {
        let cpus = nr_cpus().map_err(|(_, error)| error)?;
        for endpoint in 0..self.gates.len() {
            let open = PerCpuValues::try_from(vec![EventGate::default(); cpus])?;
            self.gates.set(endpoint, open, 0)?;
        }
        Ok(())
    }

    /// Clears the tables that packets fill.
    pub(super) fn flush(&mut self) -> Result<()> {
        empty(&mut self.flows4)?;
        empty(&mut self.flows6)?;
        empty(&mut self.affinity)?;
        empty(&mut self.fragments)?;
        empty(&mut self.fragments_outside)
    }

    /// Moves all timestamps back by this number of ticks.
    pub(super) fn age(&mut self, ticks: u64) -> Result<()> {
        let ticks32 = u32::try_from(ticks).expect("an age that a test chose");
        each(&mut self.flows4, |row| {
            row.last_seen = row.last_seen.wrapping_sub(ticks32);
        })?;
        each(&mut self.flows6, |row| {
            row.last_seen = row.last_seen.wrapping_sub(ticks32);
        })?;
        for fragments in [&mut self.fragments, &mut self.fragments_outside] {
            each(fragments, |row| {
                row.seen = row.seen.saturating_sub(ticks);
            })?;
        }
        each(&mut self.affinity, |row| {
            row.last_used = row.last_used.saturating_sub(ticks);
        })
    }

    /// Removes a row of a flow table, as an eviction does.
    pub(super) fn evict(&mut self, flow: &Flow) -> Result<()> {
        match key(flow) {
            Key::V4(key) => self.flows4.remove(&key)?,
            Key::V6(key) => self.flows6.remove(&key)?,
        }
        Ok(())
    }

    /// The backend in the row of a flow.
    pub(super) fn backend_of(&self, flow: &Flow) -> Result<Backend> {
        let row = self.row(flow)?;
        Ok((to_ip(row.destination), u16::from_be_bytes(row.ports.destination)))
    }

    /// The affinity backend of a client.
    pub(super) fn last_backend(&self, service: u32, network: u32, client: IpAddr) -> Result<Backend> {
        let client = from_ip(client);
        let row = self.affinity.get(
            &AffinityKey {
                service,
                network,
                client,
            },
            0,
        )?;
        Ok((to_ip(row.address), u16::from_be_bytes(row.port)))
    }

    /// The backend of every client with affinity, by service, network and client.
    pub(super) fn affinities(&self) -> Result<Table<(u32, u32, IpAddr), Last>> {
        let mut rows = Table::new();
        for row in &self.affinity {
            let (key, value) = row?;
            let backend = (to_ip(value.address), u16::from_be_bytes(value.port));
            rows.insert((key.service, key.network, to_ip(key.client)), Last { backend, idle: 0 });
        }
        Ok(rows)
    }

    pub(super) fn config(&self) -> Result<Config> {
        Ok(self.config.get(&0, 0)?)
    }

    pub(super) fn set_config(&mut self, config: Config) -> Result<()> {
        Ok(self.config.set(0, config, 0)?)
    }

    /// Resets the share of every endpoint.
    pub(super) fn clear_shares(&mut self) -> Result<()> {
        for endpoint in 0..self.shares.len() {
            self.shares.set(endpoint, FlowShare::default(), 0)?;
        }
        Ok(())
    }
}

enum Key {
    V4(FlowKey4),
    V6(FlowKey6),
}

/// The key of the row of a flow, in whichever direction.
fn key(flow: &Flow) -> Key {
    let (flow, _) = key_of(*flow);
    let (first, second) = (flow.source.1.to_be_bytes(), flow.destination.1.to_be_bytes());
    let (scope, ports) = (scope(flow.network, flow.protocol), EndPorts { first, second });
    match (flow.source.0, flow.destination.0) {
        (IpAddr::V4(one), IpAddr::V4(other)) => Key::V4(FlowKey4 {
            scope,
            first: one.octets(),
            second: other.octets(),
            ports,
        }),
        (one, other) => Key::V6(FlowKey6 {
            scope,
            first: from_ip(one),
            second: from_ip(other),
            ports,
        }),
    }
}

/// The key of a service port.
pub(super) fn service_key(front: &Front) -> ServiceKey {
    let (network, address, protocol, port) = *front;
    ServiceKey {
        network,
        address: from_ip(address),
        port: port.to_be_bytes(),
        protocol: protocol.into(),
    }
}

fn each<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, change: impl Fn(&mut V)) -> Result<()> {
    let rows: Vec<(K, V)> = map.iter().collect::<Result<_, _>>()?;
    for (key, mut value) in rows {
        change(&mut value);
        map.insert(key, value, 0)?;
    }
    Ok(())
}

fn empty<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in &keys {
        map.remove(key)?;
    }
    Ok(())
}

fn ports(ports: Ports) -> (u16, u16) {
    (u16::from_be_bytes(ports.source), u16::from_be_bytes(ports.destination))
}

fn flow(scope: u32, ends: (IpAddr, IpAddr), ports: EndPorts) -> Flow {
    Flow {
        network: network_of(scope),
        protocol: protocol_of(scope),
        source: (ends.0, u16::from_be_bytes(ports.first)),
        destination: (ends.1, u16::from_be_bytes(ports.second)),
    }
}
