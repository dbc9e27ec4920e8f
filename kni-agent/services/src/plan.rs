//! Plans the steps from the known state of the maps to the desired state.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::{
    address::AddressKey,
    service::{BackendKey, BackendValue, SERVICE_DROP_IF_EMPTY, ServiceKey, ServiceValue},
};
use kni_model::{GoneBackend, ServiceStep};

use super::{
    changes,
    choose::NoBackendReason,
    frontend::Frontend,
    map_state::{MapState, UDP},
    quota::ServiceQuota,
    resolve::Desired,
};

/// Steps, and the resulting frontends by id.
pub(super) struct Plan {
    pub(super) steps: Vec<ServiceStep>,
    pub(super) ids: BTreeMap<u32, ServiceKey>,
}

pub(super) fn plan(maps: &mut MapState, desired: &Desired, hz: u32, quota: ServiceQuota) -> Plan {
    let waiting = changes::postponed(quota, maps, &desired.frontends);
    maps.postpone(!waiting.is_empty());
    let mut draft = Draft {
        numbers: maps.numbers(),
        maps,
        hz,
        ids: BTreeMap::new(),
        backends: Vec::new(),
        services: Vec::new(),
        gone: Vec::new(),
        withheld: BTreeSet::new(),
    };
    for (key, frontend) in &desired.frontends {
        if waiting.contains(key) {
            draft.leave(*key);
        } else {
            draft.add(*key, frontend);
        }
    }
    draft.finish(desired, quota)
}

struct Draft<'a> {
    maps: &'a mut MapState,
    hz: u32,
    /// Numbers that are in use.
    numbers: BTreeSet<u32>,
    ids: BTreeMap<u32, ServiceKey>,
    backends: Vec<(BackendKey, BackendValue)>,
    services: Vec<(ServiceKey, ServiceValue)>,
    gone: Vec<GoneBackend>,
    /// Desired frontends that have no row yet.
    withheld: BTreeSet<ServiceKey>,
}

impl Draft<'_> {
    fn add(&mut self, key: ServiceKey, frontend: &Frontend) {
        let service = self.id(key);
        let backends = &frontend.choice.backends;
        let local = frontend.choice.empty == Some(NoBackendReason::NoneLocal);
        let value = ServiceValue {
            service,
            backends: self.list(&key, frontend),
            count: backends.len().try_into().unwrap_or(u32::MAX),
            flags: if local { SERVICE_DROP_IF_EMPTY } else { 0 },
            affinity: frontend.affinity_seconds.unwrap_or(0).saturating_mul(self.hz),
            check: 0,
        };
        if self.maps.confirmed(&key) != Some(&value) {
            self.services.push((key, value));
        }
        self.remove_stale_flows(key, service, frontend);
    }

    /// Leaves the row of a frontend as it was last confirmed.
    fn leave(&mut self, key: ServiceKey) {
        let Some(row) = self.maps.tables().services.get(&key).copied() else {
            self.withheld.insert(key);
            return;
        };
        self.ids.insert(row.service, key);
        if self.maps.confirmed(&key).is_none() {
            self.services.push((key, row));
        }
    }

    /// The id of the frontend, or a new one; also a new one if its row has no id or the id of another frontend.
    fn id(&mut self, key: ServiceKey) -> u32 {
        let is_free = |id: &u32| *id != 0 && !self.ids.contains_key(id);
        let kept = self.maps.values(&key).map(|value| value.service).find(is_free);
        let id = kept.unwrap_or_else(|| self.maps.fresh(&mut self.numbers));
        self.ids.insert(id, key);
        id
    }

    /// The number of a list of these backends: an existing one of the frontend, or a new one; 0 for an empty list.
    fn list(&mut self, key: &ServiceKey, frontend: &Frontend) -> u32 {
        let backends = &frontend.choice.backends;
        if backends.is_empty() {
            return 0;
        }
        let is_same = |list: &u32| *list != 0 && self.maps.is_list(*list, backends);
        let list = self.maps.values(key).map(|value| value.backends).find(is_same);
        let complete = list.is_some_and(|list| !self.maps.is_unconfirmed_list(list));
        let list = list.unwrap_or_else(|| self.maps.fresh(&mut self.numbers));
        self.maps.own(list, &frontend.service.namespace);
        if !complete {
            let keys = (0..).map(|slot| BackendKey { backends: list, slot });
            self.backends.extend(keys.zip(backends.iter().copied()));
        }
        list
    }

    /// Removes flows and affinities of backends that are no longer used, so that their clients choose again. Without
    /// any usable backend they are left as they are.
    ///
    /// A UDP backend is in use while it serves, because its flows are removed too. For TCP and SCTP only affinities are
    /// removed, not connections, so a backend that has left the list is no longer used: it must get no new connections.
    fn remove_stale_flows(&mut self, key: ServiceKey, id: u32, frontend: &Frontend) {
        let choice = &frontend.choice;
        let in_use: BTreeSet<&BackendValue> = if key.protocol == UDP {
            choice.serving.iter().collect()
        } else {
            choice.backends.iter().collect()
        };
        if in_use.is_empty() {
            return;
        }
        let gone = self.maps.used(&key).filter(|backend| !in_use.contains(backend));
        self.gone.extend(gone.map(|backend| GoneBackend {
            service: key,
            id,
            backend: *backend,
        }));
    }

    fn finish(self, desired: &Desired, quota: ServiceQuota) -> Plan {
        let maps = self.maps;
        let new_addresses: Vec<AddressKey> = desired
            .addresses
            .iter()
            .filter(|address| !maps.has_address(address))
            .copied()
            .collect();
        let old_addresses: Vec<AddressKey> = maps.addresses().difference(&desired.addresses).copied().collect();
        let mut old_services = maps.frontends();
        old_services.retain(|key| !desired.frontends.contains_key(key) || self.withheld.contains(key));
        let removable = maps.removable();
        let is_tight = old_services.len() + desired.frontends.len() > quota.services
            || old_addresses.len() + desired.addresses.len() > quota.services;
        let put = [
            (!self.backends.is_empty()).then_some(ServiceStep::PutBackends(self.backends)),
            (!self.services.is_empty()).then_some(ServiceStep::PutServices(self.services)),
            (!new_addresses.is_empty()).then_some(ServiceStep::PutAddresses(new_addresses)),
        ];
        let remove = [
            (!old_addresses.is_empty()).then_some(ServiceStep::RemoveAddresses(old_addresses)),
            (!old_services.is_empty()).then(|| ServiceStep::RemoveServices(old_services.into_iter().collect())),
        ];
        let clean = [
            (!self.gone.is_empty()).then_some(ServiceStep::RemoveFlows(self.gone)),
            (!removable.is_empty()).then_some(ServiceStep::RemoveBackends(removable)),
        ];
        let put = put.into_iter().flatten();
        let remove = remove.into_iter().flatten();
        // New rows first, unless there is no room for them beside the old ones.
        let mut steps: Vec<ServiceStep> = if is_tight {
            remove.chain(put).collect()
        } else {
            put.chain(remove).collect()
        };
        steps.extend(clean.into_iter().flatten());
        Plan { steps, ids: self.ids }
    }
}
