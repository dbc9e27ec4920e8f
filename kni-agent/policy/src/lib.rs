//! Compiles policies into rows of the dataplane's tables, and plans the steps from the current rows to the desired
//! rows.
//! Layer: engine.

mod blocks;
mod body;
mod catalog;
mod changes;
mod desired;
mod effective;
mod egress_rights;
mod evaluate;
mod external;
mod identity;
mod network;
mod peer;
mod pods;
mod ports;
mod prefix;
mod quota;
mod row;
mod selector;
mod set;
mod stable;
mod tables;
#[cfg(test)]
mod tests;
mod transition;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use kni_model::{
    EndpointId, Enforcement, PolicyStep, PolicyTables, SandboxId,
    policy::{Labels, Policy, PolicyDirection, PolicyPod, PolicyRef, RuleRef},
};

use self::{
    catalog::Catalog,
    changes::Changes,
    desired::Compiler,
    pods::{Pods, Sets},
    quota::Limiter,
    tables::{Desired, Differing},
    transition::Unconfirmed,
};
pub use self::{
    effective::EffectiveRule,
    egress_rights::{EgressFacts, EgressPools, EgressRight, egress_rights},
    evaluate::evaluate,
    quota::{Overrun, PolicyTable, Quota},
    selector::matches,
};

/// Turns policies, namespaces and pods into the policy tables.
///
/// A pure function of its latest inputs: the numbers of sets, identities, port sets and rules derive from their
/// content, so a restarted agent with the same inputs computes the same tables. The content of a number never changes;
/// changed content gets another number.
#[derive(Debug, Default)]
pub struct PolicyEngine {
    catalog: Catalog,
    sets: Sets,
    pods: Pods,
    compiler: Compiler,
    limiter: Limiter,
    /// The current tables.
    tables: PolicyTables,
    /// The desired tables as of the last plan.
    desired: Desired,
    unconfirmed: Unconfirmed,
    /// The state that the last plan leads to, if the tables have no room for a direct way to the desired one.
    interim: Option<PolicyTables>,
    /// Whether the last plan led to such a state.
    has_postponed: bool,
    /// Whether policies changed since the last plan. Changes of pods are those of `pods`.
    is_stale: bool,
}

impl PolicyEngine {
    /// An engine without policies and pods. `adopted` holds the rows found in the dataplane's maps, possibly from an
    /// earlier agent.
    pub fn new(adopted: PolicyTables) -> Self {
        Self {
            tables: adopted,
            is_stale: true,
            ..Self::default()
        }
    }

    /// Limits the rows of a namespace. Without a quota, tables have no limits.
    #[must_use]
    pub fn with_quota(mut self, quota: Quota) -> Self {
        self.limiter = Limiter::new(quota);
        self
    }

    /// Replaces all policies.
    pub fn set_policies<P: Into<Arc<Policy>>>(&mut self, policies: Vec<P>) {
        let replaced = self.catalog.replace(policies.into_iter().map(Into::into).collect());
        if !replaced.is_empty() {
            self.pods.refresh(&replaced, &self.catalog, &mut self.sets);
            self.is_stale = true;
        }
    }

    /// Replaces the labels of all namespaces. A namespace that is not listed only has the label
    /// `kubernetes.io/metadata.name`, which every namespace has.
    pub fn set_namespaces(&mut self, namespaces: BTreeMap<String, Labels>) {
        self.pods.set_namespaces(namespaces, &self.catalog);
    }

    /// Adds a pod, or replaces the one with the same sandbox.
    pub fn put_pod(&mut self, pod: PolicyPod) {
        if self
            .pods
            .by_sandbox
            .get(&pod.sandbox)
            .is_some_and(|known| known.object == pod)
        {
            return;
        }
        let recreated = self.pods.put(pod, &self.catalog, &mut self.sets);
        self.remove_rows(&recreated);
    }

    /// Removes a pod. Its endpoints are removed at once, because their rows no longer belong to it.
    pub fn remove_pod(&mut self, sandbox: &SandboxId) {
        let gone = self.pods.remove(sandbox);
        self.remove_rows(&gone);
    }

    fn remove_rows(&mut self, endpoints: &[EndpointId]) {
        for endpoint in endpoints {
            self.tables.endpoints.remove(endpoint);
            self.desired.tables.endpoints.remove(endpoint);
        }
    }

    /// The steps from the current tables to the desired tables; empty when they are equal. No step counts as done
    /// before [`Self::confirm`]: a plan that is not confirmed may have been carried out in part, and the next plan
    /// rewrites every row that it may have changed.
    ///
    /// After each step, every packet is evaluated as before the first step or as after the last one, for each direction
    /// separately. Where [`Self::has_postponed`], it may be denied instead. The plan removes endpoints of adopted
    /// tables whose pods were not put: put all pods before the first plan.
    pub fn plan(&mut self) -> Vec<PolicyStep> {
        let mut changes = self.pods.take_changes();
        changes.all |= std::mem::take(&mut self.is_stale);
        if !changes.is_empty() {
            self.compile(changes);
        }
        let plan_to = |to: &PolicyTables, differing: &Differing| {
            transition::plan(&self.tables, to, differing, &self.desired.networks, &self.unconfirmed)
        };
        let mut plan = plan_to(&self.desired.tables, &self.desired.differing);
        self.interim = None;
        if self.limiter.overflows(&self.tables, &plan.steps)
            && let Some(interim) = transition::toward(&self.tables, &self.desired.tables)
        {
            plan = plan_to(&interim, &Differing::all());
            self.interim = Some(interim);
        } else if plan.steps.is_empty() {
            self.desired.differing = Differing::default();
        }
        self.has_postponed = self.interim.is_some();
        for (substitute, set) in plan.substitutes {
            if let Some(content) = self.sets.contents.get(set).cloned() {
                self.sets.contents.also(substitute, content);
            }
        }
        self.unconfirmed.add(&plan.steps);
        plan.steps
    }

