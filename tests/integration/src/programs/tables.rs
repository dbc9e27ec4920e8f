//! The pinned maps, read and written past the agent.

use std::{collections::HashMap as Table, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{Array, HashMap, Map, MapData, MapError},
};
use kni_common::{
    Direction,
    address::to_ip,
    endpoint::{EndpointRow, FLAG_READY},
    flow::{FlowKey4, FlowKey6, FlowValue, FragmentKey, FragmentValue, Ports},
};

use crate::model::{Datagram, Flow};

/// Handles of the maps that tests look into.
pub(super) struct Tables {
    endpoints: Array<MapData, EndpointRow>,
    flows4: HashMap<MapData, FlowKey4, FlowValue>,
    flows6: HashMap<MapData, FlowKey6, FlowValue>,
    fragments: HashMap<MapData, FragmentKey, FragmentValue>,
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
        })
    }

    pub(super) fn generation(&self, endpoint: u32) -> Result<u32> {
        Ok(self.endpoints.get(&endpoint, 0)?.generation)
    }

    /// What the agent does for a moment while it publishes: nothing else in the row changes.
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

    /// Empties what packets fill.
    pub(super) fn flush(&mut self) -> Result<()> {
        empty(&mut self.flows4)?;
        empty(&mut self.flows6)?;
        empty(&mut self.fragments)
    }
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
