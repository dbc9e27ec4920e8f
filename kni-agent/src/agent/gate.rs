//! Gives the uplink the egress addresses that policies ask for.

use std::{net::IpAddr, sync::Arc};

use kni_enforcement::PolicySync;
use kni_model::EndpointId;
use kni_uplink::EgressAddresses;

/// What the policies say of egress addresses.
pub(super) struct Asked(pub(super) Arc<PolicySync>);

impl EgressAddresses for Asked {
    fn of(&self, endpoint: EndpointId) -> Vec<IpAddr> {
        self.0.egress_addresses(endpoint)
    }
}
