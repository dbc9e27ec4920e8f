//! Which packets the policies allow, as rows of the dataplane's tables, and the steps to get there.
//! Layer: engine.

mod beyond;
mod blocks;
mod body;
mod catalog;
mod effective;
mod identity;
mod judge;
mod peer;
mod pods;
mod ports;
mod prefix;
mod row;
mod selector;
mod set;
mod stable;
#[cfg(test)]
mod tests;
mod transition;
mod wanted;

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kni_model::{
    EndpointId, Enforcement, PolicyStep, PolicyTables, SandboxId,
    policy::{Labels, Policy, PolicyDirection, PolicyPod, PolicyRef, RuleRef},
};

use self::{
    catalog::Catalog,
    pods::{Pods, Sets},
    transition::Doubt,
    wanted::{Compiler, Wanted},
};
pub use self::{effective::EffectiveRule, judge::judge, selector::matches};

/// Turns policies, namespaces and pods into the policy tables.
///
/// A pure function of what it was told last: numbers of sets, identities, port sets and rules come from their content, so
/// that an agent that starts again with the same input wants the very same tables. The content behind a number never
/// changes; what changes gets another number.
#[derive(Debug, Default)]
pub struct PolicyEngine {
    catalog: Catalog,
    sets: Sets,
    pods: Pods,
    compiler: Compiler,
    /// As they are.
    tables: PolicyTables,
    /// As they are to be, as of the last plan.
    wanted: Wanted,
    doubt: Doubt,
    /// Whether anything was told since the last plan.
    is_stale: bool,
}

impl PolicyEngine {
    /// Without policies and pods. `adopted` is what lies in the dataplane's maps, possibly from an earlier agent.
    pub fn new(adopted: PolicyTables) -> Self {
        Self {
            tables: adopted,
            is_stale: true,
            ..Self::default()
        }
    }

    /// Replaces all policies.
    pub fn set_policies<P: Into<Arc<Policy>>>(&mut self, policies: Vec<P>) {
        let replaced = self.catalog.replace(policies.into_iter().map(Into::into).collect());
        if !replaced.is_empty() {
            self.pods.refresh(&replaced, &self.catalog, &mut self.sets);
            self.is_stale = true;
        }
    }

    /// Replaces the labels of all namespaces. One that is not listed has just `kubernetes.io/metadata.name`, which all
    /// have.
    pub fn set_namespaces(&mut self, namespaces: BTreeMap<String, Labels>) {
        if self.pods.set_namespaces(namespaces) {
            self.pods.refresh_peers(&self.catalog);
            self.is_stale = true;
        }
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
        let reborn = self.pods.put(pod, &self.catalog, &mut self.sets);
        self.forget(&reborn);
        self.is_stale = true;
    }

    /// Forgets a pod. Its endpoints are forgotten at once, as their rows are no longer theirs.
    pub fn remove_pod(&mut self, sandbox: &SandboxId) {
        let gone = self.pods.remove(sandbox);
        self.forget(&gone);
        self.is_stale = true;
    }

    fn forget(&mut self, endpoints: &[EndpointId]) {
        for endpoint in endpoints {
            self.tables.endpoints.remove(endpoint);
            self.wanted.tables.endpoints.remove(endpoint);
        }
    }

    /// The steps from the tables as they are to the tables as wanted; none when they are the same. Nothing counts as done
    /// before [`Self::confirm`]; a plan that is not confirmed may have been carried out in part, and the next one puts
    /// right whatever it touched.
    ///
    /// After each step every packet is judged as before the first or as after the last one, in each direction by itself.
    /// Endpoints of adopted tables whose pods have not been put are gone by then: put all pods before the first plan.
    pub fn plan(&mut self) -> Vec<PolicyStep> {
        if self.is_stale {
            self.compiler.compile(&self.pods, &mut self.wanted);
            self.is_stale = false;
        }
        let plan = transition::plan(&self.tables, &self.wanted.tables, &self.wanted.networks, &self.doubt);
        for (stand_in, set) in plan.stand_ins {
            if let Some(content) = self.sets.contents.get(set).cloned() {
                self.sets.contents.also(stand_in, content);
            }
        }
        self.doubt.add(&plan.steps);
        plan.steps
    }

    /// The last plan was carried out.
    pub fn confirm(&mut self) {
        self.tables.clone_from(&self.wanted.tables);
        self.doubt = Doubt::default();
        let tables = &self.tables;
        self.sets
            .retain(|number| tables.endpoints.values().any(|endpoint| endpoint.policy == number));
        self.compiler.retain(tables);
    }

    /// The tables as they are: after the last [`Self::confirm`].
    pub fn tables(&self) -> &PolicyTables {
        &self.tables
    }

    /// What is wanted at an endpoint, as of the last plan; `None` for an unknown endpoint.
    pub fn enforcement(&self, endpoint: EndpointId) -> Option<Enforcement> {
        self.wanted.tables.endpoints.get(&endpoint).copied()
    }

    /// The rule that a trail is about, also of a set that was in force until lately. `None` when no rule decided. An index
    /// one past the last rule of an `EgressPolicy` is what it decides when no rule of it matches.
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

    /// Every rule in force at an endpoint, and what is denied by default. Empty where no policy selects it.
    pub fn effective(&self, endpoint: EndpointId) -> Vec<EffectiveRule> {
        let selected = self.pods.selected(endpoint).and_then(|selected| selected.set.as_ref());
        let rules = selected.map(|set| effective::of_set(set, &self.wanted.tables, &self.compiler.references));
        rules.unwrap_or_default()
    }

    /// The source addresses that egress policies ask for at an endpoint: per family that of the first policy, by name,
    /// which has one.
    pub fn egress_addresses(&self, endpoint: EndpointId) -> Vec<IpAddr> {
        let selected = self.pods.selected(endpoint);
        selected
            .map(|selected| selected.egress_addresses.clone())
            .unwrap_or_default()
    }

    /// The endpoints of this node that a policy is about, by number.
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
