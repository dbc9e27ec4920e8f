//! Writes the rows of endpoints and addresses in an order in which the programs never see an incomplete endpoint.

mod addresses;
mod verify;

use std::collections::{BTreeMap, BTreeSet};

use kni_common::{
    IFINDEX_BASE,
    address::{ADDRESS_OF_SERVICE, AddressKey, AddressValue},
    config::{Config, FlowShare},
    counter::{Counter, DropKey, EventGate},
    endpoint::{EndpointPolicy, EndpointRow, FLAG_HANDOVER, FLAG_READY, FLAG_ROUTED, FLAG_SUSPENDED},
};
use kni_model::{EndpointId, Enforcement, NetworkId};

use super::{
    DataplaneError, EndpointConfig, NetworkRoutes,
    endpoint_row::Age,
    enforce::{self, Enforced},
    generation::Generations,
    pin::Pins,
    routes::RouteTable,
    table::{PerCpuTable, Table},
};
use addresses::exposed_networks;
pub(super) use addresses::is_stale;

/// The maps with rows per endpoint.
pub(super) struct EndpointMaps {
    pub(super) endpoints: Table<u32, EndpointRow>,
    /// What only packets without a current flow need.
    policies: Table<u32, EndpointPolicy>,
    /// Endpoints by the index of a host interface that a CNI plugin created.
    interfaces: Table<u32, u32>,
    pub(super) addresses: Table<AddressKey, AddressValue>,
    /// Networks whose addresses other nodes send to without a tunnel: such packets find their pod by a second row.
    pub(super) exposed: BTreeSet<u32>,
    /// Whether the last call of [`Self::set_exposed`] was complete. There was none yet: an earlier agent may have ended
    /// within one.
    pub(super) exposed_is_written: bool,
    pub(super) routes: RouteTable,
    pub(super) counters: PerCpuTable<u32, Counter>,
    pub(super) drops: PerCpuTable<DropKey, Counter>,
    pub(super) gates: PerCpuTable<u32, EventGate>,
    pub(super) config: Table<u32, Config>,
    shares: Table<u32, FlowShare>,
    enforced: Enforced,
    /// Endpoints at which two copies of the programs are attached.
    handovers: BTreeSet<EndpointId>,
    /// Lost events of endpoints that have been withdrawn since.
    pub(super) lost_before: u64,
    generations: Generations,
    /// The period of `generations` in which all rows were near enough.
    reviewed: u32,
}

