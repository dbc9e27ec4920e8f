//! Writes the service tables, and removes flows past new Services and flows and affinities to deleted backends.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Mutex,
};

use kni_common::{
    address::{ADDRESS_OF_SERVICE, AddressKey, AddressValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
};
use kni_model::{GoneBackend, ServiceStep, ServiceTables};

use super::{
    Dataplane, DataplaneError,
    endpoints::EndpointMaps,
    flows::{FlowTables, Taken},
    lock, membarrier,
    pin::Pins,
    table::Table,
};

/// The maps of services, with their own lock like the policy tables.
pub(super) struct ServiceMaps {
    services: Table<ServiceKey, ServiceValue>,
    backends: Table<BackendKey, BackendValue>,
    affinity: Table<AffinityKey, AffinityValue>,
    /// New Services, past which flows may lead.
    bypassed: Taken,
}

impl ServiceMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            services: Table::open("SERVICES", &pins.map("SERVICES"))?,
            backends: Table::open("BACKENDS", &pins.map("BACKENDS"))?,
            affinity: Table::open("AFFINITY", &pins.map("AFFINITY"))?,
            bypassed: Taken::default(),
        })
    }

    pub(super) fn tables(&self, endpoints: &Mutex<EndpointMaps>) -> Result<ServiceTables, DataplaneError> {
        let mut addresses = lock(endpoints).addresses_of_services()?;
        addresses.sort_unstable();
        Ok(ServiceTables {
            services: self.services.rows()?.into_iter().map(unsealed_service).collect(),
            backends: self.backends.rows()?.into_iter().map(unsealed_backend).collect(),
            addresses,
        })
    }

    /// The backends that clients of each service port may still use: those of UDP flows and of affinities.
    pub(super) fn uses(
        &self,
        flows: &FlowTables,
    ) -> Result<BTreeMap<ServiceKey, BTreeSet<BackendValue>>, DataplaneError> {
        let backend = |address, port| BackendValue {
            address,
            port,
            ..BackendValue::default()
        };
        let mut uses: BTreeMap<ServiceKey, BTreeSet<BackendValue>> = BTreeMap::new();
        for (service, address, port) in flows.service_backends()? {
            uses.entry(service).or_default().insert(backend(address, port));
        }
        let ids = self.services.rows()?.into_iter();
        let ids: BTreeMap<u32, ServiceKey> = ids.map(|(key, row)| (row.service, key)).collect();
        for (key, value) in self.affinity.rows()? {
            if let Some(service) = ids.get(&key.service) {
                let of_service = uses.entry(*service).or_default();
                of_service.insert(backend(value.address, value.port));
            }
        }
        Ok(uses)
    }

    /// Removes flows past Services that an earlier agent left when it was interrupted.
    fn remove_old_bypasses(
        &mut self,
        endpoints: &Mutex<EndpointMaps>,
        flows: &FlowTables,
    ) -> Result<(), DataplaneError> {
        let services = self.services.rows()?.into_iter();
        self.bypassed
            .add_service_ports(&services.map(|(key, _)| key).collect::<Vec<_>>());
        self.bypassed.add_addresses(&lock(endpoints).addresses_of_services()?);
        self.remove_bypasses(flows)
    }

    fn remove_bypasses(&mut self, flows: &FlowTables) -> Result<(), DataplaneError> {
        flows.remove_bypasses(&self.bypassed)?;
        self.bypassed = Taken::default();
        Ok(())
    }

    fn put_services(&mut self, rows: &[(ServiceKey, ServiceValue)]) -> Result<(), DataplaneError> {
        for (key, _) in rows {
            if self.services.get(key)?.is_none() {
                self.bypassed.add_service_ports([key]);
            }
        }
        self.services.put_all(&sealed_services(rows))
    }

    fn put_addresses(&mut self, endpoints: &Mutex<EndpointMaps>, keys: &[AddressKey]) -> Result<(), DataplaneError> {
        let written = lock(endpoints).put_service_addresses(keys)?;
        self.bypassed.add_addresses(&written);
        Ok(())
    }

    /// As [`super::policy::PolicyMaps::apply`].
    ///
    /// What refers to a row is changed some milliseconds before the row is removed, and before its flows are looked
    /// for: a program that chose an old backend may write its flow a little later.
    pub(super) fn apply(
        &mut self,
        endpoints: &Mutex<EndpointMaps>,
        flows: &FlowTables,
        steps: &[ServiceStep],
    ) -> Result<(), DataplaneError> {
        let addresses = || lock(endpoints);
        let mut moved = false;
        for step in steps {
            if waits_before(step, &mut moved) {
                membarrier::wait_for_programs();
            }
            match step {
                ServiceStep::PutBackends(rows) => self.backends.put_all(&sealed_backends(rows)),
                ServiceStep::PutServices(rows) => self.put_services(rows),
                ServiceStep::PutAddresses(keys) => self.put_addresses(endpoints, keys),
                ServiceStep::RemoveAddresses(keys) => addresses().remove_service_addresses(keys),
                ServiceStep::RemoveServices(keys) => self.services.remove_all(keys),
                ServiceStep::RemoveFlows(gone) => self.remove_uses(flows, gone),
                ServiceStep::RemoveBackends(keys) => self.backends.remove_all(keys),
            }?;
        }
        self.remove_bypasses(flows)
    }

    fn remove_uses(&self, flows: &FlowTables, gone: &[GoneBackend]) -> Result<(), DataplaneError> {
        if gone.is_empty() {
            return Ok(());
        }
        flows.remove_to_backends(gone)?;
        let gone = gone
            .iter()
            .map(|gone| (gone.id, gone.backend.address, gone.backend.port));
        let gone: HashSet<(u32, [u8; 16], [u8; 2])> = gone.collect();
        let mut stale = Vec::new();
        self.affinity.walk(|keys, values| {
            let rows = keys.iter().zip(values);
            let chosen = |(key, value): &(&AffinityKey, &AffinityValue)| {
                gone.contains(&(key.service, value.address, value.port))
            };
            stale.extend(rows.filter(chosen).map(|(key, _)| *key));
            Ok(())
        })?;
        self.affinity.remove_all(&stale)
    }
}

