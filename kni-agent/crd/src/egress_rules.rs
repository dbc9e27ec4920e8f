//! Validates an `EgressPolicy` and converts it into a policy of the model.

use std::collections::BTreeSet;

use kni_model::{
    NetworkName,
    policy::{
        ExternalRule, ExternalRules, Policy, PolicyKind, PolicyPeer, PolicyPort, PolicyRef, PolicyScope, PortMatch,
    },
};

use super::{
    EgressPolicy,
    cidr::{read_addresses, read_cidr},
    egress_policy::{EgressAction, EgressDestination, EgressPort, EgressProtocol, EgressRule},
    from_object::FromObject,
    invalid::{FieldError, InvalidObject, at, read_each},
    labels::read_selector,
    names::{NameRule, of_object, read_names},
    peers::read_range_except,
    ports::{SCTP, TCP, UDP, read_port, read_range},
};

impl FromObject<EgressPolicy> for Policy {
    type Error = InvalidObject;

    fn from_object(object: &EgressPolicy) -> Result<Self, InvalidObject> {
        convert(object).map_err(of_object(PolicyKind::EgressPolicy.as_str(), &object.metadata))
    }
}

fn convert(object: &EgressPolicy) -> Result<Policy, FieldError> {
    let (namespace, name) = read_names(&object.metadata, NameRule::Subdomain)?;
    let spec = &object.spec;
    let external = ExternalRules {
        rules: read_each("spec.rules", &spec.rules, read_rule)?,
        otherwise_allow: is_allow(spec.default_action),
        egress_addresses: read_addresses("spec.egressAddresses", &spec.egress_addresses)?,
    };
    Ok(Policy {
        reference: PolicyRef {
            kind: PolicyKind::EgressPolicy,
            namespace,
            name,
        },
        scope: read_scope(spec.pod_network_names.as_deref())?,
        pods: read_selector("spec.podSelector", &spec.pod_selector)?,
        ingress: None,
        egress: None,
        external: Some(external),
    })
}

fn read_scope(names: Option<&[String]>) -> Result<PolicyScope, FieldError> {
    const FIELD: &str = "spec.podNetworkNames";
    let Some(names) = names else {
        return Ok(PolicyScope::All);
    };
    if names.is_empty() {
        return Err(at(FIELD, "is empty; leave it out for all networks"));
    }
    let names = read_each(FIELD, names, |path, name| {
        name.parse::<NetworkName>().map_err(|error| at(path, error.to_string()))
    })?;
    Ok(PolicyScope::Networks(names.into_iter().collect::<BTreeSet<_>>()))
}

fn is_allow(action: EgressAction) -> bool {
    match action {
        EgressAction::Allow => true,
        EgressAction::Deny => false,
    }
}

fn read_rule(field: &str, rule: &EgressRule) -> Result<ExternalRule, FieldError> {
    Ok(ExternalRule {
        allow: is_allow(rule.action),
        to: read_each(&format!("{field}.to"), &rule.to, read_destination)?,
        ports: read_each(&format!("{field}.ports"), &rule.ports, read_ports)?,
    })
}

fn read_destination(field: &str, to: &EgressDestination) -> Result<PolicyPeer, FieldError> {
    read_range_except(field, &to.cidr, &to.except, read_cidr)
}

