//! Completes a request in a cluster with what the cache has of the pod: its labels, networks and attachments.
//!
//! Reads only the cache. Objects that the cache does not have yet are awaited for a limited time, never requested.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kni_cluster::{Addresses, ClusterCache, Following, Tables, joining, needs_blocks};
use kni_crd::PodFacts;
use kni_model::{AttachRequest, CniAttachment, Fabric, Home, NetworkName, Phase, PodRef, selection::PRIMARY_IFNAME};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    error::{AttachError, ErrorKind, Subject},
    networks::NetworkRegistry,
    registry::Registry,
};

/// How long an attach waits for objects that the watches are about to report, or for an address block that is being
/// allocated. The runtime repeats a failed call.
const PATIENCE: Duration = Duration::from_secs(5);

/// How much later an attach ends at most, so that the node knows what other nodes have in the pod's networks.
const OTHERS_PATIENCE: Duration = Duration::from_secs(1);

/// A complete request.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    /// The pod's own sandbox.
    pub(crate) request: AttachRequest,
    /// Its additional interfaces, each a sandbox of its own that goes with it.
    pub(crate) additional: Vec<AttachRequest>,
    /// Networks of which the node does not know yet what other nodes have; `None` where it knows all.
    pub(crate) following: Option<Following<'a>>,
}

/// Completes requests.
pub(crate) struct Preparation<'a> {
    cluster: &'a ClusterCache,
    registry: &'a Registry,
    networks: &'a NetworkRegistry,
    /// The end of all waiting.
    deadline: Instant,
}

impl<'a> Preparation<'a> {
    /// For one call.
    pub(crate) fn new(cluster: &'a ClusterCache, registry: &'a Registry, networks: &'a NetworkRegistry) -> Self {
        Self {
            cluster,
            registry,
            networks,
            deadline: Instant::now() + PATIENCE,
        }
    }

