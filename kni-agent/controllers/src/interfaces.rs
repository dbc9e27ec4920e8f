//! Writes `PodInterface` objects: one per interface of the node's pods, as read from the kernel.

mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kni_api::{NETWORK_LABEL, PodInterface, PodInterfaceSpec, PodInterfaceStatus, pod_interface, set_condition};
use kni_model::view::InterfaceView;
use kni_reflectors::version_of;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use kni_cluster::{Key, Tables};

use super::{ObjectControllers, retry::Retries, state::Interfaces};
use status::{EGRESS_READY, NotEnforced, authorized, egress_condition, status_of};

/// Interval of the kernel reads: programs and links change without a notification.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are written together.
const GATHER: Duration = Duration::from_millis(50);
/// A new interface whose programs are about to be attached by links is written with these, in one write instead of two,
/// unless that takes longer than this.
const COMPLETION: Duration = Duration::from_secs(1);
/// How often such an interface is read.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Maximum length of a field manager's name.
const MAX_MANAGER: usize = 128;
/// Field manager for server-side apply, and prefix of those that name the node.
pub(super) const FIELD_MANAGER: &str = "kni-agent";

/// New interfaces that are not written yet, and since when their programs are on filters.
type Incomplete = BTreeMap<Key, Instant>;

/// A write to the API server.
#[derive(Debug)]
enum Write {
    Put(Box<PodInterface>),
    Delete,
}

impl ObjectControllers {
    /// Writes changes for as long as the agent runs.
    pub(super) async fn reconcile_interfaces(self: Arc<Self>) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attached = self.state.changes.clone();
        let mut known = self.cache.changes();
        let mut seen = None;
        let (mut retries, mut annotations) = (Retries::default(), Retries::default());
        let mut incomplete = Incomplete::new();
        loop {
            let ticked = kni_tasks::waiting(async {
                tokio::select! {
                    _ = ticks.tick() => true,
                    () = sleep(LOOK), if !incomplete.is_empty() => true,
                    _ = attached.changed() => { tokio::time::sleep(GATHER).await; true }
                    _ = known.changed() => { tokio::time::sleep(GATHER).await; false }
                }
            })
            .await;
            let versions = {
                let tables = self.cache.tables();
                (tables.interfaces.version(), tables.pods.version())
            };
            if !ticked && seen == Some(versions) {
                continue;
            }
            seen = Some(versions);
            // Takes some microseconds in the kernel for each interface.
            let read = Arc::clone(&self.state.interfaces);
            let Ok(interfaces) = tokio::task::spawn_blocking(move || read()).await else {
                continue;
            };
            let sets = self.interface_writes(&interfaces, &mut incomplete);
            retries.retain(|key| sets.iter().any(|writes| writes.contains_key(key)));
            for writes in sets {
                let due = writes.into_iter().filter(|(key, _)| retries.is_due(key));
                let due: Vec<_> = due.map(|(key, write)| self.write_interface(key, write)).collect();
                let mut done = stream::iter(due).buffer_unordered(AT_ONCE);
                while let Some((key, succeeded)) = done.next().await {
                    retries.ended(key, succeeded);
                    kni_tasks::progress();
                }
            }
            self.write_network_status(&interfaces.views, &mut annotations).await;
        }
    }

    /// The necessary writes, in the order of the sets.
    fn interface_writes(&self, read: &Interfaces, incomplete: &mut Incomplete) -> [BTreeMap<Key, Write>; 2] {
        let enforced = (self.state.enforcement)().problem;
        let Interfaces {
            views,
            refused,
            lost,
            closed,
        } = read;
        let tables = self.cache.tables();
        let mut desired: BTreeMap<Key, PodInterface> = BTreeMap::new();
        let mut provisional: BTreeSet<Key> = BTreeSet::new();
        for view in views {
            let closed = closed.get(&view.attachment.endpoint);
            let not_enforced = match (&enforced, closed) {
                (Some(problem), _) => Some(("NotInForce", problem.as_str())),
                (None, Some(reason)) => Some(("QuotaExceeded", reason.as_str())),
                (None, None) => None,
            };
            let Some(mut object) = self.object_of(view, &tables, not_enforced) else {
                continue;
            };
            let right = lost.get(&(view.sandbox.id.clone(), view.attachment.ifname.clone()));
            if let Some(status) = &mut object.status {
                status.conditions.push(authorized(right));
                let refused = refused.get(&view.attachment.endpoint).map(Vec::as_slice);
                status.conditions.extend(egress_condition(refused.unwrap_or_default()));
            }
            let key = Key::new(&object.namespace().unwrap_or_default(), &object.name_any());
            if view.provisional {
                provisional.insert(key.clone());
            }
            desired.insert(key, object);
        }
        let rows = tables.interfaces.rows();
        let ours = rows.iter().filter(|(_, row)| row.spec.node_name == self.node);
        let gone = ours.filter(|(key, _)| !desired.contains_key(*key));
        let gone = gone.map(|(key, _)| (key.clone(), Write::Delete)).collect();
        let writes = puts(desired, rows, &provisional, incomplete);
        [gone, writes]
    }

    /// The object of an interface; `None` for pods that are not in the cluster's state, or no longer.
    fn object_of(
        &self,
        view: &InterfaceView,
        tables: &Tables,
        not_enforced: Option<NotEnforced<'_>>,
    ) -> Option<PodInterface> {
        let InterfaceView {
            sandbox, attachment, ..
        } = view;
        let pod = tables.pod_of(&self.node, &sandbox.pod)?;
        let own = sandbox.parent.as_ref().unwrap_or(&sandbox.id);
        let ifname = attachment.ifname.as_str();
        let mut object = PodInterface::new(
            &pod_interface::name(&sandbox.pod.name, &pod.uid, ifname),
            PodInterfaceSpec {
                pod_name: sandbox.pod.name.clone(),
                pod_uid: pod.uid.clone(),
                node_name: self.node.clone(),
                pod_network_name: attachment.network.to_string(),
                interface_name: ifname.to_owned(),
                sandbox_id: own.to_string(),
            },
        );
        object.metadata.namespace = Some(sandbox.pod.namespace.clone());
        // No label names the node: its name may be longer than the value of a label.
        object.metadata.labels = Some([(NETWORK_LABEL.to_owned(), attachment.network.to_string())].into());
        object.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: sandbox.pod.name.clone(),
            uid: pod.uid.clone(),
            ..OwnerReference::default()
        }]);
        object.status = Some(status_of(view, not_enforced));
        Some(object)
    }

    /// The field manager for objects that no other node writes.
    pub(super) fn field_manager(&self) -> String {
        let manager = format!("{FIELD_MANAGER}/{}", self.node);
        manager.chars().take(MAX_MANAGER).collect()
    }

    /// Returns the object and whether it was written.
    async fn write_interface(&self, key: Key, write: Write) -> (Key, bool) {
        let done = match &write {
            Write::Put(object) => self.put_interface(object).await,
            Write::Delete => self.delete_interface(&key).await,
        };
        if let Err(error) = &done {
            tracing::debug!(object = %key, %error, "cannot write a PodInterface; trying again");
        }
        let succeeded = done.is_ok();
        (key, succeeded)
    }

    async fn put_interface(&self, object: &PodInterface) -> Result<(), kube::Error> {
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<PodInterface> = Api::namespaced(self.client.clone(), &namespace);
        let name = object.name_any();
        let apply = PatchParams::apply(&self.field_manager()).force();
        let mut body = object.clone();
        body.status = None;
        let (since, known) = {
            let tables = self.cache.tables();
            let known = tables.interfaces.get(&namespace, &name).cloned();
            (tables.interfaces.newest(), known)
        };
        if known.is_none_or(|known| known.spec != object.spec || !same_metadata(&known, object)) {
            api.patch(&name, &apply, &Patch::Apply(&body)).await?;
        }
        body.status.clone_from(&object.status);
        let written = api.patch_status(&name, &apply, &Patch::Apply(&body)).await?;
        let version = version_of(&written.metadata);
        self.cache.change_written(|tables| {
            let row = Arc::new(without_managers(written));
            tables
                .interfaces
                .put_written(Key::new(&namespace, &name), since, version, Some(row))
        });
        Ok(())
    }

    async fn delete_interface(&self, key: &Key) -> Result<(), kube::Error> {
        let api: Api<PodInterface> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.delete(&key.name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
        self.cache.change(|tables| tables.interfaces.remove(key));
        Ok(())
    }
}

