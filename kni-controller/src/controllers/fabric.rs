//! Decides how packets of a network cross from node to node, once for all nodes.
//!
//! Agents read the decision in the status and nothing else, so a network is never Overlay on one node and None on
//! another but for the time that the status takes to reach them. A change of the spec takes effect with the write of
//! the status.

use kni_api::{Condition, Fabric, IN_USE_FINALIZER};
use kni_crd::PodNetwork;
use kube::ResourceExt as _;

/// Type of the condition.
const CONDITION: &str = "FabricChosen";

/// The fabric of a network: that of the spec, else the one decided before. A network without either is new, or from
/// before there were fabrics: then an earlier release has given it conditions and its finalizer, and it keeps what it
/// had.
pub(super) fn fabric(object: &PodNetwork) -> Fabric {
    if let Some(asked) = object.spec.fabric {
        return asked;
    }
    let status = object.status.as_ref();
    if let Some(known) = status.and_then(|status| status.fabric) {
        return known;
    }
    let has_finalizer = object.finalizers().iter().any(|name| name == IN_USE_FINALIZER);
    if has_finalizer || status.is_some_and(|status| !status.conditions.is_empty()) || !has_fabric(object) {
        Fabric::None
    } else {
        Fabric::Overlay
    }
}

/// Whether a fabric was chosen; `None` for networks whose packets the dataplane does not see.
pub(super) fn chosen(object: &PodNetwork, fabric: Fabric) -> Option<Condition> {
    if !has_fabric(object) {
        return None;
    }
    let (holds, reason, message) = match (object.spec.fabric, fabric) {
        (Some(_), _) => (true, "Spec", "spec.fabric is applied"),
        // A network that is made without one is Overlay.
        (None, Fabric::None) => (
            false,
            "NotSet",
            "pods reach those of their own node only, as in releases without spec.fabric: set it to Overlay or Native to \
             connect the nodes, or to None to keep them apart",
        ),
        (None, Fabric::Overlay | Fabric::Native) => (true, "Kept", "spec.fabric is absent: status.fabric stays"),
    };
    let generation = object.metadata.generation;
    Some(Condition::now(CONDITION, holds, reason, message, generation))
}

/// Whether the dataplane forwards the packets of the network.
fn has_fabric(object: &PodNetwork) -> bool {
    let provider = object.spec.provider.as_ref();
    provider.is_none_or(|provider| provider.kind == kni_api::provider::ProviderType::Ebpf)
}

#[cfg(test)]
mod tests {
    use kni_api::ConditionStatus;
    use serde_json::{Value, json};

    use super::*;

    fn network(spec: &Value, status: &Value, finalizers: &[&str]) -> PodNetwork {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": { "name": "red", "finalizers": finalizers }, "spec": spec, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn earlier() -> Value {
        let accepted = json!({
            "type": "Accepted", "status": "True", "reason": "Valid", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        json!({ "conditions": [accepted], "number": 4096 })
    }

    fn decided(object: &PodNetwork) -> (Fabric, Option<(ConditionStatus, String)>) {
        let fabric = fabric(object);
        let condition = chosen(object, fabric);
        (fabric, condition.map(|condition| (condition.status, condition.reason)))
    }

    #[test]
    fn a_new_network_is_overlay_and_one_from_before_keeps_what_it_had() {
        let is = |status, reason: &str| Some((status, reason.to_owned()));
        let kept = (Fabric::Overlay, is(ConditionStatus::True, "Kept"));
        let old = (Fabric::None, is(ConditionStatus::False, "NotSet"));
        let spec = json!({});
        assert_eq!(decided(&network(&spec, &Value::Null, &[])), kept);
        // Agents of this release may have claimed a block, and another controller may have looked at it.
        let touched = json!({ "accessReviewed": true, "blocks": [{ "cidr": "10.0.0.0/26", "node": "n1" }] });
        assert_eq!(decided(&network(&spec, &touched, &["example.com/mine"])), kept);
        assert_eq!(decided(&network(&spec, &earlier(), &[IN_USE_FINALIZER])), old);
        assert_eq!(decided(&network(&spec, &earlier(), &[])), old);
        assert_eq!(decided(&network(&spec, &Value::Null, &[IN_USE_FINALIZER])), old);
    }

    #[test]
    fn what_was_decided_stays_and_the_spec_precedes_it() {
        for fabric in [Fabric::Overlay, Fabric::Native, Fabric::None] {
            let mut status = earlier();
            status["fabric"] = json!(fabric);
            let kept = network(&json!({}), &status, &[IN_USE_FINALIZER]);
            assert_eq!(decided(&kept).0, fabric);
            assert_eq!(decided(&kept).1.unwrap().0, (fabric != Fabric::None).into());
            for asked in [Fabric::Overlay, Fabric::Native, Fabric::None] {
                let asking = network(&json!({ "fabric": asked }), &status, &[IN_USE_FINALIZER]);
                let expected = (asked, Some((ConditionStatus::True, "Spec".to_owned())));
                assert_eq!(decided(&asking), expected);
            }
        }
    }

    #[test]
    fn networks_of_other_providers_have_no_fabric() {
        let spec = json!({ "provider": { "type": "Macvlan", "parent": "eth0" } });
        assert_eq!(decided(&network(&spec, &Value::Null, &[])), (Fabric::None, None));
    }
}
