//! Converts applied policies and services to the messages of `kni.runtime.v1`.

use kni_model::flow_view::{EffectiveRuleView, PolicyOfInterface, ServiceView};
use kni_proto::runtime::{EffectiveRule, InterfacePolicy, ServicePort};

use super::{
    flow_answer::{policy, rule, socket_address},
    runtime_answer::protocol_word,
};

pub(super) fn interface_policy(view: PolicyOfInterface) -> InterfacePolicy {
    InterfacePolicy {
        ifname: view.ifname.into(),
        network: view.network.into(),
        policy_set: view.policy_set,
        rules: view.rules.into_iter().map(effective_rule).collect(),
    }
}

fn effective_rule(view: EffectiveRuleView) -> EffectiveRule {
    EffectiveRule {
        direction: view.direction.as_str().to_owned(),
        rule: view.rule.as_ref().map(rule),
        isolating: view.isolating.iter().map(policy).collect(),
        peers: view.peers,
        ports: view.ports,
        hits: view.hits,
    }
}

pub(super) fn service_port(view: ServiceView) -> ServicePort {
    ServicePort {
        service: view.service,
        network: view.network,
        address: view.address.to_string(),
        port: view.port.into(),
        protocol: protocol_word(view.protocol),
        backends: view.backends.into_iter().map(socket_address).collect(),
        affinity_seconds: view.affinity_seconds.unwrap_or(0),
        problem: view.problem,
    }
}