impl EndpointMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        let endpoints: Table<u32, EndpointRow> = Table::open("ENDPOINTS", &pins.map("ENDPOINTS"))?;
        let policies: Table<u32, EndpointPolicy> = Table::open("ENDPOINT_POLICIES", &pins.map("ENDPOINT_POLICIES"))?;
        let rows = endpoints.rows()?;
        let generations = Generations::after(&rows);
        let addresses: Table<AddressKey, AddressValue> = Table::open("ADDRESSES", &pins.map("ADDRESSES"))?;
        Ok(Self {
            exposed: exposed_networks(&addresses, &rows)?,
            exposed_is_written: false,
            enforced: Enforced::from_rows(&rows, &policies.rows()?),
            endpoints,
            policies,
            interfaces: Table::open("INTERFACES", &pins.map("INTERFACES"))?,
            addresses,
            routes: RouteTable::open(&pins.map("ROUTES"))?,
            counters: PerCpuTable::open("COUNTERS", &pins.map("COUNTERS"))?,
            drops: PerCpuTable::open("DROPS", &pins.map("DROPS"))?,
            gates: PerCpuTable::open("EVENT_GATES", &pins.map("EVENT_GATES"))?,
            config: Table::open("CONFIG", &pins.map("CONFIG"))?,
            shares: Table::open("FLOW_SHARES", &pins.map("FLOW_SHARES"))?,
            handovers: BTreeSet::new(),
            lost_before: 0,
            generations,
            reviewed: generations.period(),
        })
    }

    /// Every row of `ENDPOINTS`, including free ones.
    pub(super) fn rows(&self) -> Result<Vec<(u32, EndpointRow)>, DataplaneError> {
        self.endpoints.rows()
    }

    pub(super) fn row(&self, endpoint: EndpointId) -> Result<EndpointRow, DataplaneError> {
        self.endpoints.get(&endpoint.0)?.ok_or(DataplaneError::EndpointRange {
            id: endpoint.0,
            capacity: self.endpoints.capacity(),
        })
    }

    fn policy(&self, endpoint: EndpointId) -> Result<EndpointPolicy, DataplaneError> {
        Ok(self.policies.get(&endpoint.0)?.unwrap_or_default())
    }

    /// The configuration of a published endpoint.
    pub(super) fn config_of(&self, endpoint: EndpointId) -> Result<Option<EndpointConfig>, DataplaneError> {
        let (row, policy) = (self.row(endpoint)?, self.policy(endpoint)?);
        Ok(EndpointConfig::of_rows(endpoint, &row, &policy))
    }

    /// The row that the endpoint should have, which is ready unless the row that was `found` is suspended.
    fn desired(&self, config: &EndpointConfig, age: Age, routed: bool, found: &EndpointRow) -> EndpointRow {
        let suspended = found.flags & FLAG_SUSPENDED;
        let mut row = config.row(age, routed, suspended == 0);
        row.flags |= suspended;
        if self.handovers.contains(&config.endpoint) {
            row.flags |= FLAG_HANDOVER;
        }
        row
    }

    /// Sets or clears the flag that two copies of the programs are at the endpoint's host interface. Also clears the
    /// flag of an agent that was killed in between.
    pub(super) fn hand_over(&mut self, endpoint: EndpointId, two: bool) -> Result<(), DataplaneError> {
        if two {
            self.handovers.insert(endpoint);
        } else {
            self.handovers.remove(&endpoint);
        }
        let row = self.row(endpoint)?;
        let flag = if two { FLAG_HANDOVER } else { 0 };
        if row.flags & FLAG_HANDOVER == flag {
            return Ok(());
        }
        let flags = row.flags & !FLAG_HANDOVER | flag;
        self.endpoints.put(&endpoint.0, &EndpointRow { flags, ..row })
    }

    /// Writes a new generation, not ready; then the policy words and the addresses; then ready (I1, I2).
    pub(super) fn publish(&mut self, config: &EndpointConfig) -> Result<(), DataplaneError> {
        let enforcement = self.enforced.get(config.endpoint)?;
        let found = self.row(config.endpoint)?;
        let generation = self.generations.next();
        let age = Age::new(generation);
        let routed = self.routes.is_routed(config.network);
        let desired = self.desired(config, age, routed, &found);
        let flags = desired.flags & !FLAG_READY;
        self.endpoints
            .put(&config.endpoint.0, &EndpointRow { flags, ..desired })?;
        self.policies.put(&config.endpoint.0, &config.policy(enforcement))?;
        self.write_addresses(config, generation)?;
        self.write_interface(config)?;
        self.remove_early_drops(config.endpoint)?;
        self.endpoints.put(&config.endpoint.0, &desired)
    }

    /// Stops the traffic of a published endpoint at once, or lets it flow again; its addresses, policies and flows
    /// stay. Returns whether that is new.
    pub(super) fn suspend(&mut self, endpoint: EndpointId, suspended: bool) -> Result<bool, DataplaneError> {
        let row = self.row(endpoint)?;
        if row.network == 0 || (row.flags & FLAG_SUSPENDED != 0) == suspended {
            return Ok(false);
        }
        let flags = if suspended {
            row.flags & !FLAG_READY | FLAG_SUSPENDED
        } else {
            row.flags & !FLAG_SUSPENDED | FLAG_READY
        };
        self.endpoints.put(&endpoint.0, &EndpointRow { flags, ..row })?;
        Ok(true)
    }

    /// Keeps the generation where the row is already right, so that flows and traffic continue. An agent that was
    /// killed during a handover has left its flag, which the adoption of the interface clears.
    pub(super) fn republish(&mut self, config: &EndpointConfig) -> Result<(), DataplaneError> {
        let enforcement = self.enforced.get(config.endpoint)?;
        let mut found = self.row(config.endpoint)?;
        if !self.handovers.contains(&config.endpoint) {
            found.flags &= !FLAG_HANDOVER;
        }
        let routed = self.routes.is_routed(config.network);
        let same_policy = self.policy(config.endpoint)? == config.policy(enforcement);
        if !same_policy || found != self.desired(config, Age::of(&found), routed, &found) {
            self.remove_addresses(config.endpoint)?;
            return self.publish(config);
        }
        self.write_addresses(config, found.incarnation)?;
        self.write_interface(config)
    }

    /// Writes a network's routes and, at its endpoints, whether their packets may leave the node untranslated. Returns
    /// whether the network's egress has changed.
    pub(super) fn set_routes(&mut self, network: NetworkId, routes: &NetworkRoutes) -> Result<bool, DataplaneError> {
        let changed = self.routes.set(network, routes)?;
        let flag = if self.routes.is_routed(network) { FLAG_ROUTED } else { 0 };
        for (endpoint, row) in self.rows()? {
            if row.network == network.get() && row.flags & FLAG_ROUTED != flag {
                let flags = row.flags & !FLAG_ROUTED | flag;
                self.endpoints.put(&endpoint, &EndpointRow { flags, ..row })?;
            }
        }
        Ok(changed)
    }

    /// Makes the programs evaluate the flows of a published endpoint again.
    pub(super) fn renew_generation(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let row = self.row(endpoint)?;
        if row.network == 0 {
            return Ok(());
        }
        let generation = self.generations.next();
        self.endpoints.put(&endpoint.0, &EndpointRow { generation, ..row })
    }

    /// The incarnation of a published endpoint.
    pub(super) fn incarnation(&self, endpoint: EndpointId) -> Result<Option<u32>, DataplaneError> {
        let row = self.row(endpoint)?;
        Ok((row.network != 0).then_some(row.incarnation))
    }

    /// Applies other enforcements. For an unpublished endpoint, [`Self::publish`] will write the enforcement.
    pub(super) fn enforce(&mut self, changes: &[(EndpointId, Enforcement)]) -> Result<(), DataplaneError> {
        let capacity = self.endpoints.capacity();
        if let Some((EndpointId(id), _)) = changes.iter().find(|(endpoint, _)| endpoint.0 >= capacity) {
            return Err(DataplaneError::EndpointRange { id: *id, capacity });
        }
        self.enforced.record(changes);
        let (rows, policies) = if let [(endpoint, _)] = changes {
            let row = (endpoint.0, self.row(*endpoint)?);
            (vec![row], vec![(endpoint.0, self.policy(*endpoint)?)])
        } else {
            (self.rows()?, self.policies.rows()?)
        };
        let rounds = enforce::rounds(&rows, &policies, changes, || self.generations.next());
        self.policies.put_all(&rounds.words)?;
        self.endpoints.put_all(&rounds.generations)
    }

    /// Makes the programs evaluate again the flows between endpoints of these networks and peers that are no endpoint
    /// of this node. Must come after the change of the peers' identities.
    pub(super) fn renew_epochs(&mut self, networks: &BTreeSet<u32>) -> Result<(), DataplaneError> {
        let rows = self.rows()?.into_iter();
        let concerned = rows.filter(|(_, row)| row.network != 0 && networks.contains(&row.network));
        let renewed: Vec<(u32, EndpointRow)> = concerned
            .map(|(endpoint, row)| {
                let epoch = self.generations.next();
                (endpoint, EndpointRow { epoch, ..row })
            })
            .collect();
        self.endpoints.put_all(&renewed)
    }

    /// As [`Self::renew_epochs`], for the networks of which a destination has got another node, or none, since the last
    /// call that succeeded.
    pub(super) fn renew_moved(&mut self) -> Result<(), DataplaneError> {
        let moved = self.routes.moved();
        if !moved.is_empty() {
            self.renew_epochs(&moved)?;
            self.routes.remove_moved(&moved);
        }
        Ok(())
    }

    /// Moves generations that are too far back to be compared, every 2^20 steps. Returns the endpoints with another
    /// incarnation, whose host ports name the former one. Packets that open a flow to one of them may be dropped for
    /// some microseconds.
    pub(super) fn move_generations_near(&mut self) -> Result<BTreeMap<u32, u32>, DataplaneError> {
        if self.reviewed == self.generations.period() {
            return Ok(BTreeMap::new());
        }
        let mut incarnations = BTreeMap::new();
        for (endpoint, row) in self.rows()? {
            let Some(near) = self.generations.brought_near(&row) else {
                continue;
            };
            self.endpoints.put(&endpoint, &near)?;
            if near.incarnation != row.incarnation
                && let Some(config) = self.config_of(EndpointId(endpoint))?
            {
                self.write_addresses(&config, near.incarnation)?;
                incarnations.insert(endpoint, near.incarnation);
            }
        }
        self.reviewed = self.generations.period();
        Ok(incarnations)
    }

    /// The enforcements of the published endpoints.
    pub(super) fn enforcements(&self) -> Result<BTreeMap<EndpointId, Enforcement>, DataplaneError> {
        Ok(enforce::of_rows(&self.rows()?, &self.policies.rows()?))
    }

    /// Clears ready first. The free row keeps a new generation, so that the highest one is never lost.
    pub(super) fn withdraw(&mut self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let row = self.row(endpoint)?;
        if row.network != 0 {
            let generation = self.generations.next();
            let free = EndpointRow {
                generation,
                ..EndpointRow::default()
            };
            self.endpoints.put(&endpoint.0, &free)?;
        }
        self.enforced.remove(endpoint);
        let ifindex = self.policy(endpoint)?.ifindex;
        self.policies.put(&endpoint.0, &EndpointPolicy::default())?;
        // An interface that was created later may have the index by now.
        if self.interfaces.get(&ifindex)? == Some(endpoint.0) {
            self.interfaces.remove(&ifindex)?;
        }
        self.remove_addresses_of(endpoint, &row)?;
        self.shares.put(&endpoint.0, &FlowShare::default())?;
        self.remove_counts(endpoint)
    }

    /// Endpoints that have a row or an address.
    pub(super) fn published(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        let rows = self.rows()?.into_iter();
        let mut found: Vec<EndpointId> = rows
            .filter(|(_, row)| row.network != 0)
            .map(|(endpoint, _)| EndpointId(endpoint))
            .collect();
        let addresses = self.addresses.rows()?.into_iter().map(|(_, value)| value.endpoint);
        found.extend(
            addresses
                .filter(|endpoint| *endpoint != ADDRESS_OF_SERVICE)
                .map(EndpointId),
        );
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Index of an endpoint's host interface in its row; of a free row, the index that it would have.
    pub(super) fn host_ifindex(&self, endpoint: EndpointId) -> Result<u32, DataplaneError> {
        let found = self.policy(endpoint)?.ifindex;
        Ok(if found == 0 { IFINDEX_BASE + endpoint.0 } else { found })
    }
}

