//! Asks the API server which service accounts have the verb `join` on networks that require it, for the agents.

use std::{
    collections::{BTreeMap, BTreeSet},
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
/// Maximum number of service accounts of one network.
const MOST_ACCOUNTS: usize = 2000;

/// Service accounts, as namespace and name.
type Accounts = BTreeSet<(String, String)>;

/// The controller.
#[derive(Debug, Default)]
pub(super) struct Joins {
    /// By network: the accounts that were asked for, and when.
    asked: BTreeMap<Key, (Accounts, Instant)>,
}

/// The accounts of one network.
#[derive(Debug)]
pub(super) struct Questions {
    accounts: Accounts,
    /// The accounts in the status.
    known: Vec<String>,
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
        let mut writes = Vec::new();
        let mut asked = BTreeMap::new();
        for (key, object) in tables.networks.rows() {
            let known = object.status.as_ref().map(|status| status.join_accounts.clone());
            let known = known.unwrap_or_default();
            let accounts = accounts(tables, networks, &key.name);
            if accounts.is_empty() && known.is_empty() {
                continue;
            }
            match self.asked.remove(key) {
                Some((before, since)) if before == accounts && now.duration_since(since) < AGAIN => {
                    asked.insert(key.clone(), (before, since));
                }
                _ => {
                    asked.insert(key.clone(), (accounts.clone(), now));
                    writes.push((key.clone(), Questions { accounts, known }));
                }
            }
        }
        self.asked = asked;
        writes
    }

    async fn write(context: Context, key: Key, questions: Questions) -> kube::Result<()> {
        let answers: Vec<Option<String>> = stream::iter(questions.accounts)
            .map(|account| may_join(&context, &key.name, account))
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        let allowed: Vec<String> = answers.into_iter().flatten().collect();
        if allowed == questions.known {
            return Ok(());
        }
        tracing::info!(network = key.name, accounts = ?allowed, "service accounts with the verb join");
        let api: Api<PodNetwork> = Api::all(context.client.clone());
        let patch = Patch::Merge(serde_json::json!({ "status": { "joinAccounts": allowed } }));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

/// The service accounts of pods that the network admits, if it requires the verb.
fn accounts(tables: &Tables, networks: &Networks, network: &str) -> Accounts {
    let name = network.parse().ok();
    let spec = name.and_then(|name| networks.spec(&name));
    let Some(spec) = spec.filter(|spec| spec.access.require_join) else {
        return Accounts::new();
    };
    let mut accounts = Accounts::new();
    for (key, pod) in tables.pods.rows() {
        if pod.finished || pod.host_network || pod.service_account.is_empty() {
            continue;
        }
        let account = (key.namespace.clone(), pod.service_account.clone());
        if accounts.contains(&account) {
            continue;
        }
        let labels = tables.namespace_labels(&key.namespace);
        if labels.is_some_and(|labels| spec.admits(&key.namespace, &labels).is_ok()) {
            accounts.insert(account);
        }
        if accounts.len() >= MOST_ACCOUNTS {
            tracing::warn!(
                network,
                MOST_ACCOUNTS,
                "too many service accounts; the others are refused"
            );
            break;
        }
    }
    accounts
}

/// The account, as namespace/name, if it has the verb.
async fn may_join(
    context: &Context,
    network: &str,
    (namespace, account): (String, String),
) -> kube::Result<Option<String>> {
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
    Ok(allowed.then(|| format!("{namespace}/{account}")))
}