fn without_managers(mut object: PodInterface) -> PodInterface {
    object.metadata.managed_fields = None;
    object
}

fn same_metadata(known: &PodInterface, desired: &PodInterface) -> bool {
    let labels = desired.labels().iter();
    known.metadata.owner_references == desired.metadata.owner_references
        && labels
            .into_iter()
            .all(|(key, value)| known.labels().get(key) == Some(value))
}

/// The objects that differ from what is known, without the new ones whose programs are about to be attached by links.
fn puts(
    desired: BTreeMap<Key, PodInterface>,
    rows: &BTreeMap<Key, Arc<PodInterface>>,
    provisional: &BTreeSet<Key>,
    incomplete: &mut Incomplete,
) -> BTreeMap<Key, Write> {
    incomplete.retain(|key, _| provisional.contains(key) && !rows.contains_key(key));
    let mut writes = BTreeMap::new();
    for (key, object) in desired {
        if provisional.contains(&key) && !rows.contains_key(&key) {
            let since = *incomplete.entry(key.clone()).or_insert_with(Instant::now);
            if since.elapsed() < COMPLETION {
                continue;
            }
        }
        let object = match rows.get(&key) {
            Some(known) => match updated(known, object) {
                Some(object) => object,
                None => continue,
            },
            None => object,
        };
        writes.insert(key, Write::Put(Box::new(object)));
    }
    writes
}

/// The update of an existing object; `None` if it is up to date. Unchanged conditions keep their times.
fn updated(known: &PodInterface, mut desired: PodInterface) -> Option<PodInterface> {
    let now = desired.status.take().unwrap_or_default();
    let mut conditions = known
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let has_egress = now.conditions.iter().any(|condition| condition.type_ == EGRESS_READY);
    for condition in now.conditions {
        set_condition(&mut conditions, condition);
    }
    if !has_egress {
        conditions.retain(|condition| condition.type_ != EGRESS_READY);
    }
    let status = PodInterfaceStatus { conditions, ..now };
    let same = known.status.as_ref() == Some(&status) && known.spec == desired.spec && same_metadata(known, &desired);
    desired.status = Some(status);
    (!same).then_some(desired)
}
