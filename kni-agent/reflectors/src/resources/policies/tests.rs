//! Tests what is enforced of policies that are refused, as the API server reports them one after the other.

use http::{Request, Response};
use kni_cluster::{ClusterCache, Key};
use kube::{Client, client::Body};
use serde_json::json;
use tokio::{
    sync::{Mutex, mpsc},
    task::JoinHandle,
    time::{Duration, timeout},
};

use super::*;
use crate::{decoded::Decoded, watches::WatchState};

const LIMIT: Duration = Duration::from_secs(10);

/// One kind that is followed. Each answer of the API server is one batch of events.
struct Followed {
    cache: ClusterCache,
    batches: mpsc::UnboundedSender<Vec<Value>>,
    task: JoinHandle<()>,
    head: Value,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Followed {
    fn new<K, V>(kind: Kind<K, V>) -> Self
    where
        K: PolicyObject,
        V: PartialEq + Send + 'static,
    {
        let (batches, answers) = mpsc::unbounded_channel::<Vec<Value>>();
        let answers = Arc::new(Mutex::new(answers));
        let service = tower::service_fn(move |_request: Request<Body>| {
            let answers = Arc::clone(&answers);
            async move {
                let batch = answers.lock().await.recv().await.unwrap_or_default();
                let lines: Vec<String> = batch.iter().map(ToString::to_string).collect();
                let body = Body::from((lines.join("\n") + "\n").into_bytes());
                Ok::<_, std::convert::Infallible>(Response::new(body))
            }
        });
        let api: Api<Decoded<K>> = Api::all(Client::new(service, "default"));
        let cache = ClusterCache::new();
        let config = watcher::Config::default();
        let task = tokio::spawn(kind.reflect_selected(api, config, cache.clone(), WatchState::default()));
        let head = json!({ "apiVersion": K::api_version(&()), "kind": K::kind(&()) });
        Self {
            cache,
            batches,
            task,
            head,
        }
    }

    fn object(&self, (uid, version): (&str, u32), spec: &Value) -> Value {
        let mut object = self.head.clone();
        object["metadata"] = json!({
            "namespace": "shop", "name": "p", "uid": uid, "resourceVersion": version.to_string(), "generation": version,
            "annotations": { "k8s.v1.cni.cncf.io/policy-for": "red" },
        });
        object["spec"] = spec.clone();
        object
    }

    /// A list with one object.
    async fn list(&self, id: (&str, u32), spec: &Value) {
        let object = self.object(id, spec);
        let mut end = self.head.clone();
        let annotations = json!({ "k8s.io/initial-events-end": "true" });
        end["metadata"] = json!({ "resourceVersion": id.1.to_string(), "annotations": annotations });
        end["spec"] = json!({ "podSelector": {} });
        self.send(
            id.1,
            vec![
                json!({ "type": "ADDED", "object": object }),
                json!({ "type": "BOOKMARK", "object": end }),
            ],
        )
        .await;
    }

    /// A list after the watch could not be continued, as after an interruption.
    async fn list_again(&self, id: (&str, u32), spec: &Value) {
        let gone = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "old",
        });
        self.batches
            .send(vec![json!({ "type": "ERROR", "object": gone })])
            .unwrap();
        self.list(id, spec).await;
    }

    async fn event(&self, type_: &str, id: (&str, u32), spec: &Value) {
        let object = self.object(id, spec);
        self.send(id.1, vec![json!({ "type": type_, "object": object })]).await;
    }

    async fn send(&self, version: u32, batch: Vec<Value>) {
        let mut changes = self.cache.changes();
        self.batches.send(batch).unwrap();
        let seen = async {
            while self.version() != Some(u64::from(version)) {
                changes.changed().await.unwrap();
            }
        };
        timeout(LIMIT, seen).await.expect("the row has the version");
    }

    fn row(&self) -> Option<PolicyRow> {
        let tables = self.cache.tables();
        let object = tables.egress_objects.rows().values().map(|policy| &policy.row);
        tables.policies().chain(object).next().cloned()
    }

    fn version(&self) -> Option<u64> {
        Some(self.row()?.version)
    }

    /// The number of enforced rules, and why the object is refused. The policy always selects pods.
    fn enforced(&self) -> (usize, Option<PolicySource>) {
        let row = self.row().expect("a policy is never dropped");
        assert_eq!(row.policy.pods.requirements.len(), 1, "{row:?}");
        let rules = match &row.policy.external {
            Some(external) => external.rules.len(),
            None => row.policy.ingress.as_ref().expect("it isolates").len(),
        };
        (rules, Some(row.source).filter(|source| *source != PolicySource::Object))
    }

    /// Checks that the last valid version with its one rule is enforced.
    fn assert_last_valid(&self) {
        let (rules, source) = self.enforced();
        let Some(PolicySource::LastValid(reason)) = source else {
            panic!("{source:?}");
        };
        assert!(rules == 1 && reason.contains("cidr"), "{rules} rules, {reason}");
    }

    /// Checks that nothing is allowed.
    fn assert_closed(&self) {
        let (rules, source) = self.enforced();
        assert!(
            rules == 0 && matches!(source, Some(PolicySource::Closed(_))),
            "{rules} rules, {source:?}"
        );
    }
}

