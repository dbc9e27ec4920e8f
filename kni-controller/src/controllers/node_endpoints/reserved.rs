//! Follows the addresses that no node may have as its endpoint: those of Services, of the API server and of networks.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Bound,
};

use ipnet::IpNet;
use kni_cluster::{Key, Tables};

use super::super::fabric::shared_subnets;

/// Namespace and name of the Service of the API server.
const API_SERVER: (&str, &str) = ("default", "kubernetes");

/// The reserved addresses as of the last call of [`Self::follow`].
#[derive(Debug, Default)]
pub(super) struct Reserved {
    services: BTreeMap<Key, Vec<IpAddr>>,
    /// The Services of an address.
    of_services: BTreeMap<IpAddr, BTreeSet<Key>>,
    api_server: BTreeSet<IpAddr>,
    /// The subnets of the networks whose addresses share a world with those of nodes.
    networks: BTreeMap<String, Vec<IpNet>>,
    seen: Option<Seen>,
}

/// The versions of the tables that were compared last.
#[derive(Debug, Clone, Copy)]
struct Seen {
    services: u64,
    slices: u64,
    networks: u64,
}

/// The addresses that changes concern.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Changed {
    All,
    Only(BTreeSet<IpAddr>),
}

impl Reserved {
    /// Takes over what changed since the last call.
    pub(super) fn follow(&mut self, tables: &Tables) -> Changed {
        let now = Seen {
            services: tables.service_addresses.version(),
            slices: tables.slices.version(),
            networks: tables.networks.version(),
        };
        let seen = self.seen.replace(now);
        let changed = seen.and_then(|seen| self.changed(tables, seen));
        changed.unwrap_or_else(|| {
            *self = Self::of(tables, now);
            Changed::All
        })
    }

    fn of(tables: &Tables, seen: Seen) -> Self {
        let mut reserved = Self {
            api_server: api_server(tables),
            seen: Some(seen),
            ..Self::default()
        };
        let rows = tables.networks.rows().iter();
        reserved.networks = rows
            .filter_map(|(key, network)| Some((key.name.clone(), shared_subnets(network)?)))
            .collect();
        for key in tables.service_addresses.rows().keys() {
            reserved.replace_service(tables, key);
        }
        reserved
    }

    /// `None` if it is not known any more what changed.
    fn changed(&mut self, tables: &Tables, seen: Seen) -> Option<Changed> {
        let mut changed = BTreeSet::new();
        let keys: BTreeSet<Key> = tables
            .service_addresses
            .changed_since(seen.services)?
            .cloned()
            .collect();
        for key in keys {
            changed.extend(self.replace_service(tables, &key));
        }
        let mut slices = tables.slices.changed_since(seen.slices)?;
        if slices.any(|key| key.namespace == API_SERVER.0) {
            let api_server = api_server(tables);
            changed.extend(self.api_server.symmetric_difference(&api_server));
            self.api_server = api_server;
        }
        let names: BTreeSet<&str> = tables
            .networks
            .changed_since(seen.networks)?
            .map(|key| key.name.as_str())
            .collect();
        let mut all = false;
        for name in names {
            let subnets = tables
                .networks
                .get("", name)
                .and_then(|network| shared_subnets(network));
            // A subnet may have addresses of any node. Networks rarely change.
            all |= self.networks.get(name) != subnets.as_ref();
            match subnets {
                Some(subnets) => self.networks.insert(name.to_owned(), subnets),
                None => self.networks.remove(name),
            };
        }
        Some(if all { Changed::All } else { Changed::Only(changed) })
    }

    /// Returns the addresses that the Service has gained or lost.
    fn replace_service(&mut self, tables: &Tables, key: &Key) -> BTreeSet<IpAddr> {
        let now = tables.service_addresses.rows().get(key);
        let before = self.services.remove(key);
        if before.as_ref() == now {
            self.services.extend(before.map(|before| (key.clone(), before)));
            return BTreeSet::new();
        }
        let mut changed: BTreeSet<IpAddr> = before.iter().flatten().copied().collect();
        for address in &changed {
            if let Some(services) = self.of_services.get_mut(address) {
                services.remove(key);
                if services.is_empty() {
                    self.of_services.remove(address);
                }
            }
        }
        if let Some(now) = now {
            for address in now {
                self.of_services.entry(*address).or_default().insert(key.clone());
                changed.insert(*address);
            }
            self.services.insert(key.clone(), now.clone());
        }
        changed
    }

    /// Why a node may not have an address. `control_plane`: whether the node is part of the control plane. `confirmed`:
    /// whether it has the address already. Then only what the API server alone decides counts: an account that may
    /// write networks could take nodes off the fabric otherwise. External addresses of Services and those of load
    /// balancers never count: tenants choose them, and some load balancers have the addresses of all nodes.
    pub(super) fn reason(&self, address: IpAddr, control_plane: bool, confirmed: bool) -> Option<String> {
        if self.api_server.contains(&address) && !control_plane {
            return Some(format!(
                "{address} is an address of the API server, and the node is not labelled as part of the control plane"
            ));
        }
        if let Some(key) = self.of_services.get(&address).and_then(BTreeSet::first) {
            return Some(format!("{address} is the address of Service {key}"));
        }
        if confirmed {
            return None;
        }
        self.networks.iter().find_map(|(name, subnets)| {
            let subnet = subnets.iter().find(|subnet| subnet.contains(&address))?;
            Some(format!("{address} is inside {subnet} of PodNetwork {name}"))
        })
    }
}

/// The addresses of the API server. Only it and those who may write to namespace default can add some.
fn api_server(tables: &Tables) -> BTreeSet<IpAddr> {
    let first = Key::new(API_SERVER.0, "");
    let rows = tables.slices.rows().range((Bound::Included(first), Bound::Unbounded));
    rows.take_while(|(key, _)| key.namespace == API_SERVER.0)
        .filter_map(|(_, row)| row.as_ref().ok())
        .filter(|slice| slice.service == API_SERVER.1)
        .flat_map(|slice| &slice.endpoints)
        .flat_map(|endpoint| endpoint.addresses.iter().copied())
        .collect()
}
