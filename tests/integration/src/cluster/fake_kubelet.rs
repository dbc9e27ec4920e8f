//! A kubelet that runs no containers: it watches the pods of its node, and drives KNI for each of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

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
use tokio::{
    sync::{Semaphore, watch},
    task::{JoinHandle, JoinSet},
};
use tonic::Code;

use super::pod_worker;
use crate::kubelet::{Kubelet, Pod};

/// Label of pods that [`FakeKubelet::hold`] is about.
pub const HELD: &str = "test/held";
/// Pods that it brings up or takes down at the same time.
const AT_ONCE: usize = 8;

/// Follows the pods of one node until it is dropped. What runs then stays as it is, as when a kubelet is stopped.
pub struct FakeKubelet {
    shared: Arc<Shared>,
    follower: JoinHandle<()>,
}

/// What all workers of a kubelet share.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) kni: Kubelet,
    /// The node's addresses.
    pub(super) host: [String; 2],
    pub(super) turns: Semaphore,
    /// No pod with the label [`HELD`] is started while this is true.
    pub(super) held: watch::Sender<bool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By UID.
    pods: BTreeMap<String, Tended>,
    refusals: Vec<Refusal>,
    attaches: Vec<Duration>,
}

/// A pod that the API server has assigned to the node.
#[derive(Debug)]
struct Tended {
    namespace: String,
    name: String,
    /// Its object; nothing once that is gone.
    object: watch::Sender<Option<Arc<PodObject>>>,
    running: Option<Pod>,
    /// Whether the API server knows that it runs.
    reported: bool,
}

/// A call that failed.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Namespace and name of the pod.
    pub pod: String,
    /// The method.
    pub call: &'static str,
    /// The status.
    pub code: Code,
    /// What it says.
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {:?}: {}", self.call, self.pod, self.code, self.message)
    }
}

impl FakeKubelet {
    /// Begins to follow the pods of `node`, whose addresses are `host`.
    pub(super) fn start(client: Client, node: &str, host: [String; 2], kni: Kubelet) -> Self {
        let shared = Arc::new(Shared {
            client,
            kni,
            host,
            turns: Semaphore::new(AT_ONCE),
            held: watch::Sender::new(false),
            state: Mutex::default(),
        });
        let follower = tokio::spawn(follow(Arc::clone(&shared), node.to_owned()));
        Self { shared, follower }
    }

    /// Its connection to the agent.
    pub fn kni(&self) -> &Kubelet {
        &self.shared.kni
    }

    /// Starts no pod with the label [`HELD`] until [`Self::release`]; those that are assigned meanwhile are known.
    pub fn hold(&self) {
        self.shared.held.send_replace(true);
    }

    /// Starts pods again.
    pub fn release(&self) {
        self.shared.held.send_replace(false);
    }

    /// Whether it knows of a pod.
    pub fn knows(&self, namespace: &str, name: &str) -> bool {
        let state = self.shared.state();
        state
            .pods
            .values()
            .any(|pod| pod.namespace == namespace && pod.name == name)
    }

    /// The pods that run.
    pub fn running(&self) -> Vec<Pod> {
        let state = self.shared.state();
        state.pods.values().filter_map(|pod| pod.running.clone()).collect()
    }

    /// A pod that runs.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        let pods = self.running();
        pods.into_iter()
            .find(|pod| pod.namespace == namespace && pod.name == name)
    }

    /// A pod that runs, once the API server knows that.
    pub fn reported(&self, namespace: &str, name: &str) -> Option<Pod> {
        let state = self.shared.state();
        let mut pods = state.pods.values();
        let found = pods.find(|pod| pod.reported && pod.namespace == namespace && pod.name == name)?;
        found.running.clone()
    }

    /// Calls that failed, and were made again.
    pub fn refusals(&self) -> Vec<Refusal> {
        self.shared.state().refusals.clone()
    }

    /// How long the calls took that succeeded, from `CreateNetwork` to the answer of `QueryPodNetwork`.
    pub fn attaches(&self) -> Vec<Duration> {
        self.shared.state().attaches.clone()
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn refused(&self, refusal: Refusal) {
        self.state().refusals.push(refusal);
    }

    pub(super) fn attached(&self, uid: &str, pod: Pod, took: Duration) {
        let mut state = self.state();
        state.attaches.push(took);
        if let Some(tended) = state.pods.get_mut(uid) {
            tended.running = Some(pod);
        }
    }

    pub(super) fn reported(&self, uid: &str) {
        if let Some(tended) = self.state().pods.get_mut(uid) {
            tended.reported = true;
        }
    }

    /// The pod no longer runs, from the moment on when it is taken down.
    pub(super) fn ending(&self, uid: &str) {
        if let Some(tended) = self.state().pods.get_mut(uid) {
            tended.running = None;
        }
    }

    pub(super) fn forget(&self, uid: &str) {
        self.state().pods.remove(uid);
    }

    /// Tells a pod's worker what became of its object; the first time there is no worker yet.
    fn tell(&self, pod: PodObject) -> Option<watch::Receiver<Option<Arc<PodObject>>>> {
        let uid = pod.uid().unwrap_or_default();
        let mut state = self.state();
        if let Some(tended) = state.pods.get(&uid) {
            tended.object.send_replace(Some(Arc::new(pod)));
            return None;
        }
        let tended = Tended {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            object: watch::Sender::new(Some(Arc::new(pod))),
            running: None,
            reported: false,
        };
        let objects = tended.object.subscribe();
        state.pods.insert(uid, tended);
        Some(objects)
    }

    fn tell_gone(&self, uid: &str) {
        if let Some(tended) = self.state().pods.get(uid) {
            tended.object.send_replace(None);
        }
    }

    /// All pods that are not among `there` are gone.
    fn tell_all_but(&self, there: &BTreeSet<String>) {
        for (uid, tended) in &self.state().pods {
            if !there.contains(uid) {
                tended.object.send_replace(None);
            }
        }
    }
}

/// The API server may be away for a while; the tests do not want to wait long when it is back.
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
    // They end with this task.
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
            Ok(Event::Delete(pod)) => shared.tell_gone(&pod.uid().unwrap_or_default()),
            Ok(Event::InitDone) => shared.tell_all_but(&there),
            // The watch begins anew.
            Err(_error) => (),
        }
        while workers.try_join_next().is_some() {}
    }
}

fn tend(shared: &Arc<Shared>, pod: PodObject, workers: &mut JoinSet<()>) {
    let uid = pod.uid().unwrap_or_default();
    if let Some(objects) = shared.tell(pod) {
        workers.spawn(pod_worker::run(Arc::clone(shared), uid, objects));
    }
}
