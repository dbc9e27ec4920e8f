//! Writes the rows of `ROUTES`: the action for a network's packets to addresses of no endpoint.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use kni_common::{
    address::{from_ip, to_ip},
    route::{
        ACTION_MASQUERADE, ACTION_REMOTE, ACTION_SERVICE_RANGE, ACTION_STACK, ACTION_UNREACHABLE, FULL_PREFIX,
        ROUTE_NODE, ROUTE_OVERLAY, RouteData, RouteKey, RouteValue,
    },
};
use kni_model::NetworkId;

use super::{DataplaneError, table::Table};

/// The routes of a network for packets to no local endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkRoutes {
    /// Ranges of the network itself: packets to addresses without endpoint are dropped.
    pub subnets: Vec<IpNet>,
    /// Ranges of virtual addresses: packets to addresses without service are dropped. The node's stack gets those of
    /// services that another proxy serves.
    pub service_subnets: Vec<IpNet>,
    /// All other destinations.
    pub egress: RouteEgress,
}

/// The action for packets that leave a network's own ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteEgress {
    /// They are dropped.
    None,
    /// The node's stack gets them.
    Stack,
    /// They leave the node with an address of the node as their source, unless they are for the node itself.
    Masquerade {
        /// The node's stack gets packets for the node, or for a subnet that is not connected by the uplink. Otherwise
        /// the former are dropped, and the latter leave by the uplink like all others.
        host_access: bool,
    },
}

impl RouteEgress {
    /// The action of the default route.
    const fn action(self) -> Option<u16> {
        match self {
            Self::None => None,
            Self::Stack => Some(ACTION_STACK),
            Self::Masquerade { .. } => Some(ACTION_MASQUERADE),
        }
    }
}

/// The node's own addresses and subnets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeRoutes {
    /// Addresses of the node.
    pub own: BTreeSet<IpAddr>,
    /// Subnets that it is connected to by interfaces other than the uplink.
    pub connected: BTreeSet<IpNet>,
}

/// Destinations of a network on other nodes, by the numbers of nodes, and the node's own addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RemoteRoutes {
    /// Ranges and single addresses that another node has.
    pub(super) remote: BTreeMap<IpNet, RemoteRoute>,
    /// Addresses of this node that pods of other nodes may send to.
    pub(super) own: BTreeSet<IpAddr>,
}

/// The way to a destination on another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RemoteRoute {
    /// Key of `NODES`.
    pub(super) number: u32,
    /// Through the tunnel.
    pub(super) overlay: bool,
    /// The destination is the node itself.
    pub(super) node: bool,
}

/// Virtual addresses of services that another proxy on the node serves.
pub(super) type ForeignAddresses = BTreeMap<NetworkId, BTreeSet<IpAddr>>;

/// The rows of `ROUTES`.
#[derive(Debug)]
pub(super) struct RouteTable {
    table: Table<RouteKey, RouteValue>,
    /// The rows of each network, as written. A network whose last write failed has none here: its rows are read again.
    written: BTreeMap<u32, BTreeMap<RouteKey, RouteValue>>,
    /// The routes that this agent has set.
    networks: BTreeMap<NetworkId, NetworkRoutes>,
    /// Destinations on other nodes. `None` until they are known: those that an earlier agent wrote stay.
    remote: Option<BTreeMap<NetworkId, RemoteRoutes>>,
    node: NodeRoutes,
    /// Initially all single addresses with the stack as action that an earlier agent wrote: those that are not virtual
    /// addresses have no effect.
    foreign: ForeignAddresses,
    /// Whether every network's rows have `foreign` as this agent has set it.
    foreign_is_written: bool,
    /// Actions of the default routes by network number. Initially those of an earlier agent, so that a restart changes
    /// nothing at the endpoints.
    defaults: BTreeMap<u32, u16>,
}

impl RouteTable {
    pub(super) fn open(path: &Path) -> Result<Self, DataplaneError> {
        let table: Table<RouteKey, RouteValue> = Table::open("ROUTES", path)?;
        Self::adopt(table)
    }

