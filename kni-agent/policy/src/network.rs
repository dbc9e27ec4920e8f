//! Holds the sets and identities in use in a network, and updates its prefixes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_model::{EndpointId, Enforcement};

use super::{
    changes::Uses,
    identity::{Identity, PeerIndex, PodAddress, number, rows},
    pods::Pods,
    prefix::Prefix,
    stable::Interner,
    tables::Desired,
};

/// An endpoint with its policy set and its addresses.
pub(super) type Local<'a> = (EndpointId, u32, [Option<PodAddress<'a>>; 2]);

/// The sets and identities in use in a network.
#[derive(Debug)]
pub(super) struct Network {
    number: u32,
    pub(super) index: PeerIndex,
    pub(super) uses: Uses,
    /// The identities of the addresses of endpoints.
    local: Vec<u32>,
    /// The identity of each address of a pod of another node.
    hosts: BTreeMap<Prefix, u32>,
    /// The identities of the ranges that policies name, without those that are one of these addresses.
    regions: Vec<(Prefix, u32)>,
}

impl Network {
    /// Without sets.
    pub(super) fn new(number: u32) -> Self {
        Self {
            number,
            index: PeerIndex::new(number),
            uses: Uses::default(),
            local: Vec::new(),
            hosts: BTreeMap::new(),
            regions: Vec::new(),
        }
    }

    /// Replaces the endpoints. The tables have none of this network.
    pub(super) fn set_local(
        &mut self,
        local: &[Local<'_>],
        identities: &mut Interner<Identity>,
        desired: &mut Desired,
    ) {
        let mut used = Vec::with_capacity(local.len() * 2);
        for (endpoint, policy, addresses) in local {
            let [identity4, identity6] = addresses.each_ref().map(|address| {
                let identity = address.as_ref().map(|address| self.index.of_pod(address));
                identity.map_or(0, |identity| number(identities, identity))
            });
            let enforcement = Enforcement {
                policy: *policy,
                identity4,
                identity6,
            };
            used.extend([identity4, identity6]);
            desired.tables.endpoints.insert(*endpoint, enforcement);
            desired.networks.insert(*endpoint, self.number);
        }
        for identity in &used {
            self.uses.acquire(*identity);
        }
        for identity in std::mem::replace(&mut self.local, used) {
            self.uses.release(identity);
        }
    }

    /// Computes all prefixes anew.
    pub(super) fn renew(&mut self, pods: &Pods, identities: &mut Interner<Identity>, desired: &mut Desired) {
        let mut hosts = BTreeMap::new();
        if !self.index.sets.is_empty() {
            for (address, pods) in pods.remote(self.number) {
                let identity = self.index.of_remote(pods);
                hosts.insert(Prefix::host(address), number(identities, identity));
            }
        }
        let regions = self.index.regions(&hosts, identities);
        let before = rows(&self.regions, &self.hosts);
        desired.set_prefixes(self.number, &before, &rows(&regions, &hosts));
        for identity in hosts.values().chain(regions.iter().map(|(_, identity)| identity)) {
            self.uses.acquire(*identity);
        }
        for identity in std::mem::replace(&mut self.hosts, hosts).into_values() {
            self.uses.release(identity);
        }
        for (_, identity) in std::mem::replace(&mut self.regions, regions) {
            self.uses.release(identity);
        }
    }

    /// Updates the prefixes of addresses, while the sets are the same. Returns `false` where a policy names one of them
    /// as a range: then the prefixes must be computed anew.
    pub(super) fn update(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        pods: &Pods,
        identities: &mut Interner<Identity>,
        desired: &mut Desired,
    ) -> bool {
        let mut hosts = addresses.iter().map(|address| Prefix::host(*address));
        if hosts.any(|host| self.index.is_range(&host)) {
            return false;
        }
        for address in addresses {
            let host = Prefix::host(*address);
            let pods = pods.remote_at(self.number, *address);
            let now = pods.map(|pods| number(identities, self.index.of_remote(pods)));
            let before = match now {
                Some(identity) => self.hosts.insert(host, identity),
                None => self.hosts.remove(&host),
            };
            if before == now {
                continue;
            }
            self.uses.acquire(now.unwrap_or_default());
            self.uses.release(before.unwrap_or_default());
            let around = self.index.around(&host);
            match now.filter(|identity| *identity != around) {
                Some(identity) => desired.put_identity(host.key(self.number), identity),
                None => desired.remove_identity(&host.key(self.number)),
            }
        }
        true
    }

    /// Removes the rows of removed sets, and of identities that are no longer in use.
    pub(super) fn remove_unused(&self, gone: &BTreeSet<u32>, contents: &Interner<Identity>, desired: &mut Desired) {
        for set in gone {
            for key in desired.rows_of(*set, |identity| self.uses.had(identity)) {
                desired.remove_policy(&key);
            }
        }
        for identity in self.uses.gone() {
            let Some(content) = contents.get(identity) else {
                continue;
            };
            for set in self.index.sets_of(content) {
                desired.remove(set.number, identity);
            }
        }
    }
}
