//! Models the endpoints, their addresses, the enforced policies, and the routes of their networks.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use super::service::Services;
use crate::frames::Mac;

/// The state of an endpoint's row: the number of its life (from its publication until it is published again or
/// withdrawn), and the number of the last change to its enforced policies. Neither number is ever reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version {
    life: u64,
    change: u64,
}

impl Version {
    /// Whether both belong to the same owner of the row.
    pub fn same_life(self, other: Self) -> bool {
        self.life == other.life
    }
}

/// The configuration of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Network id.
    pub network: u32,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// MAC address of the pod end.
    pub mac: Mac,
    /// MAC address of the host end.
    pub host_mac: Mac,
    /// Whether the node's stack may exchange packets with it.
    pub host_access: bool,
}

impl Endpoint {
    /// Whether it has the address.
    pub fn has(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => self.ipv4 == Some(v4),
            IpAddr::V6(v6) => self.ipv6 == Some(v6),
        }
    }

    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let v4 = self.ipv4.map(IpAddr::V4).into_iter();
        v4.chain(self.ipv6.map(IpAddr::V6))
    }
}

/// The policies of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enforced {
    /// Policy set, 0 if no policy selects it.
    pub policy: u32,
    /// Identity of its IPv4 address.
    pub identity4: u32,
    /// Identity of its IPv6 address.
    pub identity6: u32,
}

impl Enforced {
    pub(super) fn identity(self, of: IpAddr) -> u32 {
        if of.is_ipv4() { self.identity4 } else { self.identity6 }
    }
}

/// The current state of a ready endpoint.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) id: u32,
    pub(super) endpoint: Endpoint,
    pub(super) version: Version,
    pub(super) enforced: Enforced,
    /// Number of the last change to what is known about peers outside of the node.
    pub(super) epoch: u64,
}

/// The owner of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// An endpoint, with its version at the time it got the address.
    Endpoint(u32, Version),
    /// Services.
    Service,
}

/// The action of a network for packets to addresses without an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// In one of its subnets: the address has no endpoint.
    Unreachable,
    /// In a range of virtual addresses: the address has no service.
    ServiceRange,
    /// Outside the network: the node's stack decides.
    Stack,
}

/// A port of the node: address, protocol, port.
pub type NodePort = (IpAddr, u8, u16);

#[derive(Debug, Clone)]
struct Slot {
    endpoint: Endpoint,
    version: Version,
    epoch: u64,
    ready: bool,
}

/// All endpoints, services and routes of a node.
#[derive(Debug, Clone, Default)]
pub struct World {
    capacity: u32,
    numbers: u64,
    slots: HashMap<u32, Slot>,
    enforced: HashMap<u32, Enforced>,
    addresses: HashMap<(u32, IpAddr), (u32, Version)>,
    routes: Vec<(u32, IpNet, Route)>,
    ports: BTreeMap<NodePort, (u32, Version, u16)>,
    /// Services; changed through `Lockstep` only.
    pub services: Services,
}

