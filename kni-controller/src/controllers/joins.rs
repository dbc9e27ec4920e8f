//! Asks the API server which service accounts have the verb `join` on networks that require it, for the agents.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::ready,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kni_api::{GROUP, PodNetwork};
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use tokio::time::Instant;

use super::reconcile::{Context, Reconciler, ignore_gone};

/// Interval of the questions: no watch reports that an account has got or lost a verb.
const AGAIN: Duration = Duration::from_secs(10);
/// Maximum number of concurrent questions about one network.
const AT_ONCE: usize = 8;
/// Maximum number of service accounts of one network. Namespaces share it.
const MOST_ACCOUNTS: usize = 2000;

/// A service account: namespace and name.
type Account = (String, String);
/// Service accounts.
type Accounts = BTreeSet<Account>;

/// The controller.
#[derive(Debug, Default)]
pub(super) struct Joins {
    answers: Answers,
}

/// The answers of the API server, by network.
#[derive(Debug, Clone, Default)]
struct Answers(Arc<Mutex<BTreeMap<Key, BTreeMap<Account, Answer>>>>);

/// Whether an account has the verb, and since when that is known.
#[derive(Debug, Clone, Copy)]
struct Answer {
    allowed: bool,
    at: Instant,
}

/// The accounts of one network.
#[derive(Debug)]
pub(super) struct Questions {
    accounts: Accounts,
    /// Those without a recent answer.
    due: Accounts,
    /// The accounts in the status.
    known: Vec<String>,
    answers: Answers,
}

impl Answers {
    fn by_network(&self) -> MutexGuard<'_, BTreeMap<Key, BTreeMap<Account, Answer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, network: &Key, account: Account, allowed: bool) {
        let answer = Answer {
            allowed,
            at: Instant::now(),
        };
        let mut by_network = self.by_network();
        by_network.entry(network.clone()).or_default().insert(account, answer);
    }

    /// Those of the accounts without a recent answer.
    fn due(&self, network: &Key, accounts: &Accounts, now: Instant) -> Accounts {
        let by_network = self.by_network();
        let answers = by_network.get(network);
        let is_recent = |account: &&Account| {
            let answer = answers.and_then(|answers| answers.get(*account));
            answer.is_some_and(|answer| now.duration_since(answer.at) < AGAIN)
        };
        accounts.iter().filter(|account| !is_recent(account)).cloned().collect()
    }

    /// Those of the accounts that have the verb, as namespace/name.
    fn allowed(&self, network: &Key, accounts: &Accounts) -> Vec<String> {
        let by_network = self.by_network();
        let answers = by_network.get(network);
        let is_allowed = |account: &&Account| {
            let answer = answers.and_then(|answers| answers.get(*account));
            answer.is_some_and(|answer| answer.allowed)
        };
        let allowed = accounts.iter().filter(is_allowed);
        allowed
            .map(|(namespace, account)| format!("{namespace}/{account}"))
            .collect()
    }

    /// Drops the answers about other accounts of the network.
    fn retain(&self, network: &Key, accounts: &Accounts) {
        let mut by_network = self.by_network();
        if accounts.is_empty() {
            by_network.remove(network);
        } else if let Some(answers) = by_network.get_mut(network) {
            answers.retain(|account, _| accounts.contains(account));
        }
    }
}

impl Reconciler for Joins {
    const NAME: &'static str = "joins";
    type Write = Questions;