/// Maps for tests, without a pin.
#[cfg(test)]
pub(super) mod fixture {
    use kni_common::route::{RouteData, RouteKey, RouteValue};

    use super::{super::table::fixture, *};

    /// Maps with two endpoints of network 3, and room for `addresses`.
    pub(crate) fn maps(addresses: u32) -> EndpointMaps {
        let endpoints = fixture::array(4);
        for id in [1, 2] {
            let row = EndpointRow {
                network: 3,
                incarnation: id,
                generation: id,
                epoch: id,
                ipv4: [10, 0, 0, u8::try_from(id).unwrap()],
                ..EndpointRow::default()
            };
            endpoints.put(&id, &row).unwrap();
        }
        let generations = Generations::after(&endpoints.rows().unwrap());
        EndpointMaps {
            endpoints,
            policies: fixture::array(4),
            interfaces: fixture::hash(4),
            addresses: fixture::hash(addresses),
            exposed: BTreeSet::new(),
            exposed_is_written: false,
            routes: RouteTable::adopt(fixture::trie::<RouteKey, RouteData, RouteValue>(64)).unwrap(),
            counters: fixture::per_cpu(4),
            drops: fixture::per_cpu(4),
            gates: fixture::per_cpu(4),
            config: fixture::array(1),
            shares: fixture::array(4),
            enforced: Enforced::default(),
            handovers: BTreeSet::new(),
            lost_before: 0,
            reviewed: generations.period(),
            generations,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::routes::{RemoteRoute, RemoteRoutes, RouteEgress},
        *,
    };

    #[test]
    fn a_suspended_endpoint_stays_so_until_it_is_resumed() {
        let mut maps = fixture::maps(4);
        let endpoint = EndpointId(1);
        let flags = |maps: &EndpointMaps| maps.row(endpoint).unwrap().flags & (FLAG_READY | FLAG_SUSPENDED);
        let config = maps.config_of(endpoint).unwrap().unwrap();
        maps.enforce(&[(endpoint, Enforcement::default())]).unwrap();
        maps.publish(&config).unwrap();
        assert_eq!(flags(&maps), FLAG_READY);
        assert!(maps.suspend(endpoint, true).unwrap());
        assert!(!maps.suspend(endpoint, true).unwrap(), "it is already");
        assert_eq!(flags(&maps), FLAG_SUSPENDED);
        // The next agent publishes it again.
        maps.publish(&config).unwrap();
        assert_eq!(flags(&maps), FLAG_SUSPENDED);
        maps.republish(&config).unwrap();
        assert_eq!(flags(&maps), FLAG_SUSPENDED);
        assert_eq!(maps.verify(&config), Vec::<String>::new());
        assert!(maps.suspend(endpoint, false).unwrap());
        assert_eq!(flags(&maps), FLAG_READY);
        maps.endpoints.put(&endpoint.0, &EndpointRow::default()).unwrap();
        assert!(!maps.suspend(endpoint, true).unwrap(), "there is none");
        assert_eq!(flags(&maps), 0);
    }

    #[test]
    fn flows_are_judged_again_once_after_each_move() {
        let mut maps = fixture::maps(4);
        let network = NetworkId::try_from(3).unwrap();
        let routes = NetworkRoutes {
            subnets: Vec::new(),
            service_subnets: Vec::new(),
            egress: RouteEgress::None,
        };
        maps.routes.set(network, &routes).unwrap();
        let mut epochs = |number: u32| {
            let way = RemoteRoute {
                number,
                overlay: true,
                node: false,
            };
            let routes = RemoteRoutes {
                remote: [("10.0.1.0/24".parse().unwrap(), way)].into(),
                own: BTreeSet::new(),
            };
            maps.routes.set_remote([(network, routes)].into()).unwrap();
            maps.renew_moved().unwrap();
            let rows = maps.rows().unwrap().into_iter();
            rows.map(|(_, row)| row.epoch).collect::<Vec<_>>()
        };
        let first = epochs(1);
        assert_eq!(epochs(1), first);
        let second = epochs(2);
        assert!(second[1] > first[1] && second[2] > first[2]);
        assert_eq!((second[0], second[3]), (0, 0), "rows of no endpoint");
        assert_eq!(epochs(2), second);
    }
}
