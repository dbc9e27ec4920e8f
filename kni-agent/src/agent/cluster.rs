//! Connects the controllers with the node, and applies the cluster's objects when the first lists are complete.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use kni_controllers::{Apply, Cluster, ClusterOptions, Reflectors};
use kni_netlink::Changes as UplinkChanges;
use kni_reflectors::{Sender, connect};
use kni_tasks::Tasks;

use super::{Node, apply_networks, settings};
use crate::cli::ServeArgs;

/// Starts to watch the API server.
pub(super) async fn watches(args: &ServeArgs, tasks: &Tasks) -> Result<Reflectors> {
    let limits = settings::request_limits(args);
    let connection = connect(args.cluster.kubeconfig.as_deref(), limits, Sender::Agent)
        .await
        .context("the cluster (without one: --standalone --manifests DIR)")?;
    let options = ClusterOptions {
        node: settings::place(args).name,
        shared_services: args.cluster.shared_services.iter().cloned().collect::<BTreeSet<_>>(),
        tunnel: settings::tunnel(args),
        longest_pause: args.test.api_limit.map(Duration::from_secs),
        block_grace: args.test.address_rest.map(Duration::from_secs),
    };
    Ok(Reflectors::start(connection, options, tasks.clone()))
}

/// The controllers, not yet running.
pub(super) fn join(node: &Node, watches: &Reflectors) -> Arc<Cluster> {
    let applying = node.clone();
    let apply: Apply = Arc::new(move |desired| {
        let node = applying.clone();
        async move {
            apply_networks(&node, desired)
                .await
                .map_err(|error| format!("{error:#}"))
        }
        .boxed()
    });
    let (pods, inspector) = (node.attacher.clone(), &node.inspector);
    let (sync, uplink) = (Arc::clone(&node.sync), Arc::clone(&node.uplink));
    let reach = (uplink, Arc::clone(&node.fabric));
    watches.controllers(pods, inspector, sync, reach, apply)
}

/// Waits for the API server and confirms the node's address blocks; then applies policies first, as at every start,
/// networks and services next.
pub(super) async fn begin(node: Node, watches: Reflectors, cluster: Arc<Cluster>, changes: UplinkChanges) {
    watches.synced().await;
    // Before the node has addresses to assign.
    cluster.rest_reported();
    cluster.objects().join_networks();
    // Before policies take effect: an adopted pod may have other labels by now, and a rebuilt record has none.
    cluster.relabel().await;
    cluster.objects().load_blocks().await;
    cluster.load_peers().await;
    let objects = watches.objects();
    let sync = Arc::clone(&node.sync);
    let done = tokio::task::spawn_blocking(move || {
        sync.set_objects(objects.policies, objects.namespaces, objects.services, objects.slices);
    });
    if let Err(error) = done.await {
        tracing::error!(%error, "cannot process the cluster's policies and services");
    }
    cluster.apply_egress_rights().await;
    if let Err(error) = apply_networks(&node, objects.networks).await {
        tracing::error!(%error, "cannot apply the cluster's networks");
    }
    node.tasks.spawn("uplink", Arc::clone(&node.uplink).keep(changes));
    tracing::info!("the cluster is known; pods can be attached");
    cluster.run();
}
