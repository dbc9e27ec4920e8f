//! Writes `PodInterface` objects: one per interface of the node's pods, as read from the kernel.

use std::{
    collections::BTreeMap,
    hash::{Hash as _, Hasher as _},
    sync::Arc,
    time::Duration,
};

use fnv::FnvHasher;
use futures::{StreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kni_api::{
    Condition, NETWORK_LABEL, NODE_LABEL, PodInterface, PodInterfaceSpec, PodInterfaceStatus,
    pod_interface::{AttachedProgram, InterfaceAddress, InterfaceRoute},
    set_condition,
};
use kni_model::view::{InterfaceFilter, InterfaceView};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use tokio::time::{MissedTickBehavior, interval};

use kni_cluster::{Key, Tables};

use super::Cluster;

/// Interval of the kernel reads: programs and links change without a notification.
const ROUND: Duration = Duration::from_secs(1);
/// Changes that arrive within this time are written together.
const GATHER: Duration = Duration::from_millis(50);
/// Maximum number of concurrent requests.
const AT_ONCE: usize = 16;
/// Maximum length of an object's name.
const MAX_NAME: usize = 253;
/// Field manager for server-side apply.
pub(super) const FIELD_MANAGER: &str = "kni-agent";

/// A write to the API server.
#[derive(Debug)]
enum Write {
    Put(Box<PodInterface>),
    Delete(Key),
}

impl Cluster {
    /// Writes changes for as long as the agent runs.
    pub(super) async fn reconcile_interfaces(self) {
        let mut ticks = interval(ROUND);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut attached = self.attacher.changes();
        let mut known = self.cache.changes();
        let mut seen = None;
        loop {
            let ticked = tokio::select! {
                _ = ticks.tick() => true,
                _ = attached.changed() => { tokio::time::sleep(GATHER).await; true }
                _ = known.changed() => { tokio::time::sleep(GATHER).await; false }
            };
            let versions = {
                let tables = self.cache.tables();
                (tables.interfaces.version(), tables.pods.version())
            };
            if !ticked && seen == Some(versions) {
                continue;
            }
            seen = Some(versions);
            let asked = self.inspector.clone();
            // Takes some microseconds in the kernel for each interface.
            let views = tokio::task::spawn_blocking(move || asked.interfaces(&InterfaceFilter::default())).await;
            let Ok(views) = views else { continue };
            let writes = self.interface_writes(&views);
            stream::iter(writes.into_iter().map(|write| self.write_interface(write)))
                .buffer_unordered(AT_ONCE)
                .collect::<()>()
                .await;
            self.write_network_status(&views).await;
        }
    }

    fn interface_writes(&self, views: &[InterfaceView]) -> Vec<Write> {
        let enforced = self.sync.policy_problem();
        let tables = self.cache.tables();
        let mut desired: BTreeMap<Key, PodInterface> = BTreeMap::new();
        for view in views {
            let closed = self.sync.closed_endpoint(view.attachment.endpoint);
            let not_enforced = match (&enforced, &closed) {
                (Some(problem), _) => Some(("NotInForce", problem.as_str())),
                (None, Some(reason)) => Some(("QuotaExceeded", reason.as_str())),
                (None, None) => None,
            };
            let Some(object) = self.object_of(view, &tables, not_enforced) else {
                continue;
            };
            let key = Key::new(&object.namespace().unwrap_or_default(), &object.name_any());
            desired.insert(key, object);
        }
        let rows = tables.interfaces.rows();
        let ours = rows.iter().filter(|(_, row)| row.spec.node_name == self.node);
        let gone = ours.filter(|(key, _)| !desired.contains_key(*key));
        let mut writes: Vec<Write> = gone.map(|(key, _)| Write::Delete(key.clone())).collect();
        for (key, object) in desired {
            let object = match rows.get(&key) {
                Some(known) => match updated(known, object) {
                    Some(object) => object,
                    None => continue,
                },
                None => object,
            };
            writes.push(Write::Put(Box::new(object)));
        }
        writes
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
        let pod = tables.pods.get(&sandbox.pod.namespace, &sandbox.pod.name)?;
        if !sandbox.pod.uid.is_empty() && sandbox.pod.uid != pod.uid {
            return None;
        }
        let own = sandbox.parent.as_ref().unwrap_or(&sandbox.id);
        let ifname = attachment.ifname.as_str();
        let mut object = PodInterface::new(
            &object_name(&sandbox.pod.name, ifname),
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
        object.metadata.labels = Some(
            [
                (NODE_LABEL, self.node.clone()),
                (NETWORK_LABEL, attachment.network.to_string()),
            ]
            .map(|(key, value)| (key.to_owned(), value))
            .into(),
        );
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

    async fn write_interface(&self, write: Write) {
        let done = match &write {
            Write::Put(object) => self.put_interface(object).await,
            Write::Delete(key) => self.delete_interface(key).await,
        };
        if let Err(error) = done {
            // The next round retries.
            tracing::debug!(%error, "cannot write a PodInterface");
        }
    }

    async fn put_interface(&self, object: &PodInterface) -> Result<(), kube::Error> {
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<PodInterface> = Api::namespaced(self.client.clone(), &namespace);
        let name = object.name_any();
        let apply = PatchParams::apply(FIELD_MANAGER).force();
        let mut body = object.clone();
        body.status = None;
        let known = self.cache.tables().interfaces.get(&namespace, &name).cloned();
        if known
            .as_ref()
            .is_some_and(|known| known.spec.pod_uid != object.spec.pod_uid)
        {
            // The object belongs to an earlier pod of that name.
            self.delete_interface(&Key::new(&namespace, &name)).await?;
        }
        if known.is_none_or(|known| known.spec != object.spec || !same_metadata(&known, object)) {
            api.patch(&name, &apply, &Patch::Apply(&body)).await?;
        }
        body.status.clone_from(&object.status);
        let written = api.patch_status(&name, &apply, &Patch::Apply(&body)).await?;
        self.cache.change(|tables| {
            tables
                .interfaces
                .put(Key::new(&namespace, &name), Some(Arc::new(without_managers(written))));
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

/// Why the policies of an interface are not enforced: the reason of the condition, and its message.
type NotEnforced<'a> = (&'static str, &'a str);

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

/// The update of an existing object; `None` if it is up to date. Unchanged conditions keep their times.
fn updated(known: &PodInterface, mut desired: PodInterface) -> Option<PodInterface> {
    let now = desired.status.take().unwrap_or_default();
    let mut conditions = known
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    for condition in now.conditions {
        set_condition(&mut conditions, condition);
    }
    let status = PodInterfaceStatus { conditions, ..now };
    let same = known.status.as_ref() == Some(&status) && known.spec == desired.spec && same_metadata(known, &desired);
    desired.status = Some(status);
    (!same).then_some(desired)
}

fn conditions(view: &InterfaceView, not_enforced: Option<NotEnforced<'_>>) -> Vec<Condition> {
    let healthy = view.problems.is_empty();
    let (reason, message) = if healthy {
        ("Attached", "the interface is there and its programs run".to_owned())
    } else {
        ("Unhealthy", view.problems.join("; "))
    };
    let policy = match (view.attachment.kind.has_row(), not_enforced) {
        (true, None) => ("Enforced", "the policies that select the pod are enforced"),
        (true, Some(problem)) => problem,
        (false, _) => ("NoPrograms", "no policy holds at an interface of this kind"),
    };
    vec![
        Condition::now("Ready", healthy, reason, &message, None),
        Condition::now("PolicyEnforced", policy.0 == "Enforced", policy.0, policy.1, None),
    ]
}

fn status_of(view: &InterfaceView, not_enforced: Option<NotEnforced<'_>>) -> PodInterfaceStatus {
    let InterfaceView {
        sandbox,
        attachment,
        programs,
        ..
    } = view;
    PodInterfaceStatus {
        conditions: conditions(view, not_enforced),
        interface_index: attachment.ifindex,
        host_interface_name: attachment.host_ifname.to_string(),
        host_interface_index: attachment.host_ifindex,
        netns_inode: i64::try_from(sandbox.netns_identity.inode).unwrap_or(i64::MAX),
        mac: attachment.mac.to_string(),
        mtu: attachment.mtu,
        addresses: attachment
            .addresses()
            .map(|ip| InterfaceAddress {
                ip: ip.to_string(),
                family: if ip.is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
            })
            .collect(),
        routes: attachment
            .pod_routes()
            .into_iter()
            .map(|(destination, gateway)| InterfaceRoute {
                destination: destination.to_string(),
                gateway: gateway.map(|gateway| gateway.to_string()),
            })
            .collect(),
        programs: programs
            .iter()
            .map(|program| AttachedProgram {
                hook: program.hook.clone(),
                name: program.name.clone(),
                program_id: program.id,
                link_id: program.link_id,
            })
            .collect(),
        endpoint_id: attachment.endpoint.0,
        network_id: attachment.network_id.get(),
    }
}

/// `POD.IFNAME`. Interface names that are invalid in object names, and names that are too long, are replaced by a hash
/// of both.
fn object_name(pod: &str, ifname: &str) -> String {
    let plain = |name: &str| name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let name = format!("{pod}.{ifname}");
    if plain(ifname) && name.len() <= MAX_NAME {
        return name;
    }
    let mut hasher = FnvHasher::default();
    (pod, ifname).hash(&mut hasher);
    let pod: String = pod.chars().take(MAX_NAME - 18).collect();
    // An interface name has at most 15 characters, so this form is unambiguous.
    format!("{}.{:016x}", pod.trim_end_matches(['.', '-']), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_pods_and_interfaces_apart() {
        assert_eq!(object_name("web-0", "eth0"), "web-0.eth0");
        let odd = object_name("web-0", "Net_1");
        assert!(
            odd.starts_with("web-0.") && odd != object_name("web-0", "net_1"),
            "{odd}"
        );
        let long = "a".repeat(253);
        assert!(object_name(&long, "eth0").len() <= MAX_NAME);
        assert_ne!(object_name(&long, "eth0"), object_name(&long, "net1"));
    }
}
