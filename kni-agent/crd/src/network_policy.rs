//! Reads a `NetworkPolicy`: the isolated pods of a namespace and the traffic that is allowed on their primary
//! interface.

use k8s_openapi::{
    api::networking::v1::{
        NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    },
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kni_model::policy::{Policy, PolicyKind, PolicyRef, PolicyRule, PolicyScope, Selector};

use super::{
    from_object::FromObject,
    invalid::{FieldError, InvalidObject, at, read_each, shown},
    labels::read_selector,
    names::{NameRule, of_object, read_names},
    peers::read_peer,
    ports::read_policy_port,
};

impl FromObject<NetworkPolicy> for Policy {
    type Error = InvalidObject;

    /// A missing `spec` equals an empty one, as in the API server: all pods of the namespace are isolated for ingress.
    fn from_object(object: &NetworkPolicy) -> Result<Self, InvalidObject> {
        let kind = PolicyKind::NetworkPolicy;
        convert(object).map_err(of_object(kind.as_str(), &object.metadata))
    }
}

fn convert(object: &NetworkPolicy) -> Result<Policy, FieldError> {
    let (namespace, name) = read_names(&object.metadata, NameRule::Subdomain)?;
    let spec = object.spec.clone().unwrap_or_default();
    let rules = Rules {
        pod_selector: spec.pod_selector.as_ref(),
        policy_types: spec.policy_types.as_deref(),
        ingress: spec.ingress.as_deref(),
        egress: spec.egress.as_deref(),
    };
    let reference = PolicyRef {
        kind: PolicyKind::NetworkPolicy,
        namespace,
        name,
    };
    rules.into_policy(reference, PolicyScope::Primary)
}

/// The schema that `NetworkPolicy` and `MultiNetworkPolicy` share.
pub(super) struct Rules<'a> {
    pub(super) pod_selector: Option<&'a LabelSelector>,
    pub(super) policy_types: Option<&'a [String]>,
    pub(super) ingress: Option<&'a [NetworkPolicyIngressRule]>,
    pub(super) egress: Option<&'a [NetworkPolicyEgressRule]>,
}

impl Rules<'_> {
    pub(super) fn into_policy(self, reference: PolicyRef, scope: PolicyScope) -> Result<Policy, FieldError> {
        let pods = self.pod_selector.map_or(Ok(Selector::default()), |selector| {
            read_selector("spec.podSelector", selector)
        })?;
        // Rules of a direction that is not among the types are validated, but have no effect.
        let ingress = read_each("spec.ingress", self.ingress.unwrap_or_default(), |path, rule| {
            read_rule(path, "from", rule.from.as_deref(), rule.ports.as_deref())
        })?;
        let egress = read_each("spec.egress", self.egress.unwrap_or_default(), |path, rule| {
            read_rule(path, "to", rule.to.as_deref(), rule.ports.as_deref())
        })?;
        let (isolates_ingress, isolates_egress) = read_types(self.policy_types, !egress.is_empty())?;
        Ok(Policy {
            reference,
            scope,
            pods,
            ingress: isolates_ingress.then_some(ingress),
            egress: isolates_egress.then_some(egress),
            external: None,
        })
    }
}

/// The directions in which a policy isolates: ingress, egress.
fn read_types(types: Option<&[String]>, has_egress: bool) -> Result<(bool, bool), FieldError> {
    let types = types.unwrap_or_default();
    if types.is_empty() {
        return Ok((true, has_egress));
    }
    read_each("spec.policyTypes", types, |path, name| match name.as_str() {
        "Ingress" | "Egress" => Ok(()),
        other => Err(at(path, format!("{:?} is not Ingress or Egress", shown(other)))),
    })?;
    let has = |name: &str| types.iter().any(|given| given == name);
    Ok((has("Ingress"), has("Egress")))
}

fn read_rule(
    field: &str,
    peers_name: &str,
    peers: Option<&[NetworkPolicyPeer]>,
    ports: Option<&[NetworkPolicyPort]>,
) -> Result<PolicyRule, FieldError> {
    Ok(PolicyRule {
        peers: read_each(&format!("{field}.{peers_name}"), peers.unwrap_or_default(), read_peer)?,
        ports: read_each(&format!("{field}.ports"), ports.unwrap_or_default(), read_policy_port)?,
    })
}

#[cfg(test)]
mod tests {
    use kni_model::policy::{PolicyPeer, PortMatch};

    use super::*;

