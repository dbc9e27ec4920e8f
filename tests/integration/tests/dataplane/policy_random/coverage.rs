//! Counts the forms in the random worlds, because a generator that omits a form proves nothing about it.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use k8s_openapi::{
    api::networking::v1::{NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec},
    apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
};
use kni_integration::oracle::{Direction, Peer, Policy, Protocol, World};

use super::generate::Question;

/// The number of occurrences of each form.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<&'static str, u64>);

/// Forms that must occur, each at least in one of a hundred worlds.
const FORMS: [&str; 37] = [
    "In",
    "NotIn",
    "Exists",
    "DoesNotExist",
    "matchLabels",
    "empty selector",
    "pod selector alone",
    "namespace selector alone",
    "both selectors",
    "block of IPv4",
    "block of IPv6",
    "except",
    "nested blocks",
    "rule without peers",
    "rule with empty peers",
    "rule without ports",
    "rule with empty ports",
    "no ingress list",
    "empty ingress list",
    "no egress list",
    "empty egress list",
    "no policy types",
    "named port",
    "endPort",
    "protocol without port",
    "port without protocol",
    "stacked policies",
    "MultiNetworkPolicy",
    "asked over IPv4",
    "asked over IPv6",
    "asked from outside",
    "asked to outside",
    "asked a pod of another node",
    "asked with ICMP",
    "denied",
    "allowed at an isolated end",
    "allowed by a named port",
];

impl Coverage {
    fn count(&mut self, form: &'static str, occurs: bool) {
        debug_assert!(FORMS.contains(&form), "{form} is not in the list");
        *self.0.entry(form).or_default() += u64::from(occurs);
    }

    /// Counts the forms of a world's policies.
    pub(crate) fn world(&mut self, world: &World) {
        for policy in &world.policies {
            self.count("MultiNetworkPolicy", policy.networks.is_some());
            if let Some(spec) = &policy.object.spec {
                self.spec(spec);
            }
        }
    }

    fn spec(&mut self, spec: &NetworkPolicySpec) {
        self.selector(spec.pod_selector.as_ref());
        self.count("no policy types", spec.policy_types.is_none());
        self.count("no ingress list", spec.ingress.is_none());
        self.count("empty ingress list", spec.ingress.as_ref().is_some_and(Vec::is_empty));
        self.count("no egress list", spec.egress.is_none());
        self.count("empty egress list", spec.egress.as_ref().is_some_and(Vec::is_empty));
        let ingress = spec.ingress.iter().flatten().map(|rule| (&rule.from, &rule.ports));
        let egress = spec.egress.iter().flatten().map(|rule| (&rule.to, &rule.ports));
        for (peers, ports) in ingress.chain(egress) {
            self.peers(peers.as_ref());
            self.ports(ports.as_ref());
        }
    }

    fn peers(&mut self, peers: Option<&Vec<NetworkPolicyPeer>>) {
        self.count("rule without peers", peers.is_none());
        self.count("rule with empty peers", peers.is_some_and(Vec::is_empty));
        let mut blocks = Vec::new();
        for peer in peers.into_iter().flatten() {
            let (pods, namespaces) = (peer.pod_selector.is_some(), peer.namespace_selector.is_some());
            self.count("pod selector alone", pods && !namespaces);
            self.count("namespace selector alone", namespaces && !pods);
            self.count("both selectors", pods && namespaces);
            self.selector(peer.pod_selector.as_ref());
            self.selector(peer.namespace_selector.as_ref());
            if let Some(block) = &peer.ip_block {
                self.count("block of IPv4", !block.cidr.contains(':'));
                self.count("block of IPv6", block.cidr.contains(':'));
                self.count("except", block.except.is_some());
                blocks.push(block.cidr.parse::<ipnet::IpNet>().expect("a CIDR").trunc());
            }
        }
        let nested = |(n, block): (usize, &ipnet::IpNet)| {
            let mut others = blocks.iter().enumerate().filter(|(other, _)| *other != n);
            others.any(|(_, other)| block.contains(other))
        };
        self.count("nested blocks", blocks.iter().enumerate().any(nested));
    }

