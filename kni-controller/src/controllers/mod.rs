//! Lists the controllers of the cluster. Each is a module of its own, with an entry in [`start`].
//!
//! A controller implements [`reconcile::Reconciler`]: it compares the tables with the objects, and names the writes.
//! One that does not fit is an `async fn` of its own that takes a [`Context`]; it runs until the term ends and its task
//! is dropped at any await.

mod address_space;
mod attachments;
mod block_excess;
mod egress_claims;
mod egress_owners;
mod egress_policies;
mod egress_pools;
mod egress_shares;
mod extended_resources;
mod fabric;
mod false_interfaces;
mod figures;
mod gone_blocks;
mod gone_interfaces;
mod gone_nodes;
mod joins;
mod member_names;
mod members;
mod network_numbers;
mod network_status;
mod network_unavailable;
mod networks;
mod node_endpoints;
mod open_nodes;
mod overview;
mod policy_events;
mod reconcile;
mod stray_blocks;
mod taints;

use std::time::Duration;

use kni_cluster::ClusterCache;
use kni_reflectors::reflect_cluster;
use kube::Client;
use tokio::task::JoinSet;

pub(crate) use self::network_numbers::REST;
use self::reconcile::{Context, reconcile};
use crate::{election::Leadership, events::Events, fence::fenced, health::Health, metrics::Metrics};

/// Maximum number of pods and nodes that a message names.
const MOST_NAMED: usize = 8;

/// Starts the watches and all controllers of one term, with empty tables. They end when the set is dropped. Released
/// numbers of networks rest for `rest`.
pub(crate) fn start(
    client: &Client,
    leadership: Leadership,
    (health, metrics): (&Health, &Metrics),
    rest: Duration,
) -> JoinSet<()> {
    let client = &fenced(client, leadership.clone());
    let context = Context {
        client: client.clone(),
        leadership,
        cache: ClusterCache::new(),
        events: Events::new(client.clone()),
        health: health.clone(),
        metrics: metrics.clone(),
    };
    metrics.begin_term(&context.cache);
    let mut tasks = JoinSet::new();
    let mut reflectors = reflect_cluster(client, &context.cache, metrics.watches());
    // A watch never ends by itself.
    tasks.spawn(async move { drop(reflectors.join_next().await) });
    tasks.spawn(reconcile(context.clone(), networks::NetworkStatus::default()));
    tasks.spawn(reconcile(context.clone(), network_numbers::NetworkNumbers::new(rest)));
    tasks.spawn(reconcile(context.clone(), joins::Joins::default()));
    tasks.spawn(reconcile(context.clone(), attachments::AttachmentStatus::default()));
    tasks.spawn(reconcile(context.clone(), egress_policies::EgressStatus::default()));
    tasks.spawn(reconcile(context.clone(), egress_claims::EgressClaims::default()));
    tasks.spawn(reconcile(context.clone(), egress_pools::EgressPoolStatus));
    tasks.spawn(reconcile(context.clone(), policy_events::PolicyEvents::default()));
    tasks.spawn(reconcile(context.clone(), gone_nodes::GoneNodes::default()));
    tasks.spawn(reconcile(context.clone(), gone_blocks::GoneBlocks::default()));
    tasks.spawn(reconcile(context.clone(), gone_interfaces::GoneInterfaces::default()));
    tasks.spawn(reconcile(context.clone(), stray_blocks::StrayBlocks::default()));
    tasks.spawn(reconcile(context.clone(), false_interfaces::FalseInterfaces));
    tasks.spawn(reconcile(context.clone(), members::Members::default()));
    tasks.spawn(reconcile(context.clone(), node_endpoints::NodeEndpoints::default()));
    tasks.spawn(reconcile(context.clone(), taints::Taints));
    tasks.spawn(reconcile(
        context.clone(),
        network_unavailable::NetworkUnavailable::default(),
    ));
    tasks.spawn(reconcile(context, extended_resources::ExtendedResources));
    tasks
}

/// The first names, and the number of the others.
fn listed(names: &[&str]) -> String {
    let shown: Vec<&str> = names.iter().copied().take(MOST_NAMED).collect();
    match names.len().saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The API uses signed 64-bit numbers.
fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
