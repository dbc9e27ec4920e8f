//! Writes the status of attachments: the selected pods, and those that have the interface.

use std::collections::BTreeMap;

use kni_api::{
    AttachmentSummary, Condition, PodInterface, PodNetworkAttachment, PodNetworkAttachmentStatus, set_condition,
};
use kni_cluster::{AttachmentRow, Key, Networks, Tables};
use kni_crd::AttachmentFacts;
use kni_model::{
    AccessRefusal,
    joining::{Joiner, Wish},
};
use kni_policy::matches;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use tokio::time::Instant;

use super::{
    figures::Paced,
    reconcile::{Context, Reconciler, ignore_gone},
};

/// The condition whose message counts pods.
const READY: &str = "Ready";

/// The controller.
#[derive(Debug, Default)]
pub(super) struct AttachmentStatus {
    counts: Paced<(i64, i64)>,
}

impl AttachmentStatus {
    /// Whether the difference between the status of an object and the desired one can wait: it is how many pods have
    /// the interface.
    fn can_wait(
        &mut self,
        key: &Key,
        before: &PodNetworkAttachmentStatus,
        desired: &PodNetworkAttachmentStatus,
        now: Instant,
    ) -> bool {
        let mut others = desired.clone();
        (others.selected, others.attached) = (before.selected, before.attached);
        let mut conditions = others.conditions.iter_mut();
        let ready = conditions.find(|condition| condition.type_ == READY);
        let was = before.conditions.iter().find(|condition| condition.type_ == READY);
        if let Some((ready, was)) = ready.zip(was)
            && (ready.status, &ready.reason) == (was.status, &was.reason)
        {
            ready.message.clone_from(&was.message);
        }
        let counts = (before.selected, before.attached);
        self.counts.must_wait(key, counts, now) && others == *before
    }
}

/// Interfaces by UID of the pod and name.
type Interfaces<'a> = BTreeMap<(&'a str, &'a str), &'a PodInterface>;

impl Reconciler for AttachmentStatus {
    const NAME: &'static str = "attachments";
    type Write = PodNetworkAttachmentStatus;

    fn version(tables: &Tables) -> u64 {
        [
            tables.attachments.version(),
            tables.networks.version(),
            tables.interfaces.version(),
            tables.pods.version(),
            tables.namespaces.version(),
        ]
        .into_iter()
        .sum()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, PodNetworkAttachmentStatus)> {
        if tables.attachments.rows().is_empty() {
            return Vec::new();
        }
        let interfaces = tables.interfaces.rows().values();
        let interfaces: Interfaces<'_> = interfaces
            .map(|row| ((row.spec.pod_uid.as_str(), row.spec.interface_name.as_str()), &**row))
            .collect();
        let now = Instant::now();
        self.counts.retain(&tables.attachments);
        let mut writes = Vec::new();
        for (key, row) in tables.attachments.rows() {
            let status = attachment_status(tables, networks, &interfaces, row);
            // What the object has is noted in every round.
            let waits =
                |before: &PodNetworkAttachmentStatus| self.can_wait(key, before, &status, now) || *before == status;
            if !row.object.status.as_ref().is_some_and(waits) {
                writes.push((key.clone(), status));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, status: PodNetworkAttachmentStatus) -> kube::Result<()> {
        let api: Api<PodNetworkAttachment> = Api::namespaced(context.client.clone(), &key.namespace);
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &patch).await)
    }
}

/// The desired status of an attachment.
fn attachment_status(
    tables: &Tables,
    networks: &Networks,
    interfaces: &Interfaces<'_>,
    row: &AttachmentRow,
) -> PodNetworkAttachmentStatus {
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
        (Ok(facts), Some(_)) => match refusal(tables, networks, facts) {
            Some(refusal) => (false, refusal.rule.reason(), refusal.to_string()),
            None => (true, "Valid", "the network takes pods".to_owned()),
        },
    };
    let (mut selected, mut attached) = (0, 0);
    if let Ok(facts) = &row.facts {
        for (key, pod) in tables.pods.rows() {
            let runs = !pod.node.is_empty() && !pod.finished && !pod.host_network;
            if key.namespace != facts.namespace || !runs || !matches(&facts.pods, &pod.labels) {
                continue;
            }
            selected += 1;
            let there = interfaces.get(&(pod.uid.as_str(), facts.ifname.as_str()));
            attached += i64::from(there.is_some_and(|there| there.spec.pod_network_name == facts.network.as_str()));
        }
    }
    status.selected = selected;
    status.attached = attached;
    status.summary = AttachmentSummary::new(&row.object.spec);
    set_condition(
        &mut status.conditions,
        Condition::now("Accepted", accepted, reason, &message, generation),
    );
    let ready = selected == attached && accepted;
    let counts = format!("{attached} of {selected} pods have the interface");
    let why = if ready { "AllPods" } else { "PodsMissing" };
    set_condition(
        &mut status.conditions,
        Condition::now(READY, ready, why, &counts, generation),
    );
    status
}

/// Why the network refuses every pod that the attachment selects.
fn refusal(tables: &Tables, networks: &Networks, facts: &AttachmentFacts) -> Option<AccessRefusal> {
    let spec = networks.spec(&facts.network)?;
    let labels = tables.namespace_labels(&facts.namespace)?;
    let joiner = Joiner {
        namespace: &facts.namespace,
        labels: &labels,
        account: "",
        // It depends on the pod.
        has_verb: true,
    };
    let wish = Wish {
        primary: false,
        ips: &facts.ips,
        mac: facts.mac.is_some(),
        default_route: facts.default_route,
    };
    spec.authorize(joiner, wish, None).err()
}
