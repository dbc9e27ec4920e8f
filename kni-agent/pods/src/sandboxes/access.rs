//! Asks the networks of a request whether the pod may join them, before anything is made.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
};

use kni_cluster::{ClusterCache, Networks, block_with};
use kni_model::{
    AccessRefusal, AttachRequest, CniAttachment, Home, IfName, NetworkName, NetworkSpec, PodRef, Sandbox, SandboxId,
    error_chain,
    home::HOME_LABEL,
    joining::{Joiner, Wish, primary_of, unknown_namespace},
    policy::Labels,
    selection::PRIMARY_IFNAME,
};

use super::Sandboxes;
use crate::{
    error::{AttachError, ErrorKind, Holder, Subject},
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
pub(super) struct Facts {
    namespace: String,
    labels: Labels,
    account: String,
    /// The networks that ask for the verb `join` and whose verb the account has.
    joinable: Vec<NetworkName>,
    /// The home of the namespace in the cluster, and the networks by which it was decided.
    home: Option<(Home, Arc<Networks>)>,
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

    /// The network in which pods of the namespace have their primary interface by default.
    fn primary<'a>(&'a self, state: &'a State) -> Option<&'a NetworkSpec> {
        let Some((home, networks)) = &self.home else {
            return primary_of(by_age(state), &self.labels);
        };
        let name = match home {
            Home::Network(name) => name,
            Home::Default => networks.default_network()?,
            Home::Unknown(_) => return None,
        };
        // One that only an earlier agent has understood is known by its record.
        let recorded = || state.networks.get(name).map(|known| &known.network.spec);
        networks.spec(name).or_else(recorded)
    }

    /// Refuses a primary interface in `network` while the network of the namespace is not known, and for a pod that has
    /// named none if it is another one by now: the caches may have changed since the request was completed.
    fn check_home(&self, network: &NetworkSpec, by_namespace: bool, orphans: &[&NetworkSpec]) -> Result<(), String> {
        let Some((home, _)) = &self.home else { return Ok(()) };
        let namespace = &self.namespace;
        let selects = |spec: &&&NetworkSpec| {
            let selector = spec.access.primary_of.as_ref();
            selector.is_some_and(|selector| selector.matches(&self.labels))
        };
        let orphan = orphans
            .iter()
            .find(selects)
            .filter(|_| !self.labels.contains_key(HOME_LABEL));
        let is_home = match (home, orphan) {
            (Home::Unknown(reason), _) => return Err(reason.clone()),
            (Home::Default, Some(orphan)) => {
                return Err(format!(
                    "the network of namespace {namespace} is not known: network {} selects it, but its object is gone \
                     while pods of this node are in it",
                    orphan.name
                ));
            }
            (Home::Default, None) => network.default,
            (Home::Network(name), _) => *name == network.name,
        };
        if is_home || !by_namespace {
            return Ok(());
        }
        Err(format!(
            "the network of namespace {namespace} is no longer {}",
            network.name
        ))
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

    /// The block of another node with an address, as far as this one knows. Reads the caches: the state must not be
    /// locked.
    pub(super) fn holder(&self, network: &NetworkName, address: IpAddr) -> Option<Holder> {
        let tables = self.cluster.as_ref()?.tables();
        let (block, node) = block_with(&tables, network, address)?;
        Some(Holder {
            block: block.to_owned(),
            node: node.to_owned(),
        })
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
                home: None,
            });
        };
        let tables = cluster.tables();
        let labels = tables.namespace_labels(&namespace)?;
        let found = tables.pod_of(cluster.node(), pod);
        let account = found.map(|found| found.service_account.clone()).unwrap_or_default();
        let joinable = if account.is_empty() {
            Vec::new()
        } else {
            tables.joinable(&namespace, &account)
        };
        let networks = cluster.networks(&tables);
        let home = networks.home(&namespace, &labels);
        Some(Facts {
            namespace,
            labels,
            account,
            joinable,
            home: Some((home, networks)),
        })
    }
}

