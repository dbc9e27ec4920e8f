//! Checks that the API server enforces the admission policies of `deploy/base`. Pure.

use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
use kube::ResourceExt as _;

use super::Finding;

/// What an operator can do where a policy or a binding is missing.
const REMEDY: &str = "kubectl apply -k deploy/, or helm upgrade: both write the policies and their bindings";

/// Every policy, each with a binding of the same name, and what is possible without it.
const POLICIES: [(&str, &str); 15] = [
    (
        "pod-join.kni.dev",
        "pods that a network refuses are created, and then do not start",
    ),
    (
        "attachment-join.kni.dev",
        "attachments to networks that refuse their namespace are created, and have no effect",
    ),
    (
        "service-join.kni.dev",
        "Services for networks that refuse their namespace are created, and have no effect",
    ),
    (
        "addressblock-unit.kni.dev",
        "address blocks may overlap, and two pods may have one address",
    ),
    (
        "addressblock-node.kni.dev",
        "an agent may change the address blocks of other nodes",
    ),
    (
        "addressblock-node-uid.kni.dev",
        "an agent may give address blocks of its node to a UID that no node has",
    ),
    (
        "agent-podinterfaces.kni.dev",
        "an agent may report interfaces of other nodes' pods",
    ),
    (
        "agent-networkmembers.kni.dev",
        "an agent may report pods of other nodes as members of networks",
    ),
    (
        "agent-nodeendpoints.kni.dev",
        "an agent may report addresses to which other nodes send the packets for another node",
    ),
    ("agent-nodenetworks.kni.dev", "an agent may report about other nodes"),
    (
        "agent-pods.kni.dev",
        "an agent may change the status of other nodes' pods",
    ),
    (
        "agent-egressaddressclaims.kni.dev",
        "an agent may take egress addresses of other nodes",
    ),
    (
        "controller-nodes.kni.dev",
        "kni-controller's token may change labels, taints and resources of nodes that are not its own",
    ),
    (
        "controller-podnetworks.kni.dev",
        "kni-controller's token may change the specifications of networks",
    ),
    (
        "podnetwork-in-use.kni.dev",
        "a network can be deleted while pods have interfaces in it",
    ),
];

/// Policies and bindings that are missing, or refuse nothing.
pub(super) fn policies(
    policies: &[ValidatingAdmissionPolicy],
    bindings: &[ValidatingAdmissionPolicyBinding],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, without) in POLICIES {
        let mut fails = |object: String, problem: &str| {
            findings.push(Finding::failure(object, format!("{problem}: {without}"), REMEDY));
        };
        if !policies.iter().any(|policy| policy.name_any() == name) {
            fails(format!("validatingadmissionpolicy {name}"), "it does not exist");
        }
        let object = format!("validatingadmissionpolicybinding {name}");
        let spec = bindings
            .iter()
            .find(|binding| binding.name_any() == name)
            .map(|binding| binding.spec.clone());
        let Some(spec) = spec else {
            fails(object, "it does not exist");
            continue;
        };
        if spec.policy_name != name {
            fails(object.clone(), "it binds another policy");
        }
        if !spec.validation_actions.iter().any(|action| action == "Deny") {
            fails(object, "its validationActions do not deny");
        }
    }
    findings
}

#[cfg(test)]
/// The objects of one kind in `deploy/base`.
pub(super) fn shipped<K: serde::de::DeserializeOwned>(kind: &str) -> Vec<K> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/base");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for document in text.split("\n---\n") {
            if document.lines().any(|line| line == format!("kind: {kind}")) {
                let value: serde_json::Value = serde_saphyr::from_str(document).unwrap();
                found.push(serde_json::from_value(value).unwrap());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_shipped_policies_are_expected_and_no_others() {
        let (all, bindings) = (
            shipped("ValidatingAdmissionPolicy"),
            shipped("ValidatingAdmissionPolicyBinding"),
        );
        assert_eq!(policies(&all, &bindings), []);
        let names: BTreeSet<String> = all
            .iter()
            .map(|policy: &ValidatingAdmissionPolicy| policy.name_any())
            .collect();
        let expected: BTreeSet<String> = POLICIES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names, expected, "a policy of deploy/base that is not checked");
    }

    #[test]
    fn each_missing_object_is_named() {
        let all: Vec<ValidatingAdmissionPolicy> = shipped("ValidatingAdmissionPolicy");
        let bindings: Vec<ValidatingAdmissionPolicyBinding> = shipped("ValidatingAdmissionPolicyBinding");
        assert_eq!(policies(&[], &[]).len(), 2 * POLICIES.len());
        for (name, without) in POLICIES {
            let kept: Vec<_> = all.iter().filter(|policy| policy.name_any() != name).cloned().collect();
            let findings = policies(&kept, &bindings);
            assert_eq!(findings.len(), 1);
            assert_eq!(findings[0].object, format!("validatingadmissionpolicy {name}"));
            assert_eq!(findings[0].problem, format!("it does not exist: {without}"));
            let mut weakened = bindings.clone();
            for binding in weakened.iter_mut().filter(|binding| binding.name_any() == name) {
                binding.spec.validation_actions = vec!["Audit".to_owned()];
            }
            let findings = policies(&all, &weakened);
            assert_eq!(findings.len(), 1);
            assert_eq!(findings[0].object, format!("validatingadmissionpolicybinding {name}"));
        }
    }
}