/// A specification that allows a range, in the direction that the kind has.
fn allows(egress: bool, cidr: &str) -> Value {
    let selector = json!({ "matchLabels": { "app": "a" } });
    if egress {
        let rule = json!({ "action": "Allow", "to": [{ "cidr": cidr }] });
        json!({ "podSelector": selector, "defaultAction": "Deny", "rules": [rule] })
    } else {
        json!({ "podSelector": selector, "ingress": [{ "from": [{ "ipBlock": { "cidr": cidr } }] }] })
    }
}

const VALID: &str = "192.0.2.0/24";
const INVALID: &str = "192.0.2.1";

/// One policy of a kind from its first valid version on.
async fn keeps_the_last_valid_version<K: PolicyObject, V: PartialEq + Send + 'static>(kind: Kind<K, V>) {
    let egress = matches!(K::KIND, PolicyKind::EgressPolicy);
    let (valid, invalid) = (allows(egress, VALID), allows(egress, INVALID));
    let followed = Followed::new(kind);
    followed.list(("a", 1), &valid).await;
    assert_eq!(followed.enforced(), (1, None));
    followed.event("MODIFIED", ("a", 2), &invalid).await;
    followed.assert_last_valid();
    followed.event("MODIFIED", ("a", 3), &invalid).await;
    followed.assert_last_valid();
    followed.list_again(("a", 4), &invalid).await;
    followed.assert_last_valid();
    // A restore of the API server's storage: the version is lower.
    followed.list_again(("a", 2), &invalid).await;
    followed.assert_last_valid();
    followed.list_again(("b", 5), &invalid).await;
    followed.assert_closed();
    followed.event("MODIFIED", ("b", 6), &valid).await;
    assert_eq!(followed.enforced(), (1, None));
    // Another object in one answer.
    let gone = json!({ "type": "DELETED", "object": followed.object(("b", 7), &valid) });
    let added = json!({ "type": "ADDED", "object": followed.object(("c", 8), &invalid) });
    followed.send(8, vec![gone, added]).await;
    followed.assert_closed();
}

/// A process that begins with an invalid version.
async fn closes_at_first_sight<K: PolicyObject, V: PartialEq + Send + 'static>(kind: Kind<K, V>) {
    let egress = matches!(K::KIND, PolicyKind::EgressPolicy);
    let followed = Followed::new(kind);
    followed.list(("a", 1), &allows(egress, INVALID)).await;
    followed.assert_closed();
    followed.event("MODIFIED", ("a", 2), &allows(egress, INVALID)).await;
    followed.assert_closed();
    followed.event("MODIFIED", ("a", 3), &allows(egress, VALID)).await;
    assert_eq!(followed.enforced(), (1, None));
}

#[tokio::test]
async fn a_network_policy_that_becomes_invalid_keeps_its_last_valid_version() {
    keeps_the_last_valid_version(network_policies()).await;
}

#[tokio::test]
async fn a_multi_network_policy_that_becomes_invalid_keeps_its_last_valid_version() {
    keeps_the_last_valid_version(multi_policies::<v1beta1::MultiNetworkPolicy>()).await;
    keeps_the_last_valid_version(multi_policies::<v1beta2::MultiNetworkPolicy>()).await;
}

#[tokio::test]
async fn an_egress_policy_that_becomes_invalid_keeps_its_last_valid_version() {
    keeps_the_last_valid_version(egress_policies()).await;
    keeps_the_last_valid_version(egress_objects()).await;
}

#[tokio::test]
async fn a_policy_that_was_never_valid_allows_nothing() {
    closes_at_first_sight(network_policies()).await;
    closes_at_first_sight(multi_policies::<v1beta1::MultiNetworkPolicy>()).await;
    closes_at_first_sight(multi_policies::<v1beta2::MultiNetworkPolicy>()).await;
    closes_at_first_sight(egress_policies()).await;
    closes_at_first_sight(egress_objects()).await;
}

#[tokio::test]
async fn a_policy_that_cannot_be_decoded_is_treated_as_one_that_is_invalid() {
    let (valid, invalid) = (allows(false, VALID), allows(false, INVALID));
    let mut undecodable = valid.clone();
    undecodable["ingress"] = json!("cidr");
    let followed = Followed::new(network_policies());
    followed.list(("a", 1), &undecodable).await;
    followed.assert_closed();
    followed.event("MODIFIED", ("a", 2), &invalid).await;
    followed.assert_closed();
    followed.event("MODIFIED", ("a", 3), &valid).await;
    followed.event("MODIFIED", ("a", 4), &undecodable).await;
    assert_eq!(followed.enforced().0, 1, "the last valid version");
    followed.event("MODIFIED", ("a", 5), &invalid).await;
    followed.assert_last_valid();
    assert!(
        followed.cache.tables().network_policies.refused().is_empty(),
        "it is decoded again"
    );
    followed.list_again(("b", 6), &undecodable).await;
    followed.assert_closed();
    let refused = followed.cache.tables().network_policies.refused().clone();
    assert!(refused.contains_key(&Key::new("shop", "p")), "{refused:?}");
}
