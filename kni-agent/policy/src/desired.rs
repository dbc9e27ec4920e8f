//! Compiles the desired tables, incrementally where sets or identities change.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use kni_common::policy::{IDENTITY_ANY, PORTS_ALL, PolicyKey};
use kni_model::{EndpointId, Enforcement, PolicyTables};

use super::{
    identity::{Identity, PeerIndex, PodAddress, number},
    pods::Pods,
    prefix::Prefix,
    row::{References, Rows, for_identity, for_wildcard},
    set::{DIRECTIONS, PolicySet},
    stable::Interner,
};

/// Compiles policies and pods into tables.
#[derive(Debug)]
pub(super) struct Compiler {
    pub(super) identities: Interner<Identity>,
    pub(super) references: References,
    networks: BTreeMap<u32, Network>,
    /// The wildcard rows of each set.
    wildcard: BTreeMap<u32, Rows>,
    /// Port sets that have rows, in order.
    ports: Vec<u32>,
}

/// The desired tables, with data that the tables do not contain.
#[derive(Debug, Default)]
pub(super) struct Desired {
    pub(super) tables: PolicyTables,
    /// Network of each endpoint.
    pub(super) networks: BTreeMap<EndpointId, u32>,
}

/// The sets and identities in use in a network.
#[derive(Debug)]
struct Network {
    index: PeerIndex,
    /// Without 0.
    identities: BTreeSet<u32>,
    /// The prefixes in the tables.
    prefixes: Vec<(Prefix, u32)>,
}

