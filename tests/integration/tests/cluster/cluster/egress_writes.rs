//! Checks what the admission policy of the deployment lets agents write into the claim of an egress address.

use anyhow::{Context as _, Result, ensure};
use kni_integration::{
    Cluster,
    cluster::{deployed, patience},
    wait,
};
use serde_json::{Value, json};

const AGENT: &str = "system:serviceaccount:kni-system:kni-agent";

/// Tries to write the status of a claim as the agent of a node; nothing is changed. `None`: with a token that names no
/// node. Returns why it is refused.
async fn refusal(cluster: &Cluster, claim: &str, node: Option<&str>, status: &Value) -> Result<Option<String>> {
    let uri = format!("/apis/kni.dev/v1alpha1/egressaddressclaims/{claim}/status?dryRun=All");
    let mut request = http::Request::patch(uri)
        .header("Content-Type", "application/merge-patch+json")
        .header("Impersonate-User", AGENT)
        .header("Impersonate-Group", "system:serviceaccounts");
    if let Some(node) = node {
        request = request.header("Impersonate-Extra-authentication.kubernetes.io%2fnode-name", node);
    }
    let request = request.body(serde_json::to_vec(&json!({ "status": status }))?)?;
    match cluster.client.request::<Value>(request).await {
        Ok(_written) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.message)),
        Err(error) => Err(error.into()),
    }
}

/// Checks that only the agent of `owner` writes the status of the claim, and makes no other node the holder.
pub(super) async fn an_agent_writes_only_itself(
    cluster: &Cluster,
    claim: &str,
    owner: &str,
    other: &str,
) -> Result<()> {
    let guard = deployed("base/egress-claims.yaml")?;
    ensure!(guard.len() == 2, "a policy and its binding: {guard:?}");
    cluster.apply(&guard).await?;
    let holder = |node: &str| json!({ "holder": { "nodeName": node, "nodeUid": "00000000", "epoch": 1 } });
    let held = format!("the agent of node {other} may not write the claim of an address that node {owner} holds");
    let another = format!("the agent of node {owner} may not make another node the holder of an address");
    wait::until(
        "the API server refuses to take the address away",
        patience(),
        async || {
            let refused = refusal(cluster, claim, Some(other), &holder(other)).await?;
            let words = refused.context("it is taken")?;
            ensure!(words.contains(&held), "{words}");
            Ok(true)
        },
    )
    .await?;
    let none = json!({ "holder": null });
    let rows: [(Option<&str>, Value, Option<&str>); 6] = [
        (Some(other), none.clone(), Some(&held)),
        (Some(other), json!({ "conditions": [] }), Some(&held)),
        (Some(owner), holder(other), Some(&another)),
        (None, none.clone(), Some("the agent's token names no node")),
        (Some(owner), json!({ "conditions": [] }), None),
        (Some(owner), none, None),
    ];
    for (node, status, expected) in rows {
        let refused = refusal(cluster, claim, node, &status).await?;
        println!("agent of {node:?} writes {status}: {refused:?}");
        let right = match (&refused, expected) {
            (Some(words), Some(expected)) => words.contains(expected),
            (None, None) => true,
            _ => false,
        };
        ensure!(right, "{node:?} {status}: {refused:?}");
    }
    Ok(())
}
