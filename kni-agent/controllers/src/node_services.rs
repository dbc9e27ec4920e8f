//! Derives the state of this node, and what the controllers may change of it, from the services of the agent.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use futures::FutureExt as _;
use kni_cluster::ClusterCache;
use kni_enforcement::Enforcer;
use kni_fabric::{Desired, Fabric};
use kni_inspect::Inspector;
use kni_model::{NetworkName, view::InterfaceFilter};
use kni_pods::Pods;
use kni_uplink::Uplink;

use super::{
    state::{Act, Apply, Enforcement, Interfaces, NodeState, Read},
    sync,
};

/// The state of this node, from its services.
pub(super) fn node_state(
    attacher: &Pods,
    inspector: &Inspector,
    sync: &Arc<Enforcer>,
    (uplink, fabric): (&Arc<Uplink>, &Arc<Fabric>),
    apply_networks: Apply,
    services: &(ClusterCache, Arc<Enforcer>, BTreeSet<String>),
) -> NodeState {
    let cache = services.0.clone();
    NodeState {
        changes: attacher.changes(),
        sandboxes: with(attacher, Pods::sandboxes),
        networks: with(attacher, Pods::networks),
        leases: with(attacher, Pods::leases),
        resting: with(attacher, Pods::resting),
        note_withdrawals: {
            let attacher = attacher.clone();
            Arc::new(move |withdrawn: BTreeSet<(NetworkName, IpAddr)>| {
                let is_withdrawn =
                    |network: &NetworkName, address: IpAddr| withdrawn.contains(&(network.clone(), address));
                attacher
                    .note_withdrawals(is_withdrawn)
                    .map_err(|error| error.to_string())
            })
        },
        memberships: with(attacher, Pods::interfaces),
        enforcement: with(sync, |sync| Enforcement {
            problem: sync.policy_problem(),
            closed: sync.closed_namespaces(),
        }),
        interfaces: with(
            &(
                attacher.clone(),
                inspector.clone(),
                Arc::clone(sync),
                Arc::clone(uplink),
            ),
            interfaces_of,
        ),
        status: with(inspector, |inspector| (inspector.status(), inspector.networks())),
        link_changes: uplink.network_changes(),
        addresses: acting(uplink, |uplink: Arc<Uplink>, ()| async move {
            uplink.underlay_addresses().await.map_err(|error| error.to_string())
        }),
        apply_networks,
        networks_applied: acting(services, |(cache, sync, shared), ()| async move {
            sync::apply_services(&cache, &sync, &shared).await;
        }),
        relabel: acting(&(cache, attacher.clone()), |(cache, attacher), ()| async move {
            sync::relabel(&cache, &attacher).await
        }),
        apply_peers: acting(
            &(Arc::clone(sync), Arc::clone(inspector.flows().remote_pods())),
            sync::apply_peers,
        ),
        apply_fabric: acting(fabric, |fabric: Arc<Fabric>, desired: Arc<Desired>| async move {
            fabric.apply(&desired).await.is_ok()
        }),
    }
}

fn interfaces_of((attacher, inspector, sync, uplink): &(Pods, Inspector, Arc<Enforcer>, Arc<Uplink>)) -> Interfaces {
    let views = inspector.interfaces(&InterfaceFilter::default());
    let endpoints = views.iter().map(|view| view.attachment.endpoint);
    Interfaces {
        refused: uplink.refused_interfaces(),
        lost: attacher.lost_rights(),
        closed: endpoints
            .filter_map(|endpoint| Some((endpoint, sync.closed_endpoint(endpoint)?)))
            .collect(),
        views,
    }
}

/// A function of a part of the node.
fn with<S, T>(part: &S, read: impl Fn(&S) -> T + Send + Sync + 'static) -> Read<T>
where
    S: Clone + Send + Sync + 'static,
{
    let part = part.clone();
    Arc::new(move || read(&part))
}

/// An asynchronous function of a part of the node.
fn acting<S, T, F>(part: &S, act: impl Fn(S, T) -> F + Send + Sync + 'static) -> Act<T, F::Output>
where
    S: Clone + Send + Sync + 'static,
    F: Future + Send + 'static,
{
    let part = part.clone();
    Arc::new(move |argument| act(part.clone(), argument).boxed())
}