    /// Completes a request with what the cluster has of the pod and its namespace.
    pub(crate) async fn complete(&self, mut request: AttachRequest) -> Result<Prepared<'a>, AttachError> {
        let (home, facts) = self.facts(&request).await?;
        let additional = {
            let tables = self.cluster.tables();
            if !tables.definitions.is_synced() && joining::may_name_definition(&request) {
                let reason = "the agent has not read the cluster's network-attachment-definitions yet, and the pod may \
                              name one";
                return Err(Subject::from(&request).not_ready(reason.to_owned()));
            }
            let networks = self.cluster.networks(&tables);
            if let Some(facts) = facts {
                request.labels.clone_from(&facts.labels);
                request.container_ports.clone_from(&facts.ports);
                // One that the runtime has sent stays: that of a static pod is not the one of its object.
                if request.pod.uid.is_empty() {
                    request.pod.uid.clone_from(&facts.uid);
                }
            }
            if request.cni.as_ref().is_some_and(CniAttachment::is_additional) {
                Vec::new()
            } else {
                let filled = joining::fill_in(&mut request, &tables, &networks, &home);
                let refused = |error| Subject::from(&request).error(ErrorKind::InvalidSelection(Box::new(error)));
                filled.map_err(refused)?;
                with_attachments(&mut request, &tables)?
            }
        };
        // It is read while blocks are claimed, and while the pod is attached.
        let following = self.follow(&interfaces(&request, &additional));
        self.wait_for_blocks(&request, &additional).await;
        Ok(Prepared {
            request,
            additional,
            following,
        })
    }

    /// Follows the networks of which the node does not know yet what other nodes have.
    fn follow(&self, interfaces: &BTreeMap<Option<NetworkName>, u32>) -> Option<Following<'a>> {
        let others = self.cluster.others();
        let unknown: BTreeSet<NetworkName> = {
            let tables = self.cluster.tables();
            let networks = self.cluster.networks(&tables);
            let names = interfaces.keys().filter_map(|name| match name {
                Some(name) => Some(name),
                None => networks.default_network(),
            });
            let unknown = names.filter(|name| !others.is_applied(&tables, name));
            let connected = unknown.filter(|name| networks.spec(name).is_some_and(|spec| spec.fabric != Fabric::None));
            connected.cloned().collect()
        };
        (!unknown.is_empty()).then(|| others.follow(unknown))
    }

    /// Waits until the node knows what other nodes have in the followed networks, so that the first packet of a pod
    /// arrives. Not for long, and not while the API server is away: the pod has its interface, and gets the rest later.
    pub(crate) async fn wait_for_others(&self, following: Option<Following<'_>>) {
        let Some(following) = following else { return };
        if !self.cluster.wait_for_others(&following, OTHERS_PATIENCE).await {
            self.cluster.others().count_early();
        }
    }

    /// The home of the namespace, and the pod if it is known. CNI has no labels of pods, so for its runtimes the pod
    /// must be known.
    async fn facts(&self, request: &AttachRequest) -> Result<(Home, Option<Arc<PodFacts>>), AttachError> {
        let mut changes = self.cluster.changes();
        let mut missing;
        loop {
            let attached = self.attached_network(request);
            {
                let tables = self.cluster.tables();
                let behind = tables.missing();
                if let Some(first) = behind.first() {
                    // The kubelet repeats the call: waiting here has no benefit.
                    let reason = format!("the agent has not read the cluster's {first} yet");
                    return Err(Subject::from(request).not_ready(reason));
                }
                let pod = tables.pod_of(self.cluster.node(), &request.pod);
                let namespace = &request.pod.namespace;
                let networks = self.cluster.networks(&tables);
                let home = tables
                    .namespace_labels(namespace)
                    .map(|labels| networks.home(namespace, &labels));
                missing = match (home, pod) {
                    (None, _) => format!("namespace {namespace} is not known yet"),
                    (Some(_), None) if request.cni.is_some() => unknown(&request.pod).to_owned(),
                    (Some(Home::Unknown(reason)), pod) if has_home(request) => match attached {
                        Some(network) => return Ok((Home::Network(network), pod.map(Arc::clone))),
                        None => reason,
                    },
                    (Some(home), pod) => return Ok((home, pod.map(Arc::clone))),
                };
            }
            if !matches!(timeout_at(self.deadline, changes.changed()).await, Ok(Ok(()))) {
                return Err(Subject::from(request).not_ready(missing));
            }
        }
    }

    /// The network of the primary interface of a sandbox that is attached already: the repeated call gets its answer.
    fn attached_network(&self, request: &AttachRequest) -> Option<NetworkName> {
        let attached = self.registry.lock().sandbox(&request.sandbox)?;
        let mut made = attached.attachments.iter().filter(|_| attached.phase == Phase::Ready);
        let primary = made.find(|made| made.ifname.as_str() == PRIMARY_IFNAME)?;
        Some(primary.network.clone())
    }

    /// A network without enough free addresses on the node gets blocks, if any is left. The controller of blocks
    /// usually claimed them when the pod was assigned to the node.
    async fn wait_for_blocks(&self, request: &AttachRequest, additional: &[AttachRequest]) {
        loop {
            let mut changes = self.registry.changes();
            let needing = self.needing_blocks(&interfaces(request, additional));
            // Otherwise the attach itself reports what is missing.
            if needing.is_empty() || !self.waits(needing, &mut changes).await {
                return;
            }
        }
    }

    /// Waits for another block of the networks of a request that was refused for want of addresses, until something has
    /// changed since `changes`. Returns false if there is none, or it takes too long.
    pub(crate) async fn waits_for_block(&self, request: &AttachRequest, mut changes: watch::Receiver<u64>) -> bool {
        let interfaces = interfaces(request, &[]);
        let needing = self.needing_blocks(&interfaces);
        if !needing.is_empty() {
            return self.waits(needing, &mut changes).await;
        }
        // Either there are enough by now, or there will never be.
        let is_exhausted = |name: &Option<NetworkName>| {
            let name = name.as_ref();
            name.is_some_and(|name| self.cluster.blocks().is_exhausted(name))
        };
        changes.has_changed().unwrap_or(false) && !interfaces.keys().any(is_exhausted) && Instant::now() < self.deadline
    }

    /// Waits for a change while blocks of these networks are demanded.
    async fn waits(&self, needing: Addresses, changes: &mut watch::Receiver<u64>) -> bool {
        let waiting = self.cluster.blocks().wait(needing);
        tokio::select! {
            next = timeout_at(self.deadline, changes.changed()) => matches!(next, Ok(Ok(()))),
            // The loop of the caller finds out.
            () = waiting.refused() => true,
        }
    }

    /// How many addresses networks that have too few free ones, but may still get blocks, have to give.
    fn needing_blocks(&self, interfaces: &BTreeMap<Option<NetworkName>, u32>) -> Addresses {
        let mut needing = Addresses::new();
        for view in self.networks.views() {
            let spec = &view.network.spec;
            let by_name = interfaces.get(&Some(spec.name.clone())).copied().unwrap_or_default();
            let by_default = interfaces
                .get(&None)
                .copied()
                .filter(|_| spec.default)
                .unwrap_or_default();
            let count = by_name.saturating_add(by_default);
            if count > 0 && needs_blocks(&view, count) && !self.cluster.blocks().is_exhausted(&spec.name) {
                needing.insert(spec.name.clone(), count);
            }
        }
        needing
    }
}

