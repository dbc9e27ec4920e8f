//! Writes what the programs know of other nodes: the ways to them, the numbers of networks, the ends of the tunnel.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use kni_common::{
    address::{from_ip, to_ip},
    flow::NodeRow,
    overlay::Overlay,
};
use kni_model::NetworkId;

use super::{
    DataplaneError,
    egress::{EgressShares, ShareMaps},
    pin::Pins,
    routes::{RemoteRoute, RemoteRoutes},
    table::Table,
    way::Way,
};

/// What a way leads through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hop {
    /// The tunnel device, or the interface that leads to the node. `None` while there is none: the way stays as it is,
    /// and a new one is left out.
    pub ifindex: Option<u32>,
    /// Largest IP packet that fits, in bytes, before any outer header.
    pub mtu: u32,
    /// Another value means another node, or another state of it: flows are evaluated again.
    pub stamp: u64,
}

/// The node's own ends of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelEnds {
    /// IPv4 address in the underlay.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address in the underlay.
    pub ipv6: Option<Ipv6Addr>,
    /// UDP port of all nodes' tunnels, not 0.
    pub port: u16,
    /// The network whose pods exchange packets with the stacks of all nodes.
    pub host_network: Option<NetworkId>,
}

/// A network as it is on other nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkFabric {
    /// Its number in the cluster. Networks without one exchange nothing through the tunnel.
    pub number: Option<u32>,
    /// Ranges of addresses of pods of other nodes.
    pub blocks: BTreeMap<IpNet, Way>,
    /// Addresses of other nodes that pods may send to, and receive from.
    pub nodes: BTreeMap<IpAddr, Way>,
    /// Addresses of this node, likewise.
    pub own: BTreeSet<IpAddr>,
    /// Whether packets come without a tunnel, and find their pod by its address alone.
    pub exposed: bool,
}

/// Everything that the programs know of other nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FabricRows {
    /// `None`: there is no tunnel.
    pub tunnel: Option<TunnelEnds>,
    /// The ways that networks refer to.
    pub ways: BTreeMap<Way, Hop>,
    /// The networks.
    pub networks: BTreeMap<NetworkId, NetworkFabric>,
    /// The egress addresses that several nodes share, by tunnels in `ways`.
    pub egress: BTreeMap<IpAddr, EgressShares>,
}

/// The node that has an address, and the way there, as the programs find them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherNode {
    /// The way.
    pub way: Way,
    /// Largest IP packet that fits, in bytes, before any outer header. 0: the row of the node is empty.
    pub mtu: u32,
    /// The address is the node's own.
    pub is_node: bool,
    /// The network's number in the cluster.
    pub number: Option<u32>,
    /// This node's end of the tunnel, of the family of the way.
    pub own: Option<IpAddr>,
    /// UDP port of all nodes' tunnels, 0 on a node of no cluster.
    pub port: u16,
}

/// The tables of other nodes.
pub(super) struct FabricMaps {
    pub(super) nodes: Table<u32, NodeRow>,
    pub(super) numbers: Table<u32, u32>,
    pub(super) networks: Table<u32, u32>,
    pub(super) overlay: Table<u32, Overlay>,
    pub(super) shares: ShareMaps,
    /// The rows of `NODES` in use.
    ways: BTreeMap<Way, (u32, Option<u64>)>,
    /// The port to which no flow of a pod leads since this process has removed them.
    pub(super) guarded: Option<u16>,
}

