//! Writes the rows by which packets that come without a tunnel find endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kni_common::{
    address::{AddressKey, AddressValue, from_ip},
    endpoint::EndpointRow,
    uplink::OUTSIDE,
};
use kni_model::EndpointId;

use super::{
    DataplaneError,
    endpoints::{EndpointMaps, is_stale},
};

impl EndpointMaps {
    /// Writes the row by which packets from outside find the endpoint. Another current endpoint keeps the address: two
    /// networks without a tunnel must not overlap.
    pub(super) fn expose(&self, address: IpAddr, value: AddressValue) -> Result<(), DataplaneError> {
        let key = outside_key(address);
        if let Some(found) = self.addresses.get(&key)?
            && found.endpoint != value.endpoint
        {
            let owner = self.row(EndpointId(found.endpoint))?;
            if owner.network != 0 && owner.incarnation == found.incarnation {
                tracing::warn!(%address, "two pods of networks without a tunnel have this address; the first one keeps it");
                return Ok(());
            }
        }
        self.addresses.put(&key, &value)
    }

    /// Replaces the networks whose addresses other nodes send to without a tunnel. After a failure the next call writes
    /// all rows again.
    pub(super) fn set_exposed(&mut self, exposed: BTreeSet<u32>) -> Result<(), DataplaneError> {
        if self.exposed_is_written && self.exposed == exposed {
            return Ok(());
        }
        self.exposed_is_written = false;
        self.exposed = exposed;
        let rows: BTreeMap<u32, EndpointRow> = self.rows()?.into_iter().collect();
        let known = self.addresses.rows()?.into_iter();
        let stale = known.filter(|(key, value)| {
            key.network == OUTSIDE && is_stale(key, *value, rows.get(&value.endpoint), &self.exposed)
        });
        self.addresses
            .remove_all(&stale.map(|(key, _)| key).collect::<Vec<_>>())?;
        for (endpoint, row) in rows.iter().filter(|(_, row)| self.exposed.contains(&row.network)) {
            let value = AddressValue {
                endpoint: *endpoint,
                incarnation: row.incarnation,
            };
            let v4 = Some(IpAddr::from(row.ipv4)).filter(|_| row.ipv4 != [0; 4]);
            let v6 = Some(IpAddr::from(row.ipv6)).filter(|_| row.ipv6 != [0; 16]);
            for address in v4.into_iter().chain(v6) {
                self.expose(address, value)?;
            }
        }
        self.exposed_is_written = true;
        Ok(())
    }
}

fn outside_key(address: IpAddr) -> AddressKey {
    AddressKey {
        network: OUTSIDE,
        address: from_ip(address),
    }
}

#[cfg(test)]
mod tests {
    use kni_common::address::ADDRESS_OF_SERVICE;

    use super::{super::endpoints::fixture::maps, *};

    #[test]
    fn addresses_that_did_not_fit_are_exposed_by_the_next_call() {
        let mut maps = maps(2);
        let other = AddressKey {
            network: 4,
            address: [1; 16],
        };
        let value = AddressValue {
            endpoint: ADDRESS_OF_SERVICE,
            incarnation: 0,
        };
        maps.addresses.put(&other, &value).unwrap();
        maps.set_exposed([3].into()).unwrap_err();
        maps.addresses.remove(&other).unwrap();
        maps.set_exposed([3].into()).unwrap();
        let exposed = maps.addresses.rows().unwrap();
        assert_eq!(exposed.len(), 2, "{exposed:?}");
        maps.addresses.remove(&exposed[0].0).unwrap();
        maps.addresses.put(&other, &value).unwrap();
        maps.set_exposed([3, 4].into()).unwrap_err();
        maps.set_exposed([].into()).unwrap();
        assert_eq!(maps.addresses.rows().unwrap(), [(other, value)]);
    }
}
