//! Writes the policy tables: rows of policy sets, port sets and identities. Reads the hits of rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use kni_common::{
    counter::HitKey,
    policy::{IdentityKey, IdentityValue, PolicyKey, PolicyValue, PortKey, PortValue},
};
use kni_model::{PolicyStep, PolicyTables};

use super::{
    DataplaneError,
    endpoints::EndpointMaps,
    lock, membarrier,
    pin::Pins,
    table::{PerCpuTable, Table},
};

/// The maps of policy, with their own lock: thousands of rows must not delay an attachment.
pub(super) struct PolicyMaps {
    policy: Table<PolicyKey, PolicyValue>,
    ports: Table<PortKey, PortValue>,
    identities: Table<IdentityKey, IdentityValue>,
    hits: PerCpuTable<HitKey, u64>,
}

impl PolicyMaps {
    pub(super) fn open(pins: &Pins) -> Result<Self, DataplaneError> {
        Ok(Self {
            policy: Table::open("POLICY", &pins.map("POLICY"))?,
            ports: Table::open("PORTS", &pins.map("PORTS"))?,
            identities: Table::open("IDENTITIES", &pins.map("IDENTITIES"))?,
            hits: PerCpuTable::open("HITS", &pins.map("HITS"))?,
        })
    }

    pub(super) fn tables(&self, endpoints: &Mutex<EndpointMaps>) -> Result<PolicyTables, DataplaneError> {
        let identities = self.identities.rows()?.into_iter();
        Ok(PolicyTables {
            policy: self.policy.rows()?.into_iter().collect(),
            ports: self.ports.rows()?.into_iter().collect(),
            identities: identities.map(|(key, value)| (key, value.identity)).collect(),
            endpoints: lock(endpoints).enforcements()?,
        })
    }

    /// Applies the steps in order and stops at the first failure: the state then is one between two steps, or has some
    /// rows of the failed step.
    ///
    /// Rows are removed some milliseconds after their references: a program that has read the old row of an endpoint
    /// and was then interrupted would find no rule, and would drop a packet that both the old and the new policies
    /// allow.
    pub(super) fn apply(
        &mut self,
        endpoints: &Mutex<EndpointMaps>,
        steps: &[PolicyStep],
    ) -> Result<(), DataplaneError> {
        let mut moved = false;
        for step in steps {
            if moved && is_removal(step) {
                membarrier::wait_for_programs();
                moved = false;
            }
            moved |= matches!(step, PolicyStep::PutIdentities(_) | PolicyStep::Enforce(_));
            match step {
                PolicyStep::PutPorts(rows) => self.ports.put_all(rows),
                PolicyStep::PutPolicy(rows) => self.policy.put_all(rows),
                PolicyStep::PutIdentities(rows) => {
                    let value = |identity: &u32| IdentityValue { identity: *identity };
                    let rows: Vec<_> = rows.iter().map(|(key, identity)| (*key, value(identity))).collect();
                    self.identities.put_all(&rows)
                }
                PolicyStep::Enforce(changes) => lock(endpoints).enforce(changes),
                PolicyStep::RemoveIdentities(keys) => self.identities.remove_all(keys),
                PolicyStep::RemovePolicy(keys) => self.policy.remove_all(keys),
                PolicyStep::RemovePorts(keys) => self.ports.remove_all(keys),
            }?;
            let networks = networks_of_identities(step);
            if !networks.is_empty() {
                lock(endpoints).renew_epochs(&networks)?;
            }
        }
        Ok(())
    }

    pub(super) fn hits(&self) -> Result<BTreeMap<HitKey, u64>, DataplaneError> {
        let rows = self.hits.rows()?.into_iter();
        Ok(rows.map(|(key, values)| (key, values.iter().sum())).collect())
    }

    pub(super) fn remove_hits(&mut self, sets: &[u32]) -> Result<(), DataplaneError> {
        let gone: BTreeSet<u32> = sets.iter().copied().collect();
        let keys = self.hits.rows()?.into_iter().map(|(key, _)| key);
        self.hits
            .remove_all(&keys.filter(|key| gone.contains(&key.set)).collect::<Vec<_>>())
    }
}

/// The networks whose peers' identities the step changes.
fn networks_of_identities(step: &PolicyStep) -> BTreeSet<u32> {
    let network = |key: &IdentityKey| u32::from_be_bytes(key.data.network);
    match step {
        PolicyStep::PutIdentities(rows) => rows.iter().map(|(key, _)| network(key)).collect(),
        PolicyStep::RemoveIdentities(keys) => keys.iter().map(network).collect(),
        PolicyStep::PutPorts(_)
        | PolicyStep::PutPolicy(_)
        | PolicyStep::Enforce(_)
        | PolicyStep::RemovePolicy(_)
        | PolicyStep::RemovePorts(_) => BTreeSet::new(),
    }
}

const fn is_removal(step: &PolicyStep) -> bool {
    match step {
        PolicyStep::RemoveIdentities(_) | PolicyStep::RemovePolicy(_) | PolicyStep::RemovePorts(_) => true,
        PolicyStep::PutPorts(_) | PolicyStep::PutPolicy(_) | PolicyStep::PutIdentities(_) | PolicyStep::Enforce(_) => {
            false
        }
    }
}
