//! Translates numbers of the dataplane's tables into the names that operators use.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use kni_common::{counter::HitKey, event::PolicyTrail};
use kni_dataplane::DataplaneError;
use kni_model::{
    EndpointId,
    flow_view::{EffectiveRuleView, ServiceView, TrailView},
    policy::{PolicyDirection, PolicyRef},
    service::{ServicePort, ServiceRef},
};
use kni_policy::EffectiveRule;
use kni_services::{FrontendView, Strangers, Unserved};

use super::{Enforcer, health::PolicyCounts, lock};

/// A policy and the endpoints that it selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicySummary {
    /// The policy.
    pub policy: PolicyRef,
    /// Endpoints of this node that it selects.
    pub endpoints: Vec<EndpointId>,
}

impl Enforcer {
    /// Resolves the decision of a policy set to names. `None` if no set was consulted.
    pub fn trail(&self, trail: &PolicyTrail, direction: PolicyDirection, allowed: bool) -> Option<TrailView> {
        if trail.set == 0 {
            return None;
        }
        let side = lock(&self.policy);
        Some(TrailView {
            allowed,
            rule: side.engine.rule(trail.set, direction, trail.rule, trail.ordinal),
            isolating: side.engine.isolating(trail.set, direction),
        })
    }

    /// `namespace/name:port` of a service port by its number.
    pub fn service_name(&self, service: u32) -> Option<String> {
        let (service, port) = lock(&self.services).engine.name(service)?;
        Some(service_name(&service, &port))
    }

    /// The rules enforced at an endpoint with their hits, and the number of its policy set.
    pub fn effective(&self, endpoint: EndpointId) -> Result<(u32, Vec<EffectiveRuleView>), DataplaneError> {
        let hits = self.dataplane.hits()?;
        let mut side = lock(&self.policy);
        // Applies pending changes first, because the engine would report them as enforced. The health status reports a
        // failure.
        let _in_force = self.sync_policy(&mut side).is_ok();
        let set = side
            .engine
            .enforcement(endpoint)
            .map_or(0, |enforcement| enforcement.policy);
        let rules = side.engine.effective(endpoint);
        let isolating = |direction| side.engine.isolating(set, direction);
        Ok((
            set,
            rules
                .into_iter()
                .map(|rule| rule_view(rule, isolating, &hits))
                .collect(),
        ))
    }

    /// The policies, by name, and the endpoints that they select.
    pub fn policies(&self) -> Vec<PolicySummary> {
        let side = lock(&self.policy);
        let summary = |policy: &PolicyRef| PolicySummary {
            policy: policy.clone(),
            endpoints: side.engine.members(policy),
        };
        side.engine
            .policies()
            .map(|policy| summary(&policy.reference))
            .collect()
    }

    /// The source addresses that the egress policies of an endpoint request, each with its policy.
    pub fn egress_addresses(&self, endpoint: EndpointId) -> Vec<(IpAddr, PolicyRef)> {
        lock(&self.policy).engine.egress_addresses(endpoint)
    }

    /// The services by name: the applied ones first, then those that are refused, which have no address.
    pub fn services(&self) -> Vec<ServiceView> {
        let side = lock(&self.services);
        let mut views: Vec<ServiceView> = side.engine.frontends().iter().map(service_view).collect();
        views.sort_by(|one, other| (&one.service, one.address).cmp(&(&other.service, other.address)));
        views.extend(side.engine.refused().iter().map(|text| refused_view(text)));
        views
    }

    /// The endpoints of Services that get no connections, because they are neither pods of the Service's network nor
    /// hosts outside. May block while Services are applied.
    pub fn strangers(&self) -> Vec<Strangers> {
        lock(&self.services).engine.strangers().to_vec()
    }

    /// The addresses outside of the cluster at which pods do not reach their Service. May block likewise.
    pub fn unserved(&self) -> Vec<Unserved> {
        lock(&self.services).engine.unserved().to_vec()
    }

    /// Why policies are not enforced, so that no pod can be attached.
    pub fn policy_problem(&self) -> Option<String> {
        lock(&self.health).policy_problem()
    }

    /// Namespaces whose policies exceed their quota and are enforced without rules, each with the reason. Does not
    /// block.
    pub fn closed_namespaces(&self) -> BTreeMap<String, String> {
        lock(&self.health).closed_namespaces().clone()
    }

    /// Why the policies of an endpoint are enforced without rules; `None` if they are enforced as they are. Does not
    /// block.
    pub fn closed_endpoint(&self, endpoint: EndpointId) -> Option<String> {
        lock(&self.health).closed_endpoint(endpoint).cloned()
    }