impl Dataplane {
    /// The rows of services.
    pub fn service_tables(&self) -> Result<ServiceTables, DataplaneError> {
        lock(&self.services).tables(&self.endpoints)
    }

    /// The backends that clients of each service port may still use, as flows and affinities show. Removes flows past
    /// Services, which an interrupted change may have left.
    pub fn service_uses(&self) -> Result<BTreeMap<ServiceKey, BTreeSet<BackendValue>>, DataplaneError> {
        let mut services = lock(&self.services);
        services.remove_old_bypasses(&self.endpoints, &self.flows)?;
        services.uses(&self.flows)
    }

    /// As [`Self::apply_policy`].
    pub fn apply_services(&self, steps: &[ServiceStep]) -> Result<(), DataplaneError> {
        lock(&self.services).apply(&self.endpoints, &self.flows, steps)
    }
}

/// Whether running programs must end before the step: whether `moved`, a reference was changed since the last wait, and
/// this step removes what it may have led to, or looks for what a program wrote because of it.
fn waits_before(step: &ServiceStep, moved: &mut bool) -> bool {
    let (waits, changes) = match step {
        ServiceStep::PutBackends(_) | ServiceStep::PutAddresses(_) => (false, false),
        ServiceStep::PutServices(_) => (false, true),
        ServiceStep::RemoveAddresses(_) | ServiceStep::RemoveServices(_) => (true, true),
        ServiceStep::RemoveFlows(_) | ServiceStep::RemoveBackends(_) => (true, false),
    };
    let waits = waits && *moved;
    *moved = changes || *moved && !waits;
    waits
}

/// Rows with the check words that the programs compare.
fn sealed_services(rows: &[(ServiceKey, ServiceValue)]) -> Vec<(ServiceKey, ServiceValue)> {
    let sealed = |(key, row): &(ServiceKey, ServiceValue)| {
        (
            *key,
            ServiceValue {
                check: row.seal(key),
                ..*row
            },
        )
    };
    rows.iter().map(sealed).collect()
}

fn sealed_backends(rows: &[(BackendKey, BackendValue)]) -> Vec<(BackendKey, BackendValue)> {
    let sealed = |(key, row): &(BackendKey, BackendValue)| {
        (
            *key,
            BackendValue {
                check: row.seal(key),
                ..*row
            },
        )
    };
    rows.iter().map(sealed).collect()
}

