//! Creates the service accounts, roles and admission policies of the deployment, and tokens of its accounts.

use anyhow::{Context as _, Result, ensure};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{definitions::deployed, objects};

/// Files of the deployment with permissions and priorities. Its policy about networks in use is the subject of a test.
const FILES: [&str; 8] = [
    "base/rbac.yaml",
    "base/controller-rbac.yaml",
    "base/agent-writes.yaml",
    "base/controller-writes.yaml",
    "base/addressblocks.yaml",
    "base/egress-claims.yaml",
    "base/tenants.yaml",
    "base/flow-schemas.yaml",
];
/// The policy that shows whether all are enforced, and its binding.
const LAST_POLICY: &str = "addressblock-unit.kni.dev";
/// The namespace of the deployment.
const NAMESPACE: &str = "kni-system";
/// How long tokens are valid.
const TOKEN_SECONDS: u32 = 24 * 3600;

/// The permissions of the deployment without its policies of admission, in the order in which they are applied.
pub(super) fn permissions() -> Result<Vec<Value>> {
    Ok(all()?.into_iter().filter(|object| !is_policy(object)).collect())
}

fn all() -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for file in FILES {
        let objects = deployed(file)?;
        ensure!(!objects.is_empty(), "{file} is empty");
        all.extend(objects);
    }
    Ok(all)
}

/// Applies the permissions of the deployment, without its policies of admission.
pub(super) async fn grant(client: &Client) -> Result<()> {
    apply(client, permissions()?).await
}

/// Applies the policies of admission of the deployment, [`LAST_POLICY`] after all others: the API server sees them in
/// this order.
pub(super) async fn admit(client: &Client) -> Result<()> {
    let mut policies: Vec<Value> = all()?.into_iter().filter(is_policy).collect();
    policies.sort_by_key(|object| object["metadata"]["name"] == LAST_POLICY);
    ensure!(!policies.is_empty(), "no policy of admission");
    apply(client, policies).await
}

/// Whether the object is an admission policy or its binding.
fn is_policy(object: &Value) -> bool {
    object["kind"]
        .as_str()
        .is_some_and(|kind| kind.contains("AdmissionPolicy"))
}

async fn apply(client: &Client, objects: Vec<Value>) -> Result<()> {
    let params = PatchParams::apply("test").force();
    for object in objects {
        let (resource, namespace, name) = objects::locate(&object)?;
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        let applied = api.patch(&name, &params, &Patch::Apply(&object)).await;
        applied.with_context(|| format!("{} {name}", resource.kind))?;
    }
    Ok(())
}

/// A token of a service account of the deployment, bound to a node, whose name it contains then as that of a pod does.
pub async fn token(client: &Client, account: &str, node: Option<&str>) -> Result<String> {
    let bound = node.map(|node| json!({ "kind": "Node", "apiVersion": "v1", "name": node }));
    request_token(client, account, &json!(bound)).await
}

/// A token of an agent's service account, bound to a pod on the node, which is made for that: as the kubelet's, it
/// outlives the object of the node. A fake kubelet does not run the pod, as it uses the node's network.
pub(super) async fn pod_token(client: &Client, account: &str, node: &str) -> Result<String> {
    let name = format!("{account}-{node}");
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": NAMESPACE },
        "spec": {
            "nodeName": node,
            "serviceAccountName": account,
            "automountServiceAccountToken": false,
            "hostNetwork": true,
            "containers": [{ "name": "agent", "image": "none.invalid/none" }],
            "tolerations": [{ "operator": "Exists" }],
        },
    });
    apply(client, vec![pod]).await?;
    let bound = json!({ "kind": "Pod", "apiVersion": "v1", "name": name });
    request_token(client, account, &bound).await
}

async fn request_token(client: &Client, account: &str, bound: &Value) -> Result<String> {
    let body = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": { "audiences": [], "boundObjectRef": bound, "expirationSeconds": TOKEN_SECONDS },
    });
    let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token");
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(serde_json::to_vec(&body)?)?;
    let answer: Value = client
        .request(request)
        .await
        .with_context(|| format!("token of {account}"))?;
    let token = answer["status"]["token"].as_str().context("no token")?;
    Ok(token.to_owned())
}
