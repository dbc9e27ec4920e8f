//! Leaves out what a node does not read of other nodes' objects: of all that an agent caches these are the most.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kni_api::{AddressBlock, NetworkMembers};

/// Name and UID, and whether it is being deleted. A map of labels alone takes as much memory as the rest of a block.
fn metadata(object: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: object.name,
        uid: object.uid,
        deletion_timestamp: object.deletion_timestamp,
        ..ObjectMeta::default()
    }
}

/// A block of a network that the node follows.
pub(super) fn block(object: AddressBlock) -> Arc<AddressBlock> {
    Arc::new(AddressBlock {
        metadata: metadata(object.metadata),
        ..object
    })
}

/// Members of a network that the node follows, without what only operators read.
pub(super) fn members(object: NetworkMembers) -> Arc<NetworkMembers> {
    let NetworkMembers {
        metadata: complete,
        mut spec,
        mut status,
    } = object;
    spec.members.shrink_to_fit();
    if let Some(status) = &mut status {
        status.summary = String::new();
        status.refused = Vec::new();
        status.kinds.shrink_to_fit();
        status.members.shrink_to_fit();
    }
    Arc::new(NetworkMembers {
        metadata: metadata(complete),
        spec,
        status,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_nodes_read_stays_and_a_write_without_it_is_no_change() {
        let object = |version: &str, summary: &str, member: &str| {
            let member = json!({
                "namespace": "shop", "podName": member, "podUID": "u", "interface": "eth0", "addresses": ["10.0.0.1"],
            });
            let mut confirmed = member.clone();
            confirmed["kind"] = json!(0);
            let object = json!({
                "apiVersion": "kni.dev/v1alpha1", "kind": "NetworkMembers",
                "metadata": {
                    "name": "red.a.0", "uid": "m1", "resourceVersion": version, "labels": { "kni.dev/network": "red" },
                    "managedFields": [{ "manager": version, "operation": "Apply" }],
                },
                "spec": {
                    "network": "red", "networkUID": "r", "nodeName": "n2", "nodeUID": "n", "members": [member],
                },
                "status": {
                    "summary": summary, "kinds": [{ "labels": { "app": "web" } }], "members": [confirmed],
                    "refused": [{ "podUID": "x", "interface": "eth0", "reason": version }],
                },
            });
            members(serde_json::from_value(object).unwrap())
        };
        let first = object("1", "1/2", "a");
        assert_eq!(first, object("2", "1/1", "a"));
        assert_ne!(first, object("2", "1/1", "b"));
        assert_eq!(first.metadata.name.as_deref(), Some("red.a.0"));
        let status = first.status.as_ref().unwrap();
        assert_eq!((status.members.len(), status.kinds.len()), (1, 1));
    }
}
