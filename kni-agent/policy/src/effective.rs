//! Lists the enforced rules of an endpoint for operators.

use std::collections::HashMap;

use kni_common::{
    counter::HitKey,
    policy::{PORTS_ALL, PORTS_NONE, PolicyKey},
};
use kni_model::{
    PolicyTables,
    policy::{Operator, PolicyDirection, PolicyRef, RuleRef, Selector},
};

use super::{
    body::{Body, Ports, Rule},
    peer::{Matcher, Peer},
    row::References,
    set::{DIRECTIONS, PolicySet},
};

/// Ordinal of the default deny in the dataplane's counters.
const DEFAULT_DENY: u16 = u16::MAX;

/// A rule enforced at an endpoint, or its default deny.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EffectiveRule {
    /// The rule; `None` for the default deny. The default decision of an `EgressPolicy` has the index one past its last
    /// rule.
    pub rule: Option<RuleRef>,
    /// The direction of the rule.
    pub direction: PolicyDirection,
    /// Whether it allows.
    pub allow: bool,
    /// For a default deny: the policies that isolate the endpoint. Otherwise empty.
    pub isolating: Vec<PolicyRef>,
    /// Peers as short text.
    pub peers: String,
    /// Ports as short text.
    pub ports: String,
    /// Counters of the flows that the rule decided. Where several rules allow the same flow, only one of them counts
    /// it.
    pub hits: Vec<HitKey>,
}

/// The rules of a set, with its rows in `tables`.
pub(super) fn of_set(set: &PolicySet, tables: &PolicyTables, references: &References) -> Vec<EffectiveRule> {
    let hits = hits(set.number, tables, references);
    let hits_of = |rule: &RuleRef| hits.get(rule).cloned().unwrap_or_default();
    let mut found = Vec::new();
    for direction in DIRECTIONS {
        for body in set.content.bodies() {
            found.extend(rules(body, direction).map(|rule| EffectiveRule {
                rule: Some((*rule.name).clone()),
                direction,
                allow: rule.allow,
                isolating: Vec::new(),
                peers: peers(&rule.peers),
                ports: ports(&rule.ports),
                hits: hits_of(&rule.name),
            }));
            let external = body
                .content
                .external
                .as_ref()
                .filter(|_| direction == PolicyDirection::External);
            found.extend(
                external
                    .filter(|external| external.otherwise_allow)
                    .map(|external| EffectiveRule {
                        rule: Some((*external.otherwise).clone()),
                        direction,
                        allow: true,
                        isolating: Vec::new(),
                        peers: "otherwise".to_owned(),
                        ports: "all".to_owned(),
                        hits: hits_of(&external.otherwise),
                    }),
            );
        }
        found.extend(default_deny(set, direction, &hits));
    }
    found
}

fn default_deny(
    set: &PolicySet,
    direction: PolicyDirection,
    hits: &HashMap<RuleRef, Vec<HitKey>>,
) -> Option<EffectiveRule> {
    let isolating = set.content.isolating(direction);
    if isolating.is_empty() {
        return None;
    }
    let mut keys = vec![HitKey {
        set: set.number,
        rule: 0,
        ordinal: DEFAULT_DENY,
        direction: code(direction),
    }];
    if direction == PolicyDirection::External {
        let external = set
            .content
            .bodies()
            .iter()
            .filter_map(|body| body.content.external.as_ref());
        let denying = external.filter(|external| !external.otherwise_allow);
        keys.extend(denying.filter_map(|external| hits.get(&*external.otherwise)).flatten());
    }
    Some(EffectiveRule {
        rule: None,
        direction,
        allow: false,
        isolating,
        peers: "otherwise".to_owned(),
        ports: "all".to_owned(),
        hits: keys,
    })
}

fn rules(body: &Body, direction: PolicyDirection) -> impl Iterator<Item = &Rule> {
    let external = body
        .content
        .external
        .as_ref()
        .filter(|_| direction == PolicyDirection::External);
    let allows = body.allows(direction).unwrap_or_default();
    allows
        .iter()
        .chain(external.into_iter().flat_map(|external| &external.rules))
}