    /// Compiles until the tables have room for all rows and no namespace has more than its share.
    fn compile(&mut self, mut changes: Changes) {
        self.limiter.begin(&self.pods, changes.all || changes.local);
        loop {
            let limiter = &self.limiter;
            let is_closed = |namespace: &str| limiter.is_closed(namespace);
            self.compiler
                .compile(&self.pods, &changes, is_closed, &mut self.desired);
            if self.limiter.check(&self.compiler, &self.desired.tables) {
                return;
            }
            // Another namespace is closed: its endpoints have other sets.
            changes = Changes::of_local();
        }
    }

    /// The namespaces whose policies exceed their quota, by name. Their pods are denied what these policies would
    /// allow.
    pub fn overruns(&self) -> impl Iterator<Item = &Overrun> {
        self.limiter.overruns()
    }

    /// The endpoints that policies of such namespaces select, with their namespaces.
    pub fn closed_endpoints(&self) -> impl Iterator<Item = (EndpointId, &str)> {
        let selected = self.desired.tables.endpoints.iter().filter(|(_, row)| row.policy != 0);
        let named = selected.filter_map(|(endpoint, _)| Some((*endpoint, self.pods.namespace_of(*endpoint)?)));
        named.filter(|(_, namespace)| self.limiter.is_closed(namespace))
    }

    /// Whether the last plan only made room: the tables cannot hold the new rows beside the old ones. The next plan
    /// continues. Until then the endpoints whose rows change are denied everything.
    pub fn has_postponed(&self) -> bool {
        self.has_postponed
    }

    /// Marks the last plan as carried out.
    pub fn confirm(&mut self) {
        self.unconfirmed = Unconfirmed::default();
        if let Some(interim) = self.interim.take() {
            self.tables = interim;
            self.desired.differing = Differing::all();
            return;
        }
        self.desired.confirm(&mut self.tables);
        let endpoints = self.tables.endpoints.values();
        let used: BTreeSet<u32> = endpoints.map(|endpoint| endpoint.policy).collect();
        self.sets.retain(|number| used.contains(&number));
        self.compiler.retain(&self.tables);
    }

    /// The current tables: as of the last [`Self::confirm`].
    pub fn tables(&self) -> &PolicyTables {
        &self.tables
    }

    /// The desired enforcement of an endpoint as of the last plan; `None` for an unknown endpoint.
    pub fn enforcement(&self, endpoint: EndpointId) -> Option<Enforcement> {
        self.desired.tables.endpoints.get(&endpoint).copied()
    }

    /// The rule that a trail refers to, also for a set that was removed recently. `None` when no rule decided. An index
    /// one past the last rule of an `EgressPolicy` is its default decision.
    pub fn rule(&self, set: u32, direction: PolicyDirection, rule: u32, ordinal: u32) -> Option<RuleRef> {
        if set == 0 || rule == 0 {
            return None;
        }
        let list = self.compiler.references.rules.get(rule)?;
        let named = list.get(usize::try_from(ordinal).ok()?)?;
        (named.direction == direction).then(|| (**named).clone())
    }

    /// The policies of a set that deny by default in a direction, by name.
    pub fn isolating(&self, set: u32, direction: PolicyDirection) -> Vec<PolicyRef> {
        let content = self.sets.contents.get(set);
        content.map(|content| content.isolating(direction)).unwrap_or_default()
    }

    /// Every rule enforced at an endpoint, and its default denies. Empty where no policy selects it.
    pub fn effective(&self, endpoint: EndpointId) -> Vec<EffectiveRule> {
        let closed = self
            .pods
            .namespace_of(endpoint)
            .is_some_and(|name| self.limiter.is_closed(name));
        let selected = self
            .pods
            .selected(endpoint)
            .and_then(|selected| selected.enforced(closed));
        let rules = selected.map(|set| effective::of_set(set, &self.desired.tables, &self.compiler.references));
        rules.unwrap_or_default()
    }

    /// The source addresses that egress policies request for an endpoint: per family the address of the first policy,
    /// by name, that has one, and that policy.
    pub fn egress_addresses(&self, endpoint: EndpointId) -> Vec<(IpAddr, PolicyRef)> {
        let selected = self.pods.selected(endpoint);
        selected
            .map(|selected| selected.egress_addresses.clone())
            .unwrap_or_default()
    }

    /// The endpoints of this node that a policy applies to, by number.
    pub fn members(&self, policy: &PolicyRef) -> Vec<EndpointId> {
        let Some(listed) = self.catalog.get(policy) else {
            return Vec::new();
        };
        let about = self
            .pods
            .local()
            .filter(|(_, pod, interface, _)| listed.selects(&pod.object) && listed.is_about(interface));
        let mut members: Vec<EndpointId> = about.map(|(endpoint, ..)| endpoint).collect();
        members.sort_unstable();
        members
    }

    /// Every policy, by name.
    pub fn policies(&self) -> impl Iterator<Item = &Policy> {
        self.catalog.iter()
    }
}