    fn version(tables: &Tables) -> u64 {
        [
            tables.networks.version(),
            tables.namespaces.version(),
            tables.pods.version(),
        ]
        .into_iter()
        .sum()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Questions)> {
        let now = Instant::now();
        let rows = tables.networks.rows();
        self.answers.by_network().retain(|key, _| rows.contains_key(key));
        let mut writes = Vec::new();
        for (key, object) in rows {
            let known = object.status.as_ref().map(|status| status.join_accounts.clone());
            let known = known.unwrap_or_default();
            let accounts = accounts(tables, networks, &key.name);
            self.answers.retain(key, &accounts);
            let due = self.answers.due(key, &accounts, now);
            if !due.is_empty() || self.answers.allowed(key, &accounts) != known {
                let answers = self.answers.clone();
                let questions = Questions {
                    accounts,
                    due,
                    known,
                    answers,
                };
                writes.push((key.clone(), questions));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, questions: Questions) -> kube::Result<()> {
        let Questions {
            accounts,
            due,
            known,
            answers,
        } = questions;
        stream::iter(due)
            .map(|account| may_join(&context, &key.name, account))
            .buffer_unordered(AT_ONCE)
            .try_for_each(|(account, allowed)| {
                answers.note(&key, account, allowed);
                ready(Ok(()))
            })
            .await?;
        let allowed = answers.allowed(&key, &accounts);
        if allowed == known {
            return Ok(());
        }
        tracing::info!(network = key.name, accounts = ?allowed, "service accounts with the verb join");
        let api: Api<PodNetwork> = Api::all(context.client.clone());
        let patch = Patch::Merge(serde_json::json!({ "status": { "joinAccounts": allowed } }));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

/// The service accounts of pods with a node that the network admits, if it requires the verb.
fn accounts(tables: &Tables, networks: &Networks, network: &str) -> Accounts {
    let name = network.parse().ok();
    let spec = name.and_then(|name| networks.spec(&name));
    let Some(spec) = spec.filter(|spec| spec.access.require_join) else {
        return Accounts::new();
    };
    let mut by_namespace: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (key, pod) in tables.pods.rows() {
        let is_assigned = !pod.finished && !pod.host_network && !pod.node.is_empty();
        if is_assigned && !pod.service_account.is_empty() {
            let accounts = by_namespace.entry(&key.namespace).or_default();
            accounts.insert(&pod.service_account);
        }
    }
    by_namespace.retain(|namespace, _| {
        let labels = tables.namespace_labels(namespace);
        labels.is_some_and(|labels| spec.admits(namespace, &labels).is_ok())
    });
    shared(network, &by_namespace)
}

/// The accounts of a network. If there are too many, namespaces take turns: one with many accounts displaces none of
/// another one with fewer.
fn shared(network: &str, by_namespace: &BTreeMap<&str, BTreeSet<&str>>) -> Accounts {
    let turns = by_namespace.iter().flat_map(|(namespace, accounts)| {
        let turns = accounts.iter().enumerate();
        turns.map(move |(turn, account)| (turn, *namespace, *account))
    });
    let mut turns: Vec<(usize, &str, &str)> = turns.collect();
    if turns.len() > MOST_ACCOUNTS {
        turns.sort_unstable();
        let refused = turns.split_off(MOST_ACCOUNTS);
        let namespaces: BTreeSet<&str> = refused.iter().map(|(_, namespace, _)| *namespace).collect();
        tracing::warn!(
            network,
            ?namespaces,
            refused = refused.len(),
            MOST_ACCOUNTS,
            "too many service accounts; the last ones of these namespaces are refused"
        );
    }
    let accounts = turns.into_iter();
    accounts
        .map(|(_, namespace, account)| (namespace.to_owned(), account.to_owned()))
        .collect()
}

/// An account, and whether it has the verb.
async fn may_join(context: &Context, network: &str, (namespace, account): Account) -> kube::Result<(Account, bool)> {
    let api: Api<SubjectAccessReview> = Api::all(context.client.clone());
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{namespace}:{account}")),
            groups: Some(vec![
                "system:serviceaccounts".to_owned(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".to_owned(),
            ]),
            resource_attributes: Some(ResourceAttributes {
                group: Some(GROUP.to_owned()),
                resource: Some("podnetworks".to_owned()),
                name: Some(network.to_owned()),
                verb: Some("join".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = api.create(&PostParams::default(), &review).await?;
    let allowed = answer.status.is_some_and(|status| status.allowed);
    Ok(((namespace, account), allowed))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kni_cluster::HeldBlocks;
    use kni_crd::PodFacts;
    use kni_model::policy::Labels;
    use serde_json::json;

    use super::*;

    /// The network `red`, which all namespaces may join with the verb.
    fn tables() -> Tables {
        let mut tables = Tables::default();
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork", "metadata": { "name": "red" },
            "spec": {
                "subnets": ["10.0.0.0/16"], "access": { "namespaces": { "from": "All" }, "requireJoin": true },
            },
        });
        let object = serde_json::from_value(object).unwrap();
        tables.networks.put(Key::new("", "red"), Some(Arc::new(object)));
        tables
    }

    /// A pod that has the name of its service account.
    fn pod(tables: &mut Tables, namespace: &str, account: &str, node: &str) {
        let facts = PodFacts {
            service_account: account.to_owned(),
            node: node.to_owned(),
            ..PodFacts::default()
        };
        tables.namespaces.put(Key::new("", namespace), Some(Labels::new()));
        tables.pods.put(Key::new(namespace, account), Some(Arc::new(facts)));
    }

    fn of_red(tables: &Tables) -> Accounts {
        accounts(tables, &Networks::of(tables, &HeldBlocks::new()), "red")
    }

    #[test]
    fn a_namespace_with_many_accounts_leaves_room_for_those_of_others() {
        let mut tables = tables();
        for number in 0..MOST_ACCOUNTS + 100 {
            pod(&mut tables, "aaa", &format!("a{number:04}"), "n1");
        }
        for account in ["db", "web"] {
            pod(&mut tables, "shop", account, "n1");
        }
        let accounts = of_red(&tables);
        assert_eq!(accounts.len(), MOST_ACCOUNTS);
        let of_shop = accounts.iter().filter(|(namespace, _)| namespace == "shop").count();
        assert_eq!(of_shop, 2);
    }

    #[test]
    fn a_pod_without_a_node_asks_for_nothing() {
        let mut tables = tables();
        pod(&mut tables, "shop", "pending", "");
        pod(&mut tables, "shop", "web", "n1");
        assert_eq!(of_red(&tables), [("shop".to_owned(), "web".to_owned())].into());
    }

    #[test]
    fn accounts_are_asked_when_they_are_new_and_when_the_answer_is_old() {
        let (mut joins, mut tables) = (Joins::default(), tables());
        let red = Key::new("", "red");
        let due = |joins: &mut Joins, tables: &Tables| -> Option<Vec<String>> {
            let networks = Networks::of(tables, &HeldBlocks::new());
            let (key, questions) = joins.plan(tables, &networks).pop()?;
            assert_eq!(key, red);
            Some(questions.due.into_iter().map(|(_, account)| account).collect())
        };
        let account = |name: &str| ("shop".to_owned(), name.to_owned());
        pod(&mut tables, "shop", "web", "n1");
        assert_eq!(due(&mut joins, &tables), Some(vec!["web".to_owned()]));
        joins.answers.note(&Key::new("", "red"), account("web"), false);
        assert_eq!(due(&mut joins, &tables), None);
        pod(&mut tables, "shop", "db", "n1");
        assert_eq!(due(&mut joins, &tables), Some(vec!["db".to_owned()]));
        joins.answers.note(&Key::new("", "red"), account("db"), true);
        assert_eq!(due(&mut joins, &tables), Some(vec![]), "the status is not written yet");
        for answer in joins.answers.by_network().values_mut().flat_map(BTreeMap::values_mut) {
            answer.at -= AGAIN;
        }
        assert_eq!(due(&mut joins, &tables), Some(vec!["db".to_owned(), "web".to_owned()]));
        tables.pods.remove(&Key::new("shop", "db"));
        joins.answers.note(&Key::new("", "red"), account("web"), false);
        assert_eq!(due(&mut joins, &tables), None);
        assert_eq!(joins.answers.by_network()[&Key::new("", "red")].len(), 1);
    }
}
