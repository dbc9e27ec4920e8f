//! Tracks the known content of the maps: confirmed rows, unconfirmed rows, and retired lists.

use std::collections::{BTreeMap, BTreeSet};

use kni_common::{
    address::AddressKey,
    service::{BackendKey, BackendValue, ServiceKey, ServiceValue},
};
use kni_model::{ServiceStep, ServiceTables};

/// Ticks after which an unreferenced list may be removed: at least one whole second lies between two ticks.
const RETIRED_TICKS: u64 = 2;

/// Ticks for which the backends of a removed UDP frontend are remembered: a Service that is recreated within that time
/// takes over the flows.
const REMEMBERED_TICKS: u64 = 300;

pub(super) const UDP: u16 = 17;

#[derive(Debug, Default)]
pub(super) struct MapState {
    tables: ServiceTables,
    unconfirmed: Option<Unconfirmed>,
    /// Backends that clients of each frontend may still use.
    used: BTreeMap<ServiceKey, Used>,
    /// Unreferenced lists, and the tick since which they are unreferenced.
    retired: BTreeMap<u32, u64>,
    /// The namespace of each list, if it is known.
    owners: BTreeMap<u32, String>,
    /// Whether lists of the last plan wait for room.
    postponed: bool,
    now: u64,
    /// The next candidate for the number of an id or a list. Both use one sequence, so that it stays far from the ids
    /// of removed service ports, also after a restart: leftover rows of `AFFINITY` would lead to a wrong backend.
    next: u32,
}

/// Rows that an unconfirmed plan changed.
#[derive(Debug, Default)]
struct Unconfirmed {
    /// The written value, or `None` if the plan only removed the row.
    services: BTreeMap<ServiceKey, Option<ServiceValue>>,
    addresses: BTreeSet<AddressKey>,
    /// Lists that may be incomplete.
    lists: BTreeSet<u32>,
}

#[derive(Debug, Default)]
struct Used {
    backends: BTreeSet<BackendValue>,
    /// When the frontend was removed.
    removed: Option<u64>,
}

impl MapState {
    pub(super) fn adopt(mut tables: ServiceTables) -> Self {
        tables.addresses.sort_unstable();
        tables.addresses.dedup();
        let mut state = Self {
            tables,
            ..Self::default()
        };
        state.next = state.numbers().last().map_or(1, |last| last.wrapping_add(1));
        let rows: Vec<_> = state.tables.services.iter().map(|(k, v)| (*k, v.backends)).collect();
        for (key, list) in rows {
            state.use_list(key, list);
        }
        state
    }

    /// Frontends without a row may come back with it: they are remembered like removed ones.
    pub(super) fn adopt_uses(&mut self, uses: BTreeMap<ServiceKey, BTreeSet<BackendValue>>) {
        for (key, backends) in uses {
            let removed = (!self.tables.services.contains_key(&key)).then_some(self.now);
            let of_frontend = self.used.entry(key).or_insert_with(|| Used {
                removed,
                ..Used::default()
            });
            of_frontend.backends.extend(backends);
        }
    }

    pub(super) fn tick(&mut self) {
        self.now = self.now.saturating_add(1);
        let now = self.now;
        let is_expired = |since: u64| now.saturating_sub(since) >= REMEMBERED_TICKS;
        self.used.retain(|_, used| !used.removed.is_some_and(is_expired));
    }

    pub(super) fn tables(&self) -> &ServiceTables {
        &self.tables
    }

    /// Whether a plan is needed even if the desired state is unchanged.
    pub(super) fn has_work(&self) -> bool {
        self.unconfirmed.is_some() || self.postponed || self.expired().next().is_some()
    }

    pub(super) fn postpone(&mut self, postponed: bool) {
        self.postponed = postponed;
    }

    /// Notes the namespace that a list belongs to.
    pub(super) fn own(&mut self, list: u32, namespace: &str) {
        self.owners.entry(list).or_insert_with(|| namespace.to_owned());
    }

    /// The rows of each list whose namespace is known, and whether a confirmed row names it.
    pub(super) fn held(&self) -> impl Iterator<Item = (&str, usize, bool)> {
        let named = self.named();
        let owners = self.owners.iter();
        owners.map(move |(list, namespace)| {
            let rows = self.rows_of(*list).count();
            (namespace.as_str(), rows, named.contains(list))
        })
    }