    fn ports(&mut self, ports: Option<&Vec<NetworkPolicyPort>>) {
        self.count("rule without ports", ports.is_none());
        self.count("rule with empty ports", ports.is_some_and(Vec::is_empty));
        for port in ports.into_iter().flatten() {
            self.count("named port", matches!(port.port, Some(IntOrString::String(_))));
            self.count("endPort", port.end_port.is_some());
            self.count("protocol without port", port.protocol.is_some() && port.port.is_none());
            self.count("port without protocol", port.protocol.is_none() && port.port.is_some());
        }
    }

    fn selector(&mut self, selector: Option<&LabelSelector>) {
        let Some(selector) = selector else { return };
        self.count("matchLabels", selector.match_labels.is_some());
        let empty = selector.match_labels.is_none() && selector.match_expressions.is_none();
        self.count("empty selector", empty);
        for requirement in selector.match_expressions.iter().flatten() {
            for operator in ["In", "NotIn", "Exists", "DoesNotExist"] {
                self.count(operator, requirement.operator == operator);
            }
        }
    }

    /// Counts a question and its answer.
    pub(crate) fn question(&mut self, world: &World, question: &Question, remote: bool, allowed: bool) {
        let peers = [question.from, question.to].map(|address| world.peer(question.network, address));
        self.count("asked over IPv4", question.from.is_ipv4());
        self.count("asked over IPv6", question.from.is_ipv6());
        self.count("asked from outside", matches!(peers[0], Peer::Outside(_)));
        self.count("asked to outside", matches!(peers[1], Peer::Outside(_)));
        self.count("asked a pod of another node", remote);
        self.count("asked with ICMP", question.protocol == Protocol::Icmp);
        self.count("denied", !allowed);
        let isolating = |peer: Peer<'_>, direction| match peer {
            Peer::Pod(pod, interface, _) => world.isolating(direction, pod, interface).len(),
            Peer::Outside(_) | Peer::Node(_) => 0,
        };
        let most = isolating(peers[0], Direction::Egress).max(isolating(peers[1], Direction::Ingress));
        self.count("stacked policies", most > 1);
        self.count("allowed at an isolated end", allowed && most > 0);
        self.count(
            "allowed by a named port",
            allowed && most > 0 && !without_names(world).allowed(peers[0], peers[1], question.protocol, question.port),
        );
    }

    /// Fails if a form is missing.
    pub(crate) fn check(&self, worlds: u64) -> Result<()> {
        for form in FORMS {
            let found = self.0.get(form).copied().unwrap_or_default();
            println!("{form:<32} {found:>9}");
        }
        for form in FORMS {
            let found = self.0.get(form).copied().unwrap_or_default();
            ensure!(
                found >= worlds / 100,
                "{form} occurred {found} times in {worlds} worlds"
            );
        }
        Ok(())
    }
}

/// The world without named ports; a rule with only named ports gets one that no packet matches.
fn without_names(world: &World) -> World {
    let strip = |ports: &mut Option<Vec<NetworkPolicyPort>>| {
        for port in ports.iter_mut().flatten() {
            if matches!(port.port, Some(IntOrString::String(_))) {
                port.port = Some(IntOrString::Int(1));
            }
        }
    };
    let stripped = |policy: &Policy| {
        let mut policy = policy.clone();
        let spec = policy.object.spec.get_or_insert_default();
        spec.ingress
            .iter_mut()
            .flatten()
            .for_each(|rule| strip(&mut rule.ports));
        spec.egress.iter_mut().flatten().for_each(|rule| strip(&mut rule.ports));
        policy
    };
    World {
        policies: world.policies.iter().map(stripped).collect(),
        ..world.clone()
    }
}
