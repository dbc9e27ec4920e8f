//! Writes and removes the rows of `ADDRESSES` and `INTERFACES`, by which the programs find an endpoint.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{
    address::{ADDRESS_OF_SERVICE, AddressKey, AddressValue, from_ip},
    endpoint::{EndpointPolicy, EndpointRow},
    uplink::OUTSIDE,
};
use kni_model::EndpointId;

use super::EndpointMaps;
use crate::{DataplaneError, EndpointConfig, table::Table};

pub(super) fn address_key(config: &EndpointConfig, address: IpAddr) -> AddressKey {
    AddressKey {
        network: config.network.get(),
        address: from_ip(address),
    }
}

/// The networks that an earlier agent has exposed.
pub(super) fn exposed_networks(
    addresses: &Table<AddressKey, AddressValue>,
    rows: &[(u32, EndpointRow)],
) -> Result<BTreeSet<u32>, DataplaneError> {
    let networks: BTreeMap<u32, u32> = rows.iter().map(|(endpoint, row)| (*endpoint, row.network)).collect();
    let outside = addresses.rows()?.into_iter().filter(|(key, _)| key.network == OUTSIDE);
    let exposed = outside.filter_map(|(_, value)| networks.get(&value.endpoint).copied());
    Ok(exposed.filter(|network| *network != 0).collect())
}

pub(crate) fn is_stale(
    key: &AddressKey,
    value: AddressValue,
    row: Option<&EndpointRow>,
    exposed: &BTreeSet<u32>,
) -> bool {
    let is_of = |row: &EndpointRow| match key.network {
        OUTSIDE => exposed.contains(&row.network),
        network => row.network == network,
    };
    let matches = |row: &EndpointRow| is_of(row) && row.incarnation == value.incarnation;
    value.endpoint != ADDRESS_OF_SERVICE && !row.is_some_and(matches)
}

impl EndpointMaps {
    pub(super) fn write_addresses(&self, config: &EndpointConfig, incarnation: u32) -> Result<(), DataplaneError> {
        for address in config.addresses() {
            let value = AddressValue {
                endpoint: config.endpoint.0,
                incarnation,
            };
            self.addresses.put(&address_key(config, address), &value)?;
            if self.exposed.contains(&config.network.get()) {
                self.expose(address, value)?;
            }
        }
        Ok(())
    }

    pub(super) fn write_interface(&self, config: &EndpointConfig) -> Result<(), DataplaneError> {
        match config.plugin {
            Some(ifindex) => self.interfaces.put(&ifindex, &config.endpoint.0),
            None => Ok(()),
        }
    }

    pub(super) fn remove_addresses_of(&self, endpoint: EndpointId, row: &EndpointRow) -> Result<(), DataplaneError> {
        for address in [from_ip(IpAddr::from(row.ipv4)), row.ipv6] {
            for network in [row.network, OUTSIDE] {
                let key = AddressKey { network, address };
                // The address may have a new owner already.
                if self
                    .addresses
                    .get(&key)?
                    .is_some_and(|value| value.endpoint == endpoint.0)
                {
                    self.addresses.remove(&key)?;
                }
            }
        }
        Ok(())
    }

    /// Removes all rows of an endpoint by a scan of the table, for when its addresses are not known.
    pub(super) fn remove_addresses(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        let rows = self.addresses.rows()?.into_iter();
        let stale = rows
            .filter(|(_, value)| value.endpoint == endpoint.0)
            .map(|(key, _)| key);
        self.addresses.remove_all(&stale.collect::<Vec<_>>())
    }

    /// Removes rows of addresses and interfaces that match no endpoint's row, network and incarnation, by a walk. Rows
    /// of services stay.
    pub(crate) fn remove_stale_addresses(&self) -> Result<(), DataplaneError> {
        let endpoints: BTreeMap<u32, EndpointRow> = self.rows()?.into_iter().collect();
        let policies: BTreeMap<u32, EndpointPolicy> = self.policies.rows()?.into_iter().collect();
        let interfaces = self.interfaces.rows()?.into_iter();
        let gone = interfaces
            .filter(|(ifindex, endpoint)| policies.get(endpoint).is_none_or(|row| row.ifindex != *ifindex))
            .map(|(ifindex, _)| ifindex);
        self.interfaces.remove_all(&gone.collect::<Vec<_>>())?;
        let rows = self.addresses.rows()?.into_iter();
        let stale = rows.filter(|(key, value)| is_stale(key, *value, endpoints.get(&value.endpoint), &self.exposed));
        self.addresses
            .remove_all(&stale.map(|(key, _)| key).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_services_address_is_never_stale() {
        let key = AddressKey {
            network: 3,
            address: [1; 16],
        };
        let of = |endpoint, incarnation| AddressValue { endpoint, incarnation };
        let row = EndpointRow {
            network: 3,
            incarnation: 8,
            generation: 9,
            ..EndpointRow::default()
        };
        assert!(!is_stale(&key, of(ADDRESS_OF_SERVICE, 0), None, &BTreeSet::new()));
        assert!(!is_stale(&key, of(1, 8), Some(&row), &BTreeSet::new()));
        assert!(
            is_stale(&key, of(1, 9), Some(&row), &BTreeSet::new()),
            "the generation is not the incarnation"
        );
        assert!(is_stale(&key, of(1, 8), None, &BTreeSet::new()));
        assert!(is_stale(
            &AddressKey { network: 4, ..key },
            of(1, 8),
            Some(&row),
            &BTreeSet::new()
        ));
    }
}
