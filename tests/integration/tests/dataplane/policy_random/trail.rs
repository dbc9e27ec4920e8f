//! Checks the explanation of a decision: the reported rule allows it alone, and the reported policies isolate.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use kni_common::event::PolicyTrail;
use kni_integration::oracle::{Direction, Peer, Policy, World};
use kni_model::policy::{PolicyDirection, PolicyKind, PolicyRef, RuleRef};
use kni_policy::PolicyEngine;

use super::generate::Question;

/// Compares a trail with the oracle, for one end of a question.
pub(crate) fn check(
    engine: &PolicyEngine,
    world: &World,
    question: &Question,
    direction: Direction,
    (allowed, trail): (bool, PolicyTrail),
) -> Result<()> {
    let [from, to] = [question.from, question.to].map(|address| world.peer(question.network, address));
    let (own, other, side) = match direction {
        Direction::Egress => (from, to, PolicyDirection::Egress),
        Direction::Ingress => (to, from, PolicyDirection::Ingress),
    };
    let Peer::Pod(pod, interface, _) = own else {
        return Ok(());
    };
    let isolating: BTreeSet<_> = world
        .isolating(direction, pod, interface)
        .into_iter()
        .map(reference)
        .collect();
    let told = || format!("{question:?} {direction:?} {trail:?}");
    if trail.set != 0 {
        let named: BTreeSet<_> = engine.isolating(trail.set, side).into_iter().collect();
        ensure!(
            named == isolating,
            "{}: isolated by {isolating:?}, named are {named:?}",
            told()
        );
    } else {
        ensure!(
            isolating.is_empty(),
            "{}: isolated by {isolating:?} without a set",
            told()
        );
    }
    let rule = engine.rule(trail.set, side, trail.rule, trail.ordinal);
    if !allowed || isolating.is_empty() {
        return Ok(());
    }
    let rule = rule.with_context(|| format!("{}: no rule is named", told()))?;
    let alone = World {
        policies: vec![only(world, &rule).with_context(|| format!("{}: there is no {rule}", told()))?],
        ..world.clone()
    };
    let allows = alone.may(direction, own, other, question.protocol, question.port);
    ensure!(allows && rule.direction == side, "{}: {rule} does not allow it", told());
    Ok(())
}

/// The policy reduced to this rule.
fn only(world: &World, rule: &RuleRef) -> Option<Policy> {
    let mut policy = world
        .policies
        .iter()
        .find(|policy| reference(policy) == rule.policy)?
        .clone();
    let spec = policy.object.spec.as_mut()?;
    let index = usize::try_from(rule.index).ok()?;
    match rule.direction {
        PolicyDirection::Egress => spec.egress = Some(vec![spec.egress.as_ref()?.get(index)?.clone()]),
        PolicyDirection::Ingress => spec.ingress = Some(vec![spec.ingress.as_ref()?.get(index)?.clone()]),
        PolicyDirection::External => return None,
    }
    Some(policy)
}

fn reference(policy: &Policy) -> PolicyRef {
    let metadata = &policy.object.metadata;
    PolicyRef {
        kind: match policy.networks {
            None => PolicyKind::NetworkPolicy,
            Some(_) => PolicyKind::MultiNetworkPolicy,
        },
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
    }
}
