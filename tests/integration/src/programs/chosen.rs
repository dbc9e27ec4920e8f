//! Determines the backend that a program chose at random.

use kni_common::{Direction, Verdict, counter::HitKey};

use super::{Programs, Ran, action_of, tables::Tables};
use crate::model::{Backend, Candidate, Choice};

/// As [`backend`], without counters: of a dropped packet, any backend for which it would be dropped.
pub(super) fn any_backend(choice: &Choice<'_>, ran: &Ran, tables: &Tables) -> usize {
    let find = |wanted: &dyn Fn(&Candidate) -> bool| choice.candidates.iter().position(wanted);
    let flow = &choice.flow;
    let found = if choice.service.affinity != 0 {
        let last = tables.last_backend(choice.service.id, flow.network, flow.source.0);
        last.ok().and_then(|last| find(&|one| one.backend == last))
    } else if ran.action == action_of(Verdict::Truncated) {
        find(&|one| one.fate.is_err())
    } else {
        let opened = tables.backend_of(flow).ok();
        opened.and_then(|opened| find(&|one| one.backend == opened && one.fate.is_ok()))
    };
    found.unwrap_or(0)
}

/// Uses the affinity of the client, or the opened flow, or without a flow the counted drop reason.
pub(super) fn backend(choice: &Choice<'_>, ran: &Ran, programs: &Programs, tables: &Tables) -> usize {
    let with = |wanted: &dyn Fn(&Backend, Result<(), Verdict>) -> bool| {
        let candidates = choice.candidates.iter();
        let mut matching = candidates.enumerate().filter(|(_, one)| wanted(&one.backend, one.fate));
        matching.next().map(|(index, _)| index)
    };
    let flow = &choice.flow;
    let found = if choice.service.affinity != 0 {
        let last = tables.last_backend(choice.service.id, flow.network, flow.source.0);
        last.ok().and_then(|last| with(&|backend, _| *backend == last))
    } else {
        let dropped = ran.action == action_of(Verdict::Truncated);
        let refused = dropped.then(|| counted_more(choice, programs)).flatten();
        let by_reason = refused.and_then(|reason| refused_for(reason, choice, programs));
        by_reason.or_else(|| {
            let opened = tables.backend_of(flow).ok()?;
            with(&|backend, fate| *backend == opened && fate.is_ok())
        })
    };
    found.unwrap_or(0)
}

/// A candidate whose packet would have been dropped for this reason with the counted policy hits.
fn refused_for(reason: Verdict, choice: &Choice<'_>, programs: &Programs) -> Option<usize> {
    let candidates = choice.candidates.iter().enumerate();
    let possible: Vec<_> = candidates.filter(|(_, one)| one.fate == Err(reason)).collect();
    if possible.len() < 2 {
        return possible.first().map(|(index, _)| *index);
    }
    let kernel = programs.dataplane().hits().ok()?;
    let counted = |key| kernel.get(key).copied().unwrap_or(0) - choice.hits.get(key).copied().unwrap_or(0);
    let all: Vec<&HitKey> = possible.iter().flat_map(|(_, one)| &one.hits).collect();
    let told = possible.iter().find(|(_, one)| {
        let own = |key: &HitKey| one.hits.iter().filter(|hit| *hit == key).count();
        all.iter()
            .all(|key| counted(*key) == u64::try_from(own(key)).expect("a small number"))
    });
    told.or(possible.first()).map(|(index, _)| *index)
}

/// The drop reason that the kernel has counted once more than the model.
fn counted_more(choice: &Choice<'_>, programs: &Programs) -> Option<Verdict> {
    let drops = programs.dataplane().drops().ok()?;
    let mut here = drops
        .iter()
        .filter(|drop| (drop.endpoint.0, drop.direction) == (choice.endpoint, Direction::FromPod));
    let more = here.find(|drop| {
        let known = choice.counts.get(&(choice.endpoint, Direction::FromPod, drop.reason));
        known.map_or(0, |(packets, _)| *packets) < drop.count.packets
    });
    more.map(|drop| drop.reason)
}
