//! Removes the writes of the agents and of kni-controller from the cluster when neither runs any more.

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::{
    api::{
        apps::v1::DaemonSet,
        coordination::v1::Lease,
        core::v1::{Node, Pod},
    },
    apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kni_api::{
    AddressBlock, EgressAddressClaim, EgressAddressPool, EgressPolicy, GROUP, NetworkMembers, NetworkNumber,
    NodeEndpoint, NodeNetwork, PodInterface, PodNetwork, PodNetworkAttachment, RESOURCE_PREFIX,
};
use kni_reflectors::{RequestLimits, Sender, connect};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    core::PartialObjectMeta,
};
use serde_json::{Map, Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::UninstallArgs;

/// Name of the agents' `DaemonSet`, and prefix of their field managers' names.
const AGENT: &str = "kni-agent";
/// Name of the controller's `Deployment` and of its `Lease`.
const CONTROLLER: &str = "kni-controller";
/// Label of the `DaemonSet`'s pods that clean up instead of serving.
const TASK_LABEL: &str = "kni.dev/task";
/// Annotation of pods with the status of their interfaces; agents of other networks write it as well.
const STATUS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/network-status";
/// Attempts to update an object that changes meanwhile.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_secs(1);

/// Removes everything that the agents wrote from the cluster; objects of users stay.
pub async fn uninstall(args: &UninstallArgs) -> Result<()> {
    let connection = connect(
        args.cluster.kubeconfig.as_deref(),
        RequestLimits::default(),
        Sender::Job,
    )
    .await?;
    let client = connection.client;
    let deadline = Instant::now() + Duration::from_secs(args.wait.into());
    wait_for_controller(&client, args, deadline).await?;
    wait_for_agents(&client, args, deadline).await?;
    release::<AddressBlock>(&client).await?;
    release::<PodNetwork>(&client).await?;
    release::<PodNetworkAttachment>(&client).await?;
    release::<EgressPolicy>(&client).await?;
    // A stale status would be taken for the current one: a network whose status counts pods must not be deleted.
    clear_status::<PodNetwork>(&client).await?;
    clear_status::<PodNetworkAttachment>(&client).await?;
    clear_status::<EgressPolicy>(&client).await?;
    clear_status::<EgressAddressPool>(&client).await?;
    delete_all::<EgressAddressClaim>(&client).await?;
    delete_all::<AddressBlock>(&client).await?;
    delete_all::<NetworkNumber>(&client).await?;
    delete_all::<PodInterface>(&client).await?;
    delete_all::<NetworkMembers>(&client).await?;
    delete_all::<NodeEndpoint>(&client).await?;
    delete_all::<NodeNetwork>(&client).await?;
    for node in all::<Node>(&client).await? {
        restore_node(&client, &node).await?;
    }
    for pod in all::<Pod>(&client).await? {
        restore_pod(&client, &pod).await?;
    }
    let leases: Api<Lease> = Api::namespaced(client, &args.cluster.namespace);
    let deleted = leases.delete(CONTROLLER, &DeleteParams::default()).await;
    if_there(deleted).with_context(|| format!("deleting Lease {CONTROLLER}"))?;
    tracing::info!("the cluster is as without agents");
    Ok(())
}

/// Waits for SIGTERM or SIGINT.
pub async fn rest() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Waits until no pod of kni-controller is left.
async fn wait_for_controller(client: &Client, args: &UninstallArgs, deadline: Instant) -> Result<()> {
    let namespace = &args.cluster.namespace;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let controllers = ListParams::default().labels(&format!("app.kubernetes.io/name={CONTROLLER}"));
    while let Some(pod) = pods.list_metadata(&controllers).await?.items.first() {
        ensure!(
            Instant::now() < deadline,
            "pod {namespace}/{} still runs: delete Deployment {CONTROLLER}, or apply overlays/uninstall; what it would \
             write again stays in the cluster",
            pod.name_any()
        );
        tracing::info!("waiting for the end of pod {namespace}/{}", pod.name_any());
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Waits until the agents' `DaemonSet` is gone, or its pods clean up instead.
async fn wait_for_agents(client: &Client, args: &UninstallArgs, deadline: Instant) -> Result<()> {
    let namespace = &args.cluster.namespace;
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    loop {
        let Some(set) = sets.get_opt(AGENT).await.context("reading the agents' DaemonSet")? else {
            break;
        };
        let Some(left) = unfinished(&set) else {
            return Ok(());
        };
        ensure!(
            Instant::now() < deadline,
            "DaemonSet {namespace}/{AGENT}: {left}; what its agents would write again stays in the cluster"
        );
        tracing::info!("waiting for DaemonSet {namespace}/{AGENT}: {left}");
        tokio::time::sleep(PAUSE).await;
    }
    // Its pods may outlive it for a moment.
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let agents = ListParams::default().labels(&format!("app.kubernetes.io/name={AGENT}"));
    while let Some(pod) = pods.list_metadata(&agents).await?.items.first() {
        let name = pod.name_any();
        ensure!(
            Instant::now() < deadline,
            "the agent of pod {namespace}/{name} still runs"
        );
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// The remaining work until every node is cleaned up.
fn unfinished(set: &DaemonSet) -> Option<String> {
    let labels = set
        .spec
        .template
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.labels.as_ref());
    if labels.and_then(|labels| labels.get(TASK_LABEL)).map(String::as_str) != Some("uninstall") {
        return Some("its pods are agents: delete it, or apply overlays/uninstall".to_owned());
    }
    let status = set.status.clone().unwrap_or_default();
    if status.observed_generation < set.metadata.generation {
        return Some("the change to clean up has not been seen yet".to_owned());
    }
    let (desired, updated) = (
        status.desired_number_scheduled,
        status.updated_number_scheduled.unwrap_or(0),
    );
    let done = updated.min(status.number_ready);
    (done < desired).then(|| format!("{done} of {desired} nodes are clean"))
}

/// All objects of a kind, their metadata only; none where the kind is unknown.
async fn all<K>(client: &Client) -> Result<Vec<PartialObjectMeta<K>>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    let kind = K::kind(&());
    let api: Api<K> = Api::all(client.clone());
    let listed =
        if_there(api.list_metadata(&ListParams::default()).await).with_context(|| format!("listing {kind}"))?;
    Ok(listed.map(|list| list.items).unwrap_or_default())
}

/// Patches an object by its path below the API's root, in any scope.
async fn patch<K>(client: &Client, object: &PartialObjectMeta<K>, subresource: &str, patch: &Value) -> kube::Result<()>
where
    K: Resource<DynamicType = ()>,
{
    let url = K::url_path(&(), object.metadata.namespace.as_deref());
    let request = kube::core::Request::new(url);
    let (name, params, patch) = (object.name_any(), PatchParams::default(), Patch::Merge(patch));
    let request = match subresource {
        "" => request.patch(&name, &params, &patch),
        subresource => request.patch_subresource(subresource, &name, &params, &patch),
    };
    let request = request.map_err(kube::Error::BuildRequest)?;
    client.request::<Value>(request).await.map(drop)
}

/// Removes the agents' finalizers, which block the deletion of objects.
async fn release<K>(client: &Client) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    for _try in 0..TRIES {
        let mut conflicts = false;
        for object in all::<K>(client).await? {
            let (ours, others): (Vec<&String>, Vec<&String>) =
                object.finalizers().iter().partition(|name| is_ours(name));
            if ours.is_empty() {
                continue;
            }
            let change = json!({ "metadata": {
                "finalizers": others, "resourceVersion": object.resource_version(),
            }});
            match patch(client, &object, "", &change).await {
                Err(error) if is_conflict(&error) => conflicts = true,
                done => {
                    if_there(done).with_context(|| format!("removing the finalizers of {}", shown(&object)))?;
                }
            }
        }
        if !conflicts {
            return Ok(());
        }
    }
    bail!("{} objects change all the time: does an agent still run?", K::kind(&()))
}

async fn clear_status<K>(client: &Client) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    for object in all::<K>(client).await? {
        let done = patch(client, &object, "status", &json!({ "status": null })).await;
        if_there(done).with_context(|| format!("clearing the status of {}", shown(&object)))?;
    }
    Ok(())
}

async fn delete_all<K>(client: &Client) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
{
    release::<K>(client).await?;
    for object in all::<K>(client).await? {
        let url = K::url_path(&(), object.metadata.namespace.as_deref());
        let request = kube::core::Request::new(url).delete(&object.name_any(), &DeleteParams::default())?;
        if_there(client.request::<Value>(request).await).with_context(|| format!("deleting {}", shown(&object)))?;
    }
    Ok(())
}

/// Removes taints, extended resources, labels and annotations.
async fn restore_node(client: &Client, node: &PartialObjectMeta<Node>) -> Result<()> {
    let name = node.name_any();
    let api: Api<Node> = Api::all(client.clone());
    for attempt in 1.. {
        let Some(current) = api
            .get_opt(&name)
            .await
            .with_context(|| format!("reading node {name}"))?
        else {
            return Ok(());
        };
        let mut change = Map::new();
        let taints = current.spec.and_then(|spec| spec.taints).unwrap_or_default();
        if taints.iter().any(|taint| is_ours(&taint.key)) {
            let others: Vec<_> = taints.into_iter().filter(|taint| !is_ours(&taint.key)).collect();
            change.insert("spec".into(), json!({ "taints": others }));
        }
        let metadata = &current.metadata;
        let labels = nulls(metadata.labels.iter().flat_map(|map| map.keys()), is_ours);
        let annotations = nulls(metadata.annotations.iter().flat_map(|map| map.keys()), is_ours);
        if change.is_empty() && labels.is_empty() && annotations.is_empty() {
            break;
        }
        let version = metadata.resource_version.clone();
        change.insert(
            "metadata".into(),
            json!({ "resourceVersion": version, "labels": labels, "annotations": annotations }),
        );
        match patch(client, node, "", &Value::Object(change)).await {
            Err(error) if is_conflict(&error) && attempt < TRIES => {}
            done => {
                restored(done, &name)?;
                break;
            }
        }
    }
    restore_resources(client, node, &api, &name).await
}

async fn restore_resources(client: &Client, node: &PartialObjectMeta<Node>, api: &Api<Node>, name: &str) -> Result<()> {
    let current = api
        .get_opt(name)
        .await
        .with_context(|| format!("reading node {name}"))?;
    let status = current.and_then(|node| node.status).unwrap_or_default();
    let is_resource = |key: &str| key.starts_with(RESOURCE_PREFIX);
    let capacity = nulls(status.capacity.iter().flat_map(|map| map.keys()), is_resource);
    let allocatable = nulls(status.allocatable.iter().flat_map(|map| map.keys()), is_resource);
    if capacity.is_empty() && allocatable.is_empty() {
        return Ok(());
    }
    let change = json!({ "status": { "capacity": capacity, "allocatable": allocatable } });
    restored(patch(client, node, "status", &change).await, name)
}

fn restored(done: kube::Result<()>, node: &str) -> Result<()> {
    if_there(done)
        .map(drop)
        .with_context(|| format!("removing taints and resources of node {node}"))
}

/// Removes the annotation with a pod's interfaces, if a KNI agent wrote it.
async fn restore_pod(client: &Client, pod: &PartialObjectMeta<Pod>) -> Result<()> {
    let written = |entry: &ManagedFieldsEntry| {
        let by_us = entry
            .manager
            .as_deref()
            .is_some_and(|manager| manager.starts_with(AGENT));
        let fields = entry
            .fields_v1
            .as_ref()
            .map(|fields| fields.0.pointer("/f:metadata/f:annotations"));
        by_us
            && fields
                .flatten()
                .is_some_and(|set| set.get(format!("f:{STATUS_ANNOTATION}")).is_some())
    };
    if !pod.managed_fields().iter().any(written) {
        return Ok(());
    }
    let change = json!({ "metadata": { "annotations": { STATUS_ANNOTATION: null } } });
    let done = patch(client, pod, "", &change).await;
    if_there(done)
        .map(drop)
        .with_context(|| format!("removing an annotation of {}", shown(pod)))
}

/// The keys that a merge patch removes.
fn nulls<'a>(keys: impl Iterator<Item = &'a String>, ours: impl Fn(&str) -> bool) -> Map<String, Value> {
    keys.filter(|key| ours(key))
        .map(|key| (key.clone(), Value::Null))
        .collect()
}

/// Whether a qualified name belongs to KNI's API group.
fn is_ours(name: &str) -> bool {
    name.split_once('/').is_some_and(|(group, _)| group == GROUP)
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409)
}

/// `None` where the object, or its kind, does not exist.
fn if_there<T>(outcome: kube::Result<T>) -> kube::Result<Option<T>> {
    match outcome {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        outcome => outcome.map(Some),
    }
}

fn shown<K: Resource<DynamicType = ()>>(object: &PartialObjectMeta<K>) -> String {
    let namespace = object
        .metadata
        .namespace
        .as_ref()
        .map(|namespace| format!("{namespace}/"));
    format!(
        "{} {}{}",
        K::kind(&()),
        namespace.unwrap_or_default(),
        object.name_any()
    )
}
