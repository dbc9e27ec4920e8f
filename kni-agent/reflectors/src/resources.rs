//! Lists the watched kinds and the retained fields of their objects.

mod networks;
mod policies;

use std::{fmt::Debug, sync::Arc};

use futures::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::{
    core::v1::{Namespace, Node, Pod, Service},
    discovery::v1::EndpointSlice,
};
use kni_api::{GROUP, NetworkMembers};
use kni_crd::{
    NodeNetwork, PodInterface, PodNetwork, PodNetworkAttachment, read_attachment, read_attachment_definition,
    read_endpoint_slice, read_pod, read_service, read_service_addresses,
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    core::PartialObjectMeta,
    runtime::watcher,
};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use super::{
    decoded::Decoded,
    later::spread,
    own_view::of_node,
    reflector::Kind,
    served::{Optional, Version},
    watches::WatchState,
};
use kni_cluster::{AttachmentRow, ClusterCache, NodeRow, Table, Tables};
use networks::{reflect_blocks, reflect_endpoints, reflect_members, reflect_numbers, reflect_other_blocks};
use policies::{
    reflect_egress, reflect_egress_objects, reflect_multi_policies, reflect_network_policies, reflect_policies,
};

/// The version of our own API group.
const VERSION: &str = "v1alpha1";
/// Label of the nodes of the control plane. Admission plugin `NodeRestriction` refuses it from kubelets: of the labels
/// under `kubernetes.io` they may write some well-known ones and those of `kubelet.kubernetes.io` and
/// `node.kubernetes.io`, at registration and later.
const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// The API group of the Network Plumbing Working Group.
const NPWG: &str = "k8s.cni.cncf.io";

/// A watch that runs for as long as its task: its name, and its work.
pub struct Reflector {
    /// The name of the task.
    pub task: &'static str,
    /// Never ends.
    pub run: BoxFuture<'static, ()>,
}

/// The reflectors that are being collected, and what they share.
struct Watches<'a> {
    client: &'a Client,
    cache: &'a ClusterCache,
    counts: WatchState,
    all: Vec<Reflector>,
    /// Each kind, where its objects are read, and whether it may be missing.
    paths: Vec<(&'static str, String, bool)>,
}

impl<'a> Watches<'a> {
    const fn new(client: &'a Client, cache: &'a ClusterCache, counts: WatchState) -> Self {
        Self {
            client,
            cache,
            counts,
            all: Vec::new(),
            paths: Vec::new(),
        }
    }

