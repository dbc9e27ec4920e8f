//! Tests pods that run while the right to their network changes.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kni_api::{ConditionStatus, PodInterface, PodNetwork};
use kni_integration::{
    Cluster, Pod,
    cluster::{objects, patience},
    traffic::{Stream, tcp_get},
    wait,
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::scene::event;
use crate::cluster::scene::{PORT, SILENCE, address, interface_names, kernel_addresses, serve};

/// The least time until an interface is detached whose right is lost.
const GRACE: Duration = Duration::from_mins(1);

/// Labels of namespaces and access of networks change while pods run. `cluster` is that of the scene.
pub(crate) async fn run(cluster: &Cluster) -> Result<()> {
    namespace_changes(cluster).await?;
    access_changes(cluster).await?;
    revoked(cluster).await?;
    granted(cluster).await?;
    labels_of_an_annotation(cluster).await
}

/// A namespace loses the label by which it is admitted, and gets it again.
async fn namespace_changes(cluster: &Cluster) -> Result<()> {
    let pods = cluster.run(&[objects::pod("red-team", "stays", "node1")]).await?;
    authorized(cluster, &pods[0], "eth0", Ok(())).await?;
    relabel(cluster, "red-team", "none").await?;
    authorized(cluster, &pods[0], "eth0", Err("NamespaceNotAdmitted")).await?;
    reported(cluster, &pods[0], "spec.access.namespaces").await?;
    ensure!(
        interface_names(&pods[0])? == ["eth0"],
        "a running pod keeps its interface"
    );
    let named = json!({ "annotations": { "kni.dev/network": "red" } });
    cluster
        .create_pods(&[objects::pod_with("red-team", "late", "node1", &named)])
        .await?;
    refused(cluster, "red-team/late", "spec.access.namespaces").await?;
    let explained = cluster.nodes[0].knictl(&["explain", "red-team/late", "red-team/stays", "tcp/80"]);
    let explained = format!("{:#}", explained.err().context("a refused pod is explained")?);
    ensure!(explained.contains("network red: spec.access.namespaces"), "{explained}");
    relabel(cluster, "red-team", "red").await?;
    authorized(cluster, &pods[0], "eth0", Ok(())).await?;
    // The refused pod is tried again, and runs without a change of its own.
    cluster.running("red-team", "late").await?;
    cluster.remove("red-team", &["stays", "late"]).await
}

/// The access of a network changes.
async fn access_changes(cluster: &Cluster) -> Result<()> {
    let named = json!({ "annotations": { "kni.dev/network": "shared" } });
    let pods = cluster
        .run(&[objects::pod_with("plain", "kept", "node1", &named)])
        .await?;
    access(cluster, "shared", &json!({ "namespaces": { "from": "None" } })).await?;
    authorized(cluster, &pods[0], "eth0", Err("NamespaceNotAdmitted")).await?;
    ensure!(
        interface_names(&pods[0])? == ["eth0"],
        "a running pod keeps its interface"
    );
    access(cluster, "shared", &json!({ "namespaces": { "from": "All" } })).await?;
    authorized(cluster, &pods[0], "eth0", Ok(())).await?;
    cluster.remove("plain", &["kept"]).await
}

/// A network that revokes stops the traffic of its interfaces at once, and lets it flow again with the right: nothing
/// of the interface is lost.
async fn revoked(cluster: &Cluster) -> Result<()> {
    let named = json!({ "annotations": { "kni.dev/network": "shared" } });
    let pods = ["loser", "peer"].map(|name| objects::pod_with("plain", name, "node1", &named));
    let pods = cluster.run(&pods).await?;
    let _server = serve(&pods[0])?;
    let there = address(&pods[0], true);
    let answers = || tcp_get(&pods[1].inside, there, PORT, SILENCE).is_ok();
    ensure!(answers(), "before");
    let connection = Stream::tcp(&pods[1].inside, SocketAddr::new(there, PORT))?;
    let taken = json!({ "namespaces": { "from": "None" }, "revoke": true });
    let back = json!({ "namespaces": { "from": "All" }, "revoke": null });
    access(cluster, "shared", &taken).await?;
    wait::until("its traffic is stopped", patience(), async || Ok(!answers())).await?;
    authorized(cluster, &pods[0], "eth0", Err("NamespaceNotAdmitted")).await?;
    reported(cluster, &pods[0], "its traffic is stopped").await?;
    ensure!(interface_names(&pods[0])? == ["eth0"], "it is still attached");
    access(cluster, "shared", &back).await?;
    wait::until("its traffic flows again", patience(), async || Ok(answers())).await?;
    authorized(cluster, &pods[0], "eth0", Ok(())).await?;
    ensure!(kernel_addresses(&pods[0], "eth0")? == [there], "with its address");
    let report = connection.stop();
    ensure!(report.broken.is_none(), "its connections continue: {:?}", report.broken);
    cluster.remove("plain", &["loser", "peer"]).await?;
    detached_later(cluster, &taken, &back).await
}

/// A right that stays away ends the interface; that of an attachment comes back with it.
async fn detached_later(cluster: &Cluster, taken: &Value, back: &Value) -> Result<()> {
    cluster
        .apply(&[objects::attachment("plain", "taken", "shared", "net1")])
        .await?;
    let joined = json!({ "labels": { "join": "taken" } });
    let pods = cluster
        .run(&[objects::pod_with("plain", "joined", "node1", &joined)])
        .await?;
    let names = || interface_names(&pods[0]).map(|mut names| (names.sort(), names).1);
    ensure!(names()? == ["eth0", "net1"]);
    access(cluster, "shared", taken).await?;
    let begun = Instant::now();
    wait::until("the interface is taken", 2 * patience(), async || {
        Ok(names()? == ["eth0"])
    })
    .await?;
    ensure!(begun.elapsed() >= GRACE, "after {:?}", begun.elapsed());
    access(cluster, "shared", back).await?;
    wait::until("the interface is back", patience(), async || {
        Ok(names()? == ["eth0", "net1"])
    })
    .await?;
    cluster.remove("plain", &["joined"]).await
}

/// Another service account has the verb: kni-controller asks the API server, and the agents read its answer.
async fn granted(cluster: &Cluster) -> Result<()> {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": "join-granted" },
        "rules": [{
            "apiGroups": ["kni.dev"], "resources": ["podnetworks"], "resourceNames": ["granted"], "verbs": ["join"],
        }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": "join-granted" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "join-granted" },
        "subjects": [{ "kind": "ServiceAccount", "namespace": "plain", "name": "joiner" }],
    });
    cluster.apply(&[role, binding]).await?;
    let named = json!({ "annotations": { "kni.dev/network": "granted" } });
    let mut pod = objects::pod_with("plain", "allowed", "node1", &named);
    pod["spec"]["serviceAccountName"] = json!("joiner");
    cluster.run(&[pod]).await?;
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let status = api.get("granted").await?.status.context("status")?;
    ensure!(status.join_accounts == ["plain/joiner"], "{:?}", status.join_accounts);
    cluster.remove("plain", &["allowed"]).await
}

