//! Compares the rows of a published endpoint with the desired ones.

use kni_common::address::AddressValue;

use super::{EndpointMaps, addresses::address_key};
use crate::{DataplaneError, EndpointConfig, endpoint_row::Age};

impl EndpointMaps {
    pub(crate) fn verify(&self, config: &EndpointConfig) -> Vec<String> {
        self.problems(config).unwrap_or_else(|error| vec![error.to_string()])
    }

    fn problems(&self, config: &EndpointConfig) -> Result<Vec<String>, DataplaneError> {
        let row = self.row(config.endpoint)?;
        let enforcement = self.enforced.get(config.endpoint)?;
        let routed = self.routes.is_routed(config.network);
        if row != self.desired(config, Age::of(&row), routed, &row) {
            let problem = format!("map ENDPOINTS has another row for endpoint {}", config.endpoint);
            return Ok(vec![problem]);
        }
        if self.policy(config.endpoint)? != config.policy(enforcement) {
            let problem = format!("map ENDPOINT_POLICIES has another row for endpoint {}", config.endpoint);
            return Ok(vec![problem]);
        }
        let mut problems = Vec::new();
        for address in config.addresses() {
            let expected = AddressValue {
                endpoint: config.endpoint.0,
                incarnation: row.incarnation,
            };
            if self.addresses.get(&address_key(config, address))? != Some(expected) {
                problems.push(format!("map ADDRESSES has no row for {address}"));
            }
        }
        if let Some(ifindex) = config.plugin
            && self.interfaces.get(&ifindex)? != Some(config.endpoint.0)
        {
            problems.push(format!("map INTERFACES has no row for interface {ifindex}"));
        }
        Ok(problems)
    }
}
