//! Simulates the maps of the dataplane: they refuse every step after which a packet could be misdirected.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::{
    address::to_ip,
    service::{BackendKey, BackendValue, ServiceValue},
};

use super::*;

#[derive(Default)]
pub(super) struct Maps {
    pub(super) services: BTreeMap<ServiceKey, ServiceValue>,
    pub(super) backends: BTreeMap<BackendKey, BackendValue>,
    pub(super) addresses: BTreeSet<AddressKey>,
    pub(super) now: u64,
    /// A plan failed: until its lists are removed, the engine may know rows that do not exist.
    pub(super) failed: bool,
    pub(super) sizes: ServiceQuota,
    /// The content of each list that a row ever named.
    lists: BTreeMap<u32, Vec<BackendValue>>,
    /// When the last row that named a list was replaced.
    left: BTreeMap<u32, u64>,
}

impl Maps {
    pub(super) fn holding(tables: &ServiceTables) -> Self {
        let mut maps = Self {
            services: tables.services.clone(),
            backends: tables.backends.clone(),
            addresses: tables.addresses.iter().copied().collect(),
            ..Self::default()
        };
        for value in tables.services.values() {
            maps.lists.insert(value.backends, maps.list(value.backends));
        }
        maps
    }

    pub(super) fn tables(&self) -> ServiceTables {
        ServiceTables {
            services: self.services.clone(),
            backends: self.backends.clone(),
            addresses: self.addresses.iter().copied().collect(),
        }
    }

    pub(super) fn carry_out(&mut self, steps: &[ServiceStep]) {
        for step in steps {
            self.step(step);
            let rows = self.services.len().max(self.addresses.len());
            assert!(rows <= self.sizes.services, "{rows} rows: {step:?}");
            assert!(
                self.backends.len() <= self.sizes.backends,
                "{} rows: {step:?}",
                self.backends.len()
            );
        }
    }

    fn step(&mut self, step: &ServiceStep) {
        match step {
            ServiceStep::PutBackends(rows) => {
                for (key, value) in rows {
                    self.put_backend(*key, *value);
                }
            }
            ServiceStep::PutServices(rows) => {
                for (key, value) in rows {
                    self.put_service(*key, *value);
                }
            }
            ServiceStep::PutAddresses(rows) => self.addresses.extend(rows),
            ServiceStep::RemoveAddresses(rows) => self.addresses.retain(|row| !rows.contains(row)),
            ServiceStep::RemoveServices(keys) => {
                for key in keys {
                    let old = self.services.remove(key);
                    self.leave(old);
                }
            }
            ServiceStep::RemoveFlows(gone) => {
                assert!(!gone.is_empty());
                for gone in gone {
                    let row = self.services[&gone.service];
                    assert_eq!(row.service, gone.id, "{gone:?}");
                    assert!(!self.list(row.backends).contains(&gone.backend), "in use: {gone:?}");
                }
            }
            ServiceStep::RemoveBackends(keys) => {
                for key in keys {
                    self.remove_backend(*key);
                }
            }
        }
    }

    /// The backends that a client of the frontend can reach, as `address:port`.
    pub(super) fn reach(&self, key: &ServiceKey) -> Vec<String> {
        let value = self.services[key];
        let slots = 0..value.count;
        let backends = slots.map(|slot| {
            self.backends[&BackendKey {
                backends: value.backends,
                slot,
            }]
        });
        let text = backends.map(|b| format!("{}:{}", to_ip(b.address), u16::from_be_bytes(b.port)));
        text.collect()
    }

    /// A new engine knows only numbers that are in the maps; numbers of removed lists may be used again.
    pub(super) fn drop_unused_numbers(&mut self) {
        let there: BTreeSet<u32> = self.backends.keys().map(|key| key.backends).collect();
        self.lists.retain(|list, _| there.contains(list));
    }

    fn put_backend(&mut self, key: BackendKey, value: BackendValue) {
        assert_ne!(key.backends, 0);
        if let Some(list) = self.lists.get(&key.backends) {
            assert_eq!(list.get(key.slot as usize), Some(&value), "list changed: {key:?}");
        }
        self.backends.insert(key, value);
    }

    fn put_service(&mut self, key: ServiceKey, value: ServiceValue) {
        assert_ne!(value.service, 0);
        let list = self.list(value.backends);
        assert_eq!(list.len(), value.count as usize, "incomplete: {key:?} {value:?}");
        if let Some(before) = self.lists.get(&value.backends) {
            assert_eq!(before, &list, "number used again: {value:?}");
        }
        if value.count > 0 {
            self.lists.insert(value.backends, list);
        } else {
            assert_eq!(value.backends, 0);
        }
        let same_id = self
            .services
            .iter()
            .find(|(k, v)| **k != key && v.service == value.service);
        assert_eq!(same_id, None, "{key:?} has the same id");
        let old = self.services.insert(key, value);
        self.leave(old.filter(|old| old.backends != value.backends));
    }

    fn leave(&mut self, old: Option<ServiceValue>) {
        if let Some(old) = old {
            self.left.insert(old.backends, self.now);
        }
    }

    fn remove_backend(&mut self, key: BackendKey) {
        let mut named = self.services.values().filter(|v| v.count > 0);
        assert!(named.all(|v| v.backends != key.backends), "named: {key:?}");
        if let Some(left) = self.left.get(&key.backends) {
            assert!(self.now >= left + 2, "too early: {key:?}");
        }
        let old = self.backends.remove(&key);
        assert!(old.is_some() || self.failed, "not there: {key:?}");
    }

    pub(super) fn list(&self, list: u32) -> Vec<BackendValue> {
        let rows = self.backends.iter().filter(|(key, _)| key.backends == list);
        let (slots, values): (Vec<u32>, Vec<BackendValue>) = rows.map(|(key, value)| (key.slot, *value)).unzip();
        let expected: Vec<u32> = (0..).take(slots.len()).collect();
        assert_eq!(slots, expected, "list {list} has gaps");
        values
    }
}
