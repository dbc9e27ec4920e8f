//! Implements a kubelet without containers: it watches the pods of its node, and calls KNI for each of them.

use std::{collections::BTreeSet, pin::pin, sync::Arc, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{
        WatchStreamExt as _,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use tokio::task::{JoinHandle, JoinSet};

use super::{
    pod_worker,
    tended::{Refusal, Shared},
};
use crate::kubelet::{Kubelet, Pod};

/// Watches the pods of one node until it is dropped. Running pods remain, as when a kubelet is stopped.
pub struct FakeKubelet {
    shared: Arc<Shared>,
    follower: JoinHandle<()>,
}

impl FakeKubelet {
    /// Starts watching the pods of `node`, whose addresses are `host`.
    pub(super) fn start(client: Client, node: &str, host: [String; 2], kni: Kubelet) -> Self {
        let shared = Arc::new(Shared::new(client, kni, host));
        let follower = tokio::spawn(follow(Arc::clone(&shared), node.to_owned()));
        Self { shared, follower }
    }

    /// Ends it. Its pods stay as they are.
    pub(super) fn stop(&self) {
        self.follower.abort();
    }

    /// Its connection to the agent.
    pub fn kni(&self) -> &Kubelet {
        &self.shared.kni
    }

    /// Stops starting pods with the label [`HELD`](super::HELD) until [`Self::release`]; pods assigned in between are
    /// recorded.
    pub fn hold(&self) {
        self.shared.held.send_replace(true);
    }

    /// Resumes starting pods.
    pub fn release(&self) {
        self.shared.held.send_replace(false);
    }

    /// Whether a pod has been observed.
    pub fn knows(&self, namespace: &str, name: &str) -> bool {
        let state = self.shared.state();
        state
            .pods
            .values()
            .any(|pod| pod.namespace == namespace && pod.name == name)
    }

    /// The running pods.
    pub fn running(&self) -> Vec<Pod> {
        let state = self.shared.state();
        state.pods.values().filter_map(|pod| pod.running.clone()).collect()
    }

    /// A running pod.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        let pods = self.running();
        pods.into_iter()
            .find(|pod| pod.namespace == namespace && pod.name == name)
    }

    /// A running pod whose status is reported to the API server.
    pub fn reported(&self, namespace: &str, name: &str) -> Option<Pod> {
        let state = self.shared.state();
        let mut pods = state.pods.values();
        let found = pods.find(|pod| pod.reported && pod.namespace == namespace && pod.name == name)?;
        found.running.clone()
    }

    /// Failed calls, which were retried.
    pub fn refusals(&self) -> Vec<Refusal> {
        self.shared.state().refusals.clone()
    }

    /// The durations of successful attachments, from `CreateNetwork` to the answer of `QueryPodNetwork`.
    pub fn attaches(&self) -> Vec<Duration> {
        self.shared.state().attaches.clone()
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

/// The API server may be unavailable for a while; frequent retries shorten the tests after its return.
struct Soon;

impl Iterator for Soon {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(200))
    }
}

impl Backoff for Soon {
    fn reset(&mut self) {}
}

async fn follow(shared: Arc<Shared>, node: String) {
    let pods: Api<PodObject> = Api::all(shared.client.clone());
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut events = pin!(watcher(pods, config).backoff(Soon));
    // The workers end with this task.
    let mut workers = JoinSet::new();
    let mut there = BTreeSet::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => there.clear(),
            Ok(Event::InitApply(pod)) => {
                there.extend(pod.uid());
                tend(&shared, pod, &mut workers);
            }
            Ok(Event::Apply(pod)) => tend(&shared, pod, &mut workers),
            Ok(Event::Delete(pod)) => shared.mark_deleted(&pod.uid().unwrap_or_default()),
            Ok(Event::InitDone) => shared.mark_deleted_all_but(&there),
            // The watch starts again.
            Err(_error) => (),
        }
        while workers.try_join_next().is_some() {}
    }
}

fn tend(shared: &Arc<Shared>, pod: PodObject, workers: &mut JoinSet<()>) {
    // A kubelet asks for no network for it.
    if pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true)) {
        return;
    }
    let uid = pod.uid().unwrap_or_default();
    if let Some(objects) = shared.update(pod) {
        workers.spawn(pod_worker::run(Arc::clone(shared), uid, objects));
    }
}
