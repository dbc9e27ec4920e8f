//! Asks the networks of a request whether the pod may join them, before anything is made.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use kni_cluster::ClusterCache;
use kni_model::{
    AccessRefusal, AttachRequest, CniAttachment, IfName, NetworkName, NetworkSpec, PodRef, Sandbox, SandboxId,
    error_chain,
    joining::{Joiner, Wish, primary_of, unknown_namespace},
    policy::Labels,
    selection::PRIMARY_IFNAME,
};

use super::Sandboxes;
use crate::{
    error::{AttachError, ErrorKind, Subject},
    plan::PlannedInterface,
    registry::State,
};

/// Maximum number of pods whose refusals are kept for explanations.
const MOST_REFUSALS: usize = 256;

/// The last refusals, by namespace and name of the pod.
pub(super) type Refusals = Mutex<BTreeMap<(String, String), String>>;

/// The facts about pods and namespaces on which the right to join depends: of the cluster's cache, or of manifests.
#[derive(Debug)]
pub(crate) struct Namespaces {
    cluster: Option<ClusterCache>,
    manifests: Mutex<Arc<BTreeMap<String, Labels>>>,
}

/// A pod's part of the rule.
#[derive(Debug)]
struct Facts {
    namespace: String,
    labels: Labels,
    account: String,
    /// The networks that ask for the verb `join` and whose verb the account has.
    joinable: Vec<NetworkName>,
}

impl Facts {
    fn joiner(&self, network: &NetworkName) -> Joiner<'_> {
        Joiner {
            namespace: &self.namespace,
            labels: &self.labels,
            account: &self.account,
            has_verb: self.joinable.contains(network),
        }
    }
}

impl Namespaces {
    pub(crate) fn new(cluster: Option<ClusterCache>) -> Self {
        Self {
            cluster,
            manifests: Mutex::default(),
        }
    }

    /// Replaces the namespaces of the manifests.
    pub(crate) fn set(&self, namespaces: BTreeMap<String, Labels>) {
        *self.manifests.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(namespaces);
    }

    /// `None`: the namespace is not in the cluster's cache. Without a cluster, a namespace without a manifest has the
    /// label of its name only, and no pod has a service account.
    fn facts(&self, pod: &PodRef) -> Option<Facts> {
        let namespace = pod.namespace.clone();
        let Some(cluster) = &self.cluster else {
            let known = Arc::clone(&self.manifests.lock().unwrap_or_else(PoisonError::into_inner));
            let labels = known.get(&namespace).cloned();
            return Some(Facts {
                labels: labels.unwrap_or_else(|| unknown_namespace(&namespace)),
                namespace,
                account: String::new(),
                joinable: Vec::new(),
            });
        };
        let tables = cluster.tables();
        let labels = tables.namespace_labels(&namespace)?;
        let found = tables.pods.get(&namespace, &pod.name);
        let found = found.filter(|found| pod.uid.is_empty() || pod.uid == found.uid);
        let account = found.map(|found| found.service_account.clone()).unwrap_or_default();
        let joinable = if account.is_empty() {
            Vec::new()
        } else {
            tables.joinable(&namespace, &account)
        };
        Some(Facts {
            namespace,
            labels,
            account,
            joinable,
        })
    }
}

impl Sandboxes {
    /// Refuses the request unless each of its networks lets the pod in, with what it chooses. Pods that are attached
    /// are not asked again: a repeated call gets its answer before.
    pub(super) fn authorize(&self, request: &AttachRequest, planned: &[PlannedInterface]) -> Result<(), AttachError> {
        let asked = self.ask_networks(request, planned);
        let pod = (request.pod.namespace.clone(), request.pod.name.clone());
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.remove(&pod);
        if let Err(error) = &asked
            && let ErrorKind::NotAuthorized(refusal) = error.kind()
        {
            if refusals.len() >= MOST_REFUSALS {
                refusals.pop_first();
            }
            refusals.insert(pod, refusal.to_string());
        }
        asked
    }

