//! Removes the node's entries from the status of networks, where agents of earlier releases list the blocks of nodes.
//! Every agent watches the networks, so the list is to be empty.

use std::{collections::BTreeMap, time::Duration};

use ipnet::IpNet;
use kni_claims::{ClaimError, Claims};
use kni_cluster::entries_of;
use kni_model::NetworkName;
use tokio::time::Instant;

use super::{Memory, ObjectControllers, within};

/// The node's entries in the status of networks are removed within this time. When all agents are upgraded at once,
/// each network gets so many writes.
const SPREAD: Duration = Duration::from_secs(10);

impl ObjectControllers {
    /// Removes the entries that an agent of an earlier release has made for blocks of this node, at a random time, all
    /// of a network together.
    pub(super) async fn remove_entries(&self, claims: &Claims, memory: &mut Memory) -> Result<(), ClaimError> {
        let entries = self.needless_entries();
        if entries.is_empty() {
            memory.entries_due = None;
            return Ok(());
        }
        let due = *memory.entries_due.get_or_insert_with(some_time);
        if Instant::now() < due {
            return Ok(());
        }
        memory.entries_due = None;
        let mut failed = Ok(());
        for (network, ranges) in entries {
            kni_tasks::progress();
            match within(claims.remove_entries(&network, &ranges)).await {
                Ok(Some(())) => tracing::info!(
                    %network,
                    entries = ranges.len(),
                    "removed the node's entries from the status of a network"
                ),
                // A later round continues.
                Ok(None) => {}
                Err(error) => failed = Err(error),
            }
        }
        failed
    }

    /// The node's entries in the status of networks whose blocks it holds by their objects, as agents of earlier
    /// releases make them.
    fn needless_entries(&self) -> BTreeMap<NetworkName, Vec<IpNet>> {
        let held = self.cache.blocks().held();
        let tables = self.cache.tables();
        let mut needless = BTreeMap::new();
        for (name, blocks) in held.iter() {
            let Some(object) = tables.networks.get("", name.as_str()) else {
                continue;
            };
            let mut entries = entries_of(object, &self.node);
            entries.retain(|entry| blocks.contains(entry));
            if !entries.is_empty() {
                needless.insert(name.clone(), entries);
            }
        }
        needless
    }
}

fn some_time() -> Instant {
    Instant::now() + SPREAD.mul_f64(fastrand::f64())
}