/// In a cluster, an annotation gives no pod labels for policies, also where the pod's object is not known.
async fn labels_of_an_annotation(cluster: &Cluster) -> Result<()> {
    let closed = json!({ "podSelector": { "matchLabels": { "role": "guarded" } }, "policyTypes": ["Ingress"] });
    cluster.apply(&[objects::policy("plain", "guard", &closed)]).await?;
    let labels = json!({ "labels": { "role": "guarded" } });
    cluster
        .run(&[objects::pod_with("plain", "labelled", "node1", &labels)])
        .await?;
    let kni = cluster.nodes[0].kubelet.kni();
    let selected = async |pod: &str| {
        let request = kni_proto::runtime::GetPolicyRequest {
            pod_namespace: "plain".into(),
            pod_name: pod.into(),
        };
        let policy = kni.runtime().get_policy(request).await?.into_inner();
        Ok::<_, anyhow::Error>(policy.interfaces.iter().any(|found| found.policy_set != 0))
    };
    wait::until("the policy selects the pod", patience(), async || {
        selected("labelled").await
    })
    .await?;
    let annotated = [("kni.dev/labels", "role=guarded")];
    let pod = kni.run_pod("plain", "unknown", &annotated).await?;
    ensure!(!selected("unknown").await?, "the annotation is the pod's identity");
    kni.kill_pod(pod).await?;
    cluster.remove("plain", &["labelled"]).await
}

async fn relabel(cluster: &Cluster, namespace: &str, tenant: &str) -> Result<()> {
    let api: Api<Namespace> = Api::all(cluster.client.clone());
    let labels = json!({ "metadata": { "labels": { "tenant": tenant } } });
    api.patch(namespace, &PatchParams::default(), &Patch::Merge(&labels))
        .await?;
    Ok(())
}

async fn access(cluster: &Cluster, network: &str, access: &Value) -> Result<()> {
    let api: Api<PodNetwork> = Api::all(cluster.client.clone());
    let spec = json!({ "spec": { "access": access } });
    api.patch(network, &PatchParams::default(), &Patch::Merge(&spec))
        .await?;
    Ok(())
}

/// Waits until the pod's object has the condition: true, or false with a reason.
async fn authorized(cluster: &Cluster, pod: &Pod, interface: &str, expected: Result<(), &str>) -> Result<()> {
    let api: Api<PodInterface> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let name = kni_api::pod_interface::name(&pod.name, &pod.uid, interface);
    wait::until(&format!("{name} is authorized: {expected:?}"), patience(), async || {
        let status = api.get_opt(&name).await?.and_then(|object| object.status);
        let conditions = status.map(|status| status.conditions).unwrap_or_default();
        let mut found = conditions.iter().filter(|condition| condition.type_ == "Authorized");
        let found = found.next().context("no such condition yet")?;
        Ok(match expected {
            Ok(()) => found.status == ConditionStatus::True,
            Err(reason) => found.status == ConditionStatus::False && found.reason == reason,
        })
    })
    .await
    .map(drop)
}

/// Waits for the event of a pod that names the rule.
async fn reported(cluster: &Cluster, pod: &Pod, rule: &str) -> Result<()> {
    wait::until_some(&format!("an event of pod {}", pod.name), patience(), async || {
        let note = event(cluster, &pod.namespace, &pod.name).await?;
        Ok(note.filter(|note| note.contains(rule)))
    })
    .await
    .map(drop)
}

/// Waits until the agent refuses a pod by a rule.
async fn refused(cluster: &Cluster, pod: &str, rule: &str) -> Result<()> {
    wait::until(&format!("pod {pod} is refused"), patience(), async || {
        let refusals = cluster.nodes[0].kubelet.refusals();
        let mut ours = refusals.iter().filter(|refusal| refusal.pod == pod);
        Ok(ours.any(|refusal| refusal.message.contains(rule)))
    })
    .await
    .map(drop)
}
