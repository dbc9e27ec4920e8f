//! Claims units of one network and family until the node has enough of them.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use kni_claims::{Claim, ClaimError, Claims, NetworkRef};

use super::{ObjectControllers, desired::Units, within};

/// Maximum number of further attempts where other nodes had the chosen units.
const TRIES: u32 = 16;

/// Blocks to claim for one network and family.
pub(super) struct Search {
    pub(super) network: NetworkRef,
    pub(super) ipv4: bool,
    pub(super) count: usize,
    /// Claims whose outcome is not known come first.
    pub(super) first: BTreeSet<IpNet>,
    pub(super) units: Units,
}

/// What became of a [`Search`].
pub(super) struct Found {
    pub(super) network: NetworkRef,
    pub(super) ipv4: bool,
    pub(super) held: Vec<IpNet>,
    /// Units of other nodes.
    pub(super) foreign: Vec<IpNet>,
    /// Units whose owner is not known.
    pub(super) unsettled: BTreeSet<IpNet>,
    pub(super) none_left: bool,
    pub(super) done: Result<(), ClaimError>,
}

impl Found {
    fn nothing(network: NetworkRef, ipv4: bool) -> Self {
        Self {
            network,
            ipv4,
            held: Vec::new(),
            foreign: Vec::new(),
            unsettled: BTreeSet::new(),
            none_left: false,
            done: Ok(()),
        }
    }
}

impl ObjectControllers {
    /// Tries units, many at once, until enough are claimed.
    pub(super) async fn claim(&self, claims: &Claims, search: Search) -> Found {
        let (ipv4, count, mut units) = (search.ipv4, search.count, search.units);
        let mut found = Found::nothing(search.network, ipv4);
        let mut attempt = 0;
        let mut batch: Vec<IpNet> = search.first.into_iter().collect();
        for unit in &batch {
            units.taken.insert(unit);
        }
        let mut listed = false;
        for _round in 0..TRIES {
            kni_tasks::progress();
            if !listed && !found.foreign.is_empty() {
                listed = true;
                found.done = add_taken(claims, &found.network, &mut units).await;
                if found.done.is_err() {
                    return found;
                }
            }
            while found.held.len() + batch.len() < count
                && let Some(unit) = units.next(&self.node, ipv4, attempt)
            {
                attempt += 1;
                units.taken.insert(&unit);
                batch.push(unit);
            }
            if batch.is_empty() {
                found.none_left = found.held.len() < count;
                return found;
            }
            let claimed = within(async { Ok(claims.claim_all(&found.network, &batch).await) }).await;
            // Another round continues after a request that takes too long.
            let (mut results, done) = claimed.ok().flatten().unwrap_or((BTreeMap::new(), Ok(())));
            for unit in std::mem::take(&mut batch) {
                match results.remove(&unit) {
                    Some(Claim::Ours) => found.held.push(unit),
                    Some(Claim::Taken(by)) => {
                        tracing::debug!(network = %found.network.name, block = %unit, by, "the address block is taken");
                        found.foreign.push(unit);
                    }
                    None => {
                        found.unsettled.insert(unit);
                    }
                }
            }
            found.done = done;
            if found.done.is_err() || !found.unsettled.is_empty() {
                return found;
            }
        }
        found
    }
}

/// Adds the blocks that the caches lack, for example because the node has just joined the network.
async fn add_taken(claims: &Claims, network: &NetworkRef, units: &mut Units) -> Result<(), ClaimError> {
    let taken = within(claims.taken(&network.name)).await?;
    for block in taken.iter().flatten() {
        units.taken.insert(block);
    }
    Ok(())
}
