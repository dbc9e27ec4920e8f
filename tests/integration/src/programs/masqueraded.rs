//! Reads and changes the rows of masqueraded flows, bypassing the agent.

use std::{net::Ipv4Addr, path::Path};

use anyhow::Result;
use aya::maps::{HashMap, Map, MapData};
use kni_common::{
    address::{from_ip, words},
    flow::{
        END_LOCAL, END_OUTSIDE, EndPorts, FLOW_CLOSED, FLOW_FROM_SECOND, FLOW_OPENED_BY_SECOND, FLOW_TRANSLATED,
        FlowEnd, FlowKey4, FlowValue, Ports, is_second, scope,
    },
    uplink::OUTSIDE,
};
use kni_model::EndpointId;

use super::tables::map;

/// A source and its port, a destination and its port.
pub type Tuple = (Ipv4Addr, u16, Ipv4Addr, u16);

/// The IPv4 tables of flows.
pub struct Masqueraded {
    own: HashMap<MapData, FlowKey4, FlowValue>,
    outside: HashMap<MapData, FlowKey4, FlowValue>,
}

impl Masqueraded {
    /// Opens the pinned maps in `folder`.
    pub fn open(folder: &Path) -> Result<Self> {
        Ok(Self {
            own: map(folder, "FLOWS4", Map::LruHashMap)?,
            outside: map(folder, "NAT4", Map::HashMap)?,
        })
    }

    /// Removes all rows.
    pub fn clear(&mut self) -> Result<()> {
        for table in [&mut self.own, &mut self.outside] {
            let keys: Vec<FlowKey4> = table.keys().collect::<Result<_, _>>()?;
            for key in &keys {
                table.remove(key)?;
            }
        }
        Ok(())
    }

    /// Writes the row that holds the port of a flow of `endpoint` which has expired at jiffy `since`. `tuple` is of its
    /// answers.
    pub fn put_dead(&mut self, tuple: Tuple, protocol: u8, endpoint: EndpointId, since: u32) -> Result<()> {
        self.put(tuple, protocol, endpoint, (since, 0, 0))
    }

    /// Writes the row of a closed flow that a CPU is taking over, and has not written yet.
    pub fn put_claimed(&mut self, tuple: Tuple, protocol: u8, endpoint: EndpointId, since: u32) -> Result<()> {
        self.put(tuple, protocol, endpoint, (since, u32::MAX, FLOW_CLOSED))
    }

    fn put(
        &mut self,
        tuple: Tuple,
        protocol: u8,
        endpoint: EndpointId,
        (last_seen, lifetime, flags): (u32, u32, u16),
    ) -> Result<()> {
        let pod = FlowEnd {
            id: endpoint.0,
            generation: 0,
        };
        let mut row = FlowValue {
            last_seen,
            lifetime,
            first_kind: END_OUTSIDE,
            second_kind: END_LOCAL,
            flags: FLOW_TRANSLATED | FLOW_OPENED_BY_SECOND,
            second: pod,
            ..FlowValue::default()
        };
        if sends_second(tuple) {
            (row.first_kind, row.second_kind) = (row.second_kind, row.first_kind);
            (row.first, row.second) = (row.second, row.first);
            row.flags = FLOW_TRANSLATED | FLOW_FROM_SECOND;
        }
        row.flags |= flags;
        Ok(self.outside.insert(key(tuple, protocol), row, 0)?)
    }

    /// Removes the row that holds the port of a flow, as nothing else may while the flow lives. `tuple` is of its
    /// answers. Whether there was one.
    pub fn lose(&mut self, tuple: Tuple, protocol: u8) -> bool {
        self.outside.remove(&key(tuple, protocol)).is_ok()
    }
}

fn sends_second((source, _, destination, _): Tuple) -> bool {
    let words = |ip: Ipv4Addr| words(from_ip(ip.into()));
    is_second(words(source), words(destination))
}

fn key(tuple: Tuple, protocol: u8) -> FlowKey4 {
    let (source, source_port, destination, destination_port) = tuple;
    let ports = Ports {
        source: source_port.to_be_bytes(),
        destination: destination_port.to_be_bytes(),
    };
    let second = sends_second(tuple);
    let (first, last) = if second {
        (destination, source)
    } else {
        (source, destination)
    };
    FlowKey4 {
        scope: scope(OUTSIDE, protocol),
        first: first.octets(),
        second: last.octets(),
        ports: EndPorts::from_word(ports.word(), second),
    }
}
