//! Lets the attach service ask the policies and the way out, and the way out the policies: they do not know each other.

use std::{net::IpAddr, sync::Arc};

use kni_enforcement::PolicySync;
use kni_model::{EndpointId, Sandbox, SandboxId, policy::PolicyPod};
use kni_pods::PolicyGate;
use kni_uplink::{EgressAddresses, Uplink};

pub(super) struct Gate {
    sync: Arc<PolicySync>,
    uplink: Arc<Uplink>,
}

impl Gate {
    pub(super) fn new(sync: &Arc<PolicySync>, uplink: &Arc<Uplink>) -> Self {
        Self {
            sync: Arc::clone(sync),
            uplink: Arc::clone(uplink),
        }
    }
}

impl PolicyGate for Gate {
    fn admit(&self, pod: &PolicyPod) -> Result<(), String> {
        self.sync.admit(pod).map_err(|error| error.to_string())?;
        // Behind the policies, which may ask for an address.
        self.uplink.admit(pod).map_err(|error| error.to_string())
    }

    fn adopted(&self) -> Result<(), String> {
        self.uplink.adopted();
        self.sync.adopted().map_err(|error| error.to_string())
    }

    fn published(&self, sandbox: &Sandbox) -> Result<(), String> {
        self.uplink.published(sandbox).map_err(|error| error.to_string())
    }

    fn leave(&self, sandbox: &SandboxId) {
        self.sync.leave(sandbox);
        self.uplink.leave(sandbox);
    }
}

/// What the policies say of egress addresses.
pub(super) struct Asked(pub(super) Arc<PolicySync>);

impl EgressAddresses for Asked {
    fn of(&self, endpoint: EndpointId) -> Vec<IpAddr> {
        self.0.egress_addresses(endpoint)
    }
}
