//! Removes `PodInterface`s that claim the pod of another node, or have the name of its object: the pod's own node may
//! not overwrite them, and could not report the pod.

use k8s_openapi::api::core::v1::ObjectReference;
use kni_api::{
    PodInterface,
    pod_interface::{self, PodInterfaceSpec},
};
use kni_cluster::{Key, Networks, Tables};
use kni_crd::PodFacts;
use kube::{
    Api,
    api::{DeleteParams, Preconditions},
};

use super::reconcile::{Context, Reconciler, unless_changed};

/// The controller.
pub(super) struct FalseInterfaces;

/// The object to remove, and what it claims.
#[derive(Debug)]
pub(super) struct Claim {
    uid: Option<String>,
    pod: String,
    node: String,
    /// Where the pod is.
    assigned: String,
}

impl Reconciler for FalseInterfaces {
    const NAME: &'static str = "false-interfaces";
    const NEEDS_NETWORKS: bool = false;
    type Write = Claim;

    fn version(tables: &Tables) -> u64 {
        tables.interfaces.version() + tables.pods.version()
    }

    fn plan(&mut self, tables: &Tables, _networks: &Networks) -> Vec<(Key, Claim)> {
        let mut claims = Vec::new();
        for (key, row) in tables.interfaces.rows() {
            if let Some((pod, facts)) = claimed(tables, key, &row.spec) {
                let claim = Claim {
                    uid: row.metadata.uid.clone(),
                    pod: pod.to_owned(),
                    node: row.spec.node_name.clone(),
                    assigned: facts.node.clone(),
                };
                claims.push((key.clone(), claim));
            }
        }
        claims
    }

    async fn write(context: Context, key: Key, claim: Claim) -> kube::Result<()> {
        let api: Api<PodInterface> = Api::namespaced(context.client.clone(), &key.namespace);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: claim.uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        if unless_changed(api.delete(&key.name, &params).await)?.is_some() {
            let pod = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some(key.namespace.clone()),
                name: Some(claim.pod),
                ..ObjectReference::default()
            };
            let message = format!(
                "PodInterface {key} of node {} claims the pod or the name of its object, and is removed",
                claim.node
            );
            context
                .events
                .normal(&pod, "FalseInterface", "RemoveInterface", &message)
                .await;
            let (node, assigned) = (claim.node, claim.assigned);
            tracing::warn!(interface = %key, node, assigned, "a PodInterface that claims another node's pod is removed");
        }
        Ok(())
    }
}

/// The pod of another node that an object claims, or whose object would have its name. The node of a pod never changes
/// once it is assigned.
fn claimed<'a>(tables: &'a Tables, key: &'a Key, spec: &'a PodInterfaceSpec) -> Option<(&'a str, &'a PodFacts)> {
    let elsewhere = |name: &str| {
        let pod = tables.pods.get(&key.namespace, name)?;
        (!pod.node.is_empty() && pod.node != spec.node_name).then_some(pod.as_ref())
    };
    if let Some(pod) = elsewhere(&spec.pod_name)
        && pod.uid == spec.pod_uid
    {
        return Some((&spec.pod_name, pod));
    }
    // Both parts of a name may contain dots.
    let parts = key.name.match_indices('.');
    let parts = parts.filter_map(|(at, _)| Some((key.name.get(..at)?, key.name.get(at + 1..)?)));
    let named = parts.filter_map(|(name, rest)| Some((name, rest, elsewhere(name)?)));
    let mut taken = named.filter(|(_, rest, pod)| match rest.rsplit_once('.') {
        Some((_ifname, uid)) => !uid.is_empty() && pod.uid.get(..8).unwrap_or(&pod.uid) == uid,
        // A hash, which is right in an object of its own pod.
        None => key.name != pod_interface::name(&spec.pod_name, &spec.pod_uid, &spec.interface_name) && is_hash(rest),
    });
    taken.next().map(|(name, _, pod)| (name, pod))
}

/// Whether the end of a name is the hash of [`pod_interface::name`].
fn is_hash(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    const WEB: &str = "11111111-0000-4000-8000-000000000000";
    const OTHER: &str = "22222222-0000-4000-8000-000000000000";

    /// Whether an object of pod `pod` is removed. Pod `web` runs on n1, `other` on n2, and `new` is not assigned.
    fn removed(name: &str, (pod, uid, node): (&str, &str, &str), ifname: &str) -> bool {
        let mut tables = Tables::default();
        for (name, uid, node) in [("web", WEB, "n1"), ("other", OTHER, "n2"), ("new", "3", "")] {
            let facts = PodFacts {
                uid: uid.to_owned(),
                node: node.to_owned(),
                ..PodFacts::default()
            };
            tables.pods.put(Key::new("shop", name), Some(Arc::new(facts)));
        }
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodInterface",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": {
                "podName": pod, "podUid": uid, "nodeName": node, "podNetworkName": "red", "interfaceName": ifname,
                "sandboxId": "s",
            },
        });
        let object = serde_json::from_value(object).unwrap();
        tables.interfaces.put(Key::new("shop", name), Some(Arc::new(object)));
        !FalseInterfaces.plan(&tables, &Networks::default()).is_empty()
    }

    #[test]
    fn objects_of_a_pods_own_node_and_of_its_predecessors_stay() {
        let gone = "44444444-0000-4000-8000-000000000000";
        for (pod, ifname) in [
            (("web", WEB, "n1"), "eth0"),
            (("web", WEB, "n1"), "Net_1"),
            (("other", OTHER, "n2"), "eth0"),
            // Its node removes it when the sandbox is gone.
            (("web", gone, "n2"), "eth0"),
            (("web", gone, "n2"), "Net_1"),
            (("new", "3", "n2"), "eth0"),
        ] {
            assert!(
                !removed(&pod_interface::name(pod.0, pod.1, ifname), pod, ifname),
                "{pod:?}"
            );
        }
        assert!(
            !removed("web.eth0", ("web", WEB, "n1"), "eth0"),
            "of an earlier release"
        );
    }

    #[test]
    fn claims_of_another_nodes_pod_or_of_its_name_are_removed() {
        let web = pod_interface::name("web", WEB, "eth0");
        let odd = pod_interface::name("web", WEB, "Net_1");
        for (name, pod, ifname) in [
            ("any", ("web", WEB, "n2"), "eth0"),
            (&*web, ("web", WEB, "n2"), "eth0"),
            (&*web, ("web", "0", "n2"), "eth0"),
            (&*web, ("other", OTHER, "n2"), "eth0"),
            (&*web, ("ghost", "0", "n2"), "net9"),
            (&*odd, ("other", OTHER, "n2"), "Net_1"),
        ] {
            assert!(removed(name, pod, ifname), "{name} {pod:?}");
        }
    }
}