fn read_ports(field: &str, port: &EgressPort) -> Result<PolicyPort, FieldError> {
    let protocol = match port.protocol {
        EgressProtocol::Tcp => TCP,
        EgressProtocol::Udp => UDP,
        EgressProtocol::Sctp => SCTP,
    };
    let end_field = format!("{field}.endPort");
    let matched = match (port.port, port.end_port) {
        (None, None) => PortMatch::Any,
        (None, Some(_)) => return Err(at(end_field, "needs a port, the first of the range")),
        (Some(first), end) => read_range(&end_field, read_port(&format!("{field}.port"), first)?, end)?,
    };
    Ok(PolicyPort {
        protocol,
        port: matched,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &str) -> Result<Policy, InvalidObject> {
        let spec = format!(r#"{{"podSelector":{{}}{fields}}}"#);
        let mut object = EgressPolicy::new("p", serde_json::from_str(&spec).unwrap());
        object.metadata.namespace = Some("x".to_owned());
        Policy::from_object(&object)
    }

    #[test]
    fn the_smallest_policy_allows_everything_everywhere() {
        let policy = read("").unwrap();
        assert_eq!(policy.reference.to_string(), "EgressPolicy x/p");
        assert_eq!(
            (policy.scope, policy.ingress, policy.egress),
            (PolicyScope::All, None, None)
        );
        let external = policy.external.unwrap();
        assert_eq!(
            (external.rules, external.otherwise_allow, external.egress_addresses),
            (vec![], true, vec![])
        );
    }

    #[test]
    fn a_policy_keeps_everything_it_says() {
        let policy = read(
            r#","podNetworkNames":["red","blue","red"],"defaultAction":"Deny","egressAddresses":["192.0.2.1","2001:db8::1"],
            "rules":[{"action":"Deny","to":[{"cidr":"192.0.2.0/24","except":["192.0.2.8/32"]},{"cidr":"::/0"}]},
            {"action":"Allow","ports":[{"port":443},{"protocol":"UDP","port":1000,"endPort":2000},{"protocol":"SCTP"}]}]"#,
        )
        .unwrap();
        let expect = ["blue", "red"].map(|name| name.parse().unwrap()).into();
        assert_eq!(policy.scope, PolicyScope::Networks(expect));
        let external = policy.external.unwrap();
        assert!(!external.otherwise_allow);
        assert_eq!(external.egress_addresses.len(), 2);
        assert_eq!(
            (
                external.rules[0].allow,
                external.rules[0].to.len(),
                external.rules[0].ports.len()
            ),
            (false, 2, 0)
        );
        assert!(matches!(&external.rules[0].to[0], PolicyPeer::Block { except, .. } if except.len() == 1));
        let ports: Vec<_> = external.rules[1]
            .ports
            .iter()
            .map(|p| (p.protocol, p.port.clone()))
            .collect();
        assert_eq!(
            ports,
            [
                (TCP, PortMatch::Range(443, 443)),
                (UDP, PortMatch::Range(1000, 2000)),
                (SCTP, PortMatch::Any)
            ]
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fields, field, why) in [
            (r#","podNetworkNames":[]"#, "spec.podNetworkNames", "leave it out"),
            (r#","podNetworkNames":["a","B"]"#, "spec.podNetworkNames[1]", "DNS-1123"),
            (
                r#","egressAddresses":["192.0.2.1","192.0.2.2"]"#,
                "spec.egressAddresses[1]",
                "same family",
            ),
            (
                r#","egressAddresses":["ff02::1"]"#,
                "spec.egressAddresses[0]",
                "multicast",
            ),
            (
                r#","rules":[{"action":"Deny","to":[{"cidr":"192.0.2.1/24"}]}]"#,
                "spec.rules[0].to[0].cidr",
                "write 192.0.2.0/24",
            ),
            (
                r#","rules":[{"action":"Deny","to":[{"cidr":"192.0.2.0/24","except":["192.0.3.0/25"]}]}]"#,
                "spec.rules[0].to[0].except[0]",
                "not a part of",
            ),
            (
                r#","rules":[{"action":"Deny","ports":[{"port":0}]}]"#,
                "spec.rules[0].ports[0].port",
                "1 to 65535",
            ),
            (
                r#","rules":[{"action":"Deny","ports":[{"endPort":1}]}]"#,
                "spec.rules[0].ports[0].endPort",
                "needs a port",
            ),
            (
                r#","rules":[{"action":"Deny","ports":[{"port":2,"endPort":1}]}]"#,
                "spec.rules[0].ports[0].endPort",
                "smaller",
            ),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!(error.field, field, "{fields}");
            assert!(error.reason.contains(why), "{error}");
        }
    }
}
