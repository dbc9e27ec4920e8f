//! Manages one pod of a fake kubelet, from its assignment to the deletion of its object.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Pod as PodObject;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::Status;

use super::{
    objects::MIRROR,
    tended::{HELD, Refusal, Shared},
};
use crate::kubelet::{Pod, Sandbox};

/// The desired state of a running pod.
const CONDITIONS: [&str; 5] = [
    "PodReadyToStartContainers",
    "Initialized",
    "ContainersReady",
    "Ready",
    "PodScheduled",
];

type Objects = watch::Receiver<Option<Arc<PodObject>>>;

/// The pauses between attempts; those of a real kubelet are ten times as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn run(shared: Arc<Shared>, uid: String, mut objects: Objects) {
    let Some(object) = objects.borrow_and_update().clone() else {
        return shared.remove(&uid);
    };
    let worker = Worker {
        api: Api::namespaced(shared.client.clone(), &object.namespace().unwrap_or_default()),
        shared,
        uid,
        object,
    };
    worker.live(objects).await;
}

struct Worker {
    shared: Arc<Shared>,
    api: Api<PodObject>,
    uid: String,
    /// The first observed state: later changes do not affect the sandbox, as with a kubelet.
    object: Arc<PodObject>,
}

impl Worker {
    async fn live(&self, mut objects: Objects) {
        if let Some(pod) = self.bring_up(&mut objects).await {
            self.shared.attached(&self.uid, pod.0.clone(), pod.1);
            self.report(&pod.0, &mut objects).await;
            ended(&mut objects).await;
            self.shared.ending(&self.uid);
            self.take_down(&pod.0.id).await;
        }
        self.remove_object().await;
        self.shared.remove(&self.uid);
    }

    /// Retries until the pod runs; `None` if it is deleted before.
    async fn bring_up(&self, objects: &mut Objects) -> Option<(Pod, Duration)> {
        let mut pauses = pauses();
        let mut held = self.shared.held.subscribe();
        let holdable = self.object.labels().contains_key(HELD);
        loop {
            tokio::select! {
                biased;
                () = ended(objects) => return None,
                free = held.wait_for(|held| !held || !holdable) => drop(free.ok()?),
            }
            if let Some(pod) = self.attempt().await {
                return Some(pod);
            }
            tokio::time::sleep(pauses.next()?).await;
        }
    }

    /// As in the kubelet, a sandbox without a network is removed, and the next attempt uses a new one.
    async fn attempt(&self) -> Option<(Pod, Duration)> {
        let _turn = self.shared.turns.acquire().await.ok()?;
        let (namespace, name) = (self.object.namespace().unwrap_or_default(), self.object.name_any());
        let start = Instant::now();
        let netns = match self.shared.kni.create_network(&namespace, &name).await {
            Ok(netns) => netns,
            Err(status) => {
                self.refused("CreateNetwork", &status);
                return None;
            }
        };
        let mut sandbox = Sandbox::new(&namespace, &name, &netns);
        // A kubelet and its runtime know a static pod by its own UID, not by that of its mirror pod.
        let static_uid = self.object.annotations().get(MIRROR);
        sandbox.uid.clone_from(static_uid.unwrap_or(&self.uid));
        sandbox.annotations.extend(self.object.annotations().clone());
        let id = sandbox.id.clone();
        let labels = self.object.labels().clone();
        let ran = self
            .shared
            .kni
            .run_sandbox(sandbox, netns, |request| request.labels.extend(labels));
        match ran.await {
            Ok(pod) => Some((pod, start.elapsed())),
            Err(status) => {
                self.refused("AttachInterface", &status);
                self.take_down_in_turn(&id).await;
                None
            }
        }
    }

    async fn take_down(&self, id: &str) {
        let turn = self.shared.turns.acquire().await;
        self.take_down_in_turn(id).await;
        drop(turn);
    }

    /// Retries until both calls succeed.
    async fn take_down_in_turn(&self, id: &str) {
        for pause in pauses() {
            let outcome = match self.shared.kni.detach(id).await {
                Ok(()) => self
                    .shared
                    .kni
                    .delete_network(id)
                    .await
                    .map_err(|s| ("DeleteNetwork", s)),
                Err(status) => Err(("DetachInterface", status)),
            };
            match outcome {
                Ok(()) => return,
                Err((call, status)) => self.refused(call, &status),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Reports the running pod to the API server, until that succeeds or the pod must end.
    async fn report(&self, pod: &Pod, objects: &mut Objects) {
        let status = Patch::Merge(self.status(pod));
        let name = self.object.name_any();
        let tell = async {
            for pause in pauses() {
                match self.api.patch_status(&name, &PatchParams::default(), &status).await {
                    Ok(_object) => return self.shared.reported(&self.uid),
                    Err(_error) => tokio::time::sleep(pause).await,
                }
            }
        };
        tokio::select! {
            biased;
            () = ended(objects) => (),
            () = tell => (),
        }
    }

    fn status(&self, pod: &Pod) -> Value {
        let ips: Vec<_> = pod.ips().iter().map(|ip| json!({ "ip": ip })).collect();
        let conditions = CONDITIONS.map(|kind| json!({ "type": kind, "status": "True" }));
        let mut status = json!({
            "phase": "Running",
            "hostIP": self.shared.host[0],
            "hostIPs": self.shared.host.each_ref().map(|ip| json!({ "ip": ip })),
            "conditions": conditions,
        });
        if let Some(first) = pod.ips().first() {
            status["podIP"] = json!(first);
            status["podIPs"] = json!(ips);
        }
        // The UID restricts the change to this pod, excluding a later pod with the same name.
        json!({ "metadata": { "uid": self.uid }, "status": status })
    }

    /// Retries until the object is deleted.
    async fn remove_object(&self) {
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: Some(self.uid.clone()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        for pause in pauses() {
            match self.api.delete(&self.object.name_any(), &params).await {
                Ok(_deleted) => return,
                // Deleted, or replaced by another object with the name.
                Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => return,
                Err(_error) => tokio::time::sleep(pause).await,
            }
        }
    }

    fn refused(&self, call: &'static str, status: &Status) {
        self.shared.refused(Refusal {
            pod: format!(
                "{}/{}",
                self.object.namespace().unwrap_or_default(),
                self.object.name_any()
            ),
            call,
            code: status.code(),
            message: status.message().to_owned(),
        });
    }
}

/// Waits until the pod's object is being deleted, or gone.
async fn ended(objects: &mut Objects) {
    let is_over = |object: &Option<Arc<PodObject>>| {
        object
            .as_ref()
            .is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
    };
    // An error means that the receiver is gone.
    drop(objects.wait_for(is_over).await.map(drop));
}

fn pauses() -> impl Iterator<Item = Duration> + Send {
    std::iter::successors(Some(FIRST_PAUSE), |pause| Some((*pause * 2).min(LONGEST_PAUSE)))
}
