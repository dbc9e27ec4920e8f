//! Lists the watched kinds and the retained fields of their objects.

use std::sync::Arc;

use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod, Service},
    discovery::v1::EndpointSlice,
    networking::v1::NetworkPolicy,
};
use kni_api::EgressPolicySummary;
use kni_crd::{
    EgressPolicy, FromObject, InvalidObject, NodeNetwork, PodInterface, PodNetwork, PodNetworkAttachment,
    read_attachment, read_attachment_definition, read_endpoint_slice, read_pod, read_service, v1beta1, v1beta2,
};
use kni_model::policy::Policy;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    runtime::watcher,
};
use tokio::task::JoinSet;

use super::follow::Kind;
use kni_cluster::{AttachmentRow, ClusterCache, NodeRow, PolicyRow};

/// Follows the kinds that every agent needs. The tasks end with the runtime.
pub(super) fn follow_all(client: &Client, known: &ClusterCache, node: &str) {
    follow_networks(client, known);
    follow_policies(client, known);
    follow_core(client, known);
    follow_own(client, known, node);
}

fn follow_networks(client: &Client, known: &ClusterCache) {
    let kind = Kind::<PodNetwork, _> {
        name: "podnetworks",
        table: |tables| &mut tables.networks,
        keep: |object| Some(Arc::new(object)),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<PodNetworkAttachment, _> {
        name: "podnetworkattachments",
        table: |tables| &mut tables.attachments,
        keep: |object| {
            Some(AttachmentRow {
                facts: read_attachment(&object).map_err(|invalid| invalid.to_string()),
                object: Arc::new(object),
            })
        },
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<PodInterface, _> {
        name: "podinterfaces",
        table: |tables| &mut tables.interfaces,
        keep: |mut object| {
            object.metadata.managed_fields = None;
            Some(Arc::new(object))
        },
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let definition = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition");
    let resource = ApiResource::from_gvk_with_plural(&definition, "network-attachment-definitions");
    let kind = Kind::<DynamicObject, _> {
        name: "network-attachment-definitions",
        table: |tables| &mut tables.definitions,
        keep: |object| {
            let config = object.data.pointer("/spec/config").and_then(|config| config.as_str());
            read_attachment_definition(&object.name_any(), config)
        },
        optional: true,
    };
    tokio::spawn(kind.follow(Api::all_with(client.clone(), &resource), known.clone()));
}

fn follow_policies(client: &Client, known: &ClusterCache) {
    let kind = Kind::<EgressPolicy, _> {
        name: "egresspolicies",
        table: |tables| &mut tables.egress_policies,
        keep: |object| {
            Some(PolicyRow {
                summary: EgressPolicySummary::new(&object.spec),
                ..policy_row(&object)
            })
        },
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<NetworkPolicy, _> {
        name: "networkpolicies",
        table: |tables| &mut tables.network_policies,
        keep: |object| Some(policy_row(&object)),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    tokio::spawn(follow_multi_policies(client.clone(), known.clone()));
}

/// The API server converts between the versions that it serves, so one is enough: the newer one if it is served.
async fn follow_multi_policies(client: Client, known: ClusterCache) {
    let newer: Api<v1beta2::MultiNetworkPolicy> = Api::all(client.clone());
    let one = kube::api::ListParams::default().limit(1);
    if newer.list_metadata(&one).await.is_ok() {
        let kind = Kind {
            name: "multi-networkpolicies of v1beta2",
            table: |tables| &mut tables.multi_policies,
            keep: |object: v1beta2::MultiNetworkPolicy| Some(policy_row(&object)),
            optional: true,
        };
        return kind.follow(newer, known).await;
    }
    let kind = Kind {
        name: "multi-networkpolicies of v1beta1",
        table: |tables| &mut tables.multi_policies,
        keep: |object: v1beta1::MultiNetworkPolicy| Some(policy_row(&object)),
        optional: true,
    };
    kind.follow(Api::all(client), known).await;
}

fn follow_core(client: &Client, known: &ClusterCache) {
    let kind = Kind::<Namespace, _> {
        name: "namespaces",
        table: |tables| &mut tables.namespaces,
        keep: |object| Some(object.metadata.labels.unwrap_or_default()),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<Service, _> {
        name: "services",
        table: |tables| &mut tables.services,
        keep: |object| flip(read_service(&object)),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<EndpointSlice, _> {
        name: "endpointslices",
        table: |tables| &mut tables.slices,
        keep: |object| flip(read_endpoint_slice(&object)),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<Pod, _> {
        name: "pods",
        table: |tables| &mut tables.pods,
        keep: |object| Some(Arc::new(read_pod(object))),
        optional: false,
    };
    tokio::spawn(kind.follow(Api::all(client.clone()), known.clone()));
}

/// Follows the objects that belong to the node itself.
fn follow_own(client: &Client, known: &ClusterCache, node: &str) {
    let own = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let kind = Kind::<Node, _> {
        name: "this node",
        table: |tables| &mut tables.own_node,
        keep: |object| Some(node_row(object)),
        optional: false,
    };
    tokio::spawn(kind.follow_some(Api::all(client.clone()), own.clone(), known.clone()));
    let kind = Kind::<NodeNetwork, _> {
        name: "this node's nodenetwork",
        table: |tables| &mut tables.own_network,
        keep: |object| Some(node_network(object)),
        optional: false,
    };
    tokio::spawn(kind.follow_some(Api::all(client.clone()), own, known.clone()));
}

/// Follows the nodes and their status, which only the leader needs. Ends when the set is dropped.
pub(super) fn follow_nodes(client: &Client, known: &ClusterCache) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let kind = Kind::<Node, _> {
        name: "nodes",
        table: |tables| &mut tables.nodes,
        keep: |object| Some(node_row(object)),
        optional: false,
    };
    tasks.spawn(kind.follow(Api::all(client.clone()), known.clone()));
    let kind = Kind::<NodeNetwork, _> {
        name: "nodenetworks",
        table: |tables| &mut tables.node_networks,
        keep: |object| Some(node_network(object)),
        optional: false,
    };
    tasks.spawn(kind.follow(Api::all(client.clone()), known.clone()));
    tasks
}

fn node_network(mut object: NodeNetwork) -> Arc<NodeNetwork> {
    object.metadata.managed_fields = None;
    Arc::new(object)
}

fn policy_row<K: Resource>(object: &K) -> PolicyRow
where
    Policy: FromObject<K, Error = InvalidObject>,
{
    let version = object.resource_version().unwrap_or_default();
    PolicyRow {
        policy: Policy::from_object(object)
            .map(Arc::new)
            .map_err(|invalid| invalid.to_string()),
        version: version.parse().unwrap_or(0),
        generation: object.meta().generation.unwrap_or(0),
        summary: EgressPolicySummary::default(),
    }
}

/// Valid objects that KNI does not serve are dropped.
fn flip<V>(read: Result<Option<V>, InvalidObject>) -> Option<Result<V, String>> {
    match read {
        Ok(value) => value.map(Ok),
        Err(invalid) => Some(Err(invalid.to_string())),
    }
}

/// The retained fields of a node.
pub(super) fn node_row(object: Node) -> NodeRow {
    let status = object.status.unwrap_or_default();
    let addresses = status.addresses.unwrap_or_default().into_iter();
    let resources = status.capacity.unwrap_or_default().into_iter();
    NodeRow {
        taints: object.spec.and_then(|spec| spec.taints).unwrap_or_default(),
        addresses: addresses
            .filter(|address| address.type_ == "InternalIP")
            .map(|address| address.address)
            .collect(),
        resources: resources
            .filter(|(name, _)| name.starts_with(kni_api::RESOURCE_PREFIX))
            .map(|(name, quantity)| (name, quantity.0))
            .collect(),
    }
}
