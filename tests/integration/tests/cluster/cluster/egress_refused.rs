//! Checks which egress addresses are refused in a cluster, with the reasons that policies and pools report.

use anyhow::{Context as _, Result, ensure};
use kni_api::{ConditionStatus, EgressAddressPool, EgressPolicy};
use kni_integration::{
    Cluster,
    cluster::{objects, patience},
    traffic::{Servers, udp_ask},
    wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::scene::{PORT, SILENCE};

/// Namespace, name of the policy, address, the condition that is False, its reason, and a part of its message.
const REFUSED: [(&str, &str, &str, &str, &str, &str); 9] = [
    (
        "red-team",
        "a",
        "203.0.113.9",
        "Accepted",
        "AddressNotInPool",
        "in no EgressAddressPool",
    ),
    (
        "red-team",
        "b",
        "198.51.100.200",
        "Accepted",
        "PoolNotAllowed",
        "does not admit namespace red-team",
    ),
    (
        "red-team",
        "c",
        "198.51.100.12",
        "Accepted",
        "AddressReserved",
        "the address of node node2",
    ),
    (
        "red-team",
        "d",
        "2001:db8:100::11",
        "Accepted",
        "AddressReserved",
        "the address of node node1",
    ),
    (
        "red-team",
        "e",
        "198.51.100.10",
        "Accepted",
        "AddressReserved",
        "the address of the API server",
    ),
    (
        "red-team",
        "f",
        "10.10.0.9",
        "Accepted",
        "AddressReserved",
        "inside 10.10.0.0/16 of PodNetwork",
    ),
    (
        "red-team",
        "g",
        "198.51.100.80",
        "Accepted",
        "AddressInUse",
        "in use by EgressPolicy blue-team/first",
    ),
    (
        "red-team",
        "h",
        "2001:db8:100::1",
        "AddressesReady",
        "AddressReserved",
        "the gateway of a route of this node",
    ),
    (
        "red-team",
        "i",
        "198.51.100.1",
        "AddressesReady",
        "AddressReserved",
        "the gateway of a route of this node",
    ),
];

fn policy(namespace: &str, name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "EgressPolicy", "metadata": { "name": name, "namespace": namespace },
        "spec": { "podSelector": { "matchLabels": { "egress": name } }, "egressAddresses": [address] },
    })
}

fn pool(name: &str, ranges: &Value, namespaces: &Value) -> Value {
    json!({
        "apiVersion": "kni.dev/v1alpha1", "kind": "EgressAddressPool", "metadata": { "name": name },
        "spec": { "ranges": ranges, "access": { "namespaces": namespaces } },
    })
}

async fn wait_for_refusal(cluster: &Cluster, row: &(&str, &str, &str, &str, &str, &str)) -> Result<()> {
    let (namespace, name, address, kind, reason, text) = row;
    let policies: Api<EgressPolicy> = Api::namespaced(cluster.client.clone(), namespace);
    wait::until(
        &format!("{namespace}/{name} with {address} is refused"),
        patience(),
        async || {
            let status = policies.get(name).await?.status.context("no status")?;
            let found = status.conditions.iter().find(|condition| condition.type_ == *kind);
            let found = found.with_context(|| format!("no condition {kind}: {:?}", status.conditions))?;
            let right =
                found.status == ConditionStatus::False && found.reason == *reason && found.message.contains(text);
            ensure!(right, "{found:?}");
            println!("{address:<18} {kind}=False {reason}: {}", found.message);
            Ok(true)
        },
    )
    .await
    .map(drop)
}

