//! Provides the tenants, the networks and the definitions of the tenancy table.

use anyhow::Result;
use k8s_openapi::api::events::v1::Event;
use kni_integration::{
    Cluster,
    cluster::{objects, patience},
    wait,
};
use kni_proto::runtime::ListNetworksRequest;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};

/// A cluster of one node with the networks, the namespaces and the definitions of the table.
pub(crate) async fn start(name: &str) -> Result<Cluster> {
    let cluster = Cluster::start(name, 1).await?;
    let default = objects::network_without_access(
        "default",
        &["10.244.0.0/16"],
        &json!({ "default": true, "perNodePrefix": { "ipv4": 16 } }),
    );
    let mut all = vec![default];
    for (name, tenant) in [
        ("red-team", "red"),
        ("blue-team", "blue"),
        ("partner", "partner"),
        ("vault", "vault"),
    ] {
        all.push(objects::namespace(name, &json!({ "tenant": tenant })));
    }
    all.push(objects::namespace("plain", &json!({})));
    all.extend(networks());
    all.extend(provided());
    all.extend([
        objects::attachment_definition("plain", "to-red", "red"),
        objects::attachment_definition("plain", "red", "open"),
    ]);
    cluster.apply(&all).await?;
    let wanted = networks().len() + provided().len() + 1;
    wait::until("the agent has every network", patience(), async || {
        let listed = cluster.nodes[0]
            .kubelet
            .kni()
            .runtime()
            .list_networks(ListNetworksRequest {})
            .await?;
        Ok(listed.into_inner().networks.len() == wanted)
    })
    .await?;
    Ok(cluster)
}

fn networks() -> Vec<Value> {
    let of = |tenant: &str| json!({ "matchLabels": { "tenant": tenant } });
    let selected = |tenants: &[&str]| {
        json!({
            "from": "Selected",
            "selector": { "matchExpressions": [{ "key": "tenant", "operator": "In", "values": tenants }] },
        })
    };
    let all = json!({ "from": "All" });
    let same = ["10.10.0.0/16", "fd10::/64"];
    let leased = |name: &str, subnets: &[&str], more: &Value| {
        // One block covers the network, so that every address of it can be chosen on the node.
        let mut spec = json!({ "perNodePrefix": { "ipv4": 16, "ipv6": 64 } });
        objects::merge(&mut spec, more);
        objects::network_without_access(name, subnets, &spec)
    };
    vec![
        leased("red", &same, &json!({ "namespaceSelector": of("red") })),
        leased(
            "blue",
            &same,
            &json!({
                "namespaceSelector": of("blue"),
                "access": {
                    "namespaces": selected(&["blue", "partner"]),
                    "allowAddresses": true,
                    "addressRanges": ["10.10.9.0/24"],
                },
            }),
        ),
        leased(
            "open",
            &["10.20.0.0/16"],
            &json!({ "access": {
                "namespaces": all, "allowAddresses": true, "allowMac": true, "allowDefaultRoute": true,
            } }),
        ),
        leased("shared", &["10.21.0.0/16"], &json!({ "access": { "namespaces": all } })),
        leased(
            "closed",
            &["10.22.0.0/16"],
            &json!({ "access": { "namespaces": { "from": "None" } } }),
        ),
        leased("nobodys", &["10.23.0.0/16"], &json!({})),
        leased(
            "vault",
            &["10.24.0.0/16"],
            &json!({ "namespaceSelector": of("vault"), "access": { "lockNamespaces": true } }),
        ),
        leased(
            "granted",
            &["10.25.0.0/16"],
            &json!({ "access": { "namespaces": all, "requireJoin": true } }),
        ),
    ]
}

/// Networks of providers that hand out devices of the node, for the pods of one tenant.
fn provided() -> Vec<Value> {
    let red = json!({ "from": "Selected", "selector": { "matchLabels": { "tenant": "red" } } });
    let of = |name: &str, provider: &Value| {
        let more = json!({ "provider": provider, "access": { "namespaces": red } });
        objects::network_without_access(name, &[], &more)
    };
    vec![
        of("vm", &json!({ "type": "Tap" })),
        of(
            "lan",
            &json!({ "type": "Macvlan", "parent": "uplink0", "allowUplink": true }),
        ),
        of("nic", &json!({ "type": "HostDevice", "devices": ["nic0"] })),
        of("chain", &json!({ "type": "CNI", "confName": "chain" })),
    ]
}

/// The note of the event by which the agent reports a refusal at a running pod.
pub(crate) async fn event(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Option<String>> {
    let api: Api<Event> = Api::namespaced(cluster.client.clone(), namespace);
    let listed = api.list(&ListParams::default()).await?;
    let found = listed.items.into_iter().find(|event| {
        let about = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
        about == Some(pod) && event.reason.as_deref() == Some("NotAuthorized")
    });
    Ok(found.and_then(|event| event.note))
}
