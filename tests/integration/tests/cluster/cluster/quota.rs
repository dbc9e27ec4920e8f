//! Tests a tenant whose policies need more rows than its quota: its own pods are closed, and others are as before.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kni_api::{Condition, NodeNetwork, NodeNetworkStatus, PodInterface};
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    traffic::tcp_get,
    wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::scene::{PORT, address, assert_reached, assert_silent, serve};

const POLICIES: u32 = 4;

/// Ranges of each policy: together more than the quota; 100 000 in long tests.
fn ranges() -> u32 {
    let long = kni_integration::long();
    if long { 25_000 } else { 2_500 }
}

/// The policies of the hog, which allow the addresses of all pods, and many ranges.
fn hog(count: u32) -> Vec<Value> {
    let policies = (0..POLICIES).map(|policy| {
        let blocks = (policy * count..(policy + 1) * count).map(|n| {
            let [_, high, middle, low] = n.to_be_bytes();
            format!("{}.{middle}.{low}.0/24", 64 + high)
        });
        let all = ["10.244.0.0/16".to_owned(), "fd00:244::/64".to_owned()];
        let peers: Vec<Value> = all
            .into_iter()
            .chain(blocks)
            .map(|cidr| json!({ "ipBlock": { "cidr": cidr } }))
            .collect();
        let spec = json!({ "policyTypes": ["Ingress"], "ingress": [{ "from": peers }] });
        objects::policy("hog", &format!("p{policy}"), &spec)
    });
    policies.collect()
}

/// How long another tenant waits for the slowest of five pods, and for the slower of two changes of its policy.
async fn latencies(cluster: &Cluster, pods: &[Pod], round: &str) -> Result<[Duration; 2]> {
    let mut slowest = Duration::ZERO;
    for number in 0..5 {
        let begin = Instant::now();
        let name = format!("{round}-{number}");
        cluster.run(&[objects::pod("other", &name, "node1")]).await?;
        slowest = slowest.max(begin.elapsed());
    }
    let mut change = Duration::ZERO;
    for allowed in [false, true] {
        let rules = if allowed {
            json!([{ "from": [{ "podSelector": {} }] }])
        } else {
            json!([])
        };
        let spec = json!({ "policyTypes": ["Ingress"], "ingress": rules });
        let begin = Instant::now();
        cluster.apply(&[objects::policy("other", "own", &spec)]).await?;
        wait::until("the policy of another tenant is enforced", patience(), async || {
            let quick = Duration::from_millis(20);
            Ok(tcp_get(&pods[0].inside, address(&pods[1], true), PORT, quick).is_ok() == allowed)
        })
        .await?;
        change = change.max(begin.elapsed());
    }
    Ok([slowest, change])
}

async fn status(cluster: &Cluster) -> Result<NodeNetworkStatus> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    api.get("node1").await?.status.context("no status")
}

fn holds(conditions: &[Condition], kind: &str) -> bool {
    let found = conditions.iter().find(|condition| condition.type_ == kind);
    found.is_some_and(|found| found.status == true.into())
}

async fn interface_reports_quota(cluster: &Cluster, pod: &Pod) -> Result<()> {
    wait::until("the pod's interface says why", patience(), async || {
        let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), "hog");
        let name = kni_api::pod_interface::name(&pod.name, &pod.uid, "eth0");
        let conditions = api.get(&name).await?.status.unwrap_or_default().conditions;
        let mut conditions = conditions.into_iter();
        let enforced = conditions.find(|condition| condition.type_ == "PolicyEnforced");
        Ok(enforced
            .is_some_and(|enforced| enforced.reason == "QuotaExceeded" && enforced.message.contains("namespace hog")))
    })
    .await
    .map(drop)
}

/// Fills the quota of namespace `hog`, beside namespace `other`.
pub(crate) async fn a_tenant_above_its_quota_closes_its_own_pods(cluster: &Cluster) -> Result<()> {
    let namespaces = ["hog", "other"].map(|name| objects::namespace(name, &json!({})));
    cluster.apply(&namespaces).await?;
    let others = [
        objects::pod("other", "client", "node1"),
        objects::pod("other", "server", "node1"),
    ];
    let others = cluster.run(&others).await?;
    let hogs = cluster.run(&[objects::pod("hog", "hog", "node1")]).await?;
    let (_server, _hog) = (serve(&others[1])?, serve(&hogs[0])?);
    assert_reached(&others[0], &hogs[0]);
    let before = latencies(cluster, &others, "before").await?;

    let begin = Instant::now();
    let count = ranges();
    cluster.apply(&hog(count)).await?;
    let reported = wait::until_some("the node reports the namespace", patience(), async || {
        let closed = status(cluster).await?.policies.closed;
        Ok(closed.into_iter().find(|closed| closed.namespace == "hog"))
    })
    .await?;
    println!(
        "{} ranges; after {:?}: {}",
        POLICIES * count,
        begin.elapsed(),
        reported.reason
    );
    let after = latencies(cluster, &others, "after").await?;
    println!("slowest of 5 pods, slower of 2 policy changes: {before:?} before, {after:?} beside it");
    // Much more than either takes: the tests share the machine.
    let limit = before.map(|before| before * 3 + Duration::from_secs(1));
    ensure!(
        after[0] < limit[0] && after[1] < limit[1],
        "others wait: {before:?} before, {after:?} beside it"
    );
    assert_reached(&others[0], &others[1]);
    assert_silent(&others[0], &hogs[0]);
    let node = status(cluster).await?;
    ensure!(
        holds(&node.conditions, "Ready") && node.policies.programmed,
        "{:?}",
        node.conditions
    );
    interface_reports_quota(cluster, &hogs[0]).await?;

    // With fewer ranges its pods open.
    cluster.apply(&hog(10)).await?;
    wait::until("the namespace is open", patience(), async || {
        let answer = tcp_get(
            &others[0].inside,
            address(&hogs[0], true),
            PORT,
            Duration::from_millis(100),
        );
        Ok(answer.is_ok() && status(cluster).await?.policies.closed.is_empty())
    })
    .await
    .map(drop)
}