    fn adopt(table: Table<RouteKey, RouteValue>) -> Result<Self, DataplaneError> {
        let rows = table.rows()?;
        let defaults = rows
            .iter()
            .filter(|(key, _)| key.prefix_length == 32)
            .map(|(key, value)| (u32::from_be_bytes(key.data.network), value.action));
        let mut written: BTreeMap<u32, BTreeMap<RouteKey, RouteValue>> = BTreeMap::new();
        for (key, value) in &rows {
            let network = u32::from_be_bytes(key.data.network);
            written.entry(network).or_default().insert(*key, *value);
        }
        Ok(Self {
            defaults: defaults.collect(),
            written,
            remote: None,
            foreign: single_addresses_of_stack(&rows),
            foreign_is_written: false,
            table,
            networks: BTreeMap::new(),
            node: NodeRoutes::default(),
        })
    }

    /// Whether packets of the network leave the node with the pods' own addresses.
    pub(super) fn is_routed(&self, network: NetworkId) -> bool {
        self.defaults.get(&network.get()) == Some(&ACTION_STACK)
    }

    /// Sets a network's routes; returns whether its egress has changed.
    pub(super) fn set(&mut self, network: NetworkId, routes: &NetworkRoutes) -> Result<bool, DataplaneError> {
        self.write(network, routes)?;
        self.networks.insert(network, routes.clone());
        let before = match routes.egress.action() {
            Some(action) => self.defaults.insert(network.get(), action),
            None => self.defaults.remove(&network.get()),
        };
        Ok(before.is_some() && before != routes.egress.action())
    }

    pub(super) fn set_node(&mut self, node: NodeRoutes) -> Result<(), DataplaneError> {
        if self.node == node {
            return Ok(());
        }
        self.node = node;
        self.write_all()
    }

    /// Replaces the addresses of services that another proxy serves. After a failure the next call writes all rows again.
    pub(super) fn set_foreign(&mut self, foreign: &ForeignAddresses) -> Result<(), DataplaneError> {
        if self.foreign_is_written && self.foreign == *foreign {
            return Ok(());
        }
        self.foreign_is_written = false;
        self.foreign.clone_from(foreign);
        self.write_all()?;
        self.foreign_is_written = true;
        Ok(())
    }

    /// Replaces the destinations on other nodes; returns the networks of which a destination has another node, or none.
    /// After a failure the next call writes all rows of the networks again.
    pub(super) fn set_remote(
        &mut self,
        remote: BTreeMap<NetworkId, RemoteRoutes>,
    ) -> Result<BTreeSet<u32>, DataplaneError> {
        let before = self.remote.replace(remote);
        let mut moved = BTreeSet::new();
        for (network, routes) in &self.networks {
            let now = self.remote.as_ref().and_then(|remote| remote.get(network));
            let former = before.as_ref().map(|before| before.get(network));
            if former == Some(now) && self.written.contains_key(&network.get()) {
                continue;
            }
            let desired = rows(*network, routes, &self.node, self.foreign.get(network), now);
            if write(&self.table, &mut self.written, *network, desired)? {
                moved.insert(network.get());
            }
        }
        Ok(moved)
    }

    /// The row that the network's packets to an address find.
    pub(super) fn find(&self, network: NetworkId, address: IpAddr) -> Result<Option<RouteValue>, DataplaneError> {
        self.table.get(&RouteKey {
            prefix_length: FULL_PREFIX,
            data: RouteData {
                network: network.get().to_be_bytes(),
                address: from_ip(address),
            },
        })
    }

    /// The rows of destinations on other nodes that are written.
    pub(super) fn remote_rows(&self) -> impl Iterator<Item = (&RouteKey, &RouteValue)> {
        let rows = self.written.values().flatten();
        rows.filter(|(_, value)| value.action == ACTION_REMOTE)
    }

    pub(super) fn retain(&mut self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        let is_kept = |network: u32| networks.iter().any(|id| id.get() == network);
        let unwanted = self.written.iter().filter(|(network, _)| !is_kept(**network));
        let unwanted: Vec<RouteKey> = unwanted.flat_map(|(_, rows)| rows.keys().copied()).collect();
        self.table.remove_all(&unwanted)?;
        self.written.retain(|network, _| is_kept(*network));
        self.networks.retain(|id, _| networks.contains(id));
        self.defaults.retain(|network, _| is_kept(*network));
        Ok(())
    }

