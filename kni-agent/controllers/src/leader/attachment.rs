//! Computes the status of an attachment: the selected pods, and those that have its interface.

use kni_api::{AttachmentSummary, PodNetworkAttachmentStatus, set_condition};
use kni_policy::matches;

use crate::interfaces::{condition, object_name};
use kni_cluster::{AttachmentRow, Tables};

/// The desired status of an attachment.
pub(super) fn attachment_status(tables: &Tables, row: &AttachmentRow) -> PodNetworkAttachmentStatus {
    let mut status = row.object.status.clone().unwrap_or_default();
    let generation = row.object.metadata.generation;
    let network = tables.networks.get("", &row.object.spec.pod_network_name);
    let (accepted, reason, message) = match (&row.facts, network) {
        (Err(why), _) => (false, "Refused", why.to_string()),
        (Ok(_), None) => {
            let message = format!("network {} does not exist", row.object.spec.pod_network_name);
            (false, "NetworkNotFound", message)
        }
        (Ok(_), Some(network)) if !network.spec.enabled => {
            (false, "NetworkDisabled", "the network takes no new pods".to_owned())
        }
        (Ok(_), Some(_)) => (true, "Valid", "the network takes pods".to_owned()),
    };
    let (mut selected, mut attached) = (0, 0);
    if let Ok(facts) = &row.facts {
        for (key, pod) in tables.pods.rows() {
            let runs = !pod.node.is_empty() && !pod.finished && !pod.host_network;
            if key.namespace != facts.namespace || !runs || !matches(&facts.pods, &pod.labels) {
                continue;
            }
            selected += 1;
            let name = object_name(&key.name, facts.ifname.as_str());
            let there = tables.interfaces.get(&key.namespace, &name);
            attached += i64::from(there.is_some_and(|there| {
                there.spec.pod_network_name == facts.network.as_str() && there.spec.pod_uid == pod.uid
            }));
        }
    }
    status.selected = selected;
    status.attached = attached;
    status.summary = AttachmentSummary::new(&row.object.spec);
    set_condition(
        &mut status.conditions,
        condition("Accepted", accepted, reason, &message, generation),
    );
    let ready = selected == attached && accepted;
    let counts = format!("{attached} of {selected} pods have the interface");
    let why = if ready { "AllPods" } else { "PodsMissing" };
    set_condition(
        &mut status.conditions,
        condition("Ready", ready, why, &counts, generation),
    );
    status
}
