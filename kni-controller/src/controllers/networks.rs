//! Writes the status of networks, and keeps networks that are being deleted until no pod is in them, nor can be.

use std::sync::Arc;

use kni_api::{IN_USE_FINALIZER, PodNetworkStatus};
use kni_cluster::{Key, Networks, Numbers, Tables};
use kni_crd::PodNetwork;
use kni_model::NumberProblem;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use tokio::time::Instant;

use super::{
    address_space::AddressSpace,
    block_excess::BlockExcess,
    figures::Paced,
    network_status::{BLOCKS_EXCEEDED, Figures, network_status, note_excess},
    open_nodes::OpenNodes,
    overview::Overview,
    reconcile::{Context, Reconciler, unless_changed},
};
use crate::events::{failed, turned_true};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct NetworkStatus {
    address_space: AddressSpace,
    excess: BlockExcess,
    figures: Paced<Figures>,
    open: OpenNodes,
}

impl NetworkStatus {
    /// Whether the difference between the status of an object and the desired one can wait.
    fn can_wait(&mut self, key: &Key, before: &PodNetworkStatus, desired: &PodNetworkStatus, now: Instant) -> bool {
        let present = Figures::of(before);
        let others_differ = present.apart_from(desired) != *before;
        self.figures.must_wait(key, present, now) && !others_differ
    }
}

/// The change of one network.
#[derive(Debug)]
pub(super) struct Write {
    object: Arc<PodNetwork>,
    /// `None`: the status is as it should be.
    status: Option<PodNetworkStatus>,
    finalizer: Option<Finalizer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finalizer {
    Add,
    Remove,
}

impl Reconciler for NetworkStatus {
    const NAME: &'static str = "networks";
    type Write = Write;

    fn version(tables: &Tables) -> u64 {
        [
            tables.networks.version(),
            tables.interfaces.version(),
            tables.node_networks.version(),
            tables.nodes.version(),
            tables.namespaces.version(),
            tables.numbers.version(),
            tables.service_addresses.version(),
        ]
        .into_iter()
        .sum()
    }

    fn plan(&mut self, tables: &Tables, networks: &Networks) -> Vec<(Key, Write)> {
        let overview = Overview::of(tables, networks);
        let numbers = Numbers::of(tables);
        let now = Instant::now();
        self.figures.retain(&tables.networks);
        self.address_space.update(tables);
        self.open.retain(tables.networks.rows().values().map(AsRef::as_ref));
        let excess = self.excess.update(tables, networks, now).clone();
        let mut writes = Vec::new();
        for (key, object) in tables.networks.rows() {
            let refused = networks.refused.get(&key.name).map(String::as_str);
            let number = number(&numbers, object);
            let open = self.open.of(&overview, object, refused.is_some(), now);
            let mut status = network_status(&overview, refused, number, object, &open);
            note_excess(&mut status, object, excess.get(&key.name));
            self.address_space.note(&mut status, object);
            let is_used = !overview.interfaces(&key.name).is_empty();
            // What the object has is noted in every round.
            let waits = |before: &PodNetworkStatus| self.can_wait(key, before, &status, now) || *before == status;
            let status = (!object.status.as_ref().is_some_and(waits)).then_some(status);
            let finalizer = finalizer(object, is_used || !open.is_empty());
            // Nothing reads the status of an object that goes, and a status that is refused must not keep it.
            let status = status.filter(|_| finalizer != Some(Finalizer::Remove));
            if status.is_some() || finalizer.is_some() {
                let object = Arc::clone(object);
                writes.push((
                    key.clone(),
                    Write {
                        object,
                        status,
                        finalizer,
                    },
                ));
            }
        }
        writes
    }