    fn write(&mut self, network: NetworkId, routes: &NetworkRoutes) -> Result<(), DataplaneError> {
        let remote = self.remote.as_ref().map(|remote| remote.get(&network));
        let mut desired = rows(
            network,
            routes,
            &self.node,
            self.foreign.get(&network),
            remote.flatten(),
        );
        if remote.is_none()
            && let Some(written) = self.written.get(&network.get())
        {
            let earlier = written.iter().filter(|(_, value)| is_of_fabric(**value));
            desired.extend(earlier.map(|(key, value)| (*key, *value)));
        }
        write(&self.table, &mut self.written, network, desired).map(drop)
    }

    /// Writes the rows of all networks again.
    fn write_all(&mut self) -> Result<(), DataplaneError> {
        for (network, routes) in self.networks.clone() {
            self.write(network, &routes)?;
        }
        Ok(())
    }
}

/// Whether a row is of other nodes, or of the node as they see it.
const fn is_of_fabric(value: RouteValue) -> bool {
    value.action == ACTION_REMOTE || value.flags & ROUTE_NODE != 0
}

/// Writes the rows of a network that differ. Returns whether a destination that another node had has another node now, or
/// none.
fn write(
    table: &Table<RouteKey, RouteValue>,
    written: &mut BTreeMap<u32, BTreeMap<RouteKey, RouteValue>>,
    network: NetworkId,
    desired: BTreeMap<RouteKey, RouteValue>,
) -> Result<bool, DataplaneError> {
    let before = if let Some(before) = written.remove(&network.get()) {
        before
    } else {
        let of_network = |key: &RouteKey| key.data.network == network.get().to_be_bytes();
        let rows = table.rows()?.into_iter();
        rows.filter(|(key, _)| of_network(key)).collect()
    };
    let changed = desired.iter().filter(|(key, value)| before.get(*key) != Some(*value));
    let changed: Vec<_> = changed.map(|(key, value)| (*key, *value)).collect();
    table.put_all(&changed)?;
    let gone: Vec<RouteKey> = before
        .keys()
        .filter(|key| !desired.contains_key(*key))
        .copied()
        .collect();
    table.remove_all(&gone)?;
    let was_remote = |key: &RouteKey| before.get(key).is_some_and(|value| value.action == ACTION_REMOTE);
    // A range within another one changes the node of addresses that had that one's.
    let remote = before.iter().filter(|(_, value)| value.action == ACTION_REMOTE);
    let lengths: BTreeSet<u32> = remote.map(|(key, _)| key.prefix_length).collect();
    let narrows = |key: &RouteKey| {
        lengths
            .range(..key.prefix_length)
            .any(|length| was_remote(&widened(key, *length)))
    };
    let moved = gone.iter().any(was_remote) || changed.iter().any(|(key, _)| was_remote(key) || narrows(key));
    written.insert(network.get(), desired);
    Ok(moved)
}

/// The range of that prefix length that contains a row's range. `length` includes the 32 bits of the network.
fn widened(key: &RouteKey, length: u32) -> RouteKey {
    let bits = length.saturating_sub(32);
    let mask = u128::MAX.checked_shl(128_u32.saturating_sub(bits)).unwrap_or(0);
    RouteKey {
        prefix_length: length,
        data: RouteData {
            address: (u128::from_be_bytes(key.data.address) & mask).to_be_bytes(),
            ..key.data
        },
    }
}

/// Single addresses whose packets the stack gets. The virtual ones among them are services of another proxy.
fn single_addresses_of_stack(rows: &[(RouteKey, RouteValue)]) -> ForeignAddresses {
    let mut found = ForeignAddresses::new();
    let rows = rows.iter();
    let is_of_stack = |value: &RouteValue| value.action == ACTION_STACK && value.flags & ROUTE_NODE == 0;
    for (key, _) in rows.filter(|(key, value)| key.prefix_length == FULL_PREFIX && is_of_stack(value)) {
        if let Ok(network) = NetworkId::try_from(u32::from_be_bytes(key.data.network)) {
            found.entry(network).or_default().insert(to_ip(key.data.address));
        }
    }
    found
}

