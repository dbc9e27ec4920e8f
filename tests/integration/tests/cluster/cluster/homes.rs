//! Tests pods of namespaces whose network is not known: missing, not valid, or made again.

use anyhow::{Result, ensure};
use kni_api::PodNetwork;
use kni_integration::{
    Cluster, Pod,
    cluster::{definitions, deployed, objects, patience},
    require, wait,
};
use kube::Api;
use serde_json::{Value, json};

use super::scene::wait_for_condition;

/// The namespace of the tests, which states its network.
const SHOP: &str = "shop";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_namespace_that_states_its_network_waits_for_it_in_every_order() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-homes", 1).await?;
    cluster.apply(&[objects::default_network()]).await?;
    wait_for_condition(&cluster, "default", "Programmed", true).await?;

    // The namespace and its pods come before the network.
    let shop = objects::namespace(SHOP, &json!({ "tenant": "blue", "kni.dev/network": "blue" }));
    cluster.apply(&[shop]).await?;
    let elsewhere = json!({ "annotations": { "kni.dev/network": "default" } });
    cluster
        .create_pods(&[
            objects::pod(SHOP, "early", "node1"),
            objects::pod_with(SHOP, "escapes", "node1", &elsewhere),
        ])
        .await?;
    for pod in ["early", "escapes"] {
        refused(&cluster, pod, &["namespace shop", "network blue does not exist"]).await?;
    }

    // The network comes, but does not select the namespace yet.
    cluster.apply(&[blue("another")]).await?;
    refused(
        &cluster,
        "early",
        &["namespace shop", "network blue does not select it"],
    )
    .await?;
    cluster.apply(&[blue("blue")]).await?;
    let early = cluster.running(SHOP, "early").await?;
    ensure!(network_of(&cluster, &early).await? == "blue");
    refused(&cluster, "escapes", &["spec.access.lockNamespaces"]).await?;

    // It is deleted and made again.
    cluster.remove(SHOP, &["early", "escapes"]).await?;
    cluster.delete(&blue("blue")).await?;
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    wait::until("the network is gone", patience(), async || {
        Ok(api.get_opt("blue").await?.is_none())
    })
    .await?;
    cluster.create_pods(&[objects::pod(SHOP, "between", "node1")]).await?;
    refused(&cluster, "between", &["namespace shop", "network blue does not exist"]).await?;
    cluster.apply(&[blue("blue")]).await?;
    let between = cluster.running(SHOP, "between").await?;
    ensure!(network_of(&cluster, &between).await? == "blue");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_network_that_is_not_valid_sends_no_pod_into_the_default_network() -> Result<()> {
    require!(waiting, root, netns, bpf, machine);
    let cluster = Cluster::start("cluster-homes-invalid", 1).await?;
    cluster.apply(&[objects::default_network()]).await?;
    wait_for_condition(&cluster, "default", "Programmed", true).await?;
    cluster
        .apply(&[
            objects::namespace("plain", &json!({})),
            objects::namespace(SHOP, &json!({ "tenant": "blue" })),
        ])
        .await?;
    // The API server accepts what the agent does not, as one with definitions of another release.
    let mut lax = deployed("crds/podnetworks.yaml")?;
    lax.iter_mut().for_each(without_rules);
    definitions::apply(&cluster.client, lax).await?;
    let of_shop = json!({ "namespaceSelector": { "matchLabels": { "tenant": "blue" } } });
    let invalid = objects::network("blue", &["10.30.0.1/16"], &of_shop);
    wait::until("the API server accepts the network", patience(), async || {
        cluster.apply(std::slice::from_ref(&invalid)).await?;
        Ok(true)
    })
    .await?;
    wait_for_condition(&cluster, "blue", "Accepted", false).await?;
    cluster
        .create_pods(&[
            objects::pod(SHOP, "closed", "node1"),
            objects::pod("plain", "open", "node1"),
        ])
        .await?;
    let reason = "network blue selects it, but is not valid: spec.subnets[0]";
    refused(&cluster, "closed", &["namespace shop", reason]).await?;
    let open = cluster.running("plain", "open").await?;
    ensure!(
        network_of(&cluster, &open).await? == "default",
        "other namespaces are not affected"
    );
    // Without the network the namespace is one like others.
    cluster.delete(&invalid).await?;
    let closed = cluster.running(SHOP, "closed").await?;
    ensure!(network_of(&cluster, &closed).await? == "default");
    Ok(())
}

/// Removes the rules of a definition that are not in its types.
fn without_rules(definition: &mut Value) {
    match definition {
        Value::Object(fields) => {
            fields.remove("x-kubernetes-validations");
            fields.values_mut().for_each(without_rules);
        }
        Value::Array(items) => items.iter_mut().for_each(without_rules),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// A network for namespaces of a tenant, which it locks.
fn blue(tenant: &str) -> Value {
    let more = json!({
        "namespaceSelector": { "matchLabels": { "tenant": tenant } }, "access": { "lockNamespaces": true },
    });
    objects::network_without_access("blue", &["10.10.0.0/16"], &more)
}

/// Waits until the last refusal of a pod contains all of this.
async fn refused(cluster: &Cluster, pod: &str, expected: &[&str]) -> Result<()> {
    let full = format!("{SHOP}/{pod}");
    wait::until_some(&format!("{full} is refused"), patience(), async || {
        let kubelet = &cluster.nodes[0].kubelet;
        ensure!(kubelet.pod(SHOP, pod).is_none(), "{full} runs");
        let last = kubelet.refusals().into_iter().rfind(|refusal| refusal.pod == full);
        let Some(last) = last else { return Ok(None) };
        let missing = expected.iter().find(|part| !last.message.contains(**part));
        ensure!(missing.is_none(), "{missing:?} is missing in {last}");
        Ok(Some(()))
    })
    .await
}

/// The network of a pod's `eth0`.
async fn network_of(cluster: &Cluster, pod: &Pod) -> Result<String> {
    let kubelet = cluster.nodes[0].kubelet.kni();
    let mut interfaces = kubelet.interfaces_of(&pod.namespace, &pod.name).await?.into_iter();
    let found = interfaces.find(|interface| interface.ifname == "eth0");
    Ok(found.map(|interface| interface.network).unwrap_or_default())
}
