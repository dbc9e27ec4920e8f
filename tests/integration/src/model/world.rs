//! Who is there: endpoints, their addresses, and the routes of their networks.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

use crate::frames::Mac;

/// One life of an endpoint's row: from being published until it is published anew or withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation(u64);

/// What an endpoint is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Network id.
    pub network: u32,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// Address of the pod end.
    pub mac: Mac,
    /// Address of the host end.
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

/// A ready endpoint in its present life.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) endpoint: Endpoint,
    pub(super) incarnation: Incarnation,
}

/// What a network does with packets to addresses that no endpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// One of its own subnets: nobody is there.
    Unreachable,
    /// Beyond the network: the node's stack knows.
    Stack,
}

#[derive(Debug, Clone)]
struct Slot {
    row: Row,
    ready: bool,
}

/// All endpoints and routes of a node.
#[derive(Debug, Clone, Default)]
pub struct World {
    capacity: u32,
    lives: u64,
    slots: HashMap<u32, Slot>,
    addresses: HashMap<(u32, IpAddr), (u32, Incarnation)>,
    routes: Vec<(u32, IpNet, Route)>,
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
        self.slots.get(&endpoint).map(|slot| &slot.row.endpoint)
    }

    /// The endpoint's life, ready or not.
    pub fn incarnation(&self, endpoint: u32) -> Option<Incarnation> {
        self.slots.get(&endpoint).map(|slot| slot.row.incarnation)
    }

    /// The endpoint that the interface belongs to, if traffic may flow.
    pub(super) fn ready(&self, endpoint: u32) -> Option<Row> {
        let slot = self.slots.get(&endpoint)?;
        slot.ready.then(|| slot.row.clone())
    }

    /// Who has the address in the network, according to the address table; its row may have moved on since.
    pub(super) fn owner(&self, network: u32, address: IpAddr) -> Option<(u32, Incarnation)> {
        self.addresses.get(&(network, address)).copied()
    }

    /// The ready endpoint, if it still lives the life that is remembered of it.
    pub(super) fn same_life(&self, endpoint: u32, incarnation: Incarnation) -> Option<Row> {
        self.ready(endpoint).filter(|row| row.incarnation == incarnation)
    }

    pub(super) fn publish(&mut self, endpoint: u32, config: Endpoint) {
        self.lives += 1;
        let incarnation = Incarnation(self.lives);
        for address in config.addresses() {
            self.addresses
                .insert((config.network, address), (endpoint, incarnation));
        }
        let row = Row {
            endpoint: config,
            incarnation,
        };
        self.slots.insert(endpoint, Slot { row, ready: true });
    }

    pub(super) fn withdraw(&mut self, endpoint: u32) {
        self.slots.remove(&endpoint);
        self.addresses.retain(|_, (owner, _)| *owner != endpoint);
    }

    /// Stops or resumes an endpoint's traffic without another change.
    pub fn set_ready(&mut self, endpoint: u32, ready: bool) {
        if let Some(slot) = self.slots.get_mut(&endpoint) {
            slot.ready = ready;
        }
    }

    /// Replaces a network's routes: its subnets, and everything else where it has access to the node's stack.
    pub fn set_routes(&mut self, network: u32, subnets: &[IpNet], host_access: bool) {
        self.routes.retain(|(id, ..)| *id != network);
        let subnets = subnets.iter().map(|subnet| (network, *subnet, Route::Unreachable));
        self.routes.extend(subnets);
        if host_access {
            for any in ["0.0.0.0/0", "::/0"] {
                let any = any.parse().expect("a prefix");
                self.routes.push((network, any, Route::Stack));
            }
        }
    }

    /// The network's longest prefix that has the address.
    pub(super) fn route(&self, network: u32, address: IpAddr) -> Option<Route> {
        let matching = self
            .routes
            .iter()
            .filter(|(id, prefix, _)| *id == network && prefix.contains(&address));
        let longest = matching.max_by_key(|(_, prefix, _)| prefix.prefix_len());
        longest.map(|(.., route)| *route)
    }
}
