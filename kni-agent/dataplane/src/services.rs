//! Writes the service tables, and removes flows and affinities to deleted backends.

use std::{collections::HashSet, sync::Mutex};

use kni_common::{
    address::{ADDRESS_OF_SERVICE, AddressKey, AddressValue},
    service::{AffinityKey, AffinityValue, BackendKey, BackendValue, ServiceKey, ServiceValue},
};
use kni_model::{GoneBackend, ServiceStep, ServiceTables};

use super::{DataplaneError, endpoints::EndpointMaps, flows::FlowTables, lock, pin::Pins, table::Table};

/// The maps of services, with their own lock like the policy tables.
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

    pub(super) fn tables(&self, endpoints: &Mutex<EndpointMaps>) -> Result<ServiceTables, DataplaneError> {
        let mut addresses = lock(endpoints).addresses_of_services()?;
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
        endpoints: &Mutex<EndpointMaps>,
        flows: &FlowTables,
        steps: &[ServiceStep],
    ) -> Result<(), DataplaneError> {
        let addresses = || lock(endpoints);
        for step in steps {
            match step {
                ServiceStep::PutBackends(rows) => self.backends.put_all(rows),
                ServiceStep::PutServices(rows) => self.services.put_all(rows),
                ServiceStep::PutAddresses(keys) => addresses().put_service_addresses(keys),
                ServiceStep::RemoveAddresses(keys) => addresses().remove_service_addresses(keys),
                ServiceStep::RemoveServices(keys) => self.services.remove_all(keys),
                ServiceStep::RemoveFlows(gone) => self.remove_uses(flows, gone),
                ServiceStep::RemoveBackends(keys) => self.backends.remove_all(keys),
            }?;
        }
        Ok(())
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

impl EndpointMaps {
    fn addresses_of_services(&self) -> Result<Vec<AddressKey>, DataplaneError> {
        let rows = self.addresses.rows()?.into_iter();
        let services = rows.filter(|(_, value)| value.endpoint == ADDRESS_OF_SERVICE);
        Ok(services.map(|(key, _)| key).collect())
    }

    /// Never replaces a pod's address: the author of a Service does not own the pod.
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
                    tracing::warn!(network = key.network, %address, endpoint, "the address of a service belongs to a pod, which keeps it");
                }
            }
        }
        self.addresses.put_all(&rows)
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