    /// Every number that must not be assigned again.
    pub(super) fn numbers(&self) -> BTreeSet<u32> {
        let unconfirmed = self.unconfirmed.iter().flat_map(|d| d.services.values().flatten());
        let rows = self.tables.services.values().chain(unconfirmed);
        let mut numbers: BTreeSet<u32> = rows.flat_map(|row| [row.service, row.backends]).collect();
        numbers.extend(self.lists());
        numbers
    }

    /// A nonzero number that is not in `numbers`.
    pub(super) fn fresh(&mut self, numbers: &mut BTreeSet<u32>) -> u32 {
        loop {
            let number = self.next;
            self.next = self.next.wrapping_add(1);
            if number != 0 && numbers.insert(number) {
                return number;
            }
        }
    }

    /// The possible values of a frontend's row, the confirmed value first.
    pub(super) fn values(&self, key: &ServiceKey) -> impl Iterator<Item = ServiceValue> {
        let unconfirmed = self.unconfirmed.as_ref().and_then(|d| d.services.get(key).copied());
        self.tables
            .services
            .get(key)
            .copied()
            .into_iter()
            .chain(unconfirmed.flatten())
    }

    /// The value of a frontend's row, if it is confirmed.
    pub(super) fn confirmed(&self, key: &ServiceKey) -> Option<&ServiceValue> {
        let unconfirmed = self.unconfirmed.as_ref().is_some_and(|d| d.services.contains_key(key));
        self.tables.services.get(key).filter(|_| !unconfirmed)
    }

    /// Frontends that may have a row.
    pub(super) fn frontends(&self) -> BTreeSet<ServiceKey> {
        let unconfirmed = self.unconfirmed.iter().flat_map(|d| d.services.keys());
        self.tables.services.keys().chain(unconfirmed).copied().collect()
    }

    /// Whether the address has a confirmed row.
    pub(super) fn has_address(&self, address: &AddressKey) -> bool {
        let unconfirmed = self.unconfirmed.as_ref().is_some_and(|d| d.addresses.contains(address));
        !unconfirmed && self.tables.addresses.binary_search(address).is_ok()
    }

    /// Addresses that may have a row.
    pub(super) fn addresses(&self) -> BTreeSet<AddressKey> {
        let unconfirmed = self.unconfirmed.iter().flat_map(|d| &d.addresses);
        self.tables.addresses.iter().chain(unconfirmed).copied().collect()
    }

    /// Whether the list consists of exactly these backends in this order.
    pub(super) fn is_list(&self, list: u32, backends: &[BackendValue]) -> bool {
        let slots = self.rows_of(list).map(|(key, _)| key.slot);
        slots.eq((0..).take(backends.len())) && self.rows_of(list).map(|(_, value)| value).eq(backends)
    }

    /// Whether a row of the frontend may name a list of exactly these backends, or needs none.
    pub(super) fn has_list(&self, key: &ServiceKey, backends: &[BackendValue]) -> bool {
        backends.is_empty()
            || self
                .values(key)
                .any(|row| row.backends != 0 && self.is_list(row.backends, backends))
    }

    /// Whether rows of the list may be missing.
    pub(super) fn is_unconfirmed_list(&self, list: u32) -> bool {
        self.unconfirmed.as_ref().is_some_and(|d| d.lists.contains(&list))
    }

    /// Backends that clients of the frontend may still use.
    pub(super) fn used(&self, key: &ServiceKey) -> impl Iterator<Item = &BackendValue> {
        self.used.get(key).into_iter().flat_map(|used| &used.backends)
    }

    /// Rows of lists that were retired long enough ago.
    pub(super) fn removable(&self) -> Vec<BackendKey> {
        let rows = self.expired().flat_map(|list| self.rows_of(list));
        rows.map(|(key, _)| *key).collect()
    }

