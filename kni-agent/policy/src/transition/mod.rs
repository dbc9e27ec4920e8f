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

use kni_common::policy::{IdentityKey, PolicyKey, PolicyValue, PortKey, PortValue};
use kni_model::{EndpointId, PolicyStep, PolicyTables};

pub(super) use self::interim::toward;
use self::{carriers::Carriers, substitutes::Substitutes};
use crate::tables::Differing;

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

/// A key with its values in both states.
type Difference<K, V> = (K, Option<V>, Option<V>);

/// The rows that differ between two states, without endpoints, in order.
struct Differences {
    policy: Vec<Difference<PolicyKey, PolicyValue>>,
    ports: Vec<Difference<PortKey, PortValue>>,
    identities: Vec<Difference<IdentityKey, u32>>,
}

impl Differences {
    fn new(from: &PolicyTables, to: &PolicyTables, differing: &Differing) -> Self {
        if differing.all {
            return Self {
                policy: differences(&from.policy, &to.policy).collect(),
                ports: differences(&from.ports, &to.ports).collect(),
                identities: differences(&from.identities, &to.identities).collect(),
            };
        }
        Self {
            policy: at(&differing.policy, &from.policy, &to.policy),
            ports: at(&differing.ports, &from.ports, &to.ports),
            identities: at(&differing.identities, &from.identities, &to.identities),
        }
    }
}

/// Plans the steps from one state to the other, which may differ in the rows `differing`; `networks` holds the network
/// of each endpoint of `to`.
pub(super) fn plan(
    from: &PolicyTables,
    to: &PolicyTables,
    differing: &Differing,
    networks: &BTreeMap<EndpointId, u32>,
    unconfirmed: &Unconfirmed,
) -> Plan {
    let differences = Differences::new(from, to, differing);
    let carriers = Carriers::new(from, to, &differences.identities, networks, unconfirmed);
    let substitutes = Substitutes::new(from, to, networks, &carriers);
    let mut steps = Vec::new();
    push(
        &mut steps,
        PolicyStep::PutPorts,
        missing(&differences.ports, (&from.ports, &to.ports), &unconfirmed.ports),
    );
    let mut rows: BTreeMap<PolicyKey, PolicyValue> = substitutes.rows.clone();
    rows.extend(missing(
        &differences.policy,
        (&from.policy, &to.policy),
        &unconfirmed.policy,
    ));
    push(&mut steps, PolicyStep::PutPolicy, rows.into_iter().collect());
    steps.extend(enforce::steps(&carriers, &substitutes));

    let identities = (&from.identities, &to.identities);
    let gone_identities = gone(&differences.identities, identities, &unconfirmed.identities);
    push(&mut steps, PolicyStep::RemoveIdentities, gone_identities.collect());
    let temporary = substitutes.rows.keys().filter(|key| !to.policy.contains_key(key));
    let gone_policy: BTreeSet<PolicyKey> = gone(&differences.policy, (&from.policy, &to.policy), &unconfirmed.policy)
        .chain(temporary.copied())
        .collect();
    push(&mut steps, PolicyStep::RemovePolicy, gone_policy.into_iter().collect());
    let gone_ports = gone(&differences.ports, (&from.ports, &to.ports), &unconfirmed.ports);
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
    differences: &[Difference<K, V>],
    (from, to): (&BTreeMap<K, V>, &BTreeMap<K, V>),
    unconfirmed: &BTreeSet<K>,
) -> Vec<(K, V)> {
    let rows = differences.iter().filter_map(|(key, _, value)| Some((*key, (*value)?)));
    let rewritten = unconfirmed.iter().filter_map(|key| {
        let value = to.get(key)?;
        (from.get(key) == Some(value)).then_some((*key, *value))
    });
    rows.chain(rewritten).collect()
}

fn gone<'a, K: Ord + Copy, V: PartialEq + Copy>(
    differences: &'a [Difference<K, V>],
    (from, to): (&'a BTreeMap<K, V>, &'a BTreeMap<K, V>),
    unconfirmed: &'a BTreeSet<K>,
) -> impl Iterator<Item = K> + 'a {
    let gone = differences
        .iter()
        .filter(|(.., new)| new.is_none())
        .map(|(key, ..)| *key);
    let rewritten = unconfirmed
        .iter()
        .filter(|key| !from.contains_key(key) && !to.contains_key(key))
        .copied();
    gone.chain(rewritten)
}

/// Those of the keys whose values differ, in order, with both values.
fn at<K: Ord + Copy, V: PartialEq + Copy>(
    keys: &BTreeSet<K>,
    from: &BTreeMap<K, V>,
    to: &BTreeMap<K, V>,
) -> Vec<Difference<K, V>> {
    let values = keys
        .iter()
        .map(|key| (*key, from.get(key).copied(), to.get(key).copied()));
    values.filter(|(_, old, new)| old != new).collect()
}

/// The keys whose values differ, in order, with both values.
fn differences<'a, K: Ord + Copy, V: PartialEq + Copy>(
    from: &'a BTreeMap<K, V>,
    to: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = Difference<K, V>> + 'a {
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
