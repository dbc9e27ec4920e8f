//! Writes `spec.access` of networks from before that field, so that an upgrade locks no pod out. Each network is
//! examined once.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::ObjectReference;
use kni_api::{
    Access, PodNetwork,
    access_in_use::{InUse, Interface},
};
use kni_cluster::{Key, Networks, Tables};
use kube::{
    Api, Resource as _,
    api::{Patch, PatchParams},
};

use super::reconcile::{Context, Reconciler, ignore_gone, unless_changed};

/// The controller.
pub(super) struct StatedAccess;

/// What one network needs.
#[derive(Debug)]
pub(super) struct Examined {
    object: Arc<PodNetwork>,
    access: Option<Access>,
}

impl Reconciler for StatedAccess {
    const NAME: &'static str = "stated-access";
    const NEEDS_NETWORKS: bool = false;
    type Write = Examined;

    fn version(tables: &Tables) -> u64 {
        tables.networks.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Examined)> {
        let rows = tables.networks.rows().iter();
        let new = rows.filter(|(_, object)| !object.status.as_ref().is_some_and(|status| status.access_reviewed));
        let mut new = new.peekable();
        if new.peek().is_none() {
            return Vec::new();
        }
        let namespaces = tables.namespaces.rows().keys();
        let namespaces: BTreeMap<_, _> = namespaces
            .filter_map(|key| Some((key.name.clone(), tables.namespace_labels(&key.name)?)))
            .collect();
        new.map(|(key, object)| {
            let access = in_use(tables, &key.name).access(object, &namespaces);
            let object = Arc::clone(object);
            (key.clone(), Examined { object, access })
        })
        .collect()
    }

    async fn write(context: Context, key: Key, examined: Examined) -> kube::Result<()> {
        let api: Api<PodNetwork> = Api::all(context.client.clone());
        let Examined { object, access } = examined;
        if let Some(access) = access {
            let version = &object.metadata.resource_version;
            let patch = serde_json::json!({ "metadata": { "resourceVersion": version }, "spec": { "access": access } });
            let written = api
                .patch(&key.name, &PatchParams::default(), &Patch::Merge(&patch))
                .await;
            let Some(written) = unless_changed(written)? else {
                return Ok(());
            };
            if written.spec.access.is_none() {
                tracing::warn!(
                    network = key.name,
                    "the API server does not store spec.access: the definitions are those of an earlier release"
                );
                return Ok(());
            }
            report(&context, &written, &access).await;
        }
        let reviewed = Patch::Merge(serde_json::json!({ "status": { "accessReviewed": true } }));
        ignore_gone(api.patch_status(&key.name, &PatchParams::default(), &reviewed).await)
    }
}

fn in_use(tables: &Tables, network: &str) -> InUse {
    let rows = tables.interfaces.rows().iter();
    let interfaces = rows
        .filter(|(_, row)| row.spec.pod_network_name == network)
        .filter_map(|(key, row)| {
            // A node may report an interface of a pod that is not there: it lends its namespace no right.
            let pod = tables.pods.get(&key.namespace, &row.spec.pod_name)?;
            let is_its = pod.uid == row.spec.pod_uid && pod.node == row.spec.node_name;
            is_its.then_some(Interface {
                namespace: &key.namespace,
                name: &row.spec.interface_name,
                annotations: &pod.annotations,
            })
        });
    InUse::of(
        network,
        interfaces,
        tables.attachments.rows().values().map(|row| &*row.object),
    )
}

/// Reports the change of the spec, which no user requested.
async fn report(context: &Context, network: &PodNetwork, access: &Access) {
    let written = serde_json::to_string(access).unwrap_or_default();
    tracing::info!(
        network = network.metadata.name,
        written,
        "access was written from what is in use"
    );
    let note = format!("spec.access was absent; what is in use was written into it: {written}");
    let about: ObjectReference = network.object_ref(&());
    let events = &context.events;
    events.normal(&about, "AccessWritten", "Upgrade", &note).await;
}
