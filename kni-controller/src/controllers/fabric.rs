//! Decides how packets of a network cross from node to node, once for all nodes.
//!
//! Agents read the decision in the status and nothing else, so a network is never Overlay on one node and None on
//! another but for the time that the status takes to reach them. A change of the spec takes effect with the write of
//! the status.

use ipnet::IpNet;
use kni_api::Fabric;
use kni_crd::PodNetwork;

/// The fabric of a network: that of the spec, else the one decided before, else Overlay. Networks whose packets the
/// dataplane does not see have none.
pub(super) fn fabric(object: &PodNetwork) -> Fabric {
    let decided = object.status.as_ref().and_then(|status| status.fabric);
    let initial = if has_fabric(object) {
        Fabric::Overlay
    } else {
        Fabric::None
    };
    object.spec.fabric.or(decided).unwrap_or(initial)
}

/// Whether the dataplane forwards the packets of the network.
fn has_fabric(object: &PodNetwork) -> bool {
    let provider = object.spec.provider.as_ref();
    provider.is_none_or(|provider| provider.kind == kni_api::provider::ProviderType::Ebpf)
}

/// The subnets of a network whose addresses nodes use beside their own: the default network, and those without a
/// tunnel. Others may have the same addresses as the nodes.
pub(super) fn shared_subnets(network: &PodNetwork) -> Option<Vec<IpNet>> {
    let status = network.status.as_ref();
    let native = [network.spec.fabric, status.and_then(|status| status.fabric)].contains(&Some(Fabric::Native));
    (network.spec.default || native).then(|| {
        let subnets = network.spec.subnets.iter();
        subnets.filter_map(|subnet| subnet.parse().ok()).collect()
    })
}

#[cfg(test)]
mod tests {
    use kni_api::IN_USE_FINALIZER;
    use serde_json::{Value, json};

    use super::*;

    fn decided(spec: &Value, status: &Value, finalizers: &[&str]) -> Fabric {
        let object = json!({
            "apiVersion": "kni.dev/v1alpha1", "kind": "PodNetwork",
            "metadata": { "name": "red", "finalizers": finalizers }, "spec": spec, "status": status,
        });
        fabric(&serde_json::from_value(object).unwrap())
    }

    fn touched() -> Value {
        let accepted = json!({
            "type": "Accepted", "status": "True", "reason": "Valid", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        json!({ "conditions": [accepted], "number": 4096 })
    }

    /// A restored network has its finalizer and no status.
    #[test]
    fn a_network_without_a_decision_is_overlay() {
        for status in [Value::Null, touched()] {
            for finalizers in [&[][..], &["example.com/mine"], &[IN_USE_FINALIZER]] {
                assert_eq!(decided(&json!({}), &status, finalizers), Fabric::Overlay);
            }
        }
    }

    #[test]
    fn what_was_decided_stays_and_the_spec_precedes_it() {
        for fabric in [Fabric::Overlay, Fabric::Native, Fabric::None] {
            let mut status = touched();
            status["fabric"] = json!(fabric);
            assert_eq!(decided(&json!({}), &status, &[IN_USE_FINALIZER]), fabric);
            for asked in [Fabric::Overlay, Fabric::Native, Fabric::None] {
                assert_eq!(
                    decided(&json!({ "fabric": asked }), &status, &[IN_USE_FINALIZER]),
                    asked
                );
            }
        }
    }

    #[test]
    fn networks_of_other_providers_have_no_fabric() {
        let spec = json!({ "provider": { "type": "Macvlan", "parent": "eth0" } });
        assert_eq!(decided(&spec, &Value::Null, &[]), Fabric::None);
    }
}