    /// Adds the watch of all objects of a kind.
    fn reflect<K, V>(&mut self, task: &'static str, kind: Kind<K, V>)
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + 'static,
    {
        self.reflect_selected(task, kind, watcher::Config::default());
    }

    fn reflect_selected<K, V>(&mut self, task: &'static str, kind: Kind<K, V>, config: watcher::Config)
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
        V: PartialEq + Send + 'static,
    {
        self.paths.push((kind.name(), K::url_path(&(), None), false));
        let (cache, counts) = (self.cache.clone(), self.counts.clone());
        let run = kind.reflect_selected(Api::all(self.client.clone()), config, cache, counts);
        self.all.push(Reflector { task, run: run.boxed() });
    }

    /// Adds the watch of a kind that may be missing.
    fn reflect_optional(&mut self, task: &'static str, kind: Optional, versions: Vec<Version>) {
        let paths = versions.iter().map(|(version, _)| kind.path(version));
        self.paths.extend(paths.map(|(name, path)| (name, path, true)));
        let run = kind.reflect(self.client.clone(), self.cache.clone(), versions);
        self.all.push(Reflector { task, run: run.boxed() });
    }

    /// One version of an optional kind.
    fn version<K, V>(&self, name: &'static str, kind: Kind<K, V>, api: Api<Decoded<K>>) -> Version
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        K::DynamicType: Clone + Send + Sync,
        V: PartialEq + Send + 'static,
    {
        self.version_selected(name, kind, api, watcher::Config::default())
    }

    fn version_selected<K, V>(
        &self,
        name: &'static str,
        kind: Kind<K, V>,
        api: Api<Decoded<K>>,
        config: watcher::Config,
    ) -> Version
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        K::DynamicType: Clone + Send + Sync,
        V: PartialEq + Send + 'static,
    {
        let (cache, counts) = (self.cache.clone(), self.counts.clone());
        let watch = move || {
            kind.reflect_while_served(api.clone(), config.clone(), cache.clone(), counts.clone())
                .boxed()
        };
        (name, Arc::new(watch))
    }
}

/// The watches of the kinds that the agent of `node` needs.
pub fn reflect_node(client: &Client, cache: &ClusterCache, counts: &WatchState, node: &str) -> Vec<Reflector> {
    let mut watches = Watches::new(client, cache, counts.clone());
    let own = || watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    reflect_networks(&mut watches, own(), |object| Some(of_node(object)));
    reflect_numbers(&mut watches);
    reflect_definitions(
        &mut watches,
        |tables| &mut tables.definitions,
        |object| {
            let config = object.data.pointer("/spec/config").and_then(|config| config.as_str());
            read_attachment_definition(&object.name_any(), config)
        },
    );
    reflect_policies(&mut watches);
    reflect_core(&mut watches, own());
    reflect_services(&mut watches);
    reflect_egress(&mut watches);
    reflect_own(&mut watches, node);
    reflect_blocks(&mut watches, own());
    reflect_members(&mut watches, own());
    reflect_other_blocks(&mut watches);
    reflect_endpoints(&mut watches);
    let all = watches.all.into_iter();
    all.map(|Reflector { task, run }| Reflector {
        task,
        run: spread(task, run),
    })
    .collect()
}

/// Follows the kinds that kni-controller needs. Ends when the set is dropped.
pub fn reflect_cluster(client: &Client, cache: &ClusterCache, counts: &WatchState) -> JoinSet<()> {
    let mut watches = Watches::new(client, cache, counts.clone());
    reflect_all(&mut watches);
    watches.all.into_iter().map(|reflector| reflector.run).collect()
}

/// Requests one object of each kind that kni-controller needs; returns what the API server refuses, with the reasons.
/// An error means that it did not answer.
pub async fn refused_of_cluster(client: &Client) -> Result<Vec<String>, kube::Error> {
    let cache = ClusterCache::new();
    let mut watches = Watches::new(client, &cache, WatchState::default());
    reflect_all(&mut watches);
    let mut refused = Vec::new();
    for (name, path, may_be_missing) in watches.paths {
        let request = http::Request::get(format!("{path}?limit=1")).body(Vec::new());
        match client.request_text(request.map_err(kube::Error::HttpError)?).await {
            Ok(_list) => {}
            Err(kube::Error::Api(status)) if status.code == 404 && may_be_missing => {}
            Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403 | 404) => {
                refused.push(format!("{name}: {}", status.message));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(refused)
}

fn reflect_all(watches: &mut Watches<'_>) {
    let all = watcher::Config::default;
    reflect_networks(watches, all(), |object| Some(Arc::new(object)));
    reflect_numbers(watches);
    reflect_core(watches, all());
    reflect_nodes(watches);
    reflect_blocks(watches, all());
    reflect_recent::<NetworkMembers>(
        watches,
        ("watch-networkmembers", "networkmembers"),
        |tables| &mut tables.members,
        all(),
    );
    reflect_endpoints(watches);
    reflect_egress(watches);
    // Their addresses are never egress addresses.
    reflect_services(watches);
    watches.reflect(
        "watch-service-addresses",
        Kind::<Service, _>::new(
            "addresses of services",
            |tables| &mut tables.service_addresses,
            |object| read_service_addresses(&object),
        ),
    );
    reflect_egress_objects(watches);
    // Events name policies that are refused, or whose networks do not exist.
    reflect_network_policies(watches);
    reflect_multi_policies(watches);
    reflect_definitions(watches, |tables| &mut tables.definition_names, |_| Some(()));
}

/// `network` is what is cached of a network.
fn reflect_networks(
    watches: &mut Watches<'_>,
    interfaces: watcher::Config,
    network: fn(PodNetwork) -> Option<Arc<PodNetwork>>,
) {
    let kind = Kind::<PodNetwork, _>::new("podnetworks", |tables| &mut tables.networks, network);
    watches.reflect("watch-podnetworks", kind);
    watches.reflect(
        "watch-podnetworkattachments",
        Kind::<PodNetworkAttachment, _>::new(
            "podnetworkattachments",
            |tables| &mut tables.attachments,
            |object| {
                Some(AttachmentRow {
                    facts: read_attachment(&object),
                    object: Arc::new(object),
                })
            },
        ),
    );
    let kind = Kind::<PodInterface, _>::new(
        "podinterfaces",
        |tables| &mut tables.interfaces,
        |object| Some(whole(object)),
    );
    watches.reflect_selected("watch-podinterfaces", kind, interfaces);
}

/// Definitions of other tools; only pods that name one wait for them.
fn reflect_definitions<V: PartialEq + Send + 'static>(
    watches: &mut Watches<'_>,
    table: fn(&mut Tables) -> &mut Table<V>,
    convert: fn(DynamicObject) -> Option<V>,
) {
    let definition = GroupVersionKind::gvk(NPWG, "v1", "NetworkAttachmentDefinition");
    let resource = ApiResource::from_gvk_with_plural(&definition, "network-attachment-definitions");
    let kind = Kind::new("network-attachment-definitions", table, convert);
    let versions = vec![watches.version("v1", kind, Api::all_with(watches.client.clone(), &resource))];
    let optional = Optional::new(NPWG, "network-attachment-definitions", table);
    watches.reflect_optional("watch-network-attachment-definitions", optional, versions);
}

/// Follows a kind of ours that an API server with definitions of an earlier release does not have.
fn reflect_recent<K>(
    watches: &mut Watches<'_>,
    (task, plural): (&'static str, &'static str),
    table: fn(&mut Tables) -> &mut Table<Arc<K>>,
    config: watcher::Config,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + PartialEq + Send + Sync + 'static,
{
    let kind = Kind::<K, _>::new(plural, table, |object| Some(whole(object)));
    let version = watches.version_selected(VERSION, kind, Api::all(watches.client.clone()), config);
    watches.reflect_optional(task, Optional::new(GROUP, plural, table), vec![version]);
}

fn reflect_core(watches: &mut Watches<'_>, pods: watcher::Config) {
    watches.reflect(
        "watch-namespaces",
        Kind::<PartialObjectMeta<Namespace>, _>::new(
            "namespaces",
            |tables| &mut tables.namespaces,
            |object| Some(object.metadata.labels.unwrap_or_default()),
        ),
    );
    let kind = Kind::<Pod, _>::new(
        "pods",
        |tables| &mut tables.pods,
        |object| Some(Arc::new(read_pod(object))),
    );
    watches.reflect_selected("watch-pods", kind, pods);
}

fn reflect_services(watches: &mut Watches<'_>) {
    watches.reflect(
        "watch-services",
        Kind::<Service, _>::new(
            "services",
            |tables| &mut tables.services,
            |object| read_service(&object).transpose(),
        ),
    );
    watches.reflect(
        "watch-endpointslices",
        Kind::<EndpointSlice, _>::new(
            "endpointslices",
            |tables| &mut tables.slices,
            |object| read_endpoint_slice(&object).transpose(),
        ),
    );
}

/// Follows the objects that belong to the node itself.
fn reflect_own(watches: &mut Watches<'_>, node: &str) {
    let own = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let kind = Kind::<Node, _>::new(
        "this node",
        |tables| &mut tables.own_node,
        |object| Some(node_row(object)),
    );
    watches.reflect_selected("watch-own-node", kind, own.clone());
    let kind = Kind::<NodeNetwork, _>::new(
        "this node's nodenetwork",
        |tables| &mut tables.own_network,
        |object| Some(whole(object)),
    );
    watches.reflect_selected("watch-own-nodenetwork", kind, own);
}

fn reflect_nodes(watches: &mut Watches<'_>) {
    watches.reflect(
        "watch-nodes",
        Kind::<Node, _>::new("nodes", |tables| &mut tables.nodes, |object| Some(node_row(object))),
    );
    watches.reflect(
        "watch-nodenetworks",
        Kind::<NodeNetwork, _>::new(
            "nodenetworks",
            |tables| &mut tables.node_networks,
            |object| Some(whole(object)),
        ),
    );
}

/// The object without the field that is largest and means nothing here.
fn whole<K: Resource>(mut object: K) -> Arc<K> {
    object.meta_mut().managed_fields = None;
    Arc::new(object)
}

/// The retained fields of a node.
pub fn node_row(object: Node) -> NodeRow {
    let status = object.status.unwrap_or_default();
    let labels = object.metadata.labels.unwrap_or_default();
    let of_type = |name: &str| {
        let addresses = status.addresses.iter().flatten();
        let matching = addresses.filter(|address| address.type_ == name);
        matching.map(|address| address.address.clone()).collect()
    };
    let holds = |name: &str| {
        let mut conditions = status.conditions.iter().flatten();
        conditions.any(|condition| condition.type_ == name && condition.status == "True")
    };
    let resources = status.capacity.clone().unwrap_or_default().into_iter();
    NodeRow {
        uid: object.metadata.uid.unwrap_or_default(),
        ready: holds("Ready"),
        network_unavailable: holds("NetworkUnavailable"),
        taints: object.spec.and_then(|spec| spec.taints).unwrap_or_default(),
        addresses: of_type("InternalIP"),
        external_addresses: of_type("ExternalIP"),
        control_plane: labels.contains_key(CONTROL_PLANE),
        resources: resources
            .filter(|(name, _)| name.starts_with(kni_api::RESOURCE_PREFIX))
            .map(|(name, quantity)| (name, quantity.0))
            .collect(),
    }
}
