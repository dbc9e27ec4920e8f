//! Attach in a cluster: puts into a request what the cluster says of the pod. Everything it needs is local; what is not
//! known yet is waited for a moment, never asked for.

use std::{sync::Arc, time::Duration};

use kni_crd::PodFacts;
use kni_model::{AttachRequest, CniAttachment, NetworkName, policy::Labels};
use kni_pods::{AttachError, ErrorKind, Subject};
use tokio::time::{Instant, timeout_at};

use super::{Cluster, blocks::is_starving, joining, known::Tables};

/// How long an attach waits for what its watches are about to tell, or for an address block that is being taken. The
/// runtime asks again after an error.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is to be attached.
#[derive(Debug)]
pub struct Prepared {
    /// The pod's own sandbox.
    pub request: AttachRequest,
    /// Its further interfaces, each a sandbox of its own that goes with it.
    pub further: Vec<AttachRequest>,
}

impl Cluster {
    /// Completes a request by what the cluster says of the pod and its namespace.
    pub async fn prepare(&self, mut request: AttachRequest) -> Result<Prepared, AttachError> {
        let deadline = Instant::now() + PATIENCE;
        let (namespace, facts) = self.facts(&request, deadline).await?;
        let further = {
            let tables = self.known.tables();
            let networks = self.networks(&tables);
            if let Some(facts) = facts {
                request.labels.clone_from(&facts.labels);
                request.container_ports.clone_from(&facts.ports);
                request.pod.uid.clone_from(&facts.uid);
            }
            let additional = request.cni.as_ref().is_some_and(CniAttachment::is_additional);
            if additional {
                Vec::new()
            } else {
                joining::fill_in(&mut request, &tables, &networks, &namespace);
                with_attachments(&mut request, &tables)?
            }
        };
        self.wait_for_blocks(&request, &further, deadline).await;
        Ok(Prepared { request, further })
    }

    /// The namespace's labels, and the pod if it is known. A runtime that speaks CNI says nothing of a pod's labels, so
    /// that the pod must be.
    async fn facts(
        &self,
        request: &AttachRequest,
        deadline: Instant,
    ) -> Result<(Labels, Option<Arc<PodFacts>>), AttachError> {
        let mut changes = self.known.changes();
        let mut missing;
        loop {
            {
                let tables = self.known.tables();
                let behind = tables.missing();
                if let Some(first) = behind.first() {
                    // The kubelet asks again; it is no use to keep it waiting.
                    let reason = format!("the agent has not read the cluster's {first} yet");
                    return Err(not_ready(request, reason));
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
                return Err(not_ready(request, missing));
            }
        }
    }

    /// A network of which the node has no address left gets a block, if there is one: that is asked for by the controller
    /// of blocks, which usually did so when the pod was assigned to the node.
    async fn wait_for_blocks(&self, request: &AttachRequest, further: &[AttachRequest], deadline: Instant) {
        let mut changes = self.attacher.changes();
        loop {
            let hungry = self.hungry(request, further);
            if hungry.is_empty() {
                return;
            }
            self.blocks.demand(&hungry);
            if !matches!(timeout_at(deadline, changes.changed()).await, Ok(Ok(()))) {
                // The attach itself says what is missing.
                return;
            }
        }
    }

    /// Networks without a free address that may still get one.
    fn hungry(&self, request: &AttachRequest, further: &[AttachRequest]) -> Vec<NetworkName> {
        let views = self.attacher.networks();
        let is_wanted = |name: &NetworkName, is_default: bool| {
            let primary = match &request.primary.network {
                Some(network) => network == name,
                None => is_default && !request.primary.none,
            };
            let others = request.networks.iter().map(|selection| &selection.network);
            let mut others = others.chain(further.iter().filter_map(|child| child.primary.network.as_ref()));
            primary || others.any(|network| network == name)
        };
        let hungry = views.into_iter().filter(|view| {
            let spec = &view.network.spec;
            is_wanted(&spec.name, spec.default) && is_starving(view) && !self.blocks.is_exhausted(&spec.name)
        });
        hungry.map(|view| view.network.spec.name).collect()
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
    let mut further = Vec::new();
    for (index, facts) in selected.into_iter().enumerate() {
        if tables.networks.get("", facts.network.as_str()).is_none() {
            let reason = format!(
                "network {} of PodNetworkAttachment {}/{} does not exist",
                facts.network, facts.namespace, facts.name
            );
            return Err(not_ready(request, reason));
        }
        further.extend(joining::further(request, facts, routed == Some(index)));
    }
    Ok(further)
}

fn not_ready(request: &AttachRequest, reason: String) -> AttachError {
    Subject::from(request).error(ErrorKind::NotReady(reason))
}