/// Why a pod that must be known waits. The UIDs of the API server are UUIDs, that of a static pod is a hash.
fn unknown(pod: &PodRef) -> &'static str {
    if pod.uid.is_empty() || pod.uid.contains('-') {
        "the pod is not known yet"
    } else {
        "the pod is not known yet: by its UID it is a static pod, whose mirror pod the kubelet creates as soon as it \
         reaches the API server"
    }
}

/// Whether the network of the namespace matters: as the network of the primary interface, or because it may forbid
/// another one.
fn has_home(request: &AttachRequest) -> bool {
    !request.primary.none && !request.cni.as_ref().is_some_and(CniAttachment::is_additional)
}

/// How many interfaces a request has in each network; `None` is the default network.
fn interfaces(request: &AttachRequest, additional: &[AttachRequest]) -> BTreeMap<Option<NetworkName>, u32> {
    let mut interfaces = BTreeMap::new();
    let mut add = |network: Option<NetworkName>| *interfaces.entry(network).or_insert(0) += 1;
    if !request.primary.none {
        add(request.primary.network.clone());
    }
    for selection in &request.networks {
        add(Some(selection.network.clone()));
    }
    for child in additional {
        add(child.primary.network.clone());
    }
    interfaces
}

/// The requests for the attachments that select the pod. One that has the default routes takes them from the primary
/// interface.
fn with_attachments(request: &mut AttachRequest, tables: &Tables) -> Result<Vec<AttachRequest>, AttachError> {
    let names = joining::names(request);
    let selected = joining::attachments(tables, &request.pod.namespace, &request.labels, &names);
    let routed = selected.iter().position(|facts| facts.default_route);
    if routed.is_some() && !request.networks.iter().any(|selection| selection.default_route) {
        request.primary.default_route = Some(false);
    }
    let mut additional = Vec::new();
    for (index, facts) in selected.into_iter().enumerate() {
        if tables.networks.get("", facts.network.as_str()).is_none() {
            let reason = format!(
                "network {} of PodNetworkAttachment {}/{} does not exist",
                facts.network, facts.namespace, facts.name
            );
            return Err(Subject::from(&*request).not_ready(reason));
        }
        additional.extend(joining::additional(request, facts, routed == Some(index)));
    }
    Ok(additional)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_static_pod_learns_what_it_waits_for() {
        let reason = |uid: &str| {
            unknown(&PodRef {
                uid: uid.to_owned(),
                ..PodRef::named("shop", "web")
            })
        };
        assert!(reason("9fd2a1c8d3e94f0e8a4bb1c2d3e4f506").contains("mirror pod"));
        for uid in ["", "0f0f0f0f-0000-4000-8000-000000000000"] {
            assert_eq!(reason(uid), "the pod is not known yet");
        }
    }
}
