//! Lists the watched kinds and the retained fields of their objects.

use std::sync::Arc;

use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod, Service},
    discovery::v1::EndpointSlice,
    networking::v1::NetworkPolicy,
};
use kni_api::{AddressBlock, EgressPolicySummary};
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

use super::reflector::Kind;
use kni_cluster::{AttachmentRow, ClusterCache, NodeRow, PolicyRow};

/// Follows the kinds that the agent of `node` needs. Ends when the set is dropped.
pub fn reflect_node(client: &Client, cache: &ClusterCache, node: &str) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    reflect_networks(&mut tasks, client, cache);
    reflect_definitions(&mut tasks, client, cache);
    reflect_policies(&mut tasks, client, cache);
    reflect_core(&mut tasks, client, cache);
    reflect_services(&mut tasks, client, cache);
    reflect_own(&mut tasks, client, cache, node);
    let own = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    reflect_blocks(&mut tasks, client, cache, own);
    tasks
}

/// Follows the kinds that kni-controller needs. Ends when the set is dropped.
pub fn reflect_cluster(client: &Client, cache: &ClusterCache) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    reflect_networks(&mut tasks, client, cache);
    reflect_core(&mut tasks, client, cache);
    reflect_nodes(&mut tasks, client, cache);
    reflect_blocks(&mut tasks, client, cache, watcher::Config::default());
    let kind = Kind::<EgressPolicy, _> {
        name: "egresspolicies",
        table: |tables| &mut tables.egress_objects,
        convert: |mut object| {
            object.metadata.managed_fields = None;
            Some(Arc::new(object))
        },
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    tasks
}

