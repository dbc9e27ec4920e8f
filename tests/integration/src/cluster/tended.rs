//! Holds the pods of a fake kubelet, shared by the watch of the API server and the workers of pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{Client, ResourceExt as _};
use tokio::sync::{Semaphore, watch};
use tonic::Code;

use crate::kubelet::{Kubelet, Pod};

/// Label of the pods that [`FakeKubelet::hold`](super::FakeKubelet::hold) affects.
pub const HELD: &str = "test/held";
/// Number of pods that are started or stopped concurrently.
const AT_ONCE: usize = 8;

/// The shared state of all workers of a kubelet.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) kni: Kubelet,
    /// The node's addresses.
    pub(super) host: [String; 2],
    pub(super) turns: Semaphore,
    /// While this is true, pods with the label [`HELD`] are not started.
    pub(super) held: watch::Sender<bool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The pods by UID.
    pub(super) pods: BTreeMap<String, Tended>,
    pub(super) refusals: Vec<Refusal>,
    pub(super) attaches: Vec<Duration>,
}

/// A pod that the API server has assigned to the node.
#[derive(Debug)]
pub(super) struct Tended {
    pub(super) namespace: String,
    pub(super) name: String,
    /// Its object; `None` once it is deleted.
    object: watch::Sender<Option<Arc<PodObject>>>,
    pub(super) running: Option<Pod>,
    /// Whether the API server has its running status.
    pub(super) reported: bool,
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
    /// The message.
    pub message: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {:?}: {}", self.call, self.pod, self.code, self.message)
    }
}

impl Shared {
    pub(super) fn new(client: Client, kni: Kubelet, host: [String; 2]) -> Self {
        Self {
            client,
            kni,
            host,
            turns: Semaphore::new(AT_ONCE),
            held: watch::Sender::new(false),
            state: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
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

    /// Marks the pod as no longer running, as soon as its removal starts.
    pub(super) fn ending(&self, uid: &str) {
        if let Some(tended) = self.state().pods.get_mut(uid) {
            tended.running = None;
        }
    }

    pub(super) fn remove(&self, uid: &str) {
        self.state().pods.remove(uid);
    }

    /// Sends the latest state of a pod's object to its worker; returns a receiver for a new worker the first time.
    pub(super) fn update(&self, pod: PodObject) -> Option<watch::Receiver<Option<Arc<PodObject>>>> {
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

    pub(super) fn mark_deleted(&self, uid: &str) {
        if let Some(tended) = self.state().pods.get(uid) {
            tended.object.send_replace(None);
        }
    }

    /// Marks all pods that are not in `there` as deleted.
    pub(super) fn mark_deleted_all_but(&self, there: &BTreeSet<String>) {
        for (uid, tended) in &self.state().pods {
            if !there.contains(uid) {
                tended.object.send_replace(None);
            }
        }
    }
}