    async fn write(context: Context, key: Key, write: Write) -> kube::Result<()> {
        let api: Api<PodNetwork> = Api::all(context.client.clone());
        let mut object = write.object;
        if let Some(status) = write.status {
            let desired = PodNetwork {
                status: Some(status),
                ..PodNetwork::clone(&object)
            };
            let written = api.replace_status(&key.name, &PostParams::default(), &desired).await;
            // An agent has removed its entries meanwhile, or the network is gone.
            let Some(written) = unless_changed(written)? else {
                return Ok(());
            };
            let written = Arc::new(written);
            publish(&context, &object, &written).await;
            remember(&context, &key, &object, &written);
            object = written;
        }
        let Some(finalizer) = write.finalizer else {
            return Ok(());
        };
        let mut finalizers: Vec<String> = object.finalizers().to_vec();
        finalizers.retain(|name| name != IN_USE_FINALIZER);
        match finalizer {
            Finalizer::Add => finalizers.push(IN_USE_FINALIZER.to_owned()),
            Finalizer::Remove => {
                tracing::info!(network = key.name, "the deleted network has no interfaces any more");
            }
        }
        let version = object.resource_version();
        let patch = serde_json::json!({"metadata": {"resourceVersion": version, "finalizers": finalizers}});
        let written = api
            .patch(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        if let Some(written) = unless_changed(written)?
            && finalizer == Finalizer::Add
        {
            remember(&context, &key, &object, &Arc::new(written));
        }
        Ok(())
    }
}

/// The number for the status: the present one stays while the numbers are not read.
fn number(numbers: &Numbers, object: &PodNetwork) -> Option<u32> {
    let name = object.name_any().parse().ok()?;
    match numbers.get(&name)? {
        Ok(number) => Some(*number),
        Err(NumberProblem::Unread) => object.status.as_ref()?.number,
        Err(_) => None,
    }
}

/// Publishes what turned for the worse.
async fn publish(context: &Context, before: &PodNetwork, written: &PodNetwork) {
    let conditions = |object: &PodNetwork| object.status.as_ref().map(|status| status.conditions.clone());
    let (before, after) = (
        conditions(before).unwrap_or_default(),
        conditions(written).unwrap_or_default(),
    );
    for (kind, reason, action) in [
        ("Accepted", "NetworkRefused", "Validate"),
        ("AddressesAvailable", "AddressesExhausted", "AllocateBlock"),
    ] {
        if let Some(condition) = failed(&before, &after, kind) {
            let note = &condition.message;
            context.events.warning(written, reason, action, note).await;
        }
    }
    if let Some(condition) = turned_true(&before, &after, BLOCKS_EXCEEDED) {
        let note = &condition.message;
        context
            .events
            .warning(written, BLOCKS_EXCEEDED, "CompareBlocks", note)
            .await;
    }
}

/// Records a written object before the watch reports it, unless the watch has reported this or a later one already.
fn remember(context: &Context, key: &Key, before: &PodNetwork, written: &Arc<PodNetwork>) {
    context.cache.change(|tables| {
        let known = tables.networks.rows().get(key);
        if known.is_some_and(|known| known.resource_version() == before.resource_version()) {
            tables.networks.put(key.clone(), Some(Arc::clone(written)));
        }
    });
}

/// The necessary change: a network that is being deleted keeps its finalizer until its last interface is gone, and no
/// node attaches a pod to it any more.
fn finalizer(object: &PodNetwork, in_use: bool) -> Option<Finalizer> {
    let has = object.finalizers().iter().any(|name| name == IN_USE_FINALIZER);
    match (object.metadata.deletion_timestamp.is_some(), has) {
        (false, false) => Some(Finalizer::Add),
        (true, true) if !in_use => Some(Finalizer::Remove),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kni_api::{Condition, pod_network::AddressCounts, set_condition};

    use super::{super::network_status::PROGRAMMED, *};

    fn status(interfaces: i64, used: i64) -> PodNetworkStatus {
        let addresses = AddressCounts {
            total: 256,
            used,
            allocated: 64,
        };
        PodNetworkStatus {
            interfaces,
            addresses,
            ..PodNetworkStatus::default()
        }
    }

    #[test]
    fn figures_wait_and_nothing_else_does() {
        let (mut networks, key, now) = (NetworkStatus::default(), Key::new("", "red"), Instant::now());
        let mut waits = |before: &PodNetworkStatus, desired: &PodNetworkStatus| {
            // Whatever this replica has seen before, these figures are new.
            networks.figures.must_wait(&key, Figures::of(&status(77, 77)), now);
            networks.can_wait(&key, before, desired, now)
        };
        assert!(waits(&status(2, 4), &status(4, 8)));
        assert!(
            !waits(&status(4, 8), &status(0, 0)),
            "the network is not in use any more"
        );
        assert!(!waits(&status(0, 0), &status(1, 2)), "it is in use");
        let mut full = status(5, 10);
        let condition = Condition::now("AddressesAvailable", false, "Exhausted", "n1", None);
        set_condition(&mut full.conditions, condition);
        assert!(!waits(&status(4, 8), &full), "a condition");
        let time = full.conditions[0].last_transition_time.clone();
        let counted = |ready: i64, holds: bool, message: &str| {
            let mut status = status(1, 2);
            status.nodes.ready = ready;
            let reason = if holds { "AllNodes" } else { "NodesMissing" };
            let mut condition = Condition::now(PROGRAMMED, holds, reason, message, None);
            condition.last_transition_time = time.clone();
            set_condition(&mut status.conditions, condition);
            status
        };
        let one = counted(1, false, "1 of 3");
        assert!(waits(&one, &counted(2, false, "2 of 3")));
        assert!(!waits(&one, &counted(3, true, "3 of 3")));
    }
}
