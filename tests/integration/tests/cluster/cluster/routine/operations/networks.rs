//! Exports, deletes and creates networks again, and applies objects in another order.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use kni_api::{IN_USE_FINALIZER, PodNetwork};
use kni_integration::{
    Pod,
    cluster::{objects, patience},
    traffic::Stream,
    wait,
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{
    super::{
        super::scene::{PORT, address, ask, assert_reached, assert_silent, identity, serve, wait_for_condition},
        bed::{Bed, NETWORK},
    },
    AWAY, Own,
};

/// A network of its own, and its namespace.
const SPARE: &str = "spare";
const SPARE_TEAM: &str = "spare-team";
/// Answers of a stream of the operation, before and after.
const ANSWERS: u64 = 100;

/// A label of the network.
pub(super) async fn labelled(bed: &Bed, is_set: bool) -> Result<()> {
    let value = is_set.then_some("yes");
    let patch = Patch::Merge(json!({ "metadata": { "labels": { "test/changed": value } } }));
    api(bed).patch(NETWORK, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// A network that no pod uses is exported, deleted, and created from the export.
pub(super) async fn exported(bed: &Bed) -> Result<()> {
    let spare = spare();
    bed.cluster.apply(&spare).await?;
    wait_for_condition(&bed.cluster, SPARE, "Programmed", true).await?;
    let exported = export(bed).await?;
    api(bed).delete(SPARE, &DeleteParams::default()).await?;
    gone(bed).await?;
    create(bed, &exported).await?;
    let pods = pair(bed).await?;
    let _server = serve(&pods[1])?;
    assert_reached(&pods[0], &pods[1]);
    leave(bed).await
}

/// A network that pods use is deleted: their traffic stays, new pods are refused, and it goes with the last pod. Then
/// it is created from the export of before.
pub(super) async fn deleted_in_use(bed: &Bed) -> Result<Own> {
    bed.cluster.apply(&spare()).await?;
    wait_for_condition(&bed.cluster, SPARE, "Programmed", true).await?;
    let mut own = Own::new();
    let pods = pair(bed).await?;
    let server = serve(&pods[1])?;
    assert_reached(&pods[0], &pods[1]);
    let exported = export(bed).await?;
    let streams = streams(&pods)?;
    api(bed).delete(SPARE, &DeleteParams::default()).await?;
    tokio::time::sleep(AWAY).await;
    let object = api(bed).get(SPARE).await?;
    ensure!(object.metadata.deletion_timestamp.is_some(), "it waits for its pods");
    own.extend(stop(streams, "in a network that is being deleted")?);
    drop(server);
    bed.cluster.remove(SPARE_TEAM, &["one", "two"]).await?;
    gone(bed).await?;
    create(bed, &exported).await?;
    let pods = pair(bed).await?;
    let _server = serve(&pods[1])?;
    assert_reached(&pods[0], &pods[1]);
    leave(bed).await?;
    Ok(own)
}

/// A network is restored from a backup, which has finalizers and no status, before kni-controller runs.
pub(super) async fn restored(bed: &mut Bed) -> Result<()> {
    bed.cluster.apply(&spare()).await?;
    wait_for_condition(&bed.cluster, SPARE, "Programmed", true).await?;
    let exported = export(bed).await?;
    api(bed).delete(SPARE, &DeleteParams::default()).await?;
    gone(bed).await?;
    bed.cluster.controllers.last_mut().context("one")?.kill()?;
    create_only(bed, &exported).await?;
    tokio::time::sleep(AWAY).await;
    bed.cluster.start_controller().await?;
    wait_for_condition(&bed.cluster, SPARE, "Programmed", true).await?;
    let pods = pair(bed).await?;
    let _server = serve(&pods[1])?;
    assert_reached(&pods[0], &pods[1]);
    leave(bed).await
}

/// Pods first, then their policy, and their network last.
pub(super) async fn reverse_order(bed: &Bed) -> Result<Own> {
    let [network, namespace] = spare();
    let mut stated = namespace;
    // Without it the pods would be of the default network.
    stated["metadata"]["labels"]["kni.dev/network"] = json!(SPARE);
    bed.cluster.apply(&[stated]).await?;
    bed.cluster.create_pods(&pair_objects()).await?;
    let from_none = json!({ "podSelector": { "matchLabels": { "app": "closed" } }, "policyTypes": ["Ingress"] });
    bed.cluster
        .apply(&[objects::policy(SPARE_TEAM, "closed", &from_none)])
        .await?;
    tokio::time::sleep(AWAY).await;
    ensure!(
        bed.cluster
            .nodes
            .iter()
            .all(|node| node.kubelet.pod(SPARE_TEAM, "one").is_none()),
        "a pod runs before its network exists"
    );
    bed.cluster.apply(&[network]).await?;
    let pods = [
        bed.cluster.running(SPARE_TEAM, "one").await?,
        bed.cluster.running(SPARE_TEAM, "two").await?,
        bed.cluster.running(SPARE_TEAM, "closed").await?,
    ];
    let _servers = [serve(&pods[1])?, serve(&pods[2])?];
    wait::until("the pods reach each other", patience(), async || {
        let to = identity(&pods[1]);
        Ok(ask(&pods[0], &pods[1]) == vec![Ok(to.clone()), Ok(to)])
    })
    .await?;
    let own = stop(streams(&pods[..2])?, "of pods that were first")?;
    assert_silent(&pods[0], &pods[2]);
    leave(bed).await?;
    Ok(own)
}

fn spare() -> [Value; 2] {
    let admitted = json!({ "namespaceSelector": { "matchLabels": { "tenant": SPARE } } });
    [
        objects::network(SPARE, &["10.77.0.0/24", "fd77::/120"], &admitted),
        objects::namespace(SPARE_TEAM, &json!({ "tenant": SPARE })),
    ]
}

fn pair_objects() -> [Value; 3] {
    let closed = json!({ "labels": { "app": "closed" } });
    [
        objects::pod(SPARE_TEAM, "one", "node1"),
        objects::pod(SPARE_TEAM, "two", "node2"),
        objects::pod_with(SPARE_TEAM, "closed", "node1", &closed),
    ]
}

async fn pair(bed: &Bed) -> Result<Vec<Pod>> {
    bed.cluster.run(&pair_objects()[..2]).await
}

/// UDP and TCP from the first pod to the second one.
fn streams(pods: &[Pod]) -> Result<[Stream; 2]> {
    let to = SocketAddr::new(address(&pods[1], true), PORT);
    let streams = [Stream::udp(&pods[0].inside, to)?, Stream::tcp(&pods[0].inside, to)?];
    for stream in &streams {
        stream.wait_for_answers(ANSWERS)?;
    }
    Ok(streams)
}

/// Ends the streams of [`streams`] after more answers, by their server alone.
fn stop(streams: [Stream; 2], what: &str) -> Result<Own> {
    let mut own = Own::new();
    for (stream, protocol) in streams.into_iter().zip(["UDP", "TCP"]) {
        stream.wait_for_answers(ANSWERS)?;
        let report = stream.stop();
        let server = format!("{SPARE_TEAM}/two");
        ensure!(report.identities.iter().eq([&server]), "{what}: {report:?}");
        own.push((format!("{protocol} {what}"), report));
    }
    Ok(own)
}

/// Deletes the pods, the network and the namespace.
async fn leave(bed: &Bed) -> Result<()> {
    bed.cluster.remove(SPARE_TEAM, &["one", "two", "closed"]).await?;
    let closed = objects::policy(SPARE_TEAM, "closed", &json!({}));
    let [network, namespace] = spare();
    for object in [closed, network, namespace] {
        bed.cluster.delete(&object).await?;
        wait::until("the object is gone", patience(), async || {
            Ok(bed.cluster.get(&object).await?.is_none())
        })
        .await?;
    }
    Ok(())
}

async fn gone(bed: &Bed) -> Result<()> {
    wait::until("the network is gone", patience(), async || {
        Ok(api(bed).get_opt(SPARE).await?.is_none())
    })
    .await
    .map(drop)
}

/// `kubectl get -o yaml` without what the API server refuses in a new object.
async fn export(bed: &Bed) -> Result<PodNetwork> {
    let mut exported = wait::until_some("the network has a finalizer", patience(), async || {
        let network = api(bed).get(SPARE).await?;
        let is_whole = network.status.is_some() && network.finalizers() == [IN_USE_FINALIZER];
        Ok(is_whole.then_some(network))
    })
    .await?;
    exported.metadata.resource_version = None;
    exported.metadata.managed_fields = None;
    Ok(exported)
}

/// `kubectl create` of an export: the API server drops the status, and keeps the finalizer.
async fn create(bed: &Bed, exported: &PodNetwork) -> Result<()> {
    create_only(bed, exported).await?;
    wait_for_condition(&bed.cluster, SPARE, "Programmed", true)
        .await
        .map(drop)
}

async fn create_only(bed: &Bed, exported: &PodNetwork) -> Result<()> {
    let mut object = exported.clone();
    object.metadata.uid = None;
    let created = api(bed).create(&PostParams::default(), &object).await?;
    ensure!(created.uid() != exported.uid() && created.status.is_none());
    ensure!(created.finalizers() == [IN_USE_FINALIZER], "{:?}", created.finalizers());
    Ok(())
}

fn api(bed: &Bed) -> Api<PodNetwork> {
    Api::all(bed.cluster.client.clone())
}