    fn read(spec: &str) -> Result<Policy, InvalidObject> {
        let json = format!(r#"{{"metadata":{{"namespace":"x","name":"p"}},"spec":{spec}}}"#);
        let json = json.replacen(
            '{',
            r#"{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","#,
            1,
        );
        Policy::from_object(&serde_json::from_str::<NetworkPolicy>(&json).unwrap())
    }

    fn counts(spec: &str) -> (Option<usize>, Option<usize>) {
        let policy = read(spec).unwrap();
        (
            policy.ingress.map(|rules| rules.len()),
            policy.egress.map(|rules| rules.len()),
        )
    }

    #[test]
    fn types_that_are_absent_follow_the_rules() {
        for (spec, ingress, egress) in [
            (r#"{"podSelector":{}}"#, Some(0), None),
            ("{}", Some(0), None),
            (r#"{"ingress":[],"egress":[]}"#, Some(0), None),
            (r#"{"egress":[{}]}"#, Some(0), Some(1)),
            (r#"{"policyTypes":[],"egress":[{}]}"#, Some(0), Some(1)),
            (r#"{"policyTypes":["Egress"],"ingress":[{}]}"#, None, Some(0)),
            (
                r#"{"policyTypes":["Ingress"],"egress":[{}],"ingress":[{},{}]}"#,
                Some(2),
                None,
            ),
            (r#"{"policyTypes":["Ingress","Egress"]}"#, Some(0), Some(0)),
        ] {
            assert_eq!(counts(spec), (ingress, egress), "{spec}");
        }
    }

    #[test]
    fn a_policy_keeps_everything_it_says() {
        let policy = read(
            r#"{"podSelector":{"matchLabels":{"pod":"a"}},"ingress":[
              {"from":[{"podSelector":{}},{"ipBlock":{"cidr":"10.0.0.0/8"}}],"ports":[{"port":80},{"port":"http"}]},
              {"from":[],"ports":[]}],"egress":[{"to":[{"namespaceSelector":{}}],"ports":[{"protocol":"SCTP"}]}]}"#,
        )
        .unwrap();
        assert_eq!(policy.reference.to_string(), "NetworkPolicy x/p");
        assert_eq!((policy.scope, policy.external), (PolicyScope::Primary, None));
        assert_eq!(policy.pods.requirements.len(), 1);
        let ingress = policy.ingress.unwrap();
        assert_eq!((ingress[0].peers.len(), ingress[0].ports.len()), (2, 2));
        assert_eq!(ingress[0].ports[1].port, PortMatch::Named("http".to_owned()));
        assert_eq!(ingress[1], PolicyRule::default());
        let egress = policy.egress.unwrap();
        assert!(matches!(
            &egress[0].peers[0],
            PolicyPeer::Pods {
                namespaces: Some(_),
                ..
            }
        ));
        assert_eq!(egress[0].ports[0].protocol, 132);
    }

    #[test]
    fn without_a_spec_everything_is_isolated() {
        let mut object = NetworkPolicy::default();
        object.metadata.name = Some("p".to_owned());
        let policy = Policy::from_object(&object).unwrap();
        assert_eq!(policy.reference.namespace, "default");
        assert_eq!(
            (policy.pods, policy.ingress, policy.egress),
            (Selector::default(), Some(Vec::new()), None)
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (spec, field) in [
            (r#"{"policyTypes":["Ingress","egress"]}"#, "spec.policyTypes[1]"),
            (r#"{"ingress":[{},{"from":[{}]}]}"#, "spec.ingress[1].from[0]"),
            (
                r#"{"policyTypes":["Ingress"],"egress":[{"to":[{}]}]}"#,
                "spec.egress[0].to[0]",
            ),
            (r#"{"egress":[{"ports":[{"port":0}]}]}"#, "spec.egress[0].ports[0].port"),
            (
                r#"{"podSelector":{"matchExpressions":[{"key":"a","operator":"In"}]}}"#,
                "spec.podSelector.matchExpressions[0].values",
            ),
        ] {
            let error = read(spec).unwrap_err();
            assert_eq!(error.field, field, "{spec}");
            assert!(error.to_string().starts_with("NetworkPolicy x/p: spec."), "{error}");
        }
        let unnamed = Policy::from_object(&NetworkPolicy::default()).unwrap_err();
        assert_eq!(
            unnamed.to_string(),
            "NetworkPolicy <unnamed>: metadata.name: is missing"
        );
    }
}
