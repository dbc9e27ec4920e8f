//! Leaves out what a node does not read of a `PodNetwork`, so that a change of it is no change for the agents.

use std::sync::Arc;

use kni_api::PodNetworkStatus;
use kni_crd::PodNetwork;

/// The network without the figures and conditions that kni-controller reports, which change as pods come and go in the
/// whole cluster.
pub(super) fn of_node(mut object: PodNetwork) -> Arc<PodNetwork> {
    object.metadata.managed_fields = None;
    object.metadata.resource_version = None;
    object.status = object.status.map(|status| PodNetworkStatus {
        blocks: status.blocks,
        join_accounts: status.join_accounts,
        fabric: status.fabric,
        ..PodNetworkStatus::default()
    });
    Arc::new(object)
}

#[cfg(test)]
mod tests {
    use kni_api::Fabric;
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_no_change_and_what_nodes_read_is() {
        let object = |version: &str, interfaces: u32, accounts: &[&str], fabric: &str| {
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
                "metadata": {
                    "name": "red", "uid": "u1", "generation": 3, "resourceVersion": version,
                    "managedFields": [{ "manager": version, "operation": "Apply" }],
                },
                "spec": { "subnets": ["10.0.0.0/16"] },
                "status": {
                    "blocks": [{ "cidr": "10.0.0.0/26", "node": "n1" }], "interfaces": interfaces,
                    "nodes": { "ready": interfaces, "total": interfaces }, "joinAccounts": accounts, "fabric": fabric,
                },
            });
            of_node(serde_json::from_value(object).unwrap())
        };
        let first = object("1", 1, &["a/b"], "Overlay");
        assert_eq!(first, object("2", 5, &["a/b"], "Overlay"));
        assert_ne!(first, object("2", 1, &[], "Overlay"));
        assert_ne!(first, object("2", 1, &["a/b"], "Native"));
        let status = first.status.as_ref().unwrap();
        assert_eq!((status.blocks.len(), status.fabric), (1, Some(Fabric::Overlay)));
        assert_eq!(
            (first.metadata.uid.as_deref(), first.metadata.generation),
            (Some("u1"), Some(3))
        );
    }
}