/// The pools, and a policy of blue with an address of the shared one.
async fn blue_has_an_address(cluster: &Cluster) -> Result<()> {
    let of = |tenant: &str| json!({ "from": "Selected", "selector": { "matchLabels": { "tenant": tenant } } });
    let shared = json!(["198.51.100.0/25", "2001:db8:100::/120", "10.10.0.0/24"]);
    let mut all = vec![
        pool("shared", &shared, &json!({ "from": "All" })),
        pool("blue", &json!(["198.51.100.192/26"]), &of("blue")),
        policy("blue-team", "first", "198.51.100.80"),
        objects::pod_with(
            "blue-team",
            "holder",
            "node1",
            &json!({ "labels": { "egress": "first" } }),
        ),
    ];
    let holder = all.pop().context("just pushed")?;
    cluster.apply(&all).await?;
    cluster.run(&[holder]).await?;
    let ready: Api<EgressPolicy> = Api::namespaced(cluster.client.clone(), "blue-team");
    wait::until("blue has its address", patience(), async || {
        let status = ready.get("first").await?.status.context("no status")?;
        let found = status
            .conditions
            .iter()
            .find(|condition| condition.type_ == "AddressesReady");
        ensure!(
            found.is_some_and(|found| found.status == ConditionStatus::True),
            "{found:?}"
        );
        Ok(true)
    })
    .await
    .map(drop)
}

/// Requests addresses of others in a cluster with two tenants, and checks that each is refused.
pub(super) async fn addresses_of_others_are_refused_with_the_reason(cluster: &Cluster) -> Result<()> {
    blue_has_an_address(cluster).await?;
    let _server = Servers::start(cluster.fabric.inside(), "outside", PORT)?;
    let policies: Vec<Value> = REFUSED.iter().map(|row| policy(row.0, row.1, row.2)).collect();
    cluster.apply(&policies).await?;
    let pods = ["e", "g", "h", "i"].map(|name| {
        objects::pod_with(
            "red-team",
            &format!("pod-{name}"),
            "node1",
            &json!({ "labels": { "egress": name } }),
        )
    });
    let pods = cluster.run(&pods).await?;
    for row in &REFUSED {
        wait_for_refusal(cluster, row).await?;
    }
    for pod in &pods {
        for outside in ["198.51.100.1", "2001:db8:100::1"] {
            let got = udp_ask(&pod.inside, outside.parse()?, PORT, SILENCE);
            ensure!(got.is_err(), "{} leaves with another address: {got:?}", pod.name);
        }
    }
    for node in &cluster.nodes {
        let shown = node.node.run("ip", &["address", "show", "dev", "uplink0"])?;
        for (.., address, _, _, _) in REFUSED.iter().filter(|row| !matches!(row.1, "c" | "d" | "g")) {
            ensure!(
                !shown.contains(&format!(" {address}/")),
                "{}: {address}\n{shown}",
                node.name
            );
        }
    }
    pools_are_sorted_out(cluster).await
}

/// What is wrong with a pool is reported there.
async fn pools_are_sorted_out(cluster: &Cluster) -> Result<()> {
    let none = json!({ "from": "Selected", "selector": { "matchLabels": { "tenant": "absent" } } });
    let younger = pool("younger", &json!(["198.51.100.128/26", "198.51.100.64/26"]), &none);
    cluster.apply(&[younger]).await?;
    let pools: Api<EgressAddressPool> = Api::all(cluster.client.clone());
    for (name, kind, holds, text) in [
        (
            "younger",
            "Accepted",
            false,
            "198.51.100.64/26 overlaps 198.51.100.0/25 of EgressAddressPool shared",
        ),
        ("younger", "NamespacesSelected", false, "no namespace may use it"),
        (
            "shared",
            "Accepted",
            true,
            "never used of it: 198.51.100.11 is the address of node node1",
        ),
        ("shared", "NamespacesSelected", true, "namespaces may use it"),
        ("blue", "Accepted", true, "the pool is valid"),
    ] {
        wait::until(&format!("{kind} of pool {name} is {holds}"), patience(), async || {
            let status = pools.get(name).await?.status.context("no status")?;
            let found = status.conditions.iter().find(|condition| condition.type_ == kind);
            let found = found.context("no condition")?;
            ensure!(
                found.status == ConditionStatus::from(holds) && found.message.contains(text),
                "{found:?}"
            );
            println!("pool {name:<8} {kind}={holds}: {}", found.message);
            Ok(true)
        })
        .await?;
    }
    let used = pools.get("shared").await?.status.map(|status| status.used);
    ensure!(
        used == Some(3),
        "{used:?} addresses are used: that of blue, and those of the gateway that no node may take"
    );
    Ok(())
}