    /// Problems that do not prevent the attachment of pods.
    pub fn other_problems(&self) -> Vec<String> {
        lock(&self.health).other_problems()
    }

    /// Numbers of rows, durations and failures.
    pub fn counts(&self) -> PolicyCounts {
        let (policy, ports, identities) = {
            let side = lock(&self.policy);
            let tables = side.engine.tables();
            (tables.policy.len(), tables.ports.len(), tables.identities.len())
        };
        PolicyCounts {
            policy,
            ports,
            identities,
            ..lock(&self.health).counts()
        }
    }
}

fn rule_view(
    rule: EffectiveRule,
    isolating: impl Fn(PolicyDirection) -> Vec<PolicyRef>,
    hits: &BTreeMap<HitKey, u64>,
) -> EffectiveRuleView {
    let EffectiveRule {
        rule,
        direction,
        allow,
        isolating: _,
        peers,
        ports,
        hits: keys,
    } = rule;
    let hits = keys.iter().filter_map(|key| hits.get(key)).sum();
    let peers = match (&rule, direction) {
        // Only these rules can deny.
        (Some(_), PolicyDirection::External) => format!("{} {peers}", if allow { "allow" } else { "deny" }),
        _ => peers,
    };
    EffectiveRuleView {
        direction,
        rule,
        isolating: isolating(direction),
        peers,
        ports,
        hits,
    }
}

fn service_name(service: &ServiceRef, port: &ServicePort) -> String {
    if port.name.is_empty() {
        format!("{service}:{}", port.port)
    } else {
        format!("{service}:{}", port.name)
    }
}

fn service_view(frontend: &FrontendView) -> ServiceView {
    ServiceView {
        service: service_name(&frontend.service, &frontend.port),
        network: frontend.network.to_string(),
        address: frontend.address,
        port: frontend.port.port,
        protocol: frontend.port.protocol,
        backends: frontend
            .backends
            .iter()
            .map(|backend| (backend.ip(), backend.port()))
            .collect(),
        affinity_seconds: frontend.affinity_seconds,
        problem: frontend.empty.map(|why| why.to_string()).unwrap_or_default(),
    }
}

/// Parses the message of the engine: `Service namespace/name: reason`.
fn refused_view(text: &str) -> ServiceView {
    let named = text.strip_prefix("Service ").unwrap_or(text);
    let (service, problem) = named.split_once(": ").unwrap_or((named, "not applied"));
    ServiceView {
        service: service.to_owned(),
        network: String::new(),
        address: Ipv4Addr::UNSPECIFIED.into(),
        port: 0,
        protocol: 0,
        backends: Vec::new(),
        affinity_seconds: None,
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_services_keep_their_name_and_reason() {
        let view = refused_view("Service x/web: network blue is not known");
        assert_eq!(
            (view.service.as_str(), view.problem.as_str()),
            ("x/web", "network blue is not known")
        );
    }

    #[test]
    fn hits_of_a_rule_are_summed_and_deny_is_told() {
        let key = |rule, ordinal| HitKey {
            set: 5,
            rule,
            ordinal,
            direction: 2,
        };
        let hits = [(key(1, 0), 3), (key(2, 0), 4), (key(3, 0), 100)].into();
        let policy = PolicyRef {
            kind: kni_model::policy::PolicyKind::EgressPolicy,
            namespace: "x".to_owned(),
            name: "out".to_owned(),
        };
        let rule = EffectiveRule {
            rule: Some(kni_model::policy::RuleRef {
                policy: policy.clone(),
                direction: PolicyDirection::External,
                index: 0,
            }),
            direction: PolicyDirection::External,
            allow: false,
            isolating: Vec::new(),
            peers: "192.0.2.0/24".to_owned(),
            ports: "all".to_owned(),
            hits: vec![key(1, 0), key(2, 0)],
        };
        let view = rule_view(rule, |_| vec![policy.clone()], &hits);
        assert_eq!((view.hits, view.peers.as_str()), (7, "deny 192.0.2.0/24"));
        assert_eq!(view.isolating, [policy]);
    }

    #[test]
    fn unnamed_ports_are_named_by_number() {
        let service = ServiceRef {
            namespace: "x".to_owned(),
            name: "web".to_owned(),
        };
        let port = |name: &str| ServicePort {
            name: name.to_owned(),
            protocol: 6,
            port: 80,
        };
        assert_eq!(service_name(&service, &port("")), "x/web:80");
        assert_eq!(service_name(&service, &port("http")), "x/web:http");
    }
}