impl World {
    /// An empty node with rows 0 to `capacity - 1`.
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity,
            ..Self::default()
        }
    }

    pub(super) fn has_row(&self, endpoint: u32) -> bool {
        endpoint < self.capacity
    }

    /// The endpoint, ready or not.
    pub fn endpoint(&self, endpoint: u32) -> Option<&Endpoint> {
        self.slots.get(&endpoint).map(|slot| &slot.endpoint)
    }

    /// The endpoint's version, ready or not.
    pub fn version(&self, endpoint: u32) -> Option<Version> {
        self.slots.get(&endpoint).map(|slot| slot.version)
    }

    /// The policies enforced at the endpoint, published or not; `None` if no policy has ever selected it.
    pub fn enforced(&self, endpoint: u32) -> Option<Enforced> {
        self.enforced.get(&endpoint).copied()
    }

    /// The ready endpoint of the interface.
    pub(super) fn ready(&self, id: u32) -> Option<Row> {
        let slot = self.slots.get(&id).filter(|slot| slot.ready)?;
        Some(Row {
            id,
            endpoint: slot.endpoint.clone(),
            version: slot.version,
            epoch: slot.epoch,
            enforced: self.enforced.get(&id).copied().unwrap_or_default(),
        })
    }

    /// The owner of the address in the network according to the address table; the endpoint may have changed since.
    pub(super) fn owner(&self, network: u32, address: IpAddr) -> Option<Owner> {
        if self.services.has_address(network, address) {
            return Some(Owner::Service);
        }
        let (id, version) = self.addresses.get(&(network, address))?;
        Some(Owner::Endpoint(*id, *version))
    }

    /// The ready endpoint, if it still is the owner of the address.
    pub(super) fn still(&self, network: u32, owner: Owner) -> Option<Row> {
        match owner {
            Owner::Service => None,
            Owner::Endpoint(id, version) => self
                .ready(id)
                .filter(|row| row.version.same_life(version) && row.endpoint.network == network),
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn publish(&mut self, id: u32, endpoint: Endpoint) {
        let life = self.number();
        let version = Version { life, change: 0 };
        for address in endpoint.addresses() {
            self.addresses.insert((endpoint.network, address), (id, version));
        }
        let slot = Slot {
            endpoint,
            version,
            epoch: life,
            ready: true,
        };
        self.slots.insert(id, slot);
    }

    pub(super) fn withdraw(&mut self, endpoint: u32) {
        self.slots.remove(&endpoint);
        self.enforced.remove(&endpoint);
        self.addresses.retain(|_, (owner, _)| *owner != endpoint);
        self.ports.retain(|_, (owner, ..)| *owner != endpoint);
    }

    /// Replaces the ports of the node that lead to ports of endpoints.
    pub fn set_ports(&mut self, ports: &BTreeMap<NodePort, (u32, u16)>) {
        let known = ports.iter().filter_map(|(port, (endpoint, inner))| {
            let slot = self.slots.get(endpoint)?;
            Some((*port, (*endpoint, slot.version, *inner)))
        });
        self.ports = known.collect();
    }

    /// The endpoint that a port of the node leads to, its version at the time when the port was opened, and its port.
    pub(super) fn port(&self, port: NodePort) -> Option<(u32, Version, u16)> {
        self.ports.get(&port).copied()
    }

    /// Replaces the enforced policies; the previous ones apply to no later packet.
    pub fn enforce(&mut self, endpoint: u32, enforced: Enforced) {
        let change = self.number();
        self.enforced.insert(endpoint, enforced);
        if let Some(slot) = self.slots.get_mut(&endpoint) {
            slot.version.change = change;
        }
    }

    /// What is known about peers of the network outside of the node has changed.
    pub fn renew_epochs(&mut self, network: u32) {
        let epoch = self.number();
        for slot in self.slots.values_mut().filter(|slot| slot.endpoint.network == network) {
            slot.epoch = epoch;
        }
    }

    /// The endpoint's epoch.
    pub fn epoch(&self, endpoint: u32) -> Option<u64> {
        self.slots.get(&endpoint).map(|slot| slot.epoch)
    }

    /// The endpoints of a network, ready or not.
    pub fn members(&self, network: u32) -> Vec<u32> {
        let members = self.slots.iter().filter(|(_, slot)| slot.endpoint.network == network);
        members.map(|(id, _)| *id).collect()
    }

    /// Stops or resumes the traffic of an endpoint without any other change.
    pub fn set_ready(&mut self, endpoint: u32, ready: bool) {
        if let Some(slot) = self.slots.get_mut(&endpoint) {
            slot.ready = ready;
        }
    }

    /// Replaces the routes of a network: its subnets, its ranges of virtual addresses, and the default route if it has
    /// access to the node's stack.
    pub fn set_routes(&mut self, network: u32, subnets: &[IpNet], services: &[IpNet], host_access: bool) {
        self.routes.retain(|(id, ..)| *id != network);
        let subnets = subnets.iter().map(|subnet| (network, *subnet, Route::Unreachable));
        self.routes.extend(subnets);
        let services = services.iter().map(|range| (network, *range, Route::ServiceRange));
        self.routes.extend(services);
        if host_access {
            for any in ["0.0.0.0/0", "::/0"] {
                let any = any.parse().expect("a prefix");
                self.routes.push((network, any, Route::Stack));
            }
        }
    }

    /// Whether packets of the network may leave it through the node's stack.
    pub fn has_egress(&self, network: u32) -> bool {
        self.routes
            .iter()
            .any(|(id, _, route)| *id == network && *route == Route::Stack)
    }

    /// The longest prefix of the network that contains the address.
    pub(super) fn route(&self, network: u32, address: IpAddr) -> Option<Route> {
        let matching = self
            .routes
            .iter()
            .filter(|(id, prefix, _)| *id == network && prefix.contains(&address));
        let longest = matching.max_by_key(|(_, prefix, _)| prefix.prefix_len());
        longest.map(|(.., route)| *route)
    }
}
