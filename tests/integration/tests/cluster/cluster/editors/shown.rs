//! Waits until an accepted attempt shows where its row expects it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::events::v1::Event;
use kni_api::NodeNetwork;
use kni_integration::{Cluster, eventually};
use kni_proto::runtime::ListServicesRequest;
use kube::{Api, api::ListParams};
use serde_json::Value;

use super::{
    super::{request::Request, scene::condition},
    row::{Network, Shown},
    scene::Editor,
};

/// An error names where the attempt does not show within the limit.
pub(super) async fn wait(
    cluster: &Cluster,
    editor: &Editor,
    (shown, requests): (Shown, &[Request]),
    limit: Duration,
) -> Result<()> {
    let made: Vec<&Value> = requests.iter().filter_map(Request::created).collect();
    let look = async || match shown {
        Shown::Nowhere => Ok(()),
        Shown::Running => are_running(cluster, editor, &made),
        Shown::Unattached(field) => are_refused(cluster, editor, &made, field),
        Shown::Full(network) => is_full(cluster, editor, network).await,
        Shown::Listed(problem) => is_listed(cluster, editor, &made, problem).await,
        Shown::Event(reason) => has_event(cluster, editor, &made, reason).await,
        Shown::Closed => is_closed(cluster, editor).await,
    };
    eventually(limit, look)
        .await
        .with_context(|| format!("does not show: {shown}"))
}

fn names<'a>(made: &[&'a Value], kind: &'a str) -> impl Iterator<Item = &'a str> {
    let of_kind = made.iter().copied().filter(move |object| object["kind"] == kind);
    let names: Vec<&str> = of_kind
        .filter_map(|object| object["metadata"]["name"].as_str())
        .collect();
    names.into_iter()
}

fn are_running(cluster: &Cluster, editor: &Editor, made: &[&Value]) -> Result<()> {
    let namespace = &editor.form.namespace;
    for name in names(made, "Pod") {
        let mut nodes = cluster.nodes.iter();
        let is_running = nodes.any(|node| node.kubelet.reported(namespace, name).is_some());
        ensure!(is_running, "{namespace}/{name} does not run; {}", cluster.refusals());
    }
    Ok(())
}

/// Each pod is refused, and none runs.
fn are_refused(cluster: &Cluster, editor: &Editor, made: &[&Value], field: &str) -> Result<()> {
    let namespace = &editor.form.namespace;
    for name in names(made, "Pod") {
        let full = format!("{namespace}/{name}");
        let runs = cluster
            .nodes
            .iter()
            .any(|node| node.kubelet.pod(namespace, name).is_some());
        ensure!(!runs, "{full} runs");
        let refusals = cluster.nodes.iter().flat_map(|node| node.kubelet.refusals());
        let mut of_pod = refusals.filter(|refusal| refusal.pod == full);
        let is_refused = of_pod.any(|refusal| refusal.message.contains(field));
        ensure!(is_refused, "{full} is not refused by {field}; {}", cluster.refusals());
    }
    Ok(())
}

async fn is_full(cluster: &Cluster, editor: &Editor, network: Network) -> Result<()> {
    let name = match network {
        Network::Own => &*editor.form.own,
        Network::Shared => "shared",
    };
    let found = condition(cluster, name, "AddressesAvailable").await?;
    let (status, message) = found.context("no condition")?;
    ensure!(status == false.into(), "{status:?}: {message}");
    Ok(())
}

async fn is_listed(cluster: &Cluster, editor: &Editor, made: &[&Value], problem: &str) -> Result<()> {
    // A Service that is not applied is listed without its ports.
    for member in &cluster.nodes {
        let request = ListServicesRequest {};
        let listed = member
            .kubelet
            .kni()
            .runtime()
            .list_services(request)
            .await?
            .into_inner()
            .services;
        let of_service = |name: &str| format!("{}/{name}", editor.form.namespace);
        if problem.is_empty() {
            for name in names(made, "Service") {
                let is_listed = listed.iter().any(|port| port.service.starts_with(&of_service(name)));
                ensure!(is_listed, "{name} on {}", member.name);
            }
        } else {
            let of_editor = |port: &&kni_proto::runtime::ServicePort| {
                names(made, "Service").any(|name| port.service.starts_with(&of_service(name)))
            };
            let mut problems = listed.iter().filter(of_editor).map(|port| &port.problem);
            ensure!(
                problems.any(|one| one.contains(problem)),
                "{problem} on {}",
                member.name
            );
        }
    }
    Ok(())
}

async fn has_event(cluster: &Cluster, editor: &Editor, made: &[&Value], reason: &str) -> Result<()> {
    let api: Api<Event> = Api::namespaced(cluster.client.clone(), &editor.form.namespace);
    let events = api.list(&ListParams::default()).await?.items;
    let names: Vec<&str> = made
        .iter()
        .filter_map(|object| object["metadata"]["name"].as_str())
        .collect();
    let found = events.iter().any(|event| {
        let about = event.regarding.as_ref().and_then(|about| about.name.as_deref());
        event.reason.as_deref() == Some(reason) && about.is_some_and(|about| names.contains(&about))
    });
    ensure!(found, "no event {reason} about {names:?}");
    Ok(())
}

/// The node of the namespace's pod reports it.
async fn is_closed(cluster: &Cluster, editor: &Editor) -> Result<()> {
    let api: Api<NodeNetwork> = Api::all(cluster.client.clone());
    let status = api.get(&editor.form.node).await?.status.context("no status")?;
    let mut closed = status.policies.closed.iter();
    ensure!(
        closed.any(|closed| closed.namespace == editor.form.namespace),
        "{:?}",
        status.policies
    );
    Ok(())
}
