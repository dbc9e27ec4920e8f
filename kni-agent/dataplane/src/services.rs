//! Writes the service tables, and forgets what led to backends that are gone.

use std::{collections::HashSet, sync::Mutex};

use kni_common::{
    address::{ADDRESS_OF_SERVICE, AddressKey, AddressValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
};
use kni_model::{GoneBackend, ServiceStep, ServiceTables};

use super::{DataplaneError, batch::Table, flows::FlowTables, lock, maps::Maps, pin::Pins};

/// The maps of services, with a lock of their own as the policy tables have.
pub(super) struct ServiceMaps {
    services: Table<ServiceKey, ServiceValue>,
    backends: Table<BackendKey, BackendValue>,
    affinity: Table<AffinityKey, AffinityValue>,
}

impl ServiceMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            services: Table::open("SERVICES", &pins.map("SERVICES"))?,
            backends: Table::open("BACKENDS", &pins.map("BACKENDS"))?,
            affinity: Table::open("AFFINITY", &pins.map("AFFINITY"))?,
        })
    }

    pub(super) fn tables(&self, maps: &Mutex<Maps>) -> Result<ServiceTables, DataplaneError> {
        let mut addresses = lock(maps).addresses_of_services()?;
        addresses.sort_unstable();
        Ok(ServiceTables {
            services: self.services.rows()?.into_iter().collect(),
            backends: self.backends.rows()?.into_iter().collect(),
            addresses,
        })
    }

    /// As [`super::policy::PolicyMaps::apply`].
    pub(super) fn apply(
        &mut self,
        maps: &Mutex<Maps>,
        flows: &FlowTables,
        steps: &[ServiceStep],
    ) -> Result<(), DataplaneError> {
        let maps = || lock(maps);
        for step in steps {
            match step {
                ServiceStep::PutBackends(rows) => self.backends.write(rows),
                ServiceStep::PutServices(rows) => self.services.write(rows),
                ServiceStep::PutAddresses(keys) => maps().put_service_addresses(keys),
                ServiceStep::RemoveAddresses(keys) => maps().remove_service_addresses(keys),
                ServiceStep::RemoveServices(keys) => self.services.remove(keys),
                ServiceStep::Forget(gone) => self.forget(flows, gone),
                ServiceStep::RemoveBackends(keys) => self.backends.remove(keys),
            }?;
        }
        Ok(())
    }

    fn forget(&self, flows: &FlowTables, gone: &[GoneBackend]) -> Result<(), DataplaneError> {
        if gone.is_empty() {
            return Ok(());
        }
        flows.forget(gone)?;
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
        self.affinity.remove(&stale)
    }
}

impl Maps {
    fn addresses_of_services(&self) -> Result<Vec<AddressKey>, DataplaneError> {
        let rows = self.addresses.rows()?.into_iter();
        let services = rows.filter(|(_, value)| value.endpoint == ADDRESS_OF_SERVICE);
        Ok(services.map(|(key, _)| key).collect())
    }

    /// A pod keeps its address whatever a Service says: who wrote the Service does not own the pod.
    fn put_service_addresses(&mut self, keys: &[AddressKey]) -> Result<(), DataplaneError> {
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
                    tracing::warn!(network = key.network, %address, endpoint, "a service has the address of a pod: the pod keeps it");
                }
            }
        }
        self.addresses.write(&rows)
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
        self.addresses.remove(&ours)
    }
}