fn rows(
    network: NetworkId,
    routes: &NetworkRoutes,
    node: &NodeRoutes,
    foreign: Option<&BTreeSet<IpAddr>>,
    remote: Option<&RemoteRoutes>,
) -> BTreeMap<RouteKey, RouteValue> {
    let route = |net: IpNet, action: u16| to_row(network, net, action, 0, 0);
    let defaults = [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())];
    let default_action = routes.egress.action();
    let mut rows = BTreeMap::new();
    rows.extend(
        default_action
            .iter()
            .flat_map(|action| defaults.map(|net| route(net, *action))),
    );
    // Without host access the stack does not accept the packet either, and it is dropped.
    rows.extend(beside_uplink(routes, node).map(|net| route(net, ACTION_STACK)));
    rows.extend(routes.subnets.iter().map(|net| route(*net, ACTION_UNREACHABLE)));
    rows.extend(
        routes
            .service_subnets
            .iter()
            .map(|net| route(*net, ACTION_SERVICE_RANGE)),
    );
    // Outside of the virtual ranges the network's egress decides.
    let is_virtual = |address: &&IpAddr| routes.service_subnets.iter().any(|range| range.contains(*address));
    let foreign = foreign.into_iter().flatten().filter(is_virtual);
    rows.extend(foreign.map(|address| route(IpNet::from(*address), ACTION_STACK)));
    let Some(RemoteRoutes { remote, own }) = remote else {
        return rows;
    };
    let flag = |set: bool, flag: u16| if set { flag } else { 0 };
    rows.extend(remote.iter().map(|(net, way)| {
        let flags = flag(way.overlay, ROUTE_OVERLAY) | flag(way.node, ROUTE_NODE);
        to_row(network, *net, ACTION_REMOTE, flags, way.number)
    }));
    let own = own.iter().map(|address| IpNet::from(*address));
    rows.extend(own.map(|net| to_row(network, net, ACTION_STACK, ROUTE_NODE, 0)));
    rows
}

fn to_row(network: NetworkId, net: IpNet, action: u16, flags: u16, node: u32) -> (RouteKey, RouteValue) {
    let offset = if matches!(net, IpNet::V4(_)) { 96 } else { 0 };
    let key = RouteKey {
        prefix_length: 32 + offset + u32::from(net.prefix_len()),
        data: RouteData {
            network: network.get().to_be_bytes(),
            address: from_ip(net.network()),
        },
    };
    (key, RouteValue { action, flags, node })
}

/// Destinations that do not leave by the uplink although the network masquerades. The network's own ranges take
/// precedence.
fn beside_uplink<'a>(routes: &'a NetworkRoutes, node: &'a NodeRoutes) -> impl Iterator<Item = IpNet> {
    let (own, connected) = match routes.egress {
        RouteEgress::None | RouteEgress::Stack => (false, false),
        RouteEgress::Masquerade { host_access } => (true, host_access),
    };
    let own = node
        .own
        .iter()
        .filter(move |_| own)
        .map(|address| IpNet::from(*address));
    let connected = node.connected.iter().filter(move |_| connected).copied();
    let ranges = || routes.subnets.iter().chain(&routes.service_subnets);
    own.chain(connected)
        .filter(move |net| !ranges().any(|range| range.contains(net)))
}

#[cfg(test)]
mod tests {
    use super::{super::table::fixture, *};

    /// A map without a pin.
    fn map() -> Table<RouteKey, RouteValue> {
        fixture::trie::<RouteKey, RouteData, RouteValue>(64)
    }

    fn network(number: u32) -> NetworkId {
        NetworkId::try_from(number).unwrap()
    }

    fn foreign(addresses: &[(u32, &str)]) -> ForeignAddresses {
        let mut found = ForeignAddresses::new();
        for (number, address) in addresses {
            let of_network = found.entry(network(*number)).or_default();
            of_network.insert(address.parse().unwrap());
        }
        found
    }

    fn with_services() -> NetworkRoutes {
        NetworkRoutes {
            subnets: vec!["10.0.0.0/24".parse().unwrap()],
            service_subnets: vec!["10.96.0.0/12".parse().unwrap(), "fd00:96::/112".parse().unwrap()],
            egress: RouteEgress::None,
        }
    }

