//! Writes the rows of `ROUTES`: the action for a network's packets to addresses of no endpoint.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::Path,
};

use ipnet::IpNet;
use kni_common::{
    address::{from_ip, to_ip},
    route::{
        ACTION_MASQUERADE, ACTION_REMOTE, ACTION_STACK, FULL_PREFIX, ROUTE_NODE, ROUTE_OWNED, RouteData, RouteKey,
        RouteValue,
    },
};
use kni_model::NetworkId;

use super::{
    DataplaneError,
    route_change::{RouteChange, Rows},
    table::Table,
};
use rows::rows;

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
    written: BTreeMap<u32, Rows>,
    /// The networks whose last write failed.
    unwritten: BTreeSet<u32>,
    /// Networks of which a destination may have got another node, or none, since their flows were evaluated again.
    /// Initially all with rows: the earlier agent may have ended in between.
    moved: BTreeSet<u32>,
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

    pub(super) fn adopt(table: Table<RouteKey, RouteValue>) -> Result<Self, DataplaneError> {
        let rows = table.rows()?;
        let defaults = rows
            .iter()
            .filter(|(key, _)| key.prefix_length == 32)
            .map(|(key, value)| (u32::from_be_bytes(key.data.network), value.action));
        let mut written: BTreeMap<u32, Rows> = BTreeMap::new();
        for (key, value) in &rows {
            let network = u32::from_be_bytes(key.data.network);
            written.entry(network).or_default().insert(*key, *value);
        }
        Ok(Self {
            defaults: defaults.collect(),
            moved: written.keys().copied().collect(),
            written,
            unwritten: BTreeSet::new(),
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

    /// Replaces the node's own addresses and subnets. After a failure the next call writes the rows again.
    pub(super) fn set_node(&mut self, node: NodeRoutes) -> Result<(), DataplaneError> {
        if self.node == node && self.unwritten.is_empty() {
            return Ok(());
        }
        self.node = node;
        self.write_all()
    }

    /// Replaces the addresses of services that another proxy serves. After a failure the next call writes all rows
    /// again.
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

    /// Replaces the destinations on other nodes. A network whose rows cannot all be written does not stop the others;
    /// the first error is returned, and the next call writes all rows of such a network again.
    pub(super) fn set_remote(&mut self, remote: BTreeMap<NetworkId, RemoteRoutes>) -> Result<(), DataplaneError> {
        let before = self.remote.replace(remote);
        let differs = |network: &NetworkId| {
            let now = self.remote.as_ref().and_then(|remote| remote.get(network));
            let former = before.as_ref().map(|before| before.get(network));
            former != Some(now) || self.unwritten.contains(&network.get())
        };
        let networks: Vec<NetworkId> = self.networks.keys().copied().filter(differs).collect();
        self.write_each(&networks)
    }

    /// Networks whose flows have to be evaluated again, by whichever call their destinations have moved; none before
    /// the destinations are known.
    pub(super) fn moved(&self) -> BTreeSet<u32> {
        let is_known = self.remote.is_some();
        self.moved.iter().copied().filter(|_| is_known).collect()
    }

    /// The flows of these networks have been evaluated again, after every change of their rows.
    pub(super) fn remove_moved(&mut self, networks: &BTreeSet<u32>) {
        self.moved.retain(|network| !networks.contains(network));
    }

    /// The numbers of nodes that rows refer to.
    pub(super) fn nodes(&self) -> Result<BTreeSet<u32>, DataplaneError> {
        let number = |value: &RouteValue| (value.action == ACTION_REMOTE).then_some(value.node);
        if self.unwritten.is_empty() {
            let written = self.written.values().flat_map(Rows::values);
            return Ok(written.filter_map(number).collect());
        }
        let rows = self.table.rows()?;
        Ok(rows.iter().filter_map(|(_, value)| number(value)).collect())
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
        let mut unwanted: Vec<RouteKey> = unwanted.flat_map(|(_, rows)| rows.keys().copied()).collect();
        let unknown = self.unwritten.iter().copied().filter(|network| !is_kept(*network));
        let unknown: BTreeSet<[u8; 4]> = unknown.map(u32::to_be_bytes).collect();
        if !unknown.is_empty() {
            // Which of their rows are written is only known to the table.
            let rows = self.table.rows()?.into_iter().map(|(key, _)| key);
            unwanted.extend(rows.filter(|key| unknown.contains(&key.data.network)));
        }
        self.table.remove_all(&unwanted)?;
        self.written.retain(|network, _| is_kept(*network));
        self.unwritten.retain(|network| is_kept(*network));
        self.networks.retain(|id, _| networks.contains(id));
        self.defaults.retain(|network, _| is_kept(*network));
        Ok(())
    }

    /// The rows of a network, as they are.
    fn rows_of(&self, network: NetworkId) -> Result<Rows, DataplaneError> {
        if let Some(written) = self.written.get(&network.get()) {
            return Ok(written.clone());
        }
        let of_network = |key: &RouteKey| key.data.network == network.get().to_be_bytes();
        let rows = self.table.rows()?.into_iter();
        Ok(rows.filter(|(key, _)| of_network(key)).collect())
    }

    /// Writes the rows of a network that differ. Where there is no room for new ones, the others are up to date all the
    /// same.
    fn write(&mut self, network: NetworkId, routes: &NetworkRoutes) -> Result<(), DataplaneError> {
        let before = self.rows_of(network)?;
        let remote = self.remote.as_ref().map(|remote| remote.get(&network));
        let foreign = self.foreign.get(&network);
        let mut desired = rows(network, routes, &self.node, foreign, remote.flatten());
        if remote.is_none() {
            let earlier = before.iter().filter(|(_, value)| is_of_fabric(**value));
            desired.extend(earlier.map(|(key, value)| (*key, *value)));
        }
        let change = RouteChange::between(&before, &desired);
        if change.moves(&before) {
            self.moved.insert(network.get());
        }
        self.unwritten.insert(network.get());
        self.written.remove(&network.get());
        self.table.exchange(&change.replaced, &change.added, &change.gone)?;
        self.written.insert(network.get(), desired);
        self.unwritten.remove(&network.get());
        Ok(())
    }

    /// Writes the rows of these networks that differ, also those after one that fails.
    fn write_each(&mut self, networks: &[NetworkId]) -> Result<(), DataplaneError> {
        let mut result = Ok(());
        for network in networks {
            if let Some(routes) = self.networks.get(network).cloned() {
                result = result.and(self.write(*network, &routes));
            }
        }
        result
    }

    fn write_all(&mut self) -> Result<(), DataplaneError> {
        let networks: Vec<NetworkId> = self.networks.keys().copied().collect();
        self.write_each(&networks)
    }
}

/// Whether a row is of other nodes, or of the node as they see it.
const fn is_of_fabric(value: RouteValue) -> bool {
    value.action == ACTION_REMOTE || value.flags & (ROUTE_NODE | ROUTE_OWNED) != 0
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
        let mut set = |nets: &[(&str, u32)]| set_remote(&mut table, remote(nets)).unwrap().contains(&7);
        assert!(set(&[]), "only pods have its addresses from now on");
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

    /// The networks whose flows the call has evaluated again.
    fn set_remote(
        table: &mut RouteTable,
        remote: BTreeMap<NetworkId, RemoteRoutes>,
    ) -> Result<BTreeSet<u32>, DataplaneError> {
        table.set_remote(remote)?;
        let moved = table.moved();
        table.remove_moved(&moved);
        Ok(moved)
    }

    /// A table of 64 rows, with networks 7 and 8.
    fn two_networks() -> RouteTable {
        let mut table = RouteTable::adopt(map()).unwrap();
        for number in [7, 8] {
            table.set(network(number), &with_services()).unwrap();
        }
        table
    }

    /// Routes of network 7, and more of network 8 than fit.
    fn too_many(nets: &[(&str, u32)]) -> BTreeMap<NetworkId, RemoteRoutes> {
        let mut routes = remote(nets);
        routes.insert(network(8), many(remote(&[]), 80));
        routes
    }

    /// Routes of network 7 with more.
    fn many(mut routes: BTreeMap<NetworkId, RemoteRoutes>, more: u8) -> RemoteRoutes {
        let mut of = routes.remove(&network(7)).unwrap();
        let more = (0..more).map(|host| format!("10.0.2.{host}/32"));
        let way = RemoteRoute {
            number: 9,
            overlay: true,
            node: false,
        };
        of.remote.extend(more.map(|net| (net.parse().unwrap(), way)));
        of
    }

    fn node_of(table: &RouteTable, number: u32, address: &str) -> Option<u32> {
        let found = table.find(network(number), address.parse().unwrap()).unwrap();
        found
            .filter(|route| route.action == ACTION_REMOTE)
            .map(|route| route.node)
    }

    #[test]
    fn what_has_moved_is_known_until_flows_are_judged_again() {
        let mut table = two_networks();
        set_remote(&mut table, remote(&[("10.0.0.0/26", 1)])).unwrap();
        set_remote(&mut table, too_many(&[("10.0.0.0/26", 2)])).unwrap_err();
        let moved = set_remote(&mut table, remote(&[("10.0.0.0/26", 2)])).unwrap();
        assert!(moved.contains(&7), "written by the call that failed later");
    }

    #[test]
    fn what_another_change_has_written_is_known_too() {
        let mut table = two_networks();
        let mut routes = remote(&[("10.0.0.0/26", 1)]);
        routes.insert(network(8), many(remote(&[]), 40));
        set_remote(&mut table, routes).unwrap();
        let routes: BTreeMap<_, _> = [(network(7), many(remote(&[("10.0.0.0/26", 2)]), 50))].into();
        set_remote(&mut table, routes.clone()).unwrap_err();
        // There is room again, and another caller writes the rows.
        table.retain(&[network(7)]).unwrap();
        table.set(network(7), &with_services()).unwrap();
        assert!(set_remote(&mut table, routes).unwrap().contains(&7));
    }

    #[test]
    fn a_new_process_does_not_know_what_was_judged_again() {
        let mut before = RouteTable::adopt(map()).unwrap();
        before.set(network(7), &with_services()).unwrap();
        set_remote(&mut before, remote(&[("10.0.0.0/26", 1)])).unwrap();
        // Killed between the rows and the epochs.
        before.set_remote(remote(&[("10.0.0.0/26", 2)])).unwrap();
        let mut after = RouteTable::adopt(before.table).unwrap();
        after.set(network(7), &with_services()).unwrap();
        let routes = || remote(&[("10.0.0.0/26", 2)]);
        assert!(set_remote(&mut after, routes()).unwrap().contains(&7));
        assert!(set_remote(&mut after, routes()).unwrap().is_empty());
    }

    #[test]
    fn withdrawals_need_no_room() {
        let mut table = two_networks();
        let mut routes = remote(&[("10.0.0.0/26", 1), ("10.0.0.64/26", 2)]);
        routes.insert(network(8), routes[&network(7)].clone());
        set_remote(&mut table, routes.clone()).unwrap();
        let full = [
            (network(7), many(remote(&[("10.0.0.64/26", 3)]), 80)),
            (network(8), remote(&[("10.0.0.64/26", 3)])[&network(7)].clone()),
        ];
        set_remote(&mut table, full.into()).unwrap_err();
        for number in [7, 8] {
            assert_eq!(node_of(&table, number, "10.0.0.1"), None, "withdrawn");
            assert_eq!(node_of(&table, number, "10.0.0.65"), Some(3), "moved");
        }
        assert!(set_remote(&mut table, routes).unwrap().is_superset(&[7, 8].into()));
        assert_eq!(node_of(&table, 7, "10.0.0.1"), Some(1));
    }

    #[test]
    fn a_failure_before_the_destinations_are_known_keeps_the_earlier_ones() {
        let mut before = two_networks();
        set_remote(&mut before, remote(&[("10.0.0.0/26", 1)])).unwrap();
        let mut after = RouteTable::adopt(before.table).unwrap();
        let many = (0..80).map(|host| format!("10.0.3.{host}/32").parse().unwrap());
        let routes = NetworkRoutes {
            subnets: many.collect(),
            ..with_services()
        };
        after.set(network(7), &routes).unwrap_err();
        assert_eq!(after.nodes().unwrap(), [1].into(), "of rows that are not known");
        after.set(network(7), &with_services()).unwrap();
        assert_eq!(node_of(&after, 7, "10.0.0.1"), Some(1));
        assert_eq!(after.nodes().unwrap(), [1].into());
    }

    #[test]
    fn node_routes_that_did_not_fit_are_written_by_the_next_call() {
        let mut table = RouteTable::adopt(map()).unwrap();
        let masquerades = NetworkRoutes {
            egress: RouteEgress::Masquerade { host_access: true },
            ..with_services()
        };
        table.set(network(7), &masquerades).unwrap();
        let many = (0..80).map(|host| format!("192.0.2.{host}").parse().unwrap());
        let node = NodeRoutes {
            own: many.collect(),
            ..NodeRoutes::default()
        };
        table.set_node(node.clone()).unwrap_err();
        table.set_node(node).unwrap_err();
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
        assert!(set_remote(&mut after, BTreeMap::new()).unwrap().contains(&7));
        assert_eq!(after.table.rows().unwrap().len(), written.len() - 2);
    }
}
