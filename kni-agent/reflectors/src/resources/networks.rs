//! Lists the kinds by which nodes share networks: numbers, address blocks, members and endpoints.

use std::{collections::BTreeSet, fmt::Debug, sync::Arc};

use futures::FutureExt as _;
use kni_api::{AddressBlock, GROUP, NetworkMembers, NetworkNumber, NodeEndpoint};
use kni_cluster::ClusterCache;
use kni_model::NetworkName;
use kube::{Api, Resource, runtime::watcher};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::{VERSION, Watches, reflect_recent};
use crate::{
    decoded::Decoded,
    of_others,
    reflector::Kind,
    served::{Optional, Version},
};

/// Follows the numbers of networks. Without the kind no network has one.
pub(super) fn reflect_numbers(watches: &mut Watches<'_>) {
    reflect_recent::<NetworkNumber>(
        watches,
        ("watch-networknumbers", "networknumbers"),
        |tables| &mut tables.numbers,
        watcher::Config::default(),
    );
}

/// Follows the address blocks that `config` selects.
pub(super) fn reflect_blocks(watches: &mut Watches<'_>, config: watcher::Config) {
    reflect_recent::<AddressBlock>(
        watches,
        ("watch-addressblocks", "addressblocks"),
        |tables| &mut tables.blocks,
        config,
    );
}

/// Follows the members of networks: those of the node itself, which it writes, and those of all nodes in the networks
/// that it has pods in.
pub(super) fn reflect_members(watches: &mut Watches<'_>, own: watcher::Config) {
    reflect_recent::<NetworkMembers>(
        watches,
        ("watch-own-networkmembers", "networkmembers"),
        |tables| &mut tables.own_members,
        own,
    );
    let names = ("watch-networkmembers", "networkmembers");
    let kind = Kind::new(
        names.1,
        |tables| &mut tables.members,
        |object| Some(of_others::members(object)),
    );
    reflect_joined(watches, names, kind, ClusterCache::joined);
}

/// Follows the address blocks of all nodes in the networks that the node has pods in, or counts the free addresses of.
pub(super) fn reflect_other_blocks(watches: &mut Watches<'_>) {
    let names = ("watch-addressblocks-of-networks", "addressblocks");
    let kind = Kind::new(
        names.1,
        |tables| &mut tables.other_blocks,
        |object| Some(of_others::block(object)),
    );
    reflect_joined(watches, names, kind, ClusterCache::counted);
}

/// Follows the objects of a recent kind in the networks that `joined` yields, by their label.
fn reflect_joined<K>(
    watches: &mut Watches<'_>,
    (task, plural): (&'static str, &'static str),
    kind: Kind<K, Arc<K>>,
    joined: fn(&ClusterCache) -> watch::Receiver<Option<BTreeSet<NetworkName>>>,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + PartialEq + Send + Sync + 'static,
{
    let api = Api::<Decoded<K>>::all(watches.client.clone());
    let (cache, counts) = (watches.cache.clone(), watches.counts.clone());
    let watch = move || {
        kind.reflect_joined(api.clone(), joined(&cache), cache.clone(), counts.clone())
            .boxed()
    };
    let version: Version = (VERSION, Arc::new(watch));
    watches.reflect_optional(task, Optional::new(GROUP, plural, kind.table()), vec![version]);
}

/// Follows where the nodes are. Without the kind packets of pods do not leave the node.
pub(super) fn reflect_endpoints(watches: &mut Watches<'_>) {
    reflect_recent::<NodeEndpoint>(
        watches,
        ("watch-nodeendpoints", "nodeendpoints"),
        |tables| &mut tables.node_endpoints,
        watcher::Config::default(),
    );
}