/// The requirements of the endpoints of a network, before compilation.
#[derive(Default)]
struct Needs<'a> {
    sets: BTreeMap<u32, Arc<PolicySet>>,
    remote: Vec<PodAddress<'a>>,
    local: Vec<(EndpointId, u32, [Option<PodAddress<'a>>; 2])>,
}

impl Default for Compiler {
    fn default() -> Self {
        Self {
            identities: Interner::new(1),
            references: References::default(),
            networks: BTreeMap::new(),
            wildcard: BTreeMap::new(),
            ports: Vec::new(),
        }
    }
}

impl Compiler {
    /// Updates the tables for these pods. Those of `closed` namespaces have their policies without rules.
    pub(super) fn compile(&mut self, pods: &Pods, closed: impl Fn(&str) -> bool, desired: &mut Desired) {
        let mut needs = needs(pods, closed);
        for network in self.networks.keys() {
            needs.entry(*network).or_default();
        }
        self.wildcard(&needs, &mut desired.tables);
        desired.tables.endpoints.clear();
        desired.networks.clear();
        for (network, needs) in needs {
            self.network(network, needs, desired);
        }
        self.networks.retain(|_, network| !network.index.sets.is_empty());
        self.ports(&mut desired.tables);
    }

    /// Updates the wildcard rows of the sets that are in use in any network.
    fn wildcard(&mut self, needs: &BTreeMap<u32, Needs<'_>>, tables: &mut PolicyTables) {
        let sets: BTreeMap<u32, &Arc<PolicySet>> = needs
            .values()
            .flat_map(|needs| &needs.sets)
            .map(|(n, set)| (*n, set))
            .collect();
        self.wildcard.retain(|number, _| {
            let stays = sets.contains_key(number);
            if !stays {
                remove(tables, *number, IDENTITY_ANY);
            }
            stays
        });
        for (number, set) in sets {
            if let Entry::Vacant(entry) = self.wildcard.entry(number) {
                let rows = for_wildcard(set, &mut self.references);
                append(tables, number, IDENTITY_ANY, &rows);
                entry.insert(rows);
            }
        }
    }

    fn network(&mut self, number: u32, needs: Needs<'_>, desired: &mut Desired) {
        let network = self.networks.entry(number).or_insert_with(|| Network {
            index: PeerIndex::new(number),
            identities: BTreeSet::new(),
            prefixes: Vec::new(),
        });
        let (gone, come) = network.index.set_sets(needs.sets);
        let mut identities = BTreeSet::new();
        for (endpoint, policy, addresses) in &needs.local {
            let [identity4, identity6] = addresses.each_ref().map(|address| {
                let identity = address.as_ref().map(|address| network.index.of_pod(address));
                identity.map_or(0, |identity| self::number(&mut self.identities, identity))
            });
            let enforcement = Enforcement {
                policy: *policy,
                identity4,
                identity6,
            };
            identities.extend([identity4, identity6]);
            desired.tables.endpoints.insert(*endpoint, enforcement);
            desired.networks.insert(*endpoint, number);
        }
        let prefixes = network.index.of_prefixes(&needs.remote, &mut self.identities);
        network.set_prefixes(number, prefixes, &mut desired.tables);
        identities.extend(network.prefixes.iter().map(|(_, identity)| *identity));
        identities.remove(&IDENTITY_ANY);

        network.remove_unused(&gone, &identities, &self.identities, &mut desired.tables);
        self.rows(number, &come, &identities, &mut desired.tables);
        if let Some(network) = self.networks.get_mut(&number) {
            network.identities = identities;
        }
    }

    /// Writes the rows of new sets and of new identities.
    fn rows(&mut self, number: u32, come: &BTreeSet<u32>, identities: &BTreeSet<u32>, tables: &mut PolicyTables) {
        let Some(network) = self.networks.get(&number) else {
            return;
        };
        let new_peers = network.index.peers_of(come);
        for identity in identities {
            let is_new = !network.identities.contains(identity);
            if !is_new && come.is_empty() {
                continue;
            }
            let Some(content) = self.identities.get(*identity) else {
                continue;
            };
            let is_affected = !content.names.is_empty() || content.peers.iter().any(|peer| new_peers.contains(peer));
            if !is_new && !is_affected {
                continue;
            }
            for set in network.index.sets_of(content) {
                if is_new || come.contains(&set.number) {
                    let all = self.wildcard.get(&set.number).copied().unwrap_or_default();
                    let rows = for_identity(set, content, &all, &mut self.references);
                    append(tables, set.number, *identity, &rows);
                }
            }
        }
    }

    /// Updates the rows of the port sets, which are few and shared by all networks.
    fn ports(&mut self, tables: &mut PolicyTables) {
        let mut used: Vec<u32> = tables
            .policy
            .values()
            .map(|row| row.ports)
            .filter(|ports| *ports > PORTS_ALL)
            .collect();
        used.sort_unstable();
        used.dedup();
        if used == self.ports {
            return;
        }
        let sets = used
            .iter()
            .filter_map(|number| Some((*number, self.references.ports.get(*number)?)));
        tables.ports = sets.flat_map(|(number, set)| set.rows(number)).collect();
        self.ports = used;
    }

    /// The sets that refer to the narrowest range of addresses of an identity; none if it has no range.
    pub(super) fn narrowest(&self, identity: u32) -> &[u32] {
        let Some(content) = self.identities.get(identity) else {
            return &[];
        };
        let narrowest = content.peers.iter().max_by_key(|peer| peer.range_length());
        let narrowest = narrowest.filter(|peer| peer.is_block());
        let index = self.networks.get(&content.network).map(|network| &network.index);
        let users = narrowest.and_then(|peer| index?.users(peer));
        users.unwrap_or_default()
    }

    /// The sets that refer to any peer of an identity.
    pub(super) fn referring(&self, identity: u32) -> Vec<u32> {
        let content = self.identities.get(identity);
        let sets = content.and_then(|content| {
            let network = self.networks.get(&content.network)?;
            Some(network.index.sets_of(content))
        });
        sets.into_iter().flatten().map(|set| set.number).collect()
    }

    /// Retires numbers that the tables do not use.
    pub(super) fn retain(&mut self, tables: &PolicyTables) {
        let networks: Vec<&Network> = self.networks.values().collect();
        let is_used = |number| networks.iter().any(|network| network.identities.contains(&number));
        self.identities.retain(is_used);
        let (mut ports, mut rules) = (BTreeSet::new(), BTreeSet::new());
        for row in tables.policy.values() {
            ports.insert(row.ports);
            rules.insert(row.rule);
        }
        self.references.ports.retain(|number| ports.contains(&number));
        self.references.rules.retain(|number| rules.contains(&number));
    }
}

impl Network {
    /// Writes and removes rows for the differences between the old and the new prefixes; both are sorted.
    fn set_prefixes(&mut self, number: u32, prefixes: Vec<(Prefix, u32)>, tables: &mut PolicyTables) {
        let mut after = prefixes.iter().peekable();
        for known in &self.prefixes {
            while let Some((prefix, identity)) = after.next_if(|new| new.0 < known.0) {
                tables.identities.insert(prefix.key(number), *identity);
            }
            match after.next_if(|new| new.0 == known.0) {
                None => tables.identities.remove(&known.0.key(number)),
                Some(new) if new.1 == known.1 => None,
                Some((prefix, identity)) => tables.identities.insert(prefix.key(number), *identity),
            };
        }
        tables
            .identities
            .extend(after.map(|(prefix, identity)| (prefix.key(number), *identity)));
        self.prefixes = prefixes;
    }

    /// Removes the rows of removed sets, and of identities that are no longer in use.
    fn remove_unused(
        &self,
        gone: &BTreeSet<u32>,
        identities: &BTreeSet<u32>,
        contents: &Interner<Identity>,
        tables: &mut PolicyTables,
    ) {
        for set in gone {
            let (first, last) = (row_key(*set, 1, 0), row_key(*set, u32::MAX, u32::MAX));
            let rows = tables.policy.range(first..=last).map(|(key, _)| *key);
            let rows: Vec<PolicyKey> = rows.filter(|key| self.identities.contains(&key.identity)).collect();
            for key in rows {
                tables.policy.remove(&key);
            }
        }
        for identity in self.identities.difference(identities) {
            let Some(content) = contents.get(*identity) else {
                continue;
            };
            for set in self.index.sets_of(content) {
                remove(tables, set.number, *identity);
            }
        }
    }
}

fn needs(pods: &Pods, closed: impl Fn(&str) -> bool) -> BTreeMap<u32, Needs<'_>> {
    let mut needs: BTreeMap<u32, Needs<'_>> = BTreeMap::new();
    for (endpoint, pod, interface, selected) in pods.local() {
        let needs = needs.entry(interface.network_id.get()).or_default();
        let enforced = selected.enforced(closed(&pod.object.pod.namespace));
        if let Some(set) = enforced {
            needs.sets.entry(set.number).or_insert_with(|| Arc::clone(set));
        }
        let policy = enforced.map_or(0, |set| set.number);
        let addresses = [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)];
        let addresses = addresses.map(|address| address.map(|address| pod.at(address)));
        needs.local.push((endpoint, policy, addresses));
    }
    for pod in pods.by_sandbox.values() {
        for interface in pod
            .object
            .interfaces
            .iter()
            .filter(|interface| interface.endpoint.is_none())
        {
            // A network without endpoints needs no identities.
            let Some(needs) = needs.get_mut(&interface.network_id.get()) else {
                continue;
            };
            let addresses = [interface.ipv4.map(IpAddr::V4), interface.ipv6.map(IpAddr::V6)];
            needs
                .remote
                .extend(addresses.into_iter().flatten().map(|address| pod.at(address)));
        }
    }
    needs
}

fn row_key(set: u32, identity: u32, direction: u32) -> PolicyKey {
    PolicyKey {
        set,
        identity,
        direction,
    }
}

fn append(tables: &mut PolicyTables, set: u32, identity: u32, rows: &Rows) {
    tables
        .policy
        .extend(DIRECTIONS.iter().zip(rows).filter_map(|(direction, row)| {
            let key = row_key(set, identity, direction.code());
            row.map(|row| (key, row))
        }));
}

fn remove(tables: &mut PolicyTables, set: u32, identity: u32) {
    for direction in DIRECTIONS {
        tables.policy.remove(&row_key(set, identity, direction.code()));
    }
}
