//! Finds the node that a command concerns, and the pod of that node's agent.

use k8s_openapi::api::core::v1::Pod;
use kni_api::PodInterface;
use kube::{Api, Client, ResourceExt as _, api::ListParams};

use super::cli::About;
use crate::error::Error;

/// Label of the agents' pods.
const AGENTS: &str = "app.kubernetes.io/name=kni-agent";

/// The node that a command concerns; by default the only one with an agent.
pub(super) async fn node(client: &Client, kni_namespace: &str, about: &About) -> Result<String, Error> {
    match about {
        About::Pod(pod) => {
            let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
            let what = format!("pod {}/{}", pod.namespace, pod.name);
            let found = api.get(&pod.name).await.map_err(Error::of_request(what.clone()))?;
            let node = found.spec.and_then(|spec| spec.node_name);
            node.ok_or_else(|| Error::Node(format!("{what} is on no node yet")))
        }
        About::Address(address) => by_address(client, address).await,
        About::Node => the_only_one(client, kni_namespace).await,
    }
}

/// Networks may overlap, so several pods may have an address.
async fn by_address(client: &Client, address: &str) -> Result<String, Error> {
    let api: Api<PodInterface> = Api::all(client.clone());
    let listed = api.list(&ListParams::default()).await;
    let listed = listed.map_err(Error::of_request("listing PodInterfaces"))?;
    let has = |interface: &&PodInterface| {
        let status = interface.status.as_ref();
        status.is_some_and(|status| status.addresses.iter().any(|own| own.ip == address))
    };
    let nodes = listed
        .items
        .iter()
        .filter(has)
        .map(|found| found.spec.node_name.clone());
    one(nodes.collect(), &format!("address {address}"))
}

async fn the_only_one(client: &Client, kni_namespace: &str) -> Result<String, Error> {
    let nodes = agents(client, kni_namespace).await?.into_iter().map(|(_, node)| node);
    one(nodes.collect(), "this command")
}

fn one(mut nodes: Vec<String>, what: &str) -> Result<String, Error> {
    nodes.sort_unstable();
    nodes.dedup();
    match nodes.as_slice() {
        [] => Err(Error::Node(format!("{what}: no agent knows of it"))),
        [node] => Ok(node.clone()),
        several => Err(Error::Node(format!(
            "{what}: say with --node which of {} is meant",
            several.join(", ")
        ))),
    }
}

/// The name of the pod of a node's agent.
pub(super) async fn agent(client: &Client, kni_namespace: &str, node: &str) -> Result<String, Error> {
    let agents = agents(client, kni_namespace).await?;
    let found = agents.into_iter().find(|(_, on)| on == node).map(|(name, _)| name);
    found.ok_or_else(|| {
        Error::Node(format!(
            "node {node} has no agent that runs in namespace {kni_namespace}"
        ))
    })
}

/// Names and nodes of the agents' running pods that are not being deleted.
pub(super) async fn agents(client: &Client, kni_namespace: &str) -> Result<Vec<(String, String)>, Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), kni_namespace);
    let listed = api.list(&ListParams::default().labels(AGENTS)).await;
    let listed = listed.map_err(Error::of_request("listing the agents' pods"))?;
    let runs = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
    };
    let running = listed.items.into_iter().filter(runs);
    Ok(running
        .filter_map(|pod| {
            let name = pod.name_any();
            Some((name, pod.spec?.node_name?))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_nodes_are_a_question() {
        let nodes = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(one(nodes(&["a", "a"]), "x").unwrap(), "a");
        let error = one(nodes(&["b", "a"]), "address 10.0.0.1").unwrap_err().to_string();
        assert_eq!(error, "address 10.0.0.1: say with --node which of a, b is meant");
        assert!(one(nodes(&[]), "x").is_err());
    }
}
