//! Adds and removes additional interfaces of running pods as attachments and labels change.

mod work;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kni_model::{AttachRequest, IfName, Sandbox, SandboxId};
use kni_pods::ErrorKind;
use tokio::time::{MissedTickBehavior, interval};

use kni_cluster::joining;

use self::work::Work;
use super::{Cluster, rights::NOT_AUTHORIZED};

/// Reason of the event about a fixed address that another node has.
const ADDRESS_ELSEWHERE: &str = "AddressElsewhere";
/// Interval of the periodic round.
const ROUND: Duration = Duration::from_secs(2);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(20);

/// A change to one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Make(Box<AttachRequest>),
    Take(SandboxId),
}

impl Step {
    /// The sandbox that is the interface.
    fn sandbox(&self) -> &SandboxId {
        match self {
            Self::Make(request) => &request.sandbox,
            Self::Take(id) => id,
        }
    }
}

impl Cluster {
    /// Adds and removes interfaces for as long as the agent runs. Each interface has a task of its own, so that none
    /// waits for another.
    pub(super) async fn reconcile_attachments(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.objects.cache.changes();
        let mut attached = self.attacher.changes();
        let mut work = Work::default();
        let mut seen = None;
        loop {
            let only_told = kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => false,
                    _ = known.changed() => { tokio::time::sleep(GATHER).await; true }
                    _ = attached.changed() => { tokio::time::sleep(GATHER).await; false }
                    () = work.ended() => false,
                }
            })
            .await;
            let versions = {
                let tables = self.objects.cache.tables();
                // Networks admit pods by the labels of namespaces.
                (
                    tables.attachments.version(),
                    tables.pods.version(),
                    tables.namespaces.version(),
                )
            };
            // Policies and services change most often, and do not affect interfaces.
            if only_told && seen == Some(versions) {
                continue;
            }
            seen = Some(versions);
            let steps = self.attachment_steps();
            work.retain(&steps);
            for step in steps {
                work.begin(step, |step| {
                    let cluster = Arc::clone(&self);
                    async move { cluster.attachment_step(step).await }
                });
            }
        }
    }

    /// Carries out a step; the error is the reason of its failure.
    async fn attachment_step(&self, step: Step) -> Result<(), String> {
        match step {
            Step::Make(request) => {
                let (id, pod) = (request.sandbox.clone(), request.pod.clone());
                let made = self.attacher.attach_complete(*request).await;
                let reason = made.as_ref().err().and_then(|error| event_reason(error.kind()));
                if let (Err(error), Some(reason)) = (&made, reason) {
                    let note = format!("an additional interface is refused: {}", error.kind());
                    self.events.warn_pod(&pod, reason, "Join", &note);
                }
                made.map_err(|error| error.to_string())?;
                tracing::info!(%pod, sandbox = %id, "an additional interface was added");
            }
            Step::Take(id) => {
                let taken = self.attacher.detach(id.clone()).await;
                taken.map_err(|error| error.to_string())?;
                tracing::info!(sandbox = %id, "an additional interface was removed");
            }
        }
        Ok(())
    }

    fn attachment_steps(&self) -> Vec<Step> {
        let sandboxes = self.attacher.sandboxes();
        let mut children: BTreeMap<&SandboxId, Vec<&Arc<Sandbox>>> = BTreeMap::new();
        for sandbox in &sandboxes {
            if let Some(parent) = &sandbox.parent {
                children.entry(parent).or_default().push(sandbox);
            }
        }
        let mut steps = Vec::new();
        for sandbox in sandboxes.iter().filter(|sandbox| sandbox.is_primary()) {
            let children = children.remove(&sandbox.id).unwrap_or_default();
            steps.extend(self.steps_of(sandbox, &children));
        }
        // Their pods are gone: an agent was killed between two steps.
        steps.extend(
            children
                .into_values()
                .flatten()
                .map(|orphan| Step::Take(orphan.id.clone())),
        );
        steps
    }

    fn steps_of(&self, sandbox: &Sandbox, children: &[&Arc<Sandbox>]) -> Vec<Step> {
        let tables = self.objects.cache.tables();
        let Some(pod) = tables.pod_of(&self.objects.node, &sandbox.pod) else {
            // The runtime will remove everything, or the pod is not known yet.
            return Vec::new();
        };
        let taken: Vec<IfName> = sandbox
            .attachments
            .iter()
            .map(|attachment| attachment.ifname.clone())
            .collect();
        let selected = joining::attachments(&tables, &sandbox.pod.namespace, &pod.labels, &taken);
        let mut steps = Vec::new();
        let mut kept = Vec::new();
        for facts in selected {
            let Some(request) = joining::additional_of(sandbox, facts) else {
                tracing::warn!(sandbox = %sandbox.id, ifname = %facts.ifname, "the sandbox's id is too long for an additional interface");
                continue;
            };
            match children.iter().find(|child| child.id == request.sandbox) {
                Some(child) if matches_request(child, &request) => kept.push(child.id.clone()),
                // Another one is added when it is gone.
                Some(_) => {}
                None => steps.push(Step::Make(Box::new(request))),
            }
        }
        let gone = children.iter().filter(|child| !kept.contains(&child.id));
        steps.extend(gone.map(|child| Step::Take(child.id.clone())));
        steps
    }
}

fn matches_request(child: &Sandbox, request: &AttachRequest) -> bool {
    let [attachment] = child.attachments.as_slice() else {
        return false;
    };
    let primary = &request.primary;
    primary.network.as_ref() == Some(&attachment.network)
        && primary.mac.is_none_or(|mac| mac == attachment.mac)
        && primary
            .ips
            .iter()
            .all(|ip| attachment.addresses().any(|address| address == *ip))
}

/// The reason of the pod's event about an interface that the pod's owner has to change something for.
const fn event_reason(kind: &ErrorKind) -> Option<&'static str> {
    if matches!(kind, ErrorKind::NotAuthorized(_)) {
        Some(NOT_AUTHORIZED)
    } else if matches!(kind, ErrorKind::AddressElsewhere { .. }) {
        Some(ADDRESS_ELSEWHERE)
    } else {
        None
    }
}
