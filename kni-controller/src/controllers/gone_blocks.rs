//! Releases the address blocks of nodes that have left the cluster.
//!
//! Another node may claim a block some time after no report lists the pods of the node any more: until then other nodes
//! take its addresses for theirs. A node that comes back before takes its blocks over; one that comes back later finds
//! them deleted, leases from none of them, and claims each one anew in which it still has pods.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use kni_api::{AddressBlock, LEASES_FINALIZER};
use kni_cluster::{Key, Networks, Tables};
use kni_ipam::REST;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use tokio::time::Instant;

use super::{
    gone_nodes::Missing,
    reconcile::{Context, Reconciler, unless_changed},
};

/// The controller.
#[derive(Debug, Default)]
pub(super) struct GoneBlocks {
    missing: Missing,
    /// Since when no report is left of nodes that are gone.
    withdrawn: BTreeMap<String, Instant>,
}

impl GoneBlocks {
    /// Those of the nodes whose reports are gone long enough.
    fn rested(&mut self, gone: BTreeSet<String>, tables: &Tables, now: Instant) -> BTreeSet<String> {
        if !tables.members.is_synced() {
            self.withdrawn.clear();
            return BTreeSet::new();
        }
        let reports = tables.members.rows().values();
        let listed: BTreeSet<&str> = reports.map(|report| report.spec.node_name.as_str()).collect();
        let mut rested = gone;
        rested.retain(|node| !listed.contains(node.as_str()));
        self.withdrawn.retain(|node, _| rested.contains(node));
        rested.retain(|node| {
            let since = *self.withdrawn.entry(node.clone()).or_insert(now);
            now.saturating_duration_since(since) >= REST
        });
        rested
    }
}

impl Reconciler for GoneBlocks {
    const NAME: &'static str = "gone-blocks";
    const NEEDS_NETWORKS: bool = false;
    /// The block's uid.
    type Write = String;

    fn version(tables: &Tables) -> u64 {
        tables.nodes.version() + tables.blocks.version() + tables.interfaces.version() + tables.members.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, String)> {
        let gone = self.missing.gone(tables);
        let gone = self.rested(gone, tables, Instant::now());
        let rows = tables.blocks.rows().iter();
        rows.filter(|(_, row)| gone.contains(&row.spec.node_name))
            .filter_map(|(key, row)| Some((key.clone(), row.uid()?)))
            .collect()
    }

    async fn write(context: Context, key: Key, uid: String) -> kube::Result<()> {
        if let Some(object) = release(&context.client, &key.name, &uid).await? {
            tracing::info!(
                block = key.name,
                node = object.spec.node_name,
                "released a block of a node that is gone"
            );
        }
        Ok(())
    }
}

/// Releases a block with this UID, unless its node is back: the cache may be older. Returns it if it is released.
async fn release(client: &Client, name: &str, uid: &str) -> kube::Result<Option<AddressBlock>> {
    let api: Api<AddressBlock> = Api::all(client.clone());
    let nodes: Api<Node> = Api::all(client.clone());
    let is_it = |object: &AddressBlock| object.uid().as_deref() == Some(uid);
    let Some(object) = api.get_opt(name).await?.filter(is_it) else {
        return Ok(None);
    };
    if nodes.get_metadata_opt(&object.spec.node_name).await?.is_some() {
        return Ok(None);
    }
    // Nothing, if the node has come back and taken the block over: that has changed the object.
    delete(&api, &object).await?;
    let is_deleted = |object: &AddressBlock| object.metadata.deletion_timestamp.is_some();
    let deleted = api.get_opt(name).await?.filter(is_it).filter(is_deleted);
    let Some(object) = deleted else {
        return Ok(None);
    };
    // The finalizer retains the block for a node that has come back meanwhile.
    if nodes.get_metadata_opt(&object.spec.node_name).await?.is_some() {
        return Ok(None);
    }
    drop_finalizer(&api, &object).await?;
    Ok(Some(object))
}

/// Deletes a block that is still as it was read. Its finalizer retains it while there is one.
pub(super) async fn delete(api: &Api<AddressBlock>, object: &AddressBlock) -> kube::Result<()> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: object.uid(),
            resource_version: object.resource_version(),
        }),
        ..DeleteParams::default()
    };
    unless_changed(api.delete(&object.name_any(), &params).await).map(drop)
}

