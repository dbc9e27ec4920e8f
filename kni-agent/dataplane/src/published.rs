//! Publishes endpoints to the programs and withdraws them.

use kni_model::EndpointId;

use super::{Dataplane, DataplaneError, EndpointConfig, lock};

impl Dataplane {
    /// Endpoints that fit (row 0 is none).
    pub fn capacity(&self) -> u32 {
        self.max_endpoints.saturating_sub(1)
    }

    /// Makes an endpoint ready: its row and its addresses, in an order in which no packet finds an incomplete endpoint
    /// (I1, I2).
    ///
    /// Its policies must have been applied before ([`kni_model::PolicyStep::Enforce`]), otherwise this fails with
    /// [`DataplaneError::NotEnforced`].
    pub fn publish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.endpoints).publish(endpoint)
    }

    /// Updates an endpoint that an earlier agent published, without interrupting its traffic.
    pub fn republish(&self, endpoint: &EndpointConfig) -> Result<(), DataplaneError> {
        lock(&self.endpoints).republish(endpoint)
    }

    /// Stops an endpoint's traffic and removes its addresses, counters, egress source, host ports and enforcement.
    /// Idempotent.
    pub fn withdraw(&self, endpoint: EndpointId) -> Result<(), DataplaneError> {
        lock(&self.endpoints).withdraw(endpoint)?;
        lock(&self.uplink).remove(endpoint)
    }

    /// Stops the traffic of a published endpoint, or lets it flow again, also for later agents; nothing else of it
    /// changes. Returns whether that is new.
    pub fn suspend(&self, endpoint: EndpointId, suspended: bool) -> Result<bool, DataplaneError> {
        lock(&self.endpoints).suspend(endpoint, suspended)
    }

    /// Removes addresses that their endpoint does not have: an agent that is killed inside [`Self::withdraw`] leaves
    /// them without a row that refers to them. For the start, after [`Self::republish`] of all kept endpoints.
    pub fn remove_stale_addresses(&self) -> Result<(), DataplaneError> {
        lock(&self.endpoints).remove_stale_addresses()
    }

    /// The endpoint of a row, whichever agent wrote it; `None` if the row is free.
    pub fn published(&self, endpoint: EndpointId) -> Result<Option<EndpointConfig>, DataplaneError> {
        lock(&self.endpoints).config_of(endpoint)
    }

    /// Endpoints with a row or an address, of any agent.
    pub fn published_endpoints(&self) -> Result<Vec<EndpointId>, DataplaneError> {
        lock(&self.endpoints).published()
    }

    pub(super) fn published_count(&self) -> Result<u32, DataplaneError> {
        let published = lock(&self.endpoints).enforcements()?.len();
        Ok(u32::try_from(published).unwrap_or(u32::MAX))
    }

    /// Differences between an endpoint's rows and the expected ones.
    pub fn verify(&self, endpoint: &EndpointConfig) -> Vec<String> {
        lock(&self.endpoints).verify(endpoint)
    }
}
