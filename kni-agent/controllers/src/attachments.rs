//! Adds and removes additional interfaces of running pods as attachments and labels change.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use kni_model::{AttachRequest, IfName, Sandbox, SandboxId};
use kni_pods::ErrorKind;
use tokio::time::{Instant, MissedTickBehavior, interval};

use kni_cluster::joining;

use super::{Cluster, rights::NOT_AUTHORIZED};

/// Interval of the periodic round, and of retries after a failure.
const ROUND: Duration = Duration::from_secs(2);
/// Changes that arrive within this time are processed together.
const GATHER: Duration = Duration::from_millis(20);
/// Maximum number of interfaces that are added or removed concurrently.
const AT_ONCE: usize = 8;

/// A change to one interface.
#[derive(Debug)]
enum Step {
    Make(Box<AttachRequest>),
    Take(SandboxId),
}

impl Cluster {
    /// Adds and removes interfaces for as long as the agent runs.
    pub(super) async fn reconcile_attachments(self) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = self.cache.changes();
        let mut attached = self.attacher.changes();
        let mut failed: BTreeMap<SandboxId, Instant> = BTreeMap::new();
        let mut seen = None;
        loop {
            let only_told = kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => false,
                    _ = known.changed() => { tokio::time::sleep(GATHER).await; true }
                    _ = attached.changed() => { tokio::time::sleep(GATHER).await; false }
                }
            })
            .await;
            let versions = {
                let tables = self.cache.tables();
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
            failed.retain(|_, since| since.elapsed() < ROUND);
            let steps = self.attachment_steps().into_iter();
            let due =
                steps.filter(|step| !matches!(step, Step::Make(request) if failed.contains_key(&request.sandbox)));
            let done: Vec<Option<SandboxId>> = stream::iter(due.map(|step| self.attachment_step(step)))
                .buffer_unordered(AT_ONCE)
                .collect()
                .await;
            failed.extend(done.into_iter().flatten().map(|id| (id, Instant::now())));
        }
    }

    /// Carries out a step; returns the sandbox if it could not be added.
    async fn attachment_step(&self, step: Step) -> Option<SandboxId> {
        match step {
            Step::Make(request) => {
                let (id, pod) = (request.sandbox.clone(), request.pod.clone());
                let made = self.attacher.attach_complete(*request).await;
                match made {
                    Ok(_) => {
                        tracing::info!(%pod, sandbox = %id, "an additional interface was added");
                        None
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot add an additional interface; retrying");
                        if let ErrorKind::NotAuthorized(refusal) = error.kind() {
                            let note = format!("an additional interface is refused: {refusal}");
                            self.events.warn_pod(&pod, NOT_AUTHORIZED, "Join", &note);
                        }
                        Some(id)
                    }
                }
            }
            Step::Take(id) => {
                match self.attacher.detach(id.clone()).await {
                    Ok(()) => tracing::info!(sandbox = %id, "an additional interface was removed"),
                    Err(error) => tracing::warn!(%error, "cannot remove an additional interface; retrying"),
                }
                None
            }
        }
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
        let tables = self.cache.tables();
        let Some(pod) = tables.pods.get(&sandbox.pod.namespace, &sandbox.pod.name) else {
            // The runtime will remove everything, or the pod is not known yet.
            return Vec::new();
        };
        if !sandbox.pod.uid.is_empty() && sandbox.pod.uid != pod.uid {
            return Vec::new();
        }
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