impl Sandboxes {
    /// Refuses the request unless each of its networks lets the pod in, with what it chooses. Pods that are attached
    /// are not asked again: a repeated call gets its answer before.
    ///
    /// `facts` are read before the state is locked.
    pub(super) fn authorize(
        &self,
        state: &State,
        facts: &Facts,
        request: &AttachRequest,
        planned: &[PlannedInterface],
    ) -> Result<(), AttachError> {
        let asked = ask_networks(state, facts, request, planned);
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

    /// The facts about the pod of a request.
    pub(super) fn joining_facts(&self, request: &AttachRequest) -> Result<Facts, AttachError> {
        self.access.facts(&request.pod).ok_or_else(|| {
            let reason = format!("namespace {} is not known yet", request.pod.namespace);
            Subject::from(request).not_ready(reason)
        })
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

fn ask_networks(
    state: &State,
    facts: &Facts,
    request: &AttachRequest,
    planned: &[PlannedInterface],
) -> Result<(), AttachError> {
    let subject = Subject::from(request);
    let home = facts.primary(state);
    let is_child = request.parent.is_some() || request.cni.as_ref().is_some_and(CniAttachment::is_additional);
    let orphaned = state.networks.values().filter(|known| known.orphaned);
    let orphans: Vec<&NetworkSpec> = orphaned.map(|known| &known.network.spec).collect();
    for (position, plan) in planned.iter().enumerate() {
        let wish = Wish {
            primary: position == 0 && !request.primary.none && !is_child,
            ips: &plan.ips,
            mac: plan.mac.is_some(),
            default_route: plan.default_route,
        };
        let spec = &plan.network.spec;
        if wish.primary {
            let checked = facts.check_home(spec, request.primary.by_namespace, &orphans);
            checked.map_err(|reason| subject.not_ready(reason))?;
        }
        let asked = spec.authorize(facts.joiner(&spec.name), wish, home);
        asked.map_err(|refusal| subject.error(ErrorKind::NotAuthorized(Box::new(refusal))))?;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use kni_model::policy::Selector;

    use super::*;
    use crate::plan::tests::known;

    fn facts(home: Home, labels: &[(&str, &str)]) -> Facts {
        Facts {
            namespace: "shop".to_owned(),
            labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            account: String::new(),
            joinable: Vec::new(),
            home: Some((home, Arc::default())),
        }
    }

    fn spec(name: &str) -> NetworkSpec {
        known(name, 1, name == "default", true).1.network.spec
    }

    #[test]
    fn no_primary_interface_is_made_while_the_network_of_the_namespace_is_not_known() {
        let unknown = facts(Home::Unknown("network blue is not valid".to_owned()), &[]);
        for by_namespace in [true, false] {
            let refused = unknown.check_home(&spec("default"), by_namespace, &[]);
            assert_eq!(refused.unwrap_err(), "network blue is not valid");
        }
    }

    #[test]
    fn a_pod_that_names_no_network_is_in_the_one_that_its_namespace_has_now() {
        let blue = facts(Home::Network("blue".parse().unwrap()), &[]);
        assert!(blue.check_home(&spec("blue"), true, &[]).is_ok());
        let late = blue.check_home(&spec("default"), true, &[]).unwrap_err();
        assert_eq!(late, "the network of namespace shop is no longer default");
        assert!(
            blue.check_home(&spec("default"), false, &[]).is_ok(),
            "the pod names it"
        );
        let default = facts(Home::Default, &[]);
        assert!(default.check_home(&spec("default"), true, &[]).is_ok());
        assert!(default.check_home(&spec("blue"), true, &[]).is_err());
    }

    #[test]
    fn a_network_whose_object_is_gone_has_its_namespaces_while_pods_are_in_it() {
        let mut orphan = spec("blue");
        orphan.access.primary_of = Some(Selector::default());
        let plain = facts(Home::Default, &[]);
        let refused = plain.check_home(&spec("default"), true, &[&orphan]).unwrap_err();
        assert!(
            refused.contains("namespace shop") && refused.contains("network blue selects it"),
            "{refused}"
        );
        let stated = facts(Home::Default, &[(HOME_LABEL, "default")]);
        assert!(stated.check_home(&spec("default"), true, &[&orphan]).is_ok());
        orphan.access.primary_of = None;
        assert!(plain.check_home(&spec("default"), true, &[&orphan]).is_ok());
    }
}