    /// Marks the rows of these steps as unconfirmed: the steps were handed out, and their outcome is unknown.
    pub(super) fn mark_unconfirmed(&mut self, steps: &[ServiceStep]) {
        let mut unconfirmed = self.unconfirmed.take().unwrap_or_default();
        for step in steps {
            match step {
                ServiceStep::PutBackends(rows) => {
                    unconfirmed.lists.extend(rows.iter().map(|(key, _)| key.backends));
                    self.tables.backends.extend(rows.iter().copied());
                }
                ServiceStep::PutServices(rows) => {
                    for (key, value) in rows {
                        unconfirmed.services.insert(*key, Some(*value));
                        self.use_list(*key, value.backends);
                    }
                }
                // The row may still exist: a recreated frontend keeps its id.
                ServiceStep::RemoveServices(keys) => {
                    for key in keys {
                        unconfirmed.services.entry(*key).or_default();
                    }
                }
                ServiceStep::PutAddresses(rows) | ServiceStep::RemoveAddresses(rows) => {
                    unconfirmed.addresses.extend(rows);
                }
                // These are planned again in any case.
                ServiceStep::RemoveFlows(_) | ServiceStep::RemoveBackends(_) => {}
            }
        }
        self.unconfirmed = Some(unconfirmed);
    }

    /// Records that the step was carried out.
    pub(super) fn apply(&mut self, step: ServiceStep) {
        match step {
            ServiceStep::PutBackends(rows) => self.tables.backends.extend(rows),
            ServiceStep::PutServices(rows) => {
                for (key, value) in rows {
                    self.tables.services.insert(key, value);
                    self.use_list(key, value.backends);
                }
            }
            ServiceStep::PutAddresses(rows) => {
                self.tables.addresses.extend(rows);
                self.tables.addresses.sort_unstable();
                self.tables.addresses.dedup();
            }
            ServiceStep::RemoveAddresses(rows) => {
                let rows: BTreeSet<_> = rows.into_iter().collect();
                self.tables.addresses.retain(|row| !rows.contains(row));
            }
            ServiceStep::RemoveServices(keys) => {
                for key in keys {
                    self.remove_service(&key);
                }
            }
            ServiceStep::RemoveFlows(gone) => {
                for gone in gone {
                    if let Some(used) = self.used.get_mut(&gone.service) {
                        used.backends.remove(&gone.backend);
                    }
                }
            }
            ServiceStep::RemoveBackends(rows) => {
                for row in rows {
                    self.tables.backends.remove(&row);
                }
            }
        }
    }

    /// Records that the whole plan was carried out: all rows are confirmed, and unreferenced lists retire now.
    pub(super) fn confirm_all(&mut self) {
        self.unconfirmed = None;
        let named = self.named();
        let lists: BTreeSet<u32> = self.lists().collect();
        self.owners.retain(|list, _| lists.contains(list));
        let before = std::mem::take(&mut self.retired);
        let unnamed = self.lists().filter(|list| !named.contains(list));
        let retired = unnamed.map(|list| (list, before.get(&list).copied().unwrap_or(self.now)));
        self.retired = retired.collect();
    }

    fn remove_service(&mut self, key: &ServiceKey) {
        self.tables.services.remove(key);
        if key.protocol != UDP {
            self.used.remove(key);
        } else if let Some(used) = self.used.get_mut(key) {
            used.removed = Some(self.now);
        }
    }

    /// Records that clients of the frontend may use the backends of the list.
    fn use_list(&mut self, key: ServiceKey, list: u32) {
        let backends: Vec<BackendValue> = self.rows_of(list).map(|(_, value)| *value).collect();
        let used = self.used.entry(key).or_default();
        used.removed = None;
        used.backends.extend(backends);
    }

    /// The lists that rows name.
    fn named(&self) -> BTreeSet<u32> {
        let rows = self.tables.services.values().filter(|row| row.count != 0);
        rows.map(|row| row.backends).collect()
    }

    fn expired(&self) -> impl Iterator<Item = u32> {
        let expired = self.retired.iter();
        let expired = expired.filter(|(_, since)| self.now.saturating_sub(**since) >= RETIRED_TICKS);
        expired.map(|(list, _)| *list)
    }

    fn rows_of(&self, list: u32) -> impl Iterator<Item = (&BackendKey, &BackendValue)> {
        let slot = |slot| BackendKey { backends: list, slot };
        self.tables.backends.range(slot(0)..=slot(u32::MAX))
    }

    /// The numbers of all lists, without duplicates.
    fn lists(&self) -> impl Iterator<Item = u32> {
        let mut last = None;
        let rows = self.tables.backends.keys().map(|key| key.backends);
        rows.filter(move |list| last.replace(*list) != Some(*list))
    }
}
