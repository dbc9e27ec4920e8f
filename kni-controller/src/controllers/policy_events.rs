//! Publishes events about policies that are refused or name networks that do not exist: their kinds have no status.
//!
//! The condition of an egress policy has its own event.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kni_cluster::{Key, Networks, PolicyRow, Table, Tables};
use kni_crd::POLICY_FOR;
use kni_model::policy::{NamedNetwork, PolicyKind, PolicyScope};
use tokio::time::Instant;

use super::{
    listed,
    reconcile::{Context, Reconciler},
};

/// How long networks may not exist: a policy and its networks are created one after the other.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum number of policies of one namespace and kind that have events at a time.
const MOST_REPORTED: usize = 32;

/// The controller.
#[derive(Debug, Default)]
pub(super) struct PolicyEvents {
    /// The problems that still exist and have an event.
    published: Published,
    /// Since when networks of a policy do not exist.
    since: BTreeMap<Key, Instant>,
}

type Published = Arc<Mutex<BTreeMap<Key, Problem>>>;

/// What is wrong with one policy. Two versions of an object with the same problem have one event.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Problem {
    uid: String,
    reason: &'static str,
    action: &'static str,
    note: String,
}

/// An event to publish.
#[derive(Debug)]
pub(super) struct Report {
    about: ObjectReference,
    problem: Problem,
    published: Published,
}

/// Policies of one kind.
struct Policies<'a> {
    kind: PolicyKind,
    api_version: &'static str,
    table: &'a Table<PolicyRow>,
}

impl<'a> Policies<'a> {
    fn of(tables: &'a Tables) -> [Self; 2] {
        [
            Self {
                kind: PolicyKind::NetworkPolicy,
                api_version: "networking.k8s.io/v1",
                table: &tables.network_policies,
            },
            Self {
                kind: PolicyKind::MultiNetworkPolicy,
                api_version: "k8s.cni.cncf.io/v1beta1",
                table: &tables.multi_policies,
            },
        ]
    }

    /// Policies of both kinds may have one name.
    fn key(&self, policy: &Key) -> Key {
        Key::new(&policy.namespace, &format!("{}/{}", self.kind.as_str(), policy.name))
    }

    fn reference(&self, key: &Key, row: &PolicyRow) -> ObjectReference {
        ObjectReference {
            api_version: Some(self.api_version.to_owned()),
            kind: Some(self.kind.as_str().to_owned()),
            namespace: Some(key.namespace.clone()),
            name: Some(key.name.clone()),
            uid: Some(row.uid.clone()),
            // An event of another version has another text, and is another object.
            resource_version: Some(row.version.to_string()),
            ..ObjectReference::default()
        }
    }
}

impl PolicyEvents {
    /// The problems of all policies, with the references to their objects.
    fn problems(&mut self, tables: &Tables, now: Instant) -> BTreeMap<Key, (ObjectReference, Problem)> {
        let mut problems = BTreeMap::new();
        let mut since = BTreeMap::new();
        for policies in Policies::of(tables) {
            let mut reported: BTreeMap<&str, usize> = BTreeMap::new();
            for (key, row) in policies.table.rows() {
                let id = policies.key(key);
                let problem = match row.refusal() {
                    Some(refusal) => Some(refused(row, refusal)),
                    None => missing_networks(tables, row).filter(|_| {
                        let first = self.since.get(&id).copied().unwrap_or(now);
                        since.insert(id.clone(), first);
                        now.saturating_duration_since(first) >= GRACE
                    }),
                };
                let Some(problem) = problem else { continue };
                let count = reported.entry(key.namespace.as_str()).or_default();
                *count += 1;
                if *count <= MOST_REPORTED {
                    problems.insert(id, (policies.reference(key, row), problem));
                }
            }
        }
        self.since = since;
        problems
    }
}

fn refused(row: &PolicyRow, refusal: &str) -> Problem {
    Problem {
        uid: row.uid.clone(),
        reason: "PolicyRefused",
        action: "Validate",
        note: format!(
            "{refusal}; nodes enforce the last valid version, and those that do not know it allow the selected pods nothing"
        ),
    }
}

/// Whether there is a network of a name, or a definition of another tool.
fn exists(tables: &Tables, named: &NamedNetwork) -> bool {
    let (networks, name) = (&tables.networks, named.name.as_str());
    let key = Key::new("", name);
    networks.rows().contains_key(&key)
        || networks.refused().contains_key(&key)
        || tables.definition_names.get(&named.namespace, name).is_some()
}

/// The networks that a policy names and that do not exist; none until all are known.
fn missing_networks(tables: &Tables, row: &PolicyRow) -> Option<Problem> {
    let known = tables.networks.is_synced() && tables.definition_names.is_synced();
    let PolicyScope::Named(named) = &row.policy.scope else {
        return None;
    };
    let missing = named.iter().filter(|named| !exists(tables, named));
    let missing: BTreeSet<&str> = missing.map(|named| named.name.as_str()).collect();
    let missing: Vec<&str> = missing.into_iter().collect();
    (known && !missing.is_empty()).then(|| Problem {
        uid: row.uid.clone(),
        reason: "NetworkNotFound",
        action: "SelectNetworks",
        note: format!(
            "metadata.annotations.{POLICY_FOR}: no PodNetwork and no NetworkAttachmentDefinition of the namespace is named {}, \
             so the policy isolates no interface there",
            listed(&missing)
        ),
    })
}

impl Reconciler for PolicyEvents {
    const NAME: &'static str = "policy-events";
    /// Who edits a policy all the time gets two events a minute.
    const REST: Duration = Duration::from_secs(30);
    const NEEDS_NETWORKS: bool = false;
    type Write = Report;

    fn share(report: &Report) -> &str {
        report.about.namespace.as_deref().unwrap_or_default()
    }

    fn version(tables: &Tables) -> u64 {
        tables.network_policies.version()
            + tables.multi_policies.version()
            + tables.networks.version()
            + tables.definition_names.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Report)> {
        let problems = self.problems(tables, Instant::now());
        let mut published = lock(&self.published);
        published.retain(|key, _| problems.contains_key(key));
        let new = problems
            .into_iter()
            .filter(|(key, (_, problem))| published.get(key) != Some(problem));
        new.map(|(key, (about, problem))| {
            let published = Arc::clone(&self.published);
            let report = Report {
                about,
                problem,
                published,
            };
            (key, report)
        })
        .collect()
    }

    async fn write(context: Context, key: Key, report: Report) -> kube::Result<()> {
        let problem = report.problem;
        context
            .events
            .warning_about(&report.about, problem.reason, problem.action, &problem.note)
            .await;
        lock(&report.published).insert(key, problem);
        Ok(())
    }
}

fn lock(published: &Published) -> MutexGuard<'_, BTreeMap<Key, Problem>> {
    // Each entry is complete.
    published.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