/// The counters of each rule.
fn hits(set: u32, tables: &PolicyTables, references: &References) -> HashMap<RuleRef, Vec<HitKey>> {
    let key = |identity, direction| PolicyKey {
        set,
        identity,
        direction,
    };
    let mut lists: Vec<(u32, u32)> = tables
        .policy
        .range(key(0, 0)..=key(u32::MAX, u32::MAX))
        .filter(|(_, row)| row.rule != 0 && row.ports != PORTS_NONE)
        .map(|(key, row)| {
            (
                row.rule,
                key.direction | if row.ports == PORTS_ALL { ONLY_FIRST } else { 0 },
            )
        })
        .collect();
    lists.sort_unstable();
    lists.dedup();
    let mut hits: HashMap<RuleRef, Vec<HitKey>> = HashMap::new();
    for (rule, place) in lists {
        let Some(list) = references.rules.get(rule) else {
            continue;
        };
        let count = if place & ONLY_FIRST == 0 { list.len() } else { 1 };
        for (name, ordinal) in list.iter().zip(0..DEFAULT_DENY).take(count) {
            let keys = hits.entry((**name).clone()).or_default();
            let key = HitKey {
                set,
                rule,
                ordinal,
                direction: u16::try_from(place & !ONLY_FIRST).unwrap_or_default(),
            };
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    hits
}

/// Marks rows that allow everything: they name only their first rule.
const ONLY_FIRST: u32 = 1 << 31;

fn code(direction: PolicyDirection) -> u16 {
    u16::try_from(direction.code()).unwrap_or_default()
}

fn peers(peers: &[std::sync::Arc<Peer>]) -> String {
    if peers.is_empty() {
        return "all".to_owned();
    }
    let texts: Vec<String> = peers.iter().map(|peer| matcher(&peer.what)).collect();
    texts.join(", ")
}

fn matcher(what: &Matcher) -> String {
    let pods_text = |pods: &Selector| {
        if pods.requirements.is_empty() {
            "pods".to_owned()
        } else {
            format!("pods {}", selector(pods))
        }
    };
    match what {
        Matcher::PodsOf(namespace, pods) => format!("{} in namespace {namespace}", pods_text(pods)),
        Matcher::Pods(namespaces, pods) if namespaces.requirements.is_empty() => {
            format!("{} in all namespaces", pods_text(pods))
        }
        Matcher::Pods(namespaces, pods) => format!("{} in namespaces {}", pods_text(pods), selector(namespaces)),
        Matcher::Block(cidr, except) if except.is_empty() => cidr.to_string(),
        Matcher::Block(cidr, except) => {
            let except: Vec<String> = except.iter().map(ToString::to_string).collect();
            format!("{cidr} except {}", except.join(" "))
        }
    }
}

fn selector(selector: &Selector) -> String {
    let list = |values: &std::collections::BTreeSet<String>| values.iter().cloned().collect::<Vec<_>>().join("|");
    let requirements = selector.requirements.iter().map(|requirement| {
        let key = &requirement.key;
        match &requirement.operator {
            Operator::In(values) => format!("{key}={}", list(values)),
            Operator::NotIn(values) => format!("{key}!={}", list(values)),
            Operator::Exists => key.clone(),
            Operator::DoesNotExist => format!("!{key}"),
        }
    });
    requirements.collect::<Vec<_>>().join(",")
}

fn ports(ports: &Ports) -> String {
    let Ports::Some { ranges, named } = ports else {
        return "all".to_owned();
    };
    let numbers = ranges.iter().map(|range| match (range.first, range.last) {
        (0, u16::MAX) => protocol(range.protocol),
        (first, last) if first == last => format!("{}/{first}", protocol(range.protocol)),
        (first, last) => format!("{}/{first}-{last}", protocol(range.protocol)),
    });
    let names = named
        .iter()
        .map(|port| format!("{}/{}", protocol(port.protocol), port.name));
    numbers.chain(names).collect::<Vec<_>>().join(", ")
}

fn protocol(number: u8) -> String {
    match number {
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        132 => "SCTP".to_owned(),
        other => other.to_string(),
    }
}
