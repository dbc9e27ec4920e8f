//! Converts policies into rules that do not depend on the selected pods.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

use kni_model::policy::{
    ContainerPort, Policy, PolicyDirection, PolicyPeer, PolicyPort, PolicyRef, PortMatch, RuleRef,
};

use super::{
    peer::{Peer, Peers},
    ports::PortRange,
    stable,
};

/// The rules of a policy. Two bodies are equal when policy name and rules are equal.
#[derive(Debug)]
pub(super) struct Body {
    hash: u64,
    pub(super) content: Content,
    /// The body that replaces it while its namespace exceeds its quota; `None` if it has no rule anyway.
    closed: Option<Arc<Self>>,
}

/// The content that determines equality.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Content {
    pub(super) reference: PolicyRef,
    pub(super) egress: Option<Vec<Rule>>,
    pub(super) ingress: Option<Vec<Rule>>,
    pub(super) external: Option<External>,
}

/// Rules of an `EgressPolicy`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct External {
    pub(super) rules: Vec<Rule>,
    pub(super) otherwise_allow: bool,
    /// The reference for the decision when no rule matches: its index is one past the last rule.
    pub(super) otherwise: Arc<RuleRef>,
}

/// One rule.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Rule {
    pub(super) name: Arc<RuleRef>,
    pub(super) allow: bool,
    /// Empty: every peer.
    pub(super) peers: Vec<Arc<Peer>>,
    pub(super) ports: Ports,
}

/// Ports of a rule.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) enum Ports {
    /// Every port of every protocol.
    All,
    /// A list of ports.
    Some {
        /// Ports by number.
        ranges: Vec<PortRange>,
        /// Ports by name.
        named: Vec<NamedPort>,
    },
}

/// A named port; its number depends on the receiving pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NamedPort {
    pub(super) name: String,
    pub(super) protocol: u8,
}

impl Content {
    fn closed(&self) -> Self {
        Self {
            reference: self.reference.clone(),
            egress: self.egress.as_ref().map(|_| Vec::new()),
            ingress: self.ingress.as_ref().map(|_| Vec::new()),
            external: self.external.as_ref().map(|_| External {
                rules: Vec::new(),
                otherwise_allow: false,
                otherwise: Arc::new(RuleRef {
                    policy: self.reference.clone(),
                    direction: PolicyDirection::External,
                    index: 0,
                }),
            }),
        }
    }
}

impl PartialEq for Body {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || (self.hash == other.hash && self.content == other.content)
    }
}

impl Eq for Body {}

impl Hash for Body {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Body {
    /// The body of a policy; `None` when it has no rules and isolates in no direction.
    pub(super) fn of(policy: &Policy, peers: &mut Peers) -> Option<Self> {
        let mut rules = |direction, allow: bool, list: Vec<(&[PolicyPeer], &[PolicyPort])>| -> Vec<Rule> {
            let list = list.into_iter().zip(0..);
            list.map(|((to, ports), index)| Rule {
                name: name(policy, direction, index),
                allow,
                peers: to
                    .iter()
                    .map(|peer| peers.intern(peer, &policy.reference.namespace))
                    .collect(),
                ports: Ports::of(ports),
            })
            .collect()
        };
        let mut direction = |direction, list: &Option<Vec<_>>| {
            let list: &Vec<kni_model::policy::PolicyRule> = list.as_ref()?;
            let list = list.iter().map(|rule| (&*rule.peers, &*rule.ports)).collect();
            Some(rules(direction, true, list))
        };
        let egress = direction(PolicyDirection::Egress, &policy.egress);
        let ingress = direction(PolicyDirection::Ingress, &policy.ingress);
        let external = policy.external.as_ref().map(|external| {
            let list = external.rules.iter().map(|rule| (&*rule.to, &*rule.ports)).collect();
            let mut compiled = rules(PolicyDirection::External, true, list);
            for (rule, from) in compiled.iter_mut().zip(&external.rules) {
                rule.allow = from.allow;
            }
            let end = u32::try_from(compiled.len()).unwrap_or(u32::MAX);
            External {
                rules: compiled,
                otherwise_allow: external.otherwise_allow,
                otherwise: name(policy, PolicyDirection::External, end),
            }
        });
        if egress.is_none() && ingress.is_none() && external.is_none() {
            return None;
        }
        let content = Content {
            reference: policy.reference.clone(),
            egress,
            ingress,
            external,
        };
        let closed = content.closed();
        let closed = (closed != content).then(|| Arc::new(Self::new(closed, None)));
        Some(Self::new(content, closed))
    }