fn reflect_networks(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let kind = Kind::<PodNetwork, _> {
        name: "podnetworks",
        table: |tables| &mut tables.networks,
        convert: |object| Some(Arc::new(object)),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<PodNetworkAttachment, _> {
        name: "podnetworkattachments",
        table: |tables| &mut tables.attachments,
        convert: |object| {
            Some(AttachmentRow {
                facts: read_attachment(&object),
                object: Arc::new(object),
            })
        },
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<PodInterface, _> {
        name: "podinterfaces",
        table: |tables| &mut tables.interfaces,
        convert: |mut object| {
            object.metadata.managed_fields = None;
            Some(Arc::new(object))
        },
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
}

/// Follows the network definitions of other tools.
fn reflect_definitions(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let definition = GroupVersionKind::gvk("k8s.cni.cncf.io", "v1", "NetworkAttachmentDefinition");
    let resource = ApiResource::from_gvk_with_plural(&definition, "network-attachment-definitions");
    let kind = Kind::<DynamicObject, _> {
        name: "network-attachment-definitions",
        table: |tables| &mut tables.definitions,
        convert: |object| {
            let config = object.data.pointer("/spec/config").and_then(|config| config.as_str());
            read_attachment_definition(&object.name_any(), config)
        },
        optional: true,
    };
    tasks.spawn(kind.reflect(Api::all_with(client.clone(), &resource), cache.clone()));
}

fn reflect_policies(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let kind = Kind::<EgressPolicy, _> {
        name: "egresspolicies",
        table: |tables| &mut tables.egress_policies,
        convert: |object| {
            Some(PolicyRow {
                summary: EgressPolicySummary::new(&object.spec),
                ..policy_row(&object)
            })
        },
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<NetworkPolicy, _> {
        name: "networkpolicies",
        table: |tables| &mut tables.network_policies,
        convert: |object| Some(policy_row(&object)),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    tasks.spawn(reflect_multi_policies(client.clone(), cache.clone()));
}

/// The API server converts between the versions that it serves, so one is enough: the newer one if it is served.
async fn reflect_multi_policies(client: Client, cache: ClusterCache) {
    let newer: Api<v1beta2::MultiNetworkPolicy> = Api::all(client.clone());
    let one = kube::api::ListParams::default().limit(1);
    if newer.list_metadata(&one).await.is_ok() {
        let kind = Kind {
            name: "multi-networkpolicies of v1beta2",
            table: |tables| &mut tables.multi_policies,
            convert: |object: v1beta2::MultiNetworkPolicy| Some(policy_row(&object)),
            optional: true,
        };
        return kind.reflect(newer, cache).await;
    }
    let kind = Kind {
        name: "multi-networkpolicies of v1beta1",
        table: |tables| &mut tables.multi_policies,
        convert: |object: v1beta1::MultiNetworkPolicy| Some(policy_row(&object)),
        optional: true,
    };
    kind.reflect(Api::all(client), cache).await;
}

/// Follows namespaces and pods.
fn reflect_core(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let kind = Kind::<Namespace, _> {
        name: "namespaces",
        table: |tables| &mut tables.namespaces,
        convert: |object| Some(object.metadata.labels.unwrap_or_default()),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<Pod, _> {
        name: "pods",
        table: |tables| &mut tables.pods,
        convert: |object| Some(Arc::new(read_pod(object))),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
}

/// Follows Services and their endpoints.
fn reflect_services(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let kind = Kind::<Service, _> {
        name: "services",
        table: |tables| &mut tables.services,
        convert: |object| read_service(&object).transpose(),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<EndpointSlice, _> {
        name: "endpointslices",
        table: |tables| &mut tables.slices,
        convert: |object| read_endpoint_slice(&object).transpose(),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
}

/// Follows the objects that belong to the node itself.
fn reflect_own(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache, node: &str) {
    let own = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let kind = Kind::<Node, _> {
        name: "this node",
        table: |tables| &mut tables.own_node,
        convert: |object| Some(node_row(object)),
        optional: false,
    };
    tasks.spawn(kind.reflect_selected(Api::all(client.clone()), own.clone(), cache.clone()));
    let kind = Kind::<NodeNetwork, _> {
        name: "this node's nodenetwork",
        table: |tables| &mut tables.own_network,
        convert: |object| Some(node_network(object)),
        optional: false,
    };
    tasks.spawn(kind.reflect_selected(Api::all(client.clone()), own, cache.clone()));
}

/// Follows the address blocks that `config` selects.
fn reflect_blocks(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache, config: watcher::Config) {
    let kind = Kind::<AddressBlock, _> {
        name: "addressblocks",
        table: |tables| &mut tables.blocks,
        convert: |mut object| {
            object.metadata.managed_fields = None;
            Some(Arc::new(object))
        },
        // Agents of a new release may run before its definitions are installed.
        optional: true,
    };
    tasks.spawn(kind.reflect_selected(Api::all(client.clone()), config, cache.clone()));
}

/// Follows the nodes, and what their agents report.
fn reflect_nodes(tasks: &mut JoinSet<()>, client: &Client, cache: &ClusterCache) {
    let kind = Kind::<Node, _> {
        name: "nodes",
        table: |tables| &mut tables.nodes,
        convert: |object| Some(node_row(object)),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
    let kind = Kind::<NodeNetwork, _> {
        name: "nodenetworks",
        table: |tables| &mut tables.node_networks,
        convert: |object| Some(node_network(object)),
        optional: false,
    };
    tasks.spawn(kind.reflect(Api::all(client.clone()), cache.clone()));
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
        policy: Policy::from_object(object).map(Arc::new),
        version: version.parse().unwrap_or(0),
        generation: object.meta().generation.unwrap_or(0),
        summary: EgressPolicySummary::default(),
    }
}

/// The retained fields of a node.
pub fn node_row(object: Node) -> NodeRow {
    let status = object.status.unwrap_or_default();
    let addresses = status.addresses.unwrap_or_default().into_iter();
    let resources = status.capacity.unwrap_or_default().into_iter();
    NodeRow {
        uid: object.metadata.uid.unwrap_or_default(),
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
