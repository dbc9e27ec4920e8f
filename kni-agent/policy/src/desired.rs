//! Compiles the desired tables: of what changed, where the sets are the same.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use kni_common::policy::{IDENTITY_ANY, PORTS_ALL};
use kni_model::PolicyTables;

use super::{
    changes::Changes,
    identity::Identity,
    network::{Local, Network},
    pods::Pods,
    row::{References, Rows, for_identity, for_wildcard},
    set::PolicySet,
    stable::Interner,
    tables::Desired,
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
    /// Whether rows were computed or removed since [`Compiler::retain`], so that numbers may be unused.
    has_other_rows: bool,
}

/// The requirements of the endpoints of a network, before compilation.
#[derive(Default)]
struct Needs<'a> {
    sets: BTreeMap<u32, Arc<PolicySet>>,
    local: Vec<Local<'a>>,
}

impl Default for Compiler {
    fn default() -> Self {
        Self {
            identities: Interner::new(1),
            references: References::default(),
            networks: BTreeMap::new(),
            wildcard: BTreeMap::new(),
            ports: Vec::new(),
            has_other_rows: false,
        }
    }
}

impl Compiler {
    /// Updates the tables for these changes of the pods. Those of `closed` namespaces have their policies without
    /// rules.
    pub(super) fn compile(
        &mut self,
        pods: &Pods,
        changes: &Changes,
        closed: impl Fn(&str) -> bool,
        desired: &mut Desired,
    ) {
        if changes.all || changes.local {
            let mut needs = needs(pods, closed);
            for network in self.networks.keys() {
                needs.entry(*network).or_default();
            }
            self.wildcard(&needs, desired);
            desired.tables.endpoints.clear();
            desired.networks.clear();
            for (number, needs) in needs {
                self.network(number, Some(needs), (pods, changes), desired);
            }
            self.networks.retain(|_, network| !network.index.sets.is_empty());
        } else {
            for number in changes.addresses.keys() {
                // A network without sets needs no identities.
                if self.networks.contains_key(number) {
                    self.network(*number, None, (pods, changes), desired);
                }
            }
        }
        if self.has_other_rows {
            self.ports(desired);
        }
    }

    /// Updates the wildcard rows of the sets that are in use in any network.
    fn wildcard(&mut self, needs: &BTreeMap<u32, Needs<'_>>, desired: &mut Desired) {
        let sets: BTreeMap<u32, &Arc<PolicySet>> = needs
            .values()
            .flat_map(|needs| &needs.sets)
            .map(|(n, set)| (*n, set))
            .collect();
        self.wildcard.retain(|number, _| {
            let stays = sets.contains_key(number);
            if !stays {
                desired.remove(*number, IDENTITY_ANY);
                self.has_other_rows = true;
            }
            stays
        });
        for (number, set) in sets {
            if let Entry::Vacant(entry) = self.wildcard.entry(number) {
                let rows = for_wildcard(set, &mut self.references);
                desired.append(number, IDENTITY_ANY, &rows);
                entry.insert(rows);
                self.has_other_rows = true;
            }
        }
    }

    /// Updates a network. `None`: its endpoints are the same.
    fn network(
        &mut self,
        number: u32,
        needs: Option<Needs<'_>>,
        (pods, changes): (&Pods, &Changes),
        desired: &mut Desired,
    ) {
        let mut is_other = changes.all;
        let network = self.networks.entry(number).or_insert_with(|| {
            is_other = true;
            Network::new(number)
        });
        let (mut gone, mut come) = (BTreeSet::new(), BTreeSet::new());
        if let Some(needs) = needs {
            (gone, come) = network.index.set_sets(needs.sets);
            network.set_local(&needs.local, &mut self.identities, desired);
        }
        is_other |= !gone.is_empty() || !come.is_empty();
        let none = BTreeSet::new();
        let addresses = changes.addresses.get(&number).unwrap_or(&none);
        if is_other || !network.update(addresses, pods, &mut self.identities, desired) {
            network.renew(pods, &mut self.identities, desired);
        }
        network.remove_unused(&gone, &self.identities, desired);
        let is_same = come.is_empty() && gone.is_empty() && network.uses.is_unchanged();
        self.has_other_rows |= !is_same;
        self.rows(number, &come, desired);
        if let Some(network) = self.networks.get_mut(&number) {
            network.uses.note_processed();
        }
    }

    /// Writes the rows of new sets and of new identities.
    fn rows(&mut self, number: u32, come: &BTreeSet<u32>, desired: &mut Desired) {
        let Some(network) = self.networks.get(&number) else {
            return;
        };
        let new_peers = network.index.peers_of(come);
        let identities: Vec<u32> = if come.is_empty() {
            network.uses.come().collect()
        } else {
            network.uses.all().collect()
        };
        for identity in identities {
            let is_new = !network.uses.had(identity);
            let Some(content) = self.identities.get(identity) else {
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
                    desired.append(set.number, identity, &rows);
                }
            }
        }
    }

    /// Updates the rows of the port sets, which are few and shared by all networks.
    fn ports(&mut self, desired: &mut Desired) {
        let mut used: Vec<u32> = desired
            .tables
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
        desired.set_ports(sets.flat_map(|(number, set)| set.rows(number)).collect());
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
        if !std::mem::take(&mut self.has_other_rows) {
            return;
        }
        let networks: Vec<&Network> = self.networks.values().collect();
        let is_used = |number| networks.iter().any(|network| network.uses.has(number));
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
    needs
}