    fn new(content: Content, closed: Option<Arc<Self>>) -> Self {
        Self {
            hash: stable::hash(&content),
            content,
            closed,
        }
    }

    /// The policy without its rules: it isolates in the same directions and allows nothing in them.
    pub(super) fn closed(self: &Arc<Self>) -> Arc<Self> {
        Arc::clone(self.closed.as_ref().unwrap_or(self))
    }

    /// The allow rules of a direction; `None`: the policy does not isolate in it. Egress policies have none.
    pub(super) fn allows(&self, direction: PolicyDirection) -> Option<&[Rule]> {
        match direction {
            PolicyDirection::Egress => self.content.egress.as_deref(),
            PolicyDirection::Ingress => self.content.ingress.as_deref(),
            PolicyDirection::External => None,
        }
    }

    /// Every rule.
    pub(super) fn rules(&self) -> impl Iterator<Item = &Rule> {
        let content = &self.content;
        let allows = content.egress.iter().chain(&content.ingress).flatten();
        allows.chain(content.external.iter().flat_map(|external| &external.rules))
    }

    /// Whether the policy denies by default in a direction.
    pub(super) fn isolates(&self, direction: PolicyDirection) -> bool {
        match direction {
            PolicyDirection::Egress => self.content.egress.is_some(),
            PolicyDirection::Ingress => self.content.ingress.is_some(),
            PolicyDirection::External => self.content.external.as_ref().is_some_and(|b| !b.otherwise_allow),
        }
    }
}

fn name(policy: &Policy, direction: PolicyDirection, index: u32) -> Arc<RuleRef> {
    Arc::new(RuleRef {
        policy: policy.reference.clone(),
        direction,
        index,
    })
}

impl Ports {
    fn of(ports: &[PolicyPort]) -> Self {
        if ports.is_empty() {
            return Self::All;
        }
        let (mut ranges, mut named) = (Vec::new(), Vec::new());
        for PolicyPort { protocol, port } in ports {
            let protocol = *protocol;
            let (first, last) = match port {
                PortMatch::Any => (0, u16::MAX),
                PortMatch::Range(first, last) => (*first, *last),
                PortMatch::Named(name) => {
                    named.push(NamedPort {
                        name: name.clone(),
                        protocol,
                    });
                    continue;
                }
            };
            ranges.push(PortRange { protocol, first, last });
        }
        Self::Some { ranges, named }
    }

    /// The named ports.
    pub(super) fn named(&self) -> &[NamedPort] {
        match self {
            Self::All => &[],
            Self::Some { named, .. } => named,
        }
    }

    /// The port ranges, with names resolved to these container ports; `None`: all ports.
    pub(super) fn resolve(&self, names: &[ContainerPort]) -> Option<Vec<PortRange>> {
        let Self::Some { ranges, named } = self else {
            return None;
        };
        let mut found = ranges.clone();
        for desired in named {
            let ports = names.iter().filter(|port| desired.is(port));
            found.extend(ports.map(|port| PortRange {
                protocol: port.protocol,
                first: port.port,
                last: port.port,
            }));
        }
        Some(found)
    }
}

impl NamedPort {
    /// Whether the name refers to a container port.
    pub(super) fn is(&self, port: &ContainerPort) -> bool {
        self.name == port.name && self.protocol == port.protocol
    }
}

/// The container ports that the names refer to, sorted.
pub(super) fn resolve_all<'a>(
    names: impl IntoIterator<Item = &'a NamedPort>,
    ports: &[ContainerPort],
) -> Vec<ContainerPort> {
    if ports.is_empty() {
        return Vec::new();
    }
    let found = names
        .into_iter()
        .flat_map(|name| ports.iter().filter(|port| name.is(port)));
    let mut found: Vec<ContainerPort> = found.cloned().collect();
    found.sort_unstable();
    found.dedup();
    found
}
