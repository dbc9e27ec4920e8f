//! Determines the pod of a request.

use std::collections::BTreeMap;

use kni_model::PodRef;

use super::{bounds, error::Refusal};

/// The kubelet's labels of a sandbox, the only source of the UID.
const LABEL_NAME: &str = "io.kubernetes.pod.name";
const LABEL_NAMESPACE: &str = "io.kubernetes.pod.namespace";
pub(super) const LABEL_UID: &str = "io.kubernetes.pod.uid";

/// The pod, from the request's own fields first and from the kubelet's labels where those are empty.
pub(super) fn pod(name: String, namespace: String, uid: String, labels: &BTreeMap<String, String>) -> PodRef {
    let or_label = |value: String, label: &str| {
        if value.is_empty() {
            labels.get(label).cloned().unwrap_or_default()
        } else {
            value
        }
    };
    PodRef {
        namespace: or_label(namespace, LABEL_NAMESPACE),
        name: or_label(name, LABEL_NAME),
        uid: or_label(uid, LABEL_UID),
    }
}

/// Checks length and characters. All parts may be empty.
pub(super) fn check(pod: &PodRef) -> Result<(), Refusal> {
    bounds::name("name", &pod.name)?;
    bounds::name("namespace", &pod.namespace)?;
    bounds::name("uid", &pod.uid)
}