    /// Single addresses of the stack.
    fn to_stack(table: &RouteTable) -> ForeignAddresses {
        single_addresses_of_stack(&table.table.rows().unwrap())
    }

    #[test]
    fn the_stack_gets_virtual_addresses_that_another_proxy_serves() {
        let mut table = RouteTable::adopt(map()).unwrap();
        table.set(network(7), &with_services()).unwrap();
        let plain = table.table.rows().unwrap();
        let within = foreign(&[(7, "10.96.0.9"), (7, "fd00:96::9")]);
        let mut wanted = foreign(&[(7, "10.98.0.9"), (7, "10.112.0.9"), (7, "10.0.0.9"), (8, "10.96.0.9")]);
        wanted.entry(network(7)).or_default().extend(&within[&network(7)]);
        table.set_foreign(&wanted).unwrap();
        let mut expected = foreign(&[(7, "10.98.0.9")]);
        expected.entry(network(7)).or_default().extend(&within[&network(7)]);
        assert_eq!(to_stack(&table), expected, "only virtual ones, only of known networks");
        assert_eq!(
            table.table.rows().unwrap().len(),
            plain.len() + 3,
            "nothing else changed"
        );

        table.set(network(8), &with_services()).unwrap();
        expected.extend(foreign(&[(8, "10.96.0.9")]));
        assert_eq!(to_stack(&table), expected, "a network that comes later has its own");

        table.set_foreign(&within).unwrap();
        assert_eq!(to_stack(&table), within);
        table.set_foreign(&ForeignAddresses::new()).unwrap();
        table.retain(&[network(7)]).unwrap();
        assert_eq!(table.table.rows().unwrap(), plain);
    }

    #[test]
    fn a_restart_leaves_them_to_the_other_proxy_until_they_are_set() {
        let mut before = RouteTable::adopt(map()).unwrap();
        before.set(network(7), &with_services()).unwrap();
        let wanted = foreign(&[(7, "10.96.0.9"), (7, "fd00:96::9")]);
        before.set_foreign(&wanted).unwrap();

        let mut after = RouteTable::adopt(before.table).unwrap();
        after.set(network(7), &with_services()).unwrap();
        assert_eq!(to_stack(&after), wanted);
        after.set_foreign(&ForeignAddresses::new()).unwrap();
        assert!(to_stack(&after).is_empty());
    }

    #[test]
    fn rows_that_did_not_fit_are_written_again() {
        let mut table = RouteTable::adopt(map()).unwrap();
        table.set(network(7), &with_services()).unwrap();
        let many: Vec<String> = (0..64).map(|host| format!("10.96.1.{host}")).collect();
        let many: Vec<(u32, &str)> = many.iter().map(|address| (7, address.as_str())).collect();
        table.set_foreign(&foreign(&many)).unwrap_err();
        table.set_foreign(&foreign(&many)).unwrap_err();
        table.set_foreign(&ForeignAddresses::new()).unwrap();
        assert!(to_stack(&table).is_empty());
    }

    #[test]
    fn each_range_has_its_action() {
        let routes = |egress| NetworkRoutes {
            subnets: vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
            service_subnets: vec!["10.96.0.0/12".parse().unwrap()],
            egress,
        };
        let network = NetworkId::try_from(7).unwrap();
        let actions = |egress| -> Vec<(u32, u16)> {
            let rows = rows(network, &routes(egress), &NodeRoutes::default(), None, None);
            assert!(rows.keys().all(|key| key.data.network == [0, 0, 0, 7]));
            rows.into_iter()
                .map(|(key, value)| (key.prefix_length, value.action))
                .collect()
        };
        let own = [
            (32 + 64, ACTION_UNREACHABLE),
            (32 + 96 + 12, ACTION_SERVICE_RANGE),
            (32 + 96 + 24, ACTION_UNREACHABLE),
        ];
        assert_eq!(actions(RouteEgress::None), own);
        for (egress, action) in [
            (RouteEgress::Stack, ACTION_STACK),
            (RouteEgress::Masquerade { host_access: true }, ACTION_MASQUERADE),
        ] {
            let found = actions(egress);
            assert_eq!(found.len(), 5);
            assert!(found.contains(&(32, action)) && found.contains(&(32 + 96, action)));
            assert!(own.iter().all(|row| found.contains(row)));
        }
    }

