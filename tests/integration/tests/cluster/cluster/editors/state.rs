//! Reads the objects of the victims, and of the nodes and networks that they use, without what each moment changes.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use kni_integration::{Cluster, cluster::objects};
use kube::{
    Api, ResourceExt as _,
    api::{DynamicObject, ListParams},
};
use serde_json::{Value, json};

use super::victim::{LATE, Victim};

/// Objects by kind, namespace and name.
pub(super) type State = BTreeMap<String, Value>;

/// Kinds of the victims' namespaces, and the fields that are compared.
const OF_NAMESPACES: [(&str, &str, &[&str]); 5] = [
    (
        "kni.dev/v1alpha1",
        "PodInterface",
        &["/spec", "/status/addresses", "/status/mac", "/status/netnsInode"],
    ),
    (
        "v1",
        "Pod",
        &[
            "/metadata/labels",
            "/metadata/annotations",
            "/metadata/uid",
            "/status/podIPs",
            "/status/phase",
        ],
    ),
    (
        "v1",
        "Service",
        &["/metadata/labels", "/metadata/uid", "/spec", "/status"],
    ),
    (
        "discovery.k8s.io/v1",
        "EndpointSlice",
        &["/metadata/labels", "/endpoints", "/ports"],
    ),
    ("networking.k8s.io/v1", "NetworkPolicy", &["/metadata/uid", "/spec"]),
];
/// Kinds of the cluster.
const OF_CLUSTER: [(&str, &str, &[&str]); 3] = [
    (
        "v1",
        "Node",
        &[
            "/metadata/uid",
            "/metadata/labels",
            "/spec/taints",
            "/spec/unschedulable",
        ],
    ),
    ("kni.dev/v1alpha1", "NodeEndpoint", &["/spec", "/status"]),
    ("kni.dev/v1alpha1", "NetworkNumber", &["/metadata/uid", "/spec"]),
];
/// The conditions of a network that concern its pods.
const CONDITIONS: [&str; 2] = ["Programmed", "AddressesAvailable"];

/// The present state.
pub(super) async fn read(cluster: &Cluster, victims: &[Victim; 2]) -> Result<State> {
    let mut state = State::new();
    for victim in victims {
        for (version, kind, fields) in OF_NAMESPACES {
            for object in list(cluster, version, kind, Some(victim.namespace)).await? {
                // Those of one measurement go in the background.
                if !object["metadata"]["name"]
                    .as_str()
                    .is_some_and(|name| name.starts_with(LATE))
                {
                    insert(&mut state, kind, &object, fields);
                }
            }
        }
    }
    for (version, kind, fields) in OF_CLUSTER {
        for object in list(cluster, version, kind, None).await? {
            insert(&mut state, kind, &object, fields);
        }
    }
    networks(cluster, &mut state).await?;
    members(cluster, victims, &mut state).await?;
    Ok(state)
}

/// What differs from the state before; more address blocks are no difference.
pub(super) fn differences(before: &State, now: &State) -> Vec<String> {
    let mut found = Vec::new();
    for (name, object) in before {
        match now.get(name) {
            None => found.push(format!("{name} is gone")),
            Some(other) if other != object => found.push(format!("{name} is {other}, not {object}")),
            Some(_) => {}
        }
    }
    let new = now
        .keys()
        .filter(|name| !before.contains_key(*name) && !name.starts_with("AddressBlock"));
    found.extend(new.map(|name| format!("{name} is new")));
    found
}

async fn list(cluster: &Cluster, version: &str, kind: &str, namespace: Option<&str>) -> Result<Vec<Value>> {
    let any = json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "any" } });
    let (resource, ..) = objects::locate(&any)?;
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(cluster.client.clone(), namespace, &resource),
        None => Api::all_with(cluster.client.clone(), &resource),
    };
    let listed = api
        .list(&ListParams::default())
        .await
        .with_context(|| kind.to_owned())?;
    listed
        .into_iter()
        .map(|object| {
            let name = object.name_any();
            serde_json::to_value(object).with_context(|| name)
        })
        .collect()
}

fn insert(state: &mut State, kind: &str, object: &Value, fields: &[&str]) {
    let values = fields.iter().map(|field| (*field, object.pointer(field).cloned()));
    let metadata = &object["metadata"];
    let name = format!(
        "{kind} {}/{}",
        metadata["namespace"].as_str().unwrap_or_default(),
        metadata["name"]
    );
    state.insert(name, json!(values.collect::<BTreeMap<_, _>>()));
}

/// The networks of the victims and their address blocks.
async fn networks(cluster: &Cluster, state: &mut State) -> Result<()> {
    let is_used = |name: &Value| name == "vault" || name == "default";
    for object in list(cluster, "kni.dev/v1alpha1", "PodNetwork", None).await? {
        if is_used(&object["metadata"]["name"]) {
            let kind = "PodNetwork";
            insert(
                state,
                kind,
                &object,
                &["/metadata/uid", "/metadata/finalizers", "/metadata/labels", "/spec"],
            );
            let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
            let of_pods = conditions.filter(|one| CONDITIONS.iter().any(|kind| one["type"] == *kind));
            let of_pods: BTreeMap<_, _> = of_pods.map(|one| (one["type"].to_string(), &one["status"])).collect();
            state.insert(
                format!("conditions of PodNetwork {}", object["metadata"]["name"]),
                json!(of_pods),
            );
        }
    }
    for object in list(cluster, "kni.dev/v1alpha1", "AddressBlock", None).await? {
        if is_used(&object["spec"]["network"]) {
            insert(state, "AddressBlock", &object, &["/metadata/uid", "/spec"]);
        }
    }
    Ok(())
}

/// The confirmed interfaces of the victims' pods with their labels.
async fn members(cluster: &Cluster, victims: &[Victim; 2], state: &mut State) -> Result<()> {
    for object in list(cluster, "kni.dev/v1alpha1", "NetworkMembers", None).await? {
        let status = &object["status"];
        for member in status["members"].as_array().into_iter().flatten() {
            let is_late = member["podName"].as_str().is_some_and(|name| name.starts_with(LATE));
            if victims.iter().any(|victim| member["namespace"] == victim.namespace) && !is_late {
                let kind = member["kind"].as_u64().and_then(|kind| usize::try_from(kind).ok());
                let labels = kind.map(|kind| &status["kinds"][kind]["labels"]);
                let mut member = member.clone();
                member["kind"] = json!(labels);
                let name = format!(
                    "member {} {} {}",
                    object["spec"]["network"], member["podUid"], member["interface"]
                );
                state.insert(name, member);
            }
        }
    }
    Ok(())
}