/// Removes the finalizer of a deleted block: from then on another node may claim the range.
pub(super) async fn drop_finalizer(api: &Api<AddressBlock>, object: &AddressBlock) -> kube::Result<()> {
    let others: Vec<&String> = object
        .finalizers()
        .iter()
        .filter(|name| *name != LEASES_FINALIZER)
        .collect();
    let patch = serde_json::json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": others,
    }});
    let name = object.name_any();
    let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
    unless_changed(patched).map(drop)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Duration,
    };

    use http::{Method, Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// An API server with one block, and a node that is there after so many requests for it.
    #[derive(Clone, Default)]
    struct ApiServer(Arc<Mutex<(usize, bool, Vec<String>)>>);

    impl ApiServer {
        fn reply(&self, method: &Method, path: &str) -> (StatusCode, Value) {
            let (until_back, is_deleted, writes) = &mut *self.0.lock().unwrap();
            if path.starts_with("/api/v1/nodes/") {
                if *until_back > 0 {
                    *until_back -= 1;
                    let status = json!({ "kind": "Status", "status": "Failure", "message": "", "reason": "NotFound", "code": 404 });
                    return (StatusCode::NOT_FOUND, status);
                }
                let kind = json!({ "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {} });
                return (StatusCode::OK, kind);
            }
            if method != Method::GET {
                writes.push(method.to_string());
                *is_deleted |= method == Method::DELETE;
            }
            let deleted = is_deleted.then_some("2026-01-01T00:00:00Z");
            let block = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "AddressBlock",
                "metadata": { "name": "red.v4-10-0-0-0-26", "uid": "b", "resourceVersion": "5", "deletionTimestamp": deleted },
                "spec": {
                    "network": "red", "networkUID": "r", "cidr": "10.0.0.0/26", "nodeName": "n1", "nodeUID": "u",
                },
            });
            (StatusCode::OK, block)
        }

        fn client(&self) -> Client {
            let server = self.clone();
            let service = tower::service_fn(move |request: Request<Body>| {
                let (code, value) = server.reply(request.method(), request.uri().path());
                let reply = Response::builder()
                    .status(code)
                    .body(Body::from(value.to_string().into_bytes()));
                async move { Ok::<_, std::convert::Infallible>(reply.unwrap()) }
            });
            Client::new(service, "default")
        }
    }

    #[tokio::test]
    async fn a_block_of_a_node_that_comes_back_is_not_released() {
        for (until_back, expected) in [
            (0, &[][..]),
            // Deleted before, and the node is there now.
            (1, &["DELETE"][..]),
            (9, &["DELETE", "PATCH"][..]),
        ] {
            let server = ApiServer::default();
            server.0.lock().unwrap().0 = until_back;
            let released = release(&server.client(), "red.v4-10-0-0-0-26", "b").await.unwrap();
            assert_eq!(server.0.lock().unwrap().2, expected, "{until_back}");
            assert_eq!(released.is_some(), expected.len() == 2, "{until_back}");
        }
    }

    #[test]
    fn blocks_rest_after_the_last_report_of_a_node() {
        let mut tables = Tables::default();
        let gone = || BTreeSet::from(["n1".to_owned(), "n2".to_owned()]);
        let (mut blocks, start) = (GoneBlocks::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(
            blocks.rested(gone(), &tables, start).is_empty(),
            "nothing is known of reports"
        );
        tables.members.begin();
        let key = Key::new("", "red.n1.0");
        let report = serde_json::json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers", "metadata": { "name": "red.n1.0" },
            "spec": { "network": "red", "networkUID": "r", "nodeName": "n1", "nodeUID": "u", "members": [] },
        });
        tables
            .members
            .put(key.clone(), Some(Arc::new(serde_json::from_value(report).unwrap())));
        tables.members.complete();
        assert!(blocks.rested(gone(), &tables, start).is_empty());
        let only_n2 = BTreeSet::from(["n2".to_owned()]);
        assert_eq!(blocks.rested(gone(), &tables, at(10)), only_n2);
        tables.members.remove(&key);
        assert_eq!(blocks.rested(gone(), &tables, at(20)), only_n2);
        assert_eq!(blocks.rested(gone(), &tables, at(29)), only_n2);
        assert_eq!(blocks.rested(gone(), &tables, at(30)), gone());
    }
}