    fn remote(nets: &[(&str, u32)]) -> BTreeMap<NetworkId, RemoteRoutes> {
        let way = |number: u32| RemoteRoute {
            number,
            overlay: true,
            node: false,
        };
        let nets = nets.iter().map(|(net, number)| (net.parse().unwrap(), way(*number)));
        let routes = RemoteRoutes {
            remote: nets.collect(),
            own: ["192.0.2.1".parse().unwrap()].into(),
        };
        [(network(7), routes)].into()
    }

    #[test]
    fn flows_are_judged_again_only_where_a_destination_moves() {
        let mut table = RouteTable::adopt(map()).unwrap();
        table.set(network(7), &with_services()).unwrap();
        let mut set = |nets: &[(&str, u32)]| table.set_remote(remote(nets)).unwrap().contains(&7);
        assert!(!set(&[("10.0.0.0/26", 1)]), "the first node");
        assert!(!set(&[("10.0.0.0/26", 1), ("10.0.0.64/26", 2), ("fd00::/122", 2)]));
        assert!(set(&[("10.0.0.0/26", 1), ("10.0.0.64/26", 2)]), "one is gone");
        assert!(set(&[("10.0.0.0/26", 1), ("10.0.0.64/26", 3)]), "another node");
        assert!(
            set(&[("10.0.0.0/26", 1), ("10.0.0.5/32", 4), ("10.0.0.64/26", 3)]),
            "within a range"
        );
        assert!(!set(&[("10.0.0.0/26", 1), ("10.0.0.5/32", 4), ("10.0.0.64/26", 3)]));
        assert!(set(&[]));
        let left = table.table.rows().unwrap();
        assert!(left.iter().all(|(_, value)| value.action != ACTION_REMOTE));
    }

    #[test]
    fn a_restart_keeps_the_destinations_on_other_nodes_until_they_are_set() {
        let mut before = RouteTable::adopt(map()).unwrap();
        before.set(network(7), &with_services()).unwrap();
        before.set_remote(remote(&[("10.0.0.0/26", 1)])).unwrap();
        let written = before.table.rows().unwrap();

        let mut after = RouteTable::adopt(before.table).unwrap();
        assert_eq!(after.remote_rows().count(), 1);
        after.set(network(7), &with_services()).unwrap();
        after.set_node(NodeRoutes::default()).unwrap();
        assert_eq!(after.table.rows().unwrap(), written);
        assert!(
            to_stack(&after).is_empty(),
            "the node's own address is no other proxy's"
        );
        after.set_remote(remote(&[("10.0.0.0/26", 1)])).unwrap();
        assert_eq!(after.table.rows().unwrap(), written);
        assert!(after.set_remote(BTreeMap::new()).unwrap().contains(&7));
        assert_eq!(after.table.rows().unwrap().len(), written.len() - 2);
    }

    #[test]
    fn packets_for_the_node_do_not_leave_by_the_uplink() {
        let node = NodeRoutes {
            own: ["192.0.2.2", "10.0.0.7", "2001:db8::2"]
                .map(|ip| ip.parse().unwrap())
                .into(),
            connected: ["172.17.0.0/16", "10.0.0.128/25"]
                .map(|net| net.parse().unwrap())
                .into(),
        };
        let kept = |egress| -> Vec<String> {
            let routes = NetworkRoutes {
                subnets: vec!["10.0.0.0/24".parse().unwrap()],
                service_subnets: Vec::new(),
                egress,
            };
            beside_uplink(&routes, &node).map(|net| net.to_string()).collect()
        };
        assert_eq!(
            kept(RouteEgress::Masquerade { host_access: true }),
            ["192.0.2.2/32", "2001:db8::2/128", "172.17.0.0/16"]
        );
        assert_eq!(
            kept(RouteEgress::Masquerade { host_access: false }),
            ["192.0.2.2/32", "2001:db8::2/128"]
        );
        assert!(kept(RouteEgress::Stack).is_empty() && kept(RouteEgress::None).is_empty());
    }
}
