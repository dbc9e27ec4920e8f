//! Lists nodes, networks and interfaces from the API server's objects.

use std::fmt::Debug;

use kni_api::{Condition, ConditionStatus, NodeNetwork, PodInterface, PodNetwork};
use kube::{Api, Client, Resource, ResourceExt, api::ListParams};
use serde::{Serialize, de::DeserializeOwned};

use super::cli::{InterfacesArgs, OutputArgs};
use crate::{
    commands::{List, Outcome},
    error::Error,
    table::Column,
    terminal::Terminal,
};

/// A list of objects in the format of kubectl.
#[derive(Serialize)]
struct Items<'a, K> {
    items: &'a [K],
}

const NODES: &[Column<NodeNetwork>] = &[
    Column::new("NODE", ResourceExt::name_any),
    Column::new("READY", |node| {
        ready(node.status.as_ref().map(|status| &*status.conditions))
    }),
    Column::new("NETWORKS", |node| {
        node.status
            .as_ref()
            .map_or(0, |status| status.networks.len())
            .to_string()
    }),
    Column::new("INTERFACES", |node| {
        node.status.as_ref().map_or(0, |status| status.interfaces).to_string()
    }),
    Column::new("VERSION", |node| {
        node.status
            .as_ref()
            .map(|status| status.agent_version.clone())
            .unwrap_or_default()
    }),
    Column::wide("FEATURES", |node| {
        let features = node.status.as_ref().map(|status| &status.features);
        let pairs = features
            .into_iter()
            .flatten()
            .map(|(name, value)| format!("{name}={value}"));
        pairs.collect::<Vec<_>>().join(",")
    }),
    Column::wide("REASON", |node| {
        let conditions = node.status.iter().flat_map(|status| &status.conditions);
        let bad = conditions
            .filter(|found| is_bad(found))
            .map(|found| found.message.clone());
        bad.collect::<Vec<_>>().join("; ")
    }),
];

const NETWORKS: &[Column<PodNetwork>] = &[
    Column::new("NAME", ResourceExt::name_any),
    Column::new("SUBNETS", |network| network.spec.subnets.join(",")),
    Column::new("READY", |network| {
        ready(network.status.as_ref().map(|status| &*status.conditions))
    }),
    Column::new("NODES", |network| {
        let nodes = network.status.as_ref().map(|status| status.nodes).unwrap_or_default();
        format!("{}/{}", nodes.ready, nodes.total)
    }),
    Column::new("INTERFACES", |network| {
        network
            .status
            .as_ref()
            .map_or(0, |status| status.interfaces)
            .to_string()
    }),
    Column::new("USED/TOTAL", |network| {
        let addresses = network
            .status
            .as_ref()
            .map(|status| status.addresses)
            .unwrap_or_default();
        format!("{}/{}", addresses.used, addresses.total)
    }),
    Column::wide("NAMESPACES", |network| {
        network
            .status
            .as_ref()
            .map(|status| status.namespaces.join(","))
            .unwrap_or_default()
    }),
];

const INTERFACES: &[Column<PodInterface>] = &[
    Column::new("NAMESPACE", |interface| interface.namespace().unwrap_or_default()),
    Column::new("POD", |interface| interface.spec.pod_name.clone()),
    Column::new("NETWORK", |interface| interface.spec.pod_network_name.clone()),
    Column::new("IFNAME", |interface| interface.spec.interface_name.clone()),
    Column::new("ADDRESSES", |interface| {
        let addresses = interface.status.iter().flat_map(|status| &status.addresses);
        addresses
            .map(|address| address.ip.clone())
            .collect::<Vec<_>>()
            .join(",")
    }),
    Column::new("NODE", |interface| interface.spec.node_name.clone()),
    Column::new("READY", |interface| {
        ready(interface.status.as_ref().map(|status| &*status.conditions))
    }),
    Column::wide("MAC", |interface| {
        interface
            .status
            .as_ref()
            .map(|status| status.mac.clone())
            .unwrap_or_default()
    }),
    Column::wide("HOST-IFNAME", |interface| {
        interface
            .status
            .as_ref()
            .map(|status| status.host_interface_name.clone())
            .unwrap_or_default()
    }),
    Column::wide("SANDBOX", |interface| interface.spec.sandbox_id.clone()),
];

