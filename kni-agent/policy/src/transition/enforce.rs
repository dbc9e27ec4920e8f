//! Orders the steps that move endpoints and prefixes to their new sets and identities.

use std::collections::BTreeMap;

use kni_common::policy::IdentityKey;
use kni_model::{EndpointId, Enforcement, PolicyStep};

use super::{
    carriers::{Carriers, MovedEndpoint, MovedPrefix},
    push,
    substitutes::Substitutes,
};

/// Moves endpoints and prefixes: to substitute sets, to new identities, to new sets, and from substitute identities to
/// the final ones.
pub(super) fn steps(carriers: &Carriers, substitutes: &Substitutes) -> Vec<PolicyStep> {
    if carriers.is_single() {
        let rows = carriers.endpoints.iter().map(|moved| (moved.id, moved.new));
        let mut steps = Vec::new();
        push(&mut steps, PolicyStep::Enforce, rows.collect());
        return steps;
    }
    let mut moves = Moves::new(&carriers.endpoints);
    moves.endpoints(|moved, before| Enforcement {
        policy: substitutes.leaving(moved).unwrap_or(before.policy),
        ..before
    });
    moves.prefixes(&carriers.prefixes, |moved| {
        let identity = substitutes.identity(moved.network, moved.old, moved.new);
        moved.must_put(identity).then_some(identity)
    });
    moves.endpoints(|moved, before| {
        let old = moved.old.unwrap_or_default();
        Enforcement {
            policy: before.policy,
            identity4: substitutes.identity(moved.network, old.identity4, moved.new.identity4),
            identity6: substitutes.identity(moved.network, old.identity6, moved.new.identity6),
        }
    });
    moves.endpoints(|moved, before| Enforcement {
        policy: moved.new.policy,
        ..before
    });
    moves.prefixes(&carriers.prefixes, |moved| {
        let is_substituted = substitutes.identity(moved.network, moved.old, moved.new) != moved.new;
        is_substituted.then_some(moved.new)
    });
    moves.endpoints(|moved, _| moved.new);
    // New endpoints follow after all others, together with those that a failed plan may have left at any of the steps.
    let begin = carriers
        .endpoints
        .iter()
        .filter(|moved| moved.old.is_none() || moved.is_unconfirmed);
    let begin = begin.map(|moved| (moved.id, moved.new)).collect();
    push(&mut moves.steps, PolicyStep::Enforce, begin);
    merge_last(&mut moves.steps);
    moves.steps
}

/// The steps so far, and the resulting state of existing endpoints.
struct Moves<'a> {
    steps: Vec<PolicyStep>,
    now: BTreeMap<EndpointId, (&'a MovedEndpoint, Enforcement)>,
}

impl<'a> Moves<'a> {
    fn new(endpoints: &'a [MovedEndpoint]) -> Self {
        let known = endpoints
            .iter()
            .filter_map(|moved| Some((moved.id, (moved, moved.old?))));
        Self {
            steps: Vec::new(),
            now: known.collect(),
        }
    }

    fn endpoints(&mut self, next: impl Fn(&MovedEndpoint, Enforcement) -> Enforcement) {
        let mut rows = Vec::new();
        for (id, (moved, now)) in &mut self.now {
            let next = next(moved, *now);
            if *now != next {
                *now = next;
                rows.push((*id, next));
            }
        }
        push(&mut self.steps, PolicyStep::Enforce, rows);
    }

    fn prefixes(&mut self, prefixes: &[MovedPrefix], next: impl Fn(&MovedPrefix) -> Option<u32>) {
        let rows = prefixes.iter().filter_map(|moved| Some((moved.key, next(moved)?)));
        let rows: Vec<(IdentityKey, u32)> = rows.collect();
        push(&mut self.steps, PolicyStep::PutIdentities, rows);
    }
}

/// Merges the last two steps if they are of the same kind and have no endpoint in common.
fn merge_last(steps: &mut Vec<PolicyStep>) {
    let Some(PolicyStep::Enforce(last)) = steps.pop_if(|step| matches!(step, PolicyStep::Enforce(_))) else {
        return;
    };
    if let Some(PolicyStep::Enforce(before)) = steps.last_mut()
        && !last.iter().any(|(id, _)| before.iter().any(|(known, _)| known == id))
    {
        before.extend(last);
    } else {
        steps.push(PolicyStep::Enforce(last));
    }
}