/// A row without its check word. A wrong one remains, so that the row differs from every row that is desired.
fn unsealed_service((key, row): (ServiceKey, ServiceValue)) -> (ServiceKey, ServiceValue) {
    let check = row.check ^ row.seal(&key);
    (key, ServiceValue { check, ..row })
}

fn unsealed_backend((key, row): (BackendKey, BackendValue)) -> (BackendKey, BackendValue) {
    let check = row.check ^ row.seal(&key);
    (key, BackendValue { check, ..row })
}

impl EndpointMaps {
    fn addresses_of_services(&self) -> Result<Vec<AddressKey>, DataplaneError> {
        let rows = self.addresses.rows()?.into_iter();
        let services = rows.filter(|(_, value)| value.endpoint == ADDRESS_OF_SERVICE);
        Ok(services.map(|(key, _)| key).collect())
    }

    /// Never replaces a pod's address: the author of a Service does not own the pod. Returns the rows that were
    /// written.
    fn put_service_addresses(&mut self, keys: &[AddressKey]) -> Result<Vec<AddressKey>, DataplaneError> {
        let value = AddressValue {
            endpoint: ADDRESS_OF_SERVICE,
            incarnation: 0,
        };
        let mut rows = Vec::with_capacity(keys.len());
        for key in keys {
            match self.addresses.get(key)?.map(|found| found.endpoint) {
                None | Some(ADDRESS_OF_SERVICE) => rows.push((*key, value)),
                Some(endpoint) => {
                    let address = kni_common::address::to_ip(key.address);
                    tracing::warn!(network = key.network, %address, endpoint, "the address of a service belongs to a pod, which keeps it");
                }
            }
        }
        self.addresses.put_all(&rows)?;
        Ok(rows.into_iter().map(|(key, _)| key).collect())
    }

    fn remove_service_addresses(&mut self, keys: &[AddressKey]) -> Result<(), DataplaneError> {
        let mut ours = Vec::with_capacity(keys.len());
        for key in keys {
            if self
                .addresses
                .get(key)?
                .is_some_and(|value| value.endpoint == ADDRESS_OF_SERVICE)
            {
                ours.push(*key);
            }
        }
        self.addresses.remove_all(&ours)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_programs_end_before_what_they_may_have_read_is_removed() {
        let put_services = ServiceStep::PutServices(Vec::new());
        let put_backends = ServiceStep::PutBackends(Vec::new());
        let remove_services = ServiceStep::RemoveServices(Vec::new());
        let remove_addresses = ServiceStep::RemoveAddresses(Vec::new());
        let remove_flows = ServiceStep::RemoveFlows(Vec::new());
        let remove_backends = ServiceStep::RemoveBackends(Vec::new());
        let waits = |steps: &[&ServiceStep]| {
            let mut moved = false;
            steps
                .iter()
                .map(|step| waits_before(step, &mut moved))
                .collect::<Vec<_>>()
        };
        // Another backend: its flows and affinities are looked for when no program chooses the old one any more.
        assert_eq!(
            waits(&[&put_backends, &put_services, &remove_flows, &remove_backends]),
            [false, false, true, false]
        );
        // A service that goes: address, row, flows, each when no program is on the way from the one before.
        assert_eq!(
            waits(&[
                &put_services,
                &remove_addresses,
                &remove_services,
                &remove_flows,
                &remove_backends
            ]),
            [false, true, true, true, false]
        );
        // Old lists alone: nothing refers to them since an earlier call.
        assert_eq!(waits(&[&put_backends, &remove_backends]), [false, false]);
    }

    #[test]
    fn rows_are_read_as_they_were_written() {
        let key = ServiceKey {
            network: 1,
            ..ServiceKey::default()
        };
        let row = ServiceValue {
            service: 3,
            backends: 4,
            count: 5,
            ..ServiceValue::default()
        };
        let [sealed] = sealed_services(&[(key, row)])[..] else {
            panic!("one row")
        };
        assert_ne!(sealed.1.check, 0);
        assert_eq!(unsealed_service(sealed), (key, row));
        let torn = ServiceValue { count: 6, ..sealed.1 };
        assert_ne!(unsealed_service((key, torn)).1, ServiceValue { count: 6, ..row });
    }
}
