//! Completes a request in a cluster with what the cache has of the pod: its labels, networks and attachments.
//!
//! Reads only the cache. Objects that the cache does not have yet are awaited for a limited time, never requested.

use std::{sync::Arc, time::Duration};

use kni_cluster::{ClusterCache, Tables, joining, needs_block};
use kni_crd::PodFacts;
use kni_model::{AttachRequest, CniAttachment, NetworkName, policy::Labels};
use tokio::time::{Instant, timeout_at};

use crate::{
    error::{AttachError, Subject},
    networks::NetworkRegistry,
    registry::Registry,
};

/// How long an attach waits for objects that the watches are about to report, or for an address block that is being
/// allocated. The runtime repeats a failed call.
const PATIENCE: Duration = Duration::from_secs(5);

/// A complete request.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The pod's own sandbox.
    pub(crate) request: AttachRequest,
    /// Its additional interfaces, each a sandbox of its own that goes with it.
    pub(crate) additional: Vec<AttachRequest>,
}

/// Completes requests.
pub(crate) struct Preparation<'a> {
    pub(crate) cluster: &'a ClusterCache,
    pub(crate) registry: &'a Registry,
    pub(crate) networks: &'a NetworkRegistry,
}

impl Preparation<'_> {
    /// Completes a request with what the cluster has of the pod and its namespace.
    pub(crate) async fn complete(&self, mut request: AttachRequest) -> Result<Prepared, AttachError> {
        let deadline = Instant::now() + PATIENCE;
        let (namespace, facts) = self.facts(&request, deadline).await?;
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
                request.pod.uid.clone_from(&facts.uid);
            }
            if request.cni.as_ref().is_some_and(CniAttachment::is_additional) {
                Vec::new()
            } else {
                joining::fill_in(&mut request, &tables, &networks, &namespace);
                with_attachments(&mut request, &tables)?
            }
        };
        self.wait_for_blocks(&request, &additional, deadline).await;
        Ok(Prepared { request, additional })
    }

    /// The namespace's labels, and the pod if it is known. CNI has no labels of pods, so for its runtimes the pod must be
    /// known.
    async fn facts(
        &self,
        request: &AttachRequest,
        deadline: Instant,
    ) -> Result<(Labels, Option<Arc<PodFacts>>), AttachError> {
        let mut changes = self.cluster.changes();
        let mut missing;
        loop {
            {
                let tables = self.cluster.tables();
                let behind = tables.missing();
                if let Some(first) = behind.first() {
                    // The kubelet repeats the call: waiting here has no benefit.
                    let reason = format!("the agent has not read the cluster's {first} yet");
                    return Err(Subject::from(request).not_ready(reason));
                }
                let pod = tables.pods.get(&request.pod.namespace, &request.pod.name);
                let pod = pod.filter(|pod| request.pod.uid.is_empty() || pod.uid == request.pod.uid);
                let namespace = tables.namespaces.get("", &request.pod.namespace);
                missing = match (namespace, pod) {
                    (None, _) => format!("namespace {} is not known yet", request.pod.namespace),
                    (Some(_), None) if request.cni.is_some() => "the pod is not known yet".to_owned(),
                    (Some(labels), pod) => return Ok((labels.clone(), pod.map(Arc::clone))),
                };
            }
            if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                return Err(Subject::from(request).not_ready(missing));
            }
        }
    }

    /// A network without a free address on the node gets a block, if one is left. The controller of blocks usually
    /// allocated it when the pod was assigned to the node.
    async fn wait_for_blocks(&self, request: &AttachRequest, additional: &[AttachRequest], deadline: Instant) {
        let mut changes = self.registry.changes();
        loop {
            let needing = self.needing_blocks(request, additional);
            if needing.is_empty() {
                return;
            }
            self.cluster.blocks().demand(&needing);
            if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                // The attach itself reports what is missing.
                return;
            }
        }
    }

    /// Networks without a free address that may still get one.
    fn needing_blocks(&self, request: &AttachRequest, additional: &[AttachRequest]) -> Vec<NetworkName> {
        let views = self.networks.views();
        let is_wanted = |name: &NetworkName, is_default: bool| {
            let primary = match &request.primary.network {
                Some(network) => network == name,
                None => is_default && !request.primary.none,
            };
            let others = request.networks.iter().map(|selection| &selection.network);
            let mut others = others.chain(additional.iter().filter_map(|child| child.primary.network.as_ref()));
            primary || others.any(|network| network == name)
        };
        let needing = views.into_iter().filter(|view| {
            let spec = &view.network.spec;
            is_wanted(&spec.name, spec.default) && needs_block(view) && !self.cluster.blocks().is_exhausted(&spec.name)
        });
        needing.map(|view| view.network.spec.name).collect()
    }
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
