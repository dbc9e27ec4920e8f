//! Plans the steps from the current tables to the desired tables; no intermediate state drops a packet that both allow.
//!
//! First the identities change, then the endpoints switch to their new sets, then unused rows are removed. In between a
//! set may meet an identity that it was not compiled for; the rows for these pairs are written first and repeat the
//! decision of the packet's old state. Where one identity or one set would need two different decisions, a substitute
//! replaces it.

mod around;
mod carriers;
mod enforce;
mod interim;
mod substitutes;

use std::collections::{BTreeMap, BTreeSet};

use kni_common::policy::{IdentityKey, PolicyKey, PolicyValue, PortKey};
use kni_model::{EndpointId, PolicyStep, PolicyTables};

pub(super) use self::interim::toward;
use self::{carriers::Carriers, substitutes::Substitutes};

/// Rows whose presence is unknown, because a plan that changed them was not confirmed.
#[derive(Debug, Default)]
pub(super) struct Unconfirmed {
    policy: BTreeSet<PolicyKey>,
    ports: BTreeSet<PortKey>,
    identities: BTreeSet<IdentityKey>,
    endpoints: BTreeSet<EndpointId>,
}

impl Unconfirmed {
    /// Adds the rows that these steps change.
    pub(super) fn add(&mut self, steps: &[PolicyStep]) {
        for step in steps {
            match step {
                PolicyStep::PutPorts(rows) => self.ports.extend(rows.iter().map(|(key, _)| *key)),
                PolicyStep::PutPolicy(rows) => self.policy.extend(rows.iter().map(|(key, _)| *key)),
                PolicyStep::PutIdentities(rows) => self.identities.extend(rows.iter().map(|(key, _)| *key)),
                PolicyStep::Enforce(rows) => self.endpoints.extend(rows.iter().map(|(key, _)| *key)),
                PolicyStep::RemoveIdentities(keys) => self.identities.extend(keys),
                PolicyStep::RemovePolicy(keys) => self.policy.extend(keys),
                PolicyStep::RemovePorts(keys) => self.ports.extend(keys),
            }
        }
    }
}

/// A plan.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) steps: Vec<PolicyStep>,
    /// Temporary substitute sets, each with the set that it replaces.
    pub(super) substitutes: Vec<(u32, u32)>,
}

/// Plans the steps from one state to the other; `networks` holds the network of each endpoint of `to`.
pub(super) fn plan(
    from: &PolicyTables,
    to: &PolicyTables,
    networks: &BTreeMap<EndpointId, u32>,
    unconfirmed: &Unconfirmed,
) -> Plan {
    let carriers = Carriers::new(from, to, networks, unconfirmed);
    let substitutes = Substitutes::new(from, to, networks, &carriers);
    let mut steps = Vec::new();
    push(
        &mut steps,
        PolicyStep::PutPorts,
        missing(&from.ports, &to.ports, &unconfirmed.ports),
    );
    let mut rows: BTreeMap<PolicyKey, PolicyValue> = substitutes.rows.clone();
    rows.extend(missing(&from.policy, &to.policy, &unconfirmed.policy));
    push(&mut steps, PolicyStep::PutPolicy, rows.into_iter().collect());
    steps.extend(enforce::steps(&carriers, &substitutes));

    let gone_identities = gone(&from.identities, &to.identities, &unconfirmed.identities);
    push(&mut steps, PolicyStep::RemoveIdentities, gone_identities.collect());
    let substitute_rows = substitutes.rows.keys().copied().collect();
    let gone_policy: BTreeSet<PolicyKey> = gone(&from.policy, &to.policy, &unconfirmed.policy)
        .chain(gone(&BTreeMap::new(), &to.policy, &substitute_rows))
        .collect();
    push(&mut steps, PolicyStep::RemovePolicy, gone_policy.into_iter().collect());
    let gone_ports = gone(&from.ports, &to.ports, &unconfirmed.ports);
    push(&mut steps, PolicyStep::RemovePorts, gone_ports.collect());
    Plan {
        steps,
        substitutes: substitutes.named,
    }
}

fn push<T>(steps: &mut Vec<PolicyStep>, step: impl Fn(Vec<T>) -> PolicyStep, rows: Vec<T>) {
    if !rows.is_empty() {
        steps.push(step(rows));
    }
}

fn missing<K: Ord + Copy, V: PartialEq + Copy>(
    from: &BTreeMap<K, V>,
    to: &BTreeMap<K, V>,
    unconfirmed: &BTreeSet<K>,
) -> Vec<(K, V)> {
    let rows = differences(from, to).filter_map(|(key, _, value)| Some((key, value?)));
    let rewritten = unconfirmed.iter().filter_map(|key| {
        let value = to.get(key)?;
        (from.get(key) == Some(value)).then_some((*key, *value))
    });
    rows.chain(rewritten).collect()
}

fn gone<'a, K: Ord + Copy, V: PartialEq + Copy>(
    from: &'a BTreeMap<K, V>,
    to: &'a BTreeMap<K, V>,
    unconfirmed: &'a BTreeSet<K>,
) -> impl Iterator<Item = K> + 'a {
    let gone = differences(from, to)
        .filter(|(.., new)| new.is_none())
        .map(|(key, ..)| key);
    let rewritten = unconfirmed
        .iter()
        .filter(|key| !from.contains_key(key) && !to.contains_key(key))
        .copied();
    gone.chain(rewritten)
}

/// The keys whose values differ, in order, with both values.
fn differences<'a, K: Ord + Copy, V: PartialEq + Copy>(
    from: &'a BTreeMap<K, V>,
    to: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (K, Option<V>, Option<V>)> + 'a {
    let (mut from, mut to) = (from.iter().peekable(), to.iter().peekable());
    std::iter::from_fn(move || {
        loop {
            let order = match (from.peek(), to.peek()) {
                (None, None) => return None,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some((old, _)), Some((new, _))) => old.cmp(new),
            };
            let old = if order.is_le() { from.next() } else { None };
            let new = if order.is_ge() { to.next() } else { None };
            let values = (old.map(|(_, value)| *value), new.map(|(_, value)| *value));
            if values.0 != values.1 {
                let (key, _) = old.or(new)?;
                return Some((*key, values.0, values.1));
            }
        }
    })
}
