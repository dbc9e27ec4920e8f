//! Chooses a state between two others, for a change whose new rows do not fit beside the old ones.

use std::collections::BTreeSet;

use kni_common::policy::IDENTITY_ANY;
use kni_model::{Enforcement, PolicyTables};

use super::differences;
use crate::stable;

/// A state on the way from `from` to `to` that needs no new rows. `None`: none removes any more rows before new ones
/// are written.
///
/// First the endpoints whose sets change are denied everything, so that the rows of these sets can go. Then the
/// prefixes that `to` does not have go, with all rows about them. If that does not suffice either, the endpoints whose
/// sets get other rows are denied too: what remains then is a part of `to`. An endpoint without a set stays as it is.
pub(crate) fn toward(from: &PolicyTables, to: &PolicyTables) -> Option<PolicyTables> {
    let others = BTreeSet::new();
    let without_moved = || denied(from, to, &others);
    let without_changed = || {
        let changed = differences(&from.policy, &to.policy).map(|(key, ..)| key.set);
        denied(from, to, &changed.collect())
    };
    let states: [&dyn Fn() -> PolicyTables; 3] = [&without_moved, &|| pruned(from, to), &without_changed];
    states.iter().map(|state| state()).find(|state| state != from)
}

/// `from`, with everything denied to the endpoints that have another set in `to`, or one of the sets `others`.
fn denied(from: &PolicyTables, to: &PolicyTables, others: &BTreeSet<u32>) -> PolicyTables {
    let used = |set: u32| {
        let mut sets = from.policy.keys().chain(to.policy.keys()).map(|key| key.set);
        sets.any(|known| known == set) || to.endpoints.values().any(|endpoint| endpoint.policy == set)
    };
    // A set without rows denies.
    let denied = stable::number(&"denied", 1, used);
    let mut state = from.clone();
    state.endpoints.retain(|id, _| to.endpoints.contains_key(id));
    for (id, now) in &mut state.endpoints {
        let stays = to.endpoints.get(id).is_some_and(|new| new.policy == now.policy) && !others.contains(&now.policy);
        if now.policy != 0 && !stays {
            now.policy = denied;
        }
    }
    let left: BTreeSet<u32> = state.endpoints.values().map(|endpoint| endpoint.policy).collect();
    state.policy.retain(|key, _| left.contains(&key.set));
    state
}

/// `from` without the prefixes that `to` does not have, without the rows about identities out of use then, and
/// without unused ports. Sets that `to` keeps do not distinguish these prefixes from those around them.
fn pruned(from: &PolicyTables, to: &PolicyTables) -> PolicyTables {
    let mut state = from.clone();
    state.identities.retain(|prefix, _| to.identities.contains_key(prefix));
    let of_endpoint = |endpoint: &Enforcement| [endpoint.identity4, endpoint.identity6];
    let known: BTreeSet<u32> = state
        .endpoints
        .values()
        .flat_map(of_endpoint)
        .chain(state.identities.values().copied())
        .chain([IDENTITY_ANY])
        .collect();
    state.policy.retain(|key, _| known.contains(&key.identity));
    let ports: BTreeSet<u32> = state.policy.values().map(|row| row.ports).collect();
    state
        .ports
        .retain(|key, _| ports.contains(&u32::from_be_bytes(key.data.ports)));
    state
}
