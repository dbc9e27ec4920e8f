//! Reads and writes the pinned maps, bypassing the agent.

use std::{collections::HashMap as Table, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError},
};
use kni_common::{
    Direction,
    address::{from_ip, to_ip},
    config::{Config, FlowShare},
    endpoint::{EndpointRow, FLAG_READY},
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue, Ports},
    service::{AffinityKey, AffinityValue},
};

use crate::model::{Backend, Datagram, Flow};

/// Handles of the maps that tests access.
pub(super) struct Tables {
    endpoints: Array<MapData, EndpointRow>,
    flows4: HashMap<MapData, FlowKey4, FlowValue>,
    flows6: HashMap<MapData, FlowKey6, FlowValue>,
    fragments: HashMap<MapData, FragmentKey, FragmentValue>,
    affinity: HashMap<MapData, AffinityKey, AffinityValue>,
    config: Array<MapData, Config>,
    shares: Array<MapData, FlowShare>,
}

fn map<T: TryFrom<Map, Error = MapError>>(folder: &std::path::Path, name: &str, of: fn(MapData) -> Map) -> Result<T> {
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
            affinity: map(folder, "AFFINITY", Map::LruHashMap)?,
            config: map(folder, "CONFIG", Map::Array)?,
            shares: map(folder, "FLOW_SHARES", Map::Array)?,
        })
    }

    pub(super) fn generation(&self, endpoint: u32) -> Result<u32> {
        Ok(self.endpoints.get(&endpoint, 0)?.generation)
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
            let ends = (IpAddr::from(key.source), IpAddr::from(key.destination));
            flows.insert(flow(key.network, key.protocol, ends, key.ports)?, value);
        }
        for row in &self.flows6 {
            let (key, value) = row?;
            let ends = (IpAddr::from(key.source), IpAddr::from(key.destination));
            flows.insert(flow(key.network, key.protocol, ends, key.ports)?, value);
        }
        Ok(flows)
    }

    pub(super) fn fragments(&self) -> Result<Table<Datagram, (u16, u16)>> {
        let mut fragments = Table::new();
        for row in &self.fragments {
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
            fragments.insert(datagram, ports(value.ports));
        }
        Ok(fragments)
    }

    /// Clears the tables that packets fill.
    pub(super) fn flush(&mut self) -> Result<()> {
        empty(&mut self.flows4)?;
        empty(&mut self.flows6)?;
        empty(&mut self.affinity)?;
        empty(&mut self.fragments)
    }

    /// Moves all timestamps back by this number of ticks.
    pub(super) fn age(&mut self, ticks: u64) -> Result<()> {
        each(&mut self.flows4, |row| {
            row.last_seen = row.last_seen.saturating_sub(ticks);
        })?;
        each(&mut self.flows6, |row| {
            row.last_seen = row.last_seen.saturating_sub(ticks);
        })?;
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
        let row = match key(flow) {
            Key::V4(key) => self.flows4.get(&key, 0)?,
            Key::V6(key) => self.flows6.get(&key, 0)?,
        };
        Ok((to_ip(row.address), u16::from_be_bytes(row.ports.destination)))
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

fn key(flow: &Flow) -> Key {
    let (source, destination) = (flow.source.1.to_be_bytes(), flow.destination.1.to_be_bytes());
    let (network, ports, protocol) = (flow.network, Ports { source, destination }, u32::from(flow.protocol));
    match (flow.source.0, flow.destination.0) {
        (IpAddr::V4(from), IpAddr::V4(to)) => Key::V4(FlowKey4 {
            network,
            source: from.octets(),
            destination: to.octets(),
            ports,
            protocol,
        }),
        (from, to) => Key::V6(FlowKey6 {
            network,
            source: from_ip(from),
            destination: from_ip(to),
            ports,
            protocol,
        }),
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

fn flow(network: u32, protocol: u32, ends: (IpAddr, IpAddr), row: Ports) -> Result<Flow> {
    let (source, destination) = ports(row);
    Ok(Flow {
        network,
        protocol: u8::try_from(protocol)?,
        source: (ends.0, source),
        destination: (ends.1, destination),
    })
}