/// Shows the nodes' agents.
pub(super) async fn status(client: &Client, args: &OutputArgs, terminal: &mut Terminal<'_>) -> Result<Outcome, Error> {
    let nodes: Vec<NodeNetwork> = list(&Api::all(client.clone())).await?;
    show(&nodes, NODES, "nodes with an agent", args, terminal)?;
    let all_ready = nodes.iter().all(|node| {
        let conditions = node.status.as_ref().map(|status| &*status.conditions);
        ready(conditions) == "True"
    });
    Ok(if all_ready { Outcome::Done } else { Outcome::NotReady })
}

/// Shows the networks.
pub(super) async fn networks(
    client: &Client,
    args: &OutputArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let networks: Vec<PodNetwork> = list(&Api::all(client.clone())).await?;
    show(&networks, NETWORKS, "networks", args, terminal)
}

/// Shows the interfaces of pods, in all namespaces unless one is named.
pub(super) async fn interfaces(
    client: &Client,
    args: InterfacesArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let api: Api<PodInterface> = match &args.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let mut interfaces = list(&api).await?;
    let fits = |wanted: &Option<String>, found: &String| wanted.as_ref().is_none_or(|wanted| wanted == found);
    interfaces.retain(|interface| {
        fits(&args.pod, &interface.spec.pod_name) && fits(&args.network, &interface.spec.pod_network_name)
    });
    show(&interfaces, INTERFACES, "interfaces", &args.output, terminal)
}

fn show<K: Serialize>(
    items: &[K],
    columns: &[Column<K>],
    noun: &str,
    args: &OutputArgs,
    terminal: &mut Terminal<'_>,
) -> Result<Outcome, Error> {
    let list = List {
        document: &Items { items },
        rows: items,
        columns,
        noun,
    };
    list.show(args.format, terminal)
}

async fn list<K>(api: &Api<K>) -> Result<Vec<K>, Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let listed = api.list(&ListParams::default()).await;
    let what = format!("listing {}", K::plural(&()));
    Ok(listed.map_err(Error::of_request(what))?.items)
}

/// The status of condition Ready.
fn ready(conditions: Option<&[Condition]>) -> String {
    let found = conditions
        .into_iter()
        .flatten()
        .find(|condition| condition.type_ == "Ready");
    match found.map(|condition| condition.status) {
        Some(ConditionStatus::True) => "True",
        Some(ConditionStatus::False) => "False",
        Some(ConditionStatus::Unknown) | None => "Unknown",
    }
    .to_owned()
}

/// Whether a condition reports a problem: Degraded does when it is true, the others when they are not.
fn is_bad(condition: &Condition) -> bool {
    let good = if condition.type_ == "Degraded" {
        ConditionStatus::False
    } else {
        ConditionStatus::True
    };
    condition.status != good
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::table::table;

    #[test]
    fn interfaces_show_what_kubectl_shows() {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
            "metadata": { "namespace": "shop", "name": "web.eth0" },
            "spec": {
                "podName": "web", "podUid": "u", "nodeName": "node1", "podNetworkName": "red",
                "interfaceName": "eth0", "sandboxId": "5a",
            },
            "status": {
                "addresses": [{ "ip": "10.0.0.2", "family": "IPv4" }, { "ip": "fd00::2", "family": "IPv6" }],
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "R", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        });
        let interface: PodInterface = serde_json::from_value(object).unwrap();
        assert_eq!(
            table(INTERFACES, &[interface], false, None),
            "NAMESPACE   POD   NETWORK   IFNAME   ADDRESSES          NODE    READY\n\
             shop        web   red       eth0     10.0.0.2,fd00::2   node1   True\n"
        );
        assert_eq!(ready(None), "Unknown");
    }
}