    /// Why a network refused the last attach of a pod.
    pub(crate) fn refusal_of(&self, namespace: &str, name: &str) -> Option<String> {
        let refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    fn ask_networks(&self, request: &AttachRequest, planned: &[PlannedInterface]) -> Result<(), AttachError> {
        let subject = Subject::from(request);
        let Some(facts) = self.access.facts(&request.pod) else {
            let reason = format!("namespace {} is not known yet", request.pod.namespace);
            return Err(subject.not_ready(reason));
        };
        let state = self.registry.lock();
        let home = primary_of(by_age(&state), &facts.labels);
        let is_child = request.parent.is_some() || request.cni.as_ref().is_some_and(CniAttachment::is_additional);
        for (position, plan) in planned.iter().enumerate() {
            let wish = Wish {
                primary: position == 0 && !request.primary.none && !is_child,
                ips: &plan.ips,
                mac: plan.mac.is_some(),
                default_route: plan.default_route,
            };
            let spec = &plan.network.spec;
            let asked = spec.authorize(facts.joiner(&spec.name), wish, home);
            asked.map_err(|refusal| subject.error(ErrorKind::NotAuthorized(Box::new(refusal))))?;
        }
        Ok(())
    }

    /// The rights of running pods, by interface: `None` where the pod has it, else what it has lost. Pods of namespaces
    /// that are not known, and networks whose definition is gone, are left out.
    pub(crate) fn rights(&self) -> BTreeMap<(SandboxId, IfName), Option<LostRight>> {
        let ready: Vec<Arc<Sandbox>> = self.registry.lock().ready().map(Arc::clone).collect();
        let facts: Vec<Option<Facts>> = ready.iter().map(|sandbox| self.access.facts(&sandbox.pod)).collect();
        let state = self.registry.lock();
        let networks = by_age(&state);
        let mut rights = BTreeMap::new();
        for (sandbox, facts) in ready.iter().zip(&facts) {
            let Some(facts) = facts else { continue };
            let home = primary_of(networks.iter().copied(), &facts.labels);
            for attachment in &sandbox.attachments {
                let known = networks.iter().find(|spec| spec.name == attachment.network);
                let Some(spec) = known else { continue };
                let is_primary = sandbox.is_primary() && attachment.ifname.as_str() == PRIMARY_IFNAME;
                let stays = spec.stays(facts.joiner(&spec.name), is_primary, home);
                let lost = stays.err().map(|refusal| LostRight {
                    refusal,
                    revoke: spec.access.revoke,
                    can_suspend: attachment.kind.has_row(),
                });
                rights.insert((sandbox.id.clone(), attachment.ifname.clone()), lost);
            }
        }
        rights
    }

    /// Stops the traffic of interfaces (true), or lets it flow again (false), and leaves all others as they are.
    /// Returns how many have changed, and a problem for each that could not be changed.
    pub(crate) fn suspend(&self, interfaces: &BTreeMap<(SandboxId, IfName), bool>) -> (usize, Vec<String>) {
        // While it is held no other sandbox gets the number of an endpoint.
        let state = self.registry.lock();
        let (mut changed, mut problems) = (0, Vec::new());
        for (sandbox, attachment) in state.attachments().filter(|(_, made)| made.kind.has_row()) {
            let key = (sandbox.id.clone(), attachment.ifname.clone());
            let Some(suspended) = interfaces.get(&key) else {
                continue;
            };
            match self.kernel.dataplane.suspend(attachment.endpoint, *suspended) {
                Ok(is_new) => changed += usize::from(is_new),
                Err(error) => {
                    let (ifname, pod) = (&attachment.ifname, &sandbox.pod);
                    problems.push(format!("interface {ifname} of pod {pod}: {}", error_chain(&error)));
                }
            }
        }
        (changed, problems)
    }
}

/// A right that a running pod has no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostRight {
    /// Why it would be refused.
    pub refusal: AccessRefusal,
    /// Whether its network takes it back.
    pub revoke: bool,
    /// Whether its traffic can be stopped while it stays attached: it passes the agent's programs.
    pub can_suspend: bool,
}

/// The networks that take pods, the oldest first.
fn by_age(state: &State) -> Vec<&NetworkSpec> {
    let mut networks: Vec<_> = state.networks.values().filter(|known| !known.orphaned).collect();
    networks.sort_by_key(|known| known.rank);
    networks.into_iter().map(|known| &known.network.spec).collect()
}
