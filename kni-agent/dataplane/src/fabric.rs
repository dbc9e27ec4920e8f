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
    route::{ACTION_REMOTE, ROUTE_NODE, ROUTE_OVERLAY},
};
use kni_model::NetworkId;

use super::{
    Dataplane, DataplaneError,
    egress::{EgressShares, ShareMaps},
    lock, membarrier,
    pin::Pins,
    routes::{RemoteRoute, RemoteRoutes},
    table::Table,
    way::Way,
};

/// What a way leads through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hop {
    /// The tunnel device, or the interface that leads to the node.
    pub ifindex: u32,
    /// Largest IP packet that fits, in bytes, before any outer header.
    pub mtu: u32,
    /// Another value means another node, or another state of it: flows are judged again.
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
    /// UDP port of the tunnel, 0 for none.
    pub port: u16,
}

/// The tables of other nodes.
pub(super) struct FabricMaps {
    nodes: Table<u32, NodeRow>,
    numbers: Table<u32, u32>,
    networks: Table<u32, u32>,
    overlay: Table<u32, Overlay>,
    pub(super) shares: ShareMaps,
    /// The rows of `NODES` in use.
    ways: BTreeMap<Way, (u32, Option<u64>)>,
}

impl FabricMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let nodes: Table<u32, NodeRow> = Table::open("NODES", &pins.map("NODES"))?;
        Ok(Self {
            ways: BTreeMap::new(),
            numbers: Table::open("NUMBERS", &pins.map("NUMBERS"))?,
            networks: Table::open("NETWORKS", &pins.map("NETWORKS"))?,
            overlay: Table::open("OVERLAY", &pins.map("OVERLAY"))?,
            shares: ShareMaps::open(pins)?,
            nodes,
        })
    }

    /// Takes over the rows of an earlier agent. `overlay`: the numbers that tunnel routes refer to.
    fn adopt(&mut self, overlay: &BTreeSet<u32>) -> Result<(), DataplaneError> {
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

    /// Writes new and changed ways; those that are not wanted any more stay until [`Self::retain_ways`].
    fn put_ways(&mut self, ways: &BTreeMap<Way, Hop>) -> Result<(), DataplaneError> {
        let capacity = self.nodes.capacity();
        let used: BTreeSet<u32> = self.ways.values().map(|(number, _)| *number).collect();
        let mut free = (1..capacity).filter(|number| !used.contains(number));
        for (way, hop) in ways {
            let known = self.ways.get(way).copied();
            let Some(number) = known.map(|(number, _)| number).or_else(|| free.next()) else {
                return Err(DataplaneError::TooManyNodes { capacity: capacity - 1 });
            };
            let before = self.nodes.get(&number)?.unwrap_or_default();
            let stamp = known.and_then(|(_, stamp)| stamp);
            // An earlier agent's row has no stamp: the node is the same as long as its address is.
            let is_same = known.is_some() && stamp.is_none_or(|stamp| stamp == hop.stamp);
            let row = NodeRow {
                underlay: from_ip(way.underlay),
                generation: if is_same {
                    before.generation
                } else {
                    before.generation.wrapping_add(1)
                },
                mtu: hop.mtu,
                ifindex: hop.ifindex,
                reserved: 0,
            };
            if row != before {
                self.nodes.put(&number, &row)?;
            }
            self.ways.insert(*way, (number, Some(hop.stamp)));
        }
        Ok(())
    }

    /// Removes the other ways. Generations stay: a number never returns to an earlier one.
    fn retain_ways(&mut self, ways: &BTreeMap<Way, Hop>) -> Result<(), DataplaneError> {
        let unwanted: Vec<(Way, u32)> = {
            let known = self.ways.iter().filter(|(way, _)| !ways.contains_key(way));
            known.map(|(way, (number, _))| (*way, *number)).collect()
        };
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

    fn numbers(fabric: &FabricRows) -> BTreeMap<u32, u32> {
        let networks = fabric.networks.iter();
        networks
            .filter_map(|(network, of)| Some((network.get(), of.number?)))
            .collect()
    }

    fn put_numbers(&self, numbers: &BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
        for (network, number) in numbers {
            if self.numbers.get(network)? != Some(*number) {
                self.numbers.put(network, number)?;
            }
            if self.networks.get(number)? != Some(*network) {
                self.networks.put(number, network)?;
            }
        }
        Ok(())
    }

    /// Removes what no network has any more. First what arrives, so that no packet finds a network that is about to go.
    fn retain_numbers(&self, numbers: &BTreeMap<u32, u32>) -> Result<(), DataplaneError> {
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

    fn set_tunnel(&self, tunnel: Option<TunnelEnds>) -> Result<bool, DataplaneError> {
        let before = self.overlay.get(&0)?.unwrap_or_default();
        let row = tunnel.map_or_else(Overlay::default, |tunnel| Overlay {
            ipv4: tunnel.ipv4.map_or([0; 4], |ip| ip.octets()),
            ipv6: tunnel.ipv6.map_or([0; 16], |ip| ip.octets()),
            port: tunnel.port.to_be_bytes(),
            forwards_egress: before.forwards_egress,
            host_network: tunnel.host_network.map_or(0, NetworkId::get),
        });
        if row != before {
            self.overlay.put(&0, &row)?;
        }
        Ok(row.port != before.port)
    }

    /// Writes the shares of egress addresses. Whether programs may still use rows that were removed or replaced.
    pub(super) fn write_shares(&self) -> Result<bool, DataplaneError> {
        let number = |way: &Way| self.ways.get(way).map(|(number, _)| *number);
        let Some((forwards, replaced)) = self.shares.write(number)? else {
            return Ok(false);
        };
        let before = self.overlay.get(&0)?.unwrap_or_default();
        let forwards_egress = u16::from(forwards);
        if before.forwards_egress != forwards_egress {
            let row = Overlay {
                forwards_egress,
                ..before
            };
            self.overlay.put(&0, &row)?;
        }
        Ok(replaced)
    }

    /// The routes of a network by the numbers of nodes.
    fn routes(&self, fabric: &NetworkFabric) -> RemoteRoutes {
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

impl Dataplane {
    /// The other node that has an address of the network, as the rows of the programs name it.
    pub fn other_node(&self, network: NetworkId, address: IpAddr) -> Result<Option<OtherNode>, DataplaneError> {
        let maps = lock(&self.fabric);
        let route = lock(&self.endpoints).routes.find(network, address)?;
        let Some(route) = route.filter(|route| route.action == ACTION_REMOTE) else {
            return Ok(None);
        };
        let row = maps.nodes.get(&route.node)?.filter(|row| row.ifindex != 0);
        let (underlay, mtu) = row.map_or((IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0), |row| {
            (to_ip(row.underlay), row.mtu)
        });
        let tunnel = maps.overlay.get(&0)?.unwrap_or_default();
        let own = match underlay {
            IpAddr::V4(_) => IpAddr::from(tunnel.ipv4),
            IpAddr::V6(_) => IpAddr::from(tunnel.ipv6),
        };
        Ok(Some(OtherNode {
            way: Way {
                underlay,
                overlay: route.flags & ROUTE_OVERLAY != 0,
            },
            mtu,
            is_node: route.flags & ROUTE_NODE != 0,
            number: maps.numbers.get(&network.get())?,
            own: Some(own).filter(|own| !own.is_unspecified()),
            port: u16::from_be_bytes(tunnel.port),
        }))
    }

    /// The network with this number in the cluster, as the programs find it.
    pub fn network_of(&self, number: u32) -> Result<Option<NetworkId>, DataplaneError> {
        let found = lock(&self.fabric).networks.get(&number)?;
        Ok(found.and_then(|network| NetworkId::try_from(network).ok()))
    }

    /// Replaces what the programs know of other nodes. Until the first call they use what an earlier agent wrote.
    ///
    /// Rows are written before those that refer to them, and removed in reverse (I2). When it returns, established flows
    /// whose far end has moved, or is not known any more, are judged again. Blocking: some microseconds per changed row.
    pub fn set_fabric(&self, fabric: &FabricRows) -> Result<(), DataplaneError> {
        let mut maps = lock(&self.fabric);
        let is_new = {
            let endpoints = lock(&self.endpoints);
            let rows = endpoints.routes.remote_rows();
            let overlay = rows.filter(|(_, value)| value.flags & ROUTE_OVERLAY != 0);
            let overlay: BTreeSet<u32> = overlay.map(|(_, value)| value.node).collect();
            let shares = maps.shares.nodes()?;
            maps.adopt(&(&overlay | &shares))?;
            maps.set_tunnel(fabric.tunnel)?
        };
        if let Some(tunnel) = fabric.tunnel.filter(|_| is_new) {
            // A pod may have a flow to the port from before it was that of tunnels.
            self.flows.remove_to_port(tunnel.port)?;
        }
        let numbers = FabricMaps::numbers(fabric);
        maps.put_ways(&fabric.ways)?;
        maps.put_numbers(&numbers)?;
        let networks = fabric.networks.iter();
        let routes = networks.map(|(network, of)| (*network, maps.routes(of))).collect();
        {
            let mut endpoints = lock(&self.endpoints);
            let moved = endpoints.routes.set_remote(routes)?;
            let exposed = fabric.networks.iter().filter(|(_, network)| network.exposed);
            endpoints.set_exposed(exposed.map(|(network, _)| network.get()).collect())?;
            if !moved.is_empty() {
                endpoints.renew_epochs(&moved)?;
            }
        }
        maps.shares.set_desired(&fabric.egress);
        maps.write_shares()?;
        // A program may be about to use a way that its route named.
        membarrier::wait_for_programs();
        maps.retain_ways(&fabric.ways)?;
        maps.retain_numbers(&numbers)
    }
}
