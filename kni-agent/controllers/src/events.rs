//! Reports to users what happened to their pods, as Events of events.k8s.io.

use k8s_openapi::api::core::v1::ObjectReference;
use kni_model::{PodRef, service::ServiceRef};
use kube::{
    Client,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

/// Maximum length of a note, in bytes (the API server's limit).
const MAX_NOTE: usize = 1024;

/// Writes events in the background. Clones share the deduplication.
#[derive(Clone)]
pub(super) struct Events {
    recorder: Recorder,
}

impl Events {
    /// The events of the agent of a node.
    pub(super) fn new(client: Client, node: &str) -> Self {
        let reporter = Reporter {
            controller: "kni-agent".to_owned(),
            instance: Some(node.to_owned()),
        };
        Self {
            recorder: Recorder::new(client, reporter),
        }
    }

    /// Reports something about a pod that its owner must know. An event that cannot be written is lost: conditions and
    /// the log have the same content.
    pub(super) fn warn_pod(&self, pod: &PodRef, reason: &str, action: &str, note: &str) {
        let (events, pod) = (self.clone(), pod.clone());
        let (reason, action, note) = (reason.to_owned(), action.to_owned(), note.to_owned());
        tokio::spawn(async move {
            if let Err(error) = events.publish(&pod, &reason, &action, &note).await {
                tracing::debug!(%error, "cannot write an event");
            }
        });
    }

    /// [`Self::warn_pod`] for a caller that tries again.
    pub(super) async fn publish(
        &self,
        pod: &PodRef,
        reason: &str,
        action: &str,
        note: &str,
    ) -> Result<(), kube::Error> {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()).filter(|uid| !uid.is_empty()),
            ..ObjectReference::default()
        };
        self.warn(&about, reason, action, note).await
    }

    /// Reports something about a Service that its owner must know; as [`Self::warn_pod`].
    pub(super) async fn warn_service(&self, service: &ServiceRef, reason: &str, action: &str, note: &str) {
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Service".to_owned()),
            namespace: Some(service.namespace.clone()),
            name: Some(service.name.clone()),
            ..ObjectReference::default()
        };
        if let Err(error) = self.warn(&about, reason, action, note).await {
            tracing::debug!(%error, "cannot write an event");
        }
    }

    async fn warn(&self, about: &ObjectReference, reason: &str, action: &str, note: &str) -> Result<(), kube::Error> {
        let mut note = note.to_owned();
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        self.recorder.publish(&event, about).await
    }
}