impl FabricMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let nodes: Table<u32, NodeRow> = Table::open("NODES", &pins.map("NODES"))?;
        Ok(Self {
            ways: BTreeMap::new(),
            guarded: None,
            numbers: Table::open("NUMBERS", &pins.map("NUMBERS"))?,
            networks: Table::open("NETWORKS", &pins.map("NETWORKS"))?,
            overlay: Table::open("OVERLAY", &pins.map("OVERLAY"))?,
            shares: ShareMaps::open(pins)?,
            nodes,
        })
    }

    /// Takes over the rows of an earlier agent. `overlay`: the numbers that tunnel routes refer to.
    pub(super) fn adopt(&mut self, overlay: &BTreeSet<u32>) -> Result<(), DataplaneError> {
        if !self.ways.is_empty() {
            return Ok(());
        }
        let used = self.nodes.rows()?.into_iter().filter(|(_, row)| row.ifindex != 0);
        for (number, row) in used {
            let way = Way {
                underlay: to_ip(row.underlay),
                overlay: overlay.contains(&number),
            };
            self.ways.insert(way, (number, None));
        }
        Ok(())
    }

    /// Writes new and changed ways, also those after one that fails; unwanted ones stay until [`Self::retain_ways`].
    /// Routes to a way that has no room, or leads through no interface yet, are left out.
    pub(super) fn put_ways(&mut self, ways: &BTreeMap<Way, Hop>) -> Result<(), DataplaneError> {
        let capacity = self.nodes.capacity();
        let used: BTreeSet<u32> = self.ways.values().map(|(number, _)| *number).collect();
        let mut free = (1..capacity).filter(|number| !used.contains(number));
        let mut result = Ok(());
        for (way, hop) in ways {
            let known = self.ways.get(way).map(|(number, _)| *number);
            if known.is_none() && hop.ifindex.is_none() {
                continue;
            }
            let written = match known.or_else(|| free.next()) {
                Some(number) => self.put_way(*way, *hop, number),
                None => Err(DataplaneError::TooManyNodes { capacity: capacity - 1 }),
            };
            result = result.and(written);
        }
        result
    }

    fn put_way(&mut self, way: Way, hop: Hop, number: u32) -> Result<(), DataplaneError> {
        let before = self.nodes.get(&number)?.unwrap_or_default();
        // An earlier agent's row has no stamp: the node is the same as long as its address is.
        let is_same = |stamp: Option<u64>| stamp.is_none_or(|stamp| stamp == hop.stamp);
        let row = NodeRow {
            underlay: from_ip(way.underlay),
            generation: if self.ways.get(&way).is_some_and(|(_, stamp)| is_same(*stamp)) {
                before.generation
            } else {
                before.generation.wrapping_add(1)
            },
            mtu: hop.mtu,
            ifindex: hop.ifindex.unwrap_or(before.ifindex),
            reserved: 0,
        };
        if row != before {
            self.nodes.put(&number, &row)?;
        }
        self.ways.insert(way, (number, Some(hop.stamp)));
        Ok(())
    }

    /// Removes the other ways, but those that rows still refer to (I2). Generations stay: a number never returns to an
    /// earlier one.
    pub(super) fn retain_ways(
        &mut self,
        ways: &BTreeMap<Way, Hop>,
        referenced: &BTreeSet<u32>,
    ) -> Result<(), DataplaneError> {
        let known = self.ways.iter().map(|(way, (number, _))| (*way, *number));
        let unwanted: Vec<(Way, u32)> = known
            .filter(|(way, number)| !ways.contains_key(way) && !referenced.contains(number))
            .collect();
        for (way, number) in unwanted {
            let before = self.nodes.get(&number)?.unwrap_or_default();
            let row = NodeRow {
                generation: before.generation.wrapping_add(1),
                ..NodeRow::default()
            };
            self.nodes.put(&number, &row)?;
            self.ways.remove(&way);
        }
        Ok(())
    }

    /// Whether there is a way through the tunnel.
    pub(super) fn has_tunnels(&self) -> bool {
        self.ways.keys().any(|way| way.overlay)
    }

    pub(super) fn numbers(fabric: &FabricRows) -> BTreeMap<u32, u32> {
        let networks = fabric.networks.iter();
        networks
            .filter_map(|(network, of)| Some((network.get(), of.number?)))
            .collect()
    }

    /// Writes numbers. One that fails is removed from the desired ones: the network exchanges nothing with a number
    /// that it may have had before.
    pub(super) fn put_numbers(&self, numbers: &mut BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for (network, number) in numbers.clone() {
            let written = self.put_number(network, number);
            if written.is_err() {
                numbers.remove(&network);
            }
            result = result.and(written);
        }
        result
    }

    fn put_number(&self, network: u32, number: u32) -> Result<(), DataplaneError> {
        if self.numbers.get(&network)? != Some(number) {
            self.numbers.put(&network, &number)?;
        }
        if self.networks.get(&number)? != Some(network) {
            self.networks.put(&number, &network)?;
        }
        Ok(())
    }

    /// Removes what no network has any more. First what arrives, so that no packet finds a network that is about to go.
    pub(super) fn retain_numbers(&self, numbers: &BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
        let wanted: BTreeMap<u32, u32> = numbers.iter().map(|(network, number)| (*number, *network)).collect();
        let rows = self.networks.rows()?.into_iter();
        let gone = rows.filter(|(number, network)| wanted.get(number) != Some(network));
        self.networks
            .remove_all(&gone.map(|(number, _)| number).collect::<Vec<_>>())?;
        let rows = self.numbers.rows()?.into_iter();
        let gone = rows.filter(|(network, number)| numbers.get(network) != Some(number));
        self.numbers
            .remove_all(&gone.map(|(network, _)| network).collect::<Vec<_>>())
    }

    /// Writes the node's ends of the tunnel.
    pub(super) fn set_tunnel(&self, tunnel: TunnelEnds) -> Result<(), DataplaneError> {
        self.change_overlay(|before| Overlay {
            ipv4: tunnel.ipv4.map_or([0; 4], |ip| ip.octets()),
            ipv6: tunnel.ipv6.map_or([0; 16], |ip| ip.octets()),
            port: tunnel.port.to_be_bytes(),
            forwards_egress: before.forwards_egress,
            host_network: tunnel.host_network.map_or(0, NetworkId::get),
        })
    }

    /// Writes the port of tunnels, whether or not the node has one.
    pub(super) fn set_port(&self, port: u16) -> Result<(), DataplaneError> {
        self.change_overlay(|before| Overlay {
            port: port.to_be_bytes(),
            ..before
        })
    }

    /// Removes the node's ends of the tunnel. The port stays: other nodes may believe packets from this node's address.
    pub(super) fn remove_tunnel(&self) -> Result<(), DataplaneError> {
        self.change_overlay(|before| Overlay {
            port: before.port,
            forwards_egress: before.forwards_egress,
            ..Overlay::default()
        })
    }

    fn change_overlay(&self, change: impl FnOnce(Overlay) -> Overlay) -> Result<(), DataplaneError> {
        let before = self.overlay.get(&0)?.unwrap_or_default();
        let row = change(before);
        if row == before {
            return Ok(());
        }
        self.overlay.put(&0, &row)
    }

    /// Writes the shares of egress addresses. Whether programs may still use rows that were removed or replaced.
    pub(super) fn write_shares(&self) -> Result<bool, DataplaneError> {
        let number = |way: &Way| self.ways.get(way).map(|(number, _)| *number);
        let Some((forwards, replaced)) = self.shares.write(number)? else {
            return Ok(false);
        };
        self.change_overlay(|before| Overlay {
            forwards_egress: u16::from(forwards),
            ..before
        })?;
        Ok(replaced)
    }

    /// The routes of a network by the numbers of nodes.
    pub(super) fn routes(&self, fabric: &NetworkFabric) -> RemoteRoutes {
        let number = |way: &Way, node: bool| {
            let (number, _) = self.ways.get(way)?;
            Some(RemoteRoute {
                number: *number,
                overlay: way.overlay,
                node,
            })
        };
        let blocks = fabric.blocks.iter();
        let blocks = blocks.filter_map(|(net, way)| Some((*net, number(way, false)?)));
        let nodes = fabric.nodes.iter();
        let nodes = nodes.filter_map(|(address, way)| Some((IpNet::from(*address), number(way, true)?)));
        RemoteRoutes {
            remote: blocks.chain(nodes).collect(),
            own: fabric.own.clone(),
        }
    }
}
