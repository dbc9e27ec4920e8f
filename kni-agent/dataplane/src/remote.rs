//! Applies what the programs know of other nodes, and reads it as they find it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
};

use kni_common::{
    address::to_ip,
    route::{ACTION_REMOTE, ROUTE_NODE, ROUTE_OVERLAY},
};
use kni_model::NetworkId;

use super::{
    Dataplane, DataplaneError,
    fabric::{FabricMaps, FabricRows, OtherNode},
    lock, membarrier,
    way::Way,
};

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

    /// Makes the programs refuse datagrams of pods and of the node's processes to the port of tunnels, whether or not
    /// this node has a tunnel: other nodes believe packets from its address as long as they know it.
    ///
    /// Must come before pods are attached. When it returns, no flow of an attached pod leads to the port. Blocking: the
    /// first call, and one with another port, walks the flow tables, 0.3 us per row.
    pub fn guard_tunnel_port(&self, port: u16) -> Result<(), DataplaneError> {
        let mut maps = lock(&self.fabric);
        maps.set_port(port)?;
        self.remove_flows_to_port(&mut maps, port)
    }

    /// A pod may have a flow to the port from before it was that of tunnels.
    fn remove_flows_to_port(&self, maps: &mut FabricMaps, port: u16) -> Result<(), DataplaneError> {
        if maps.guarded == Some(port) {
            return Ok(());
        }
        // A program that has read the row before may be about to write such a flow.
        membarrier::wait_for_programs();
        self.flows.remove_to_port(port)?;
        maps.guarded = Some(port);
        Ok(())
    }

    /// Replaces what the programs know of other nodes. Until the first call they use what an earlier agent wrote.
    ///
    /// Rows are written before those that refer to them, and removed in reverse (I2). When it returns, established
    /// flows whose far end has moved, or is not known any more, are evaluated again. Blocking: some microseconds per
    /// changed row.
    ///
    /// # Errors
    /// The first one. What has no room stops nothing else: everything that another node has no longer is removed all
    /// the same. The next call writes what is missing.
    pub fn set_fabric(&self, fabric: &FabricRows) -> Result<(), DataplaneError> {
        let mut maps = lock(&self.fabric);
        self.adopt_ways(&mut maps)?;
        let mut numbers = FabricMaps::numbers(fabric);
        let mut result = Ok(());
        if let Some(tunnel) = fabric.tunnel {
            let guarded = maps.set_tunnel(tunnel);
            result = guarded.and_then(|()| self.remove_flows_to_port(&mut maps, tunnel.port));
        }
        // `and` has its argument evaluated after an error, too.
        result = result.and(maps.put_ways(&fabric.ways));
        result = result.and(maps.put_numbers(&mut numbers));
        result = result.and(self.write_routes(&maps, fabric));
        maps.shares.set_desired(&fabric.egress);
        let written = maps.write_shares();
        if written.is_err() {
            maps.shares.unwritten();
        }
        result = result.and(written.map(drop));
        // A program may be about to use a way that its route named.
        membarrier::wait_for_programs();
        result = result.and(self.remove_ways(&mut maps, fabric));
        result = result.and(maps.retain_numbers(&numbers));
        if fabric.tunnel.is_none() && !maps.has_tunnels() {
            result = result.and(maps.remove_tunnel());
        }
        result
    }

    fn adopt_ways(&self, maps: &mut FabricMaps) -> Result<(), DataplaneError> {
        let endpoints = lock(&self.endpoints);
        let rows = endpoints.routes.remote_rows();
        let overlay = rows.filter(|(_, value)| value.flags & ROUTE_OVERLAY != 0);
        let overlay: BTreeSet<u32> = overlay.map(|(_, value)| value.node).collect();
        let shares = maps.shares.nodes()?;
        maps.adopt(&(&overlay | &shares))
    }

    /// Writes the routes of the networks, and has the flows evaluated again whose far ends they move.
    fn write_routes(&self, maps: &FabricMaps, fabric: &FabricRows) -> Result<(), DataplaneError> {
        let networks = fabric.networks.iter();
        let routes = networks.map(|(network, of)| (*network, maps.routes(of))).collect();
        let exposed = fabric.networks.iter().filter(|(_, network)| network.exposed);
        let exposed = exposed.map(|(network, _)| network.get()).collect();
        let mut endpoints = lock(&self.endpoints);
        let result = endpoints.routes.set_remote(routes);
        let result = result.and(endpoints.set_exposed(exposed));
        result.and(endpoints.renew_moved())
    }

    /// Removes the ways that no network needs and no row refers to.
    fn remove_ways(&self, maps: &mut FabricMaps, fabric: &FabricRows) -> Result<(), DataplaneError> {
        let routes = lock(&self.endpoints).routes.nodes()?;
        let shares = maps.shares.nodes()?;
        maps.retain_ways(&fabric.ways, &(&routes | &shares))
    }
}
